//! A waiter, and the table's state for it.

use super::events::{SubmissionId, Waiter};
use super::queue::QueuePosition;
use crate::lock::record::{Claim, Denial};
use crate::lock::{Instant, Token};

/// A waiter in its queues.
#[derive(Debug)]
pub(super) struct Entry {
    pub waiter: Waiter,
    pub place: QueuePosition,
    pub arrived: Instant,
    pub deadline: Instant,
    /// The batch that asks the store for this waiter.
    pub in_flight: Option<SubmissionId>,
    pub cancelled: bool,
    pub attempts: u32,
    pub last_sleep_ms: u32,
    /// Why the last attempt failed.
    pub denial: Option<Denial>,
    pub store_error: Option<String>,
    /// Set if an attempt had no answer and may have been granted: the latest moment at which that grant ends.
    pub unsure_until: Option<Instant>,
    pub replan: Option<Box<Claim>>,
    /// The store may have a place in the global queue for the waiter.
    pub in_global_queue: bool,
    /// If the waiter's batch is denied, the store notes that this proxy waits.
    pub marks: bool,
    /// It became the next waiter while a batch was in flight that may not have seen the change.
    pub again: bool,
    pub own_lease: OwnLease,
}

/// Whether the proxy has asked the store, after a waiter's deadline, if the waiter itself holds the lease that
/// blocks it.
#[derive(Debug)]
pub enum OwnLease {
    NotSought,
    Sought {
        /// The token of the lease that blocked the waiter then; `None` if no lease was known.
        blocked_by: Option<Token>,
    },
}

impl Entry {
    /// The ticket of the waiter in the global queue.
    pub fn ticket(&self) -> Option<u64> {
        self.waiter.claim.global.as_ref().map(|own| own.number)
    }
}
