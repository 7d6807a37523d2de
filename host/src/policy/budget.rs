//! The resources that one call may use, and which limit a failed call has exceeded.

use wasmtime::{ResourceLimiter, Trap, UpdateDeadline, WasmBacktrace};

use super::{Fault, FaultKind, Hook};
use crate::clock;

/// The most elements that the tables of one call may have together.
pub(super) const MAX_TABLE_ELEMENTS: usize = 10_000;
/// The maximum numbers of core instances, memories and tables of one component. A policy that is compiled to WebAssembly is one module with
/// one memory. The runtimes of interpreted languages add helper modules, some with a memory.
pub(super) const MAX_CORE_INSTANCES: u32 = 16;
pub(super) const MAX_MEMORIES: u32 = 4;
pub(super) const MAX_TABLES: u32 = 16;

/// The state of one call's store.
pub(super) struct Budget {
    memory_bytes: usize,
    /// The bytes of all memories of the call, and the elements of all its tables.
    memory_used: usize,
    table_used: usize,
    /// The processor time that the call may use after half of its time, in microseconds.
    rest_us: u64,
    /// This thread's processor time when half of the call's time had passed.
    half_way_us: Option<u64>,
    memory_denied: bool,
    table_denied: bool,
}

impl Budget {
    pub(super) fn new(memory_bytes: usize, rest_us: u64) -> Budget {
        Budget {
            memory_bytes,
            memory_used: 0,
            table_used: 0,
            rest_us,
            half_way_us: None,
            memory_denied: false,
            table_denied: false,
        }
    }

    /// Called at every tick after half of the call's time. From then on only processor time counts, because a busy
    /// machine may take the processor away from the call, which is not the policy's fault.
    pub(super) fn at_tick(&mut self) -> UpdateDeadline {
        let now = clock::thread_us();
        let half_way = *self.half_way_us.get_or_insert(now);
        if now.saturating_sub(half_way) < self.rest_us {
            UpdateDeadline::Continue(1)
        } else {
            UpdateDeadline::Interrupt
        }
    }

    /// The fault of a failed call.
    pub(super) fn fault(&self, hook: Hook, error: &wasmtime::Error) -> Fault {
        let (kind, detail) = self.classify(error);
        Fault { hook, kind, detail }
    }

    fn classify(&self, error: &wasmtime::Error) -> (FaultKind, String) {
        // The guest's allocator turns a refused growth into an arbitrary trap.
        if self.memory_denied {
            return (FaultKind::Memory, format!("asked for more than {} bytes of memory", self.memory_bytes));
        }
        if self.table_denied {
            return (
                FaultKind::Memory,
                format!("asked for tables of more than {MAX_TABLE_ELEMENTS} elements"),
            );
        }
        match error.downcast_ref::<Trap>() {
            Some(Trap::OutOfFuel) => (FaultKind::Time, "ran past its fuel".to_owned()),
            Some(Trap::Interrupt) => (FaultKind::Time, "ran past its time".to_owned()),
            Some(Trap::StackOverflow) => (FaultKind::Stack, "recursed past its stack".to_owned()),
            Some(Trap::MemoryOutOfBounds) if recursed(error) => {
                (FaultKind::Stack, "recursed past its stack".to_owned())
            }
            Some(Trap::UnreachableCodeReached) => (FaultKind::Trap, "panicked".to_owned()),
            Some(trap) => (FaultKind::Trap, trap.to_string()),
            // The error is not a guest trap: wasmtime could not decode the answer.
            None => (FaultKind::Answer, error.root_cause().to_string()),
        }
    }
}

/// Whether a function is on the stack at least four times. The guest's own stack lies below its data, so a stack
/// overflow looks like an access out of bounds.
fn recursed(error: &wasmtime::Error) -> bool {
    let Some(trace) = error.downcast_ref::<WasmBacktrace>() else { return false };
    let frames = trace.frames();
    frames.iter().any(|one| frames.iter().filter(|other| other.func_index() == one.func_index()).count() >= 4)
}

/// What is in use after something grows from `now` to `wanted`, if all of it stays within `limit`.
fn grown(used: usize, now: usize, wanted: usize, limit: usize) -> Option<usize> {
    used.saturating_sub(now).checked_add(wanted).filter(|all| *all <= limit)
}

/// The limits are on the sums over all memories and tables of the call. A new memory or table grows from 0.
impl ResourceLimiter for Budget {
    fn memory_growing(&mut self, now: usize, wanted: usize, max: Option<usize>) -> wasmtime::Result<bool> {
        // This growth fails anyway, because the memory itself has a lower limit: it must not count.
        if max.is_some_and(|max| wanted > max) {
            return Ok(false);
        }
        let granted = grown(self.memory_used, now, wanted, self.memory_bytes);
        self.memory_denied |= granted.is_none();
        self.memory_used = granted.unwrap_or(self.memory_used);
        Ok(granted.is_some())
    }

    fn table_growing(&mut self, now: usize, wanted: usize, max: Option<usize>) -> wasmtime::Result<bool> {
        if max.is_some_and(|max| wanted > max) {
            return Ok(false);
        }
        let granted = grown(self.table_used, now, wanted, MAX_TABLE_ELEMENTS);
        self.table_denied |= granted.is_none();
        self.table_used = granted.unwrap_or(self.table_used);
        Ok(granted.is_some())
    }

    fn instances(&self) -> usize {
        // The limit covers component and core instances together.
        2 * MAX_CORE_INSTANCES as usize
    }

    fn tables(&self) -> usize {
        MAX_TABLES as usize
    }

    fn memories(&self) -> usize {
        MAX_MEMORIES as usize
    }
}
