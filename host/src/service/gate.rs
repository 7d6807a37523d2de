//! Whether locks are granted. Tasks that wait for the gate continue in the order in which they came, and before tasks
//! that come later.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};

use tokio::sync::{Mutex, Notify};

/// A gate, which is closed at first.
#[derive(Default)]
pub struct Gate {
    is_open: AtomicBool,
    opened: Notify,
    /// How many tasks wait.
    waiting: AtomicUsize,
    /// The first of the tasks that wait has the lock; the others wait for it in their order.
    line: Mutex<()>,
}

impl Gate {
    /// Opens the gate and wakes the tasks that wait.
    pub fn open(&self) {
        self.is_open.store(true, SeqCst);
        self.opened.notify_waiters();
    }

    /// Closes the gate.
    pub fn close(&self) {
        self.is_open.store(false, SeqCst);
    }

    /// Whether the gate is open.
    pub fn is_open(&self) -> bool {
        self.is_open.load(SeqCst)
    }

    /// Whether the gate is open and no task waits.
    pub fn is_clear(&self) -> bool {
        self.is_open() && self.waiting.load(SeqCst) == 0
    }

    /// Waits until the gate is open and all tasks that came before have gone through.
    pub async fn opened(&self) {
        if self.is_clear() {
            return;
        }
        let _waits = Waits::new(&self.waiting);
        let _first = self.line.lock().await;
        loop {
            let opened = self.opened.notified();
            if self.is_open() {
                return;
            }
            opened.await;
        }
    }
}

/// Counts a task that waits, until it is dropped.
struct Waits<'a>(&'a AtomicUsize);

impl Waits<'_> {
    fn new(waiting: &AtomicUsize) -> Waits<'_> {
        waiting.fetch_add(1, SeqCst);
        Waits(waiting)
    }
}

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

    use super::*;

    #[tokio::test]
    async fn waiters_at_a_gate_continue_in_order_of_arrival() {
        let gate = Arc::new(Gate::default());
        let (tell, mut told) = unbounded_channel();
        for n in 0..50 {
            let (gate, tell) = (gate.clone(), tell.clone());
            tokio::spawn(async move {
                gate.opened().await;
                tell.send(n).expect("somebody listens");
            });
        }
        drop(tell);
        tokio::task::yield_now().await;
        gate.open();
        let mut order = Vec::new();
        while let Some(n) = told.recv().await {
            order.push(n);
        }
        assert_eq!(order, (0..50).collect::<Vec<_>>());
    }

    #[tokio::test]
    async fn a_task_that_comes_when_the_gate_has_just_opened_does_not_pass_those_that_waited() {
        let gate = Arc::new(Gate::default());
        let (tell, mut told) = unbounded_channel();
        let pass = async |n: usize, gate: Arc<Gate>, tell: UnboundedSender<usize>| {
            gate.opened().await;
            tell.send(n).expect("somebody listens");
        };
        for n in 0..3 {
            tokio::spawn(pass(n, gate.clone(), tell.clone()));
        }
        tokio::task::yield_now().await;
        gate.open();
        pass(3, gate, tell).await;
        let mut order = Vec::new();
        while let Some(n) = told.recv().await {
            order.push(n);
        }
        assert_eq!(order, [0, 1, 2, 3]);
    }
}
