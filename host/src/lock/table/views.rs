//! What a [`Table`](super::Table) shows of its waiters and leases.

use super::events::WaiterId;
use crate::lock::{Instant, Mode};

/// The state of a claim on this proxy.
#[derive(Clone, Copy, Debug)]
pub enum Standing {
    /// The claim still waits.
    Waiter {
        /// Identifies the waiter.
        id: WaiterId,
    },
    /// The claim was granted. This proxy has known the lease since `since`. The lease ends at `until`, unless
    /// another proxy has renewed it.
    Lease {
        /// Identifies the lease.
        nonce: u64,
        /// When this proxy learned of the lease.
        since: Instant,
        /// When the lease ends, by this proxy's clock.
        until: Instant,
    },
}

/// A waiter in a queue, for display.
#[derive(Clone, Debug)]
pub struct Queued {
    /// Identifies the waiter.
    pub waiter: WaiterId,
    /// The owner that the client named.
    pub owner: Box<str>,
    /// How the key is to be held.
    pub mode: Mode,
    /// The [`Waiter::rank`](super::Waiter::rank): lower ranks go first.
    pub rank: i32,
    /// The [`Waiter::group`](super::Waiter::group).
    pub group: Box<str>,
    /// How long the waiter has been waiting, in milliseconds.
    pub waited_ms: u32,
}
