//! Whether locks are granted. Those that wait for it go on in the order in which they came.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use tokio::sync::Notify;

/// Closed at first.
#[derive(Default)]
pub struct Gate {
    is_open: AtomicBool,
    opened: Notify,
}

impl Gate {
    pub fn open(&self) {
        self.is_open.store(true, SeqCst);
        self.opened.notify_waiters();
    }

    pub fn close(&self) {
        self.is_open.store(false, SeqCst);
    }

    pub fn is_open(&self) -> bool {
        self.is_open.load(SeqCst)
    }

    /// Returns when it is open.
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
