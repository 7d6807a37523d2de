//! The events that go into a [`Table`](super::Table).

use std::sync::Arc;

use super::charge::Charge;
use crate::lock::record::{Claim, NextWaiter, Outcome, Release};
use crate::lock::{Instant, Key, ServerTime};

/// Identifies a waiter. The caller chooses the number; it must never repeat on one table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WaiterId(pub u64);

/// Identifies an in-flight batch: an [`Action::Submit`](super::Action::Submit) and the [`Event::Completed`] that answers it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SubmissionId(pub u64);

/// Identifies a release: an [`Event::Release`] and the [`Action::Released`](super::Action::Released) that answers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReleaseId(pub u64);

/// An acquire that enters the queues of its keys. [`Action::Finish`](super::Action::Finish) answers it, unless [`Event::Cancel`] comes first.
#[derive(Clone, Debug)]
pub struct Waiter {
    /// Identifies the waiter in later events and actions.
    pub id: WaiterId,
    /// The operation that the store is asked for.
    pub claim: Claim,
    /// Waiters of a lower rank are granted first.
    pub rank: i32,
    /// The group that the waiter's policy assigned to it, for its `fairness` hook.
    pub group: Box<str>,
    /// How long the waiter may wait, in milliseconds; 0 to try once.
    pub wait_ms: u32,
    /// The most waiters that a queue may have for this waiter to enter it; at least 1 counts.
    pub max_waiters: u32,
    /// Whether its policy has a `fairness` hook.
    pub asks_choice: bool,
    /// Whether its policy has a `backoff` hook.
    pub asks_backoff: bool,
    /// Random bits for back-off.
    pub seed: u32,
    /// What the waiter occupies of the limits of its client.
    pub charge: Charge,
}

/// Something that happened outside the table. [`Table::handle_event`](super::Table::handle_event) processes it.
#[derive(Clone, Debug)]
pub enum Event {
    /// A waiter arrives. [`Action::Finish`](super::Action::Finish) answers it.
    Enqueue(Box<Waiter>),
    /// The waiter's client is gone. A grant that is in flight is undone.
    Cancel(WaiterId),
    /// A holder gives up a lease. [`Action::Released`](super::Action::Released) answers it.
    Release {
        /// Identifies the release in its answer.
        id: ReleaseId,
        /// The release, as sent to the store.
        release: Release,
    },
    /// The store's answer to an [`Action::Submit`](super::Action::Submit).
    Completed {
        /// The batch that is answered.
        ticket: SubmissionId,
        /// The outcomes, or why there are none.
        result: Result<Answered, Unheard>,
    },
    /// The answer to an [`Action::Choose`](super::Action::Choose); `waiter` is `None` if the policy failed or gave an invalid answer.
    Chosen {
        /// The key whose next waiter was chosen.
        key: Key,
        /// The `choice` of the [`Action::Choose`](super::Action::Choose); an answer to an older choice is ignored.
        choice: u64,
        /// The candidate that is next.
        waiter: Option<WaiterId>,
    },
    /// The answer to an [`Action::Backoff`](super::Action::Backoff).
    Backoff {
        /// The waiter whose policy answered.
        waiter: WaiterId,
        /// The key that is held.
        key: Key,
        /// What the policy decided.
        decision: Next,
    },
    /// A lease was renewed until `until`, on this or on another proxy. Renewals do not go through the queues.
    Renewed {
        /// Identifies the lease.
        nonce: u64,
        /// When the lease now ends, by this proxy's clock.
        until: Instant,
    },
    /// A lease was found lost, or the session that held it is gone.
    Lost {
        /// Identifies the lease.
        nonce: u64,
    },
    /// The caller of a grant, which is for `ttl_ms` milliseconds, was gone before it was told. The grant is undone.
    Undelivered {
        /// Identifies the lease.
        nonce: u64,
        /// The keys of the grant.
        keys: Arc<[Key]>,
        /// The `attempt` of the claim that was granted.
        attempt: u64,
        /// The lease time of the grant, in milliseconds.
        ttl_ms: u32,
    },
    /// An operator took the key away from its holders.
    Taken(Key),
    /// A notification: the key was probably freed through another proxy.
    Wake(Key),
    /// The proxy of the next waiter has ended.
    PeerGone {
        /// The proxy that has ended.
        peer: Arc<str>,
        /// The key for which that proxy was to be notified.
        key: Key,
    },
    /// The store named this proxy as the next waiter, but no such waiter is known here.
    Orphan {
        /// The key for which the store named the waiter.
        key: Key,
        /// The waiter that the store named.
        next_waiter: NextWaiter,
    },
    /// The waiter's keys have changed with its policy. The waiter keeps its place in the order of arrival. The
    /// new claim has an `attempt` of its own.
    Replan {
        /// The waiter whose policy has changed.
        waiter: WaiterId,
        /// The claim for the new keys.
        claim: Box<Claim>,
    },
    /// Answer all waiters and accept no new ones.
    Shutdown,
}

/// The store's answer to a batch.
#[derive(Clone, Debug)]
pub struct Answered {
    /// One outcome for each operation of the batch, in the same order.
    pub outcomes: Vec<Outcome>,
    /// The proxy's clock before the store was asked. Leases are counted from this moment.
    pub asked_at: Instant,
    /// The store's clock at the decision.
    pub now: ServerTime,
}

/// The store did not answer a batch.
#[derive(Clone, Debug)]
pub struct Unheard {
    /// The cause, as a sentence.
    pub why: String,
    /// Whether the store may have applied the batch.
    pub sent: bool,
}

/// What the head of a queue does next while its key is held.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// Ask the store again after `after_ms` milliseconds.
    Poll {
        /// The pause before the next poll, in milliseconds.
        after_ms: u32,
    },
    /// Wait until the holder's lease ends or a notification comes; poll only at the longest interval.
    WakeUp,
    /// Stop waiting: the waiter is told that the key is held, with this reason.
    GiveUp {
        /// The policy's reason, for the client.
        reason: String,
    },
}
