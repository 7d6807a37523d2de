//! The timers of a [`Table`](super::Table).

use std::sync::Arc;

use super::events::WaiterId;
use crate::lock::Key;

/// What is due at a moment.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Timer {
    Deadline(WaiterId),
    Poll(Key),
    /// Ask the store whether a lease has ended.
    Look(u64),
    /// Continue with the chores.
    Chores,
    /// Give up a place in the global queue or, without a ticket, the note that this proxy waits.
    Leave(Key, Arc<str>, Option<u64>),
    /// Let the waiters that have arrived recently join the global queue.
    Join(Key),
    /// Extend the places of this proxy's waiters in the global queue.
    Keep(Key),
}
