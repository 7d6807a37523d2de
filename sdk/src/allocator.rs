//! The allocator of a policy, which allocates memory from the end of the static data and never frees it.
//!
//! Each call runs in a fresh instance that is discarded afterwards, so freeing memory would be wasted work. A heap
//! that starts at a fixed address keeps the number of pages small that the proxy must clean between calls.

use core::alloc::{GlobalAlloc, Layout};
use core::arch::wasm32::{memory_grow, memory_size};
use core::ptr::null_mut;
use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};

const PAGE: usize = 65_536;

unsafe extern "C" {
    /// The end of data and stack, which the linker defines.
    static __heap_base: u8;
}

/// The first free address; 0 before the first allocation.
static NEXT: AtomicUsize = AtomicUsize::new(0);

struct Bump;

#[global_allocator]
static BUMP: Bump = Bump;

fn next() -> usize {
    match NEXT.load(Relaxed) {
        0 => (&raw const __heap_base) as usize,
        next => next,
    }
}

/// Moves the first free address to `end`. Returns false if the proxy gives no more memory.
fn claim_until(end: usize) -> bool {
    let have = memory_size(0) * PAGE;
    if end > have && memory_grow(0, (end - have).div_ceil(PAGE)) == usize::MAX {
        return false;
    }
    NEXT.store(end, Relaxed);
    true
}

// SAFETY: addresses only increase. Each block lies between two values of NEXT, is aligned, and is inside the memory
// that `claim_until` has obtained. There are no threads.
unsafe impl GlobalAlloc for Bump {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let Some(start) = next().checked_next_multiple_of(layout.align()) else { return null_mut() };
        match start.checked_add(layout.size()) {
            Some(end) if claim_until(end) => start as *mut u8,
            _ => null_mut(),
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as for `alloc`. The memory of a fresh instance is zero, and no memory is allocated twice.
        unsafe { self.alloc(layout) }
    }

    unsafe fn dealloc(&self, _block: *mut u8, _layout: Layout) {}

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if size <= layout.size() {
            return block;
        }
        let start = block as usize;
        if start + layout.size() == next() {
            return match start.checked_add(size) {
                Some(end) if claim_until(end) => block,
                _ => null_mut(),
            };
        }
        let Ok(wanted) = Layout::from_size_align(size, layout.align()) else { return null_mut() };
        // SAFETY: the new block does not overlap the old block and is longer.
        unsafe {
            let new = self.alloc(wanted);
            if !new.is_null() {
                core::ptr::copy_nonoverlapping(block, new, layout.size());
            }
            new
        }
    }
}
