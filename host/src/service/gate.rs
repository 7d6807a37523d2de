//! Whether locks are granted. Tasks that wait for the gate continue in the order in which they came.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use tokio::sync::Notify;

/// A gate, which is closed at first.
#[derive(Default)]
pub struct Gate {
    is_open: AtomicBool,
    opened: Notify,
}

impl Gate {
    /// Opens the gate and wakes all tasks that wait.
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

    /// Waits until the gate is open.
    pub async fn opened(&self) {
        loop {
            let opened = self.opened.notified();
            if self.is_open() {
                return;
            }
            opened.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::sync::mpsc::unbounded_channel;

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
}
