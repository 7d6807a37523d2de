//! What a [`Table`](super::Table) shows of its waiters and leases.

use super::events::WaiterId;
use crate::lock::Mode;

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
