//! A node of a cluster that is replicated as Galera does: both nodes take writes.
//!
//! What is committed on one node is there on the other one at once, and undoes the transactions that are in its way there.
//! Such a transaction is told with its next packet. One that is undone while a packet of its own is run is not told, and
//! its COMMIT succeeds: MariaDB 10.11 does the same. A single statement outside of a
//! transaction reports that it was undone.

use std::collections::VecDeque;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::state::SessionId;
use super::{Failure, Server};

/// From one statement of a packet to the next: what the other node commits may come between them.
pub(super) const STATEMENT: Duration = Duration::from_micros(200);

impl Server {
    /// From now on `peer` is given what is committed here.
    pub fn join(&self, peer: &Arc<Server>) {
        // A server has one peer.
        let _ = self.peer.set(Arc::downgrade(peer));
        let mut state = self.state();
        state.log = Some(VecDeque::new());
        state.settings.insert("wsrep_on".to_owned(), "ON".to_owned());
    }

    /// Every other proxy does not see the server, or sees it again.
    pub fn hide(&self, is_hidden: bool) {
        self.is_hidden.store(is_hidden, Relaxed);
    }

    pub fn is_hidden_from(&self, proxy: usize) -> bool {
        self.is_hidden.load(Relaxed) && proxy.is_multiple_of(2)
    }

    /// Gives the other node what was committed here.
    pub(super) fn share(&self) {
        let Some(peer) = self.peer.get().and_then(Weak::upgrade) else { return };
        let committed = self.state().log.as_mut().map(std::mem::take).unwrap_or_default();
        if committed.is_empty() {
            return;
        }
        let mut state = peer.state();
        for (_, change) in committed {
            state.apply_over(change);
        }
        drop(state);
        peer.changed.notify_waiters();
    }

    /// # Errors
    /// The session's transaction was undone by the other node since the last packet.
    pub(super) fn is_undone(&self, session: SessionId) -> Result<(), Failure> {
        match std::mem::take(&mut self.state().session(session)?.is_undone) {
            true => {
                Err(Failure::new(1213, "Deadlock found when trying to get lock; try restarting transaction"))
            }
            false => Ok(()),
        }
    }
}
