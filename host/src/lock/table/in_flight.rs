//! The batches of operations that the store has not answered.

use super::chores::Abandon;
use super::events::{ReleaseId, WaiterId};
use crate::lock::record::{GlobalQueueChange, Release};
use crate::lock::{Key, LeaseRef};

/// A batch of operations that the store has not answered.
#[derive(Debug)]
pub(super) struct InFlight {
    pub items: Vec<BatchItem>,
    /// The keys whose queues wait for the answer.
    pub keys: Vec<Key>,
}

/// One operation of a batch, and its caller.
#[derive(Debug)]
pub(super) enum BatchItem {
    Release { id: ReleaseId, release: Release },
    Acquire { waiter: WaiterId },
    Rejoin { waiter: WaiterId, over: bool },
    Abandon(Abandon),
    GlobalQueue { key: Key, change: GlobalQueueChange },
    Look { lease: LeaseRef },
}

impl BatchItem {
    /// The key whose next waiter the item finds.
    pub fn looks_at(&self) -> Option<&Key> {
        match self {
            BatchItem::GlobalQueue { key, .. } => Some(key),
            _ => None,
        }
    }

    pub fn waiter(&self) -> Option<WaiterId> {
        match self {
            BatchItem::Acquire { waiter } | BatchItem::Rejoin { waiter, .. } => Some(*waiter),
            BatchItem::Release { .. }
            | BatchItem::Abandon(_)
            | BatchItem::GlobalQueue { .. }
            | BatchItem::Look { .. } => None,
        }
    }
}
