//! A cluster node that replicates as Galera does: both nodes take writes.
//!
//! A commit on one node is visible on the other node at once, and undoes the transactions that conflict with it
//! there. Such a transaction gets an error with its next packet. A transaction that is undone while one of its
//! packets runs gets no error, and its COMMIT succeeds: MariaDB 10.11 does the same. A single statement outside a
//! transaction reports that it was undone.

use std::collections::VecDeque;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::state::SessionId;
use super::{Failure, Server};

/// The time between two statements of a packet. The other node may commit in between.
pub(super) const STATEMENT: Duration = Duration::from_micros(200);

impl Server {
    /// From now on, `peer` receives the commits of this server.
    pub fn join(&self, peer: &Arc<Server>) {
        // A server has only one peer.
        let _ = self.peer.set(Arc::downgrade(peer));
        let mut state = self.state.lock();
        state.log = Some(VecDeque::new());
        state.settings.insert("wsrep_on".to_owned(), "ON".to_owned());
    }

    /// Hides the server from every other proxy, or shows it again.
    pub fn hide(&self, is_hidden: bool) {
        self.is_hidden.store(is_hidden, Relaxed);
    }

    /// Whether the proxy cannot reach the server.
    pub fn is_hidden_from(&self, proxy: usize) -> bool {
        self.is_hidden.load(Relaxed) && proxy.is_multiple_of(2)
    }

    /// Sends the commits of this server to the other node.
    pub(super) fn share(&self) {
        let Some(peer) = self.peer.get().and_then(Weak::upgrade) else { return };
        let committed = self.state.lock().log.as_mut().map(std::mem::take).unwrap_or_default();
        if committed.is_empty() {
            return;
        }
        let mut state = peer.state.lock();
        for (_, change) in committed {
            state.apply_over(change);
        }
        drop(state);
        peer.changed.notify_waiters();
    }

    /// Checks whether the other node has undone the session's transaction.
    ///
    /// # Errors
    /// The transaction was undone since the last packet.
    pub(super) fn is_undone(&self, session: SessionId) -> Result<(), Failure> {
        match std::mem::take(&mut self.state.lock().session(session)?.is_undone) {
            true => {
                Err(Failure::new(1213, "Deadlock found when trying to get lock; try restarting transaction"))
            }
            false => Ok(()),
        }
    }
}
