//! The resources that one call may use, and which limit a failed call has exceeded.

use wasmtime::{ResourceLimiter, Trap, UpdateDeadline, WasmBacktrace};

use super::{Fault, FaultKind, Hook};
use crate::clock;

pub(super) const MAX_TABLE_ELEMENTS: usize = 10_000;
/// The maximum numbers of core instances and tables of one component. A policy is one module; the runtimes of other
/// languages add a few helper modules.
pub(super) const MAX_CORE_INSTANCES: u32 = 8;
pub(super) const MAX_TABLES: u32 = 8;

/// The state of one call's store.
pub(super) struct Budget {
    memory_bytes: usize,
    /// The processor time that the call may use after half of its time, in microseconds.
    rest_us: u64,
    /// This thread's processor time when half of the call's time had passed.
    half_way_us: Option<u64>,
    memory_denied: bool,
    table_denied: bool,
}

impl Budget {
    pub(super) fn new(memory_bytes: usize, rest_us: u64) -> Budget {
        Budget { memory_bytes, rest_us, half_way_us: None, memory_denied: false, table_denied: false }
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
                format!("asked for a table of more than {MAX_TABLE_ELEMENTS} elements"),
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

impl ResourceLimiter for Budget {
    fn memory_growing(&mut self, _now: usize, wanted: usize, _max: Option<usize>) -> wasmtime::Result<bool> {
        let granted = wanted <= self.memory_bytes;
        self.memory_denied |= !granted;
        Ok(granted)
    }

    fn table_growing(&mut self, _now: usize, wanted: usize, _max: Option<usize>) -> wasmtime::Result<bool> {
        let granted = wanted <= MAX_TABLE_ELEMENTS;
        self.table_denied |= !granted;
        Ok(granted)
    }

    fn instances(&self) -> usize {
        // The limit covers component and core instances together.
        2 * MAX_CORE_INSTANCES as usize
    }

    fn tables(&self) -> usize {
        MAX_TABLES as usize
    }

    fn memories(&self) -> usize {
        1
    }
}
