//! The actions that come out of a [`Table`](super::Table).

use std::sync::Arc;

use super::events::{ReleaseId, SubmissionId, WaiterId};
use crate::lock::record::{Grant, HeldBy, NextWaiter, Op, Outcome, StoredValue};
use crate::lock::{Instant, Key, Token};

/// Something that the caller of the table must do: see [`Table::poll_action`](super::Table::poll_action).
#[derive(Clone, Debug)]
pub enum Action {
    /// Run the operations as one group in the store, and report the answer with [`Event::Completed`](super::Event::Completed).
    Submit {
        /// Identifies the batch in its answer.
        ticket: SubmissionId,
        /// The operations, in order.
        ops: Vec<Op>,
    },
    /// Ask the policy of `candidates[0]` which candidate is next, and report the answer with [`Event::Chosen`](super::Event::Chosen).
    Choose {
        /// The key that is or becomes free.
        key: Key,
        /// Identifies this choice in its answer.
        choice: u64,
        /// The first waiters of each group, in the order of their positions.
        candidates: Vec<Candidate>,
        /// The groups of the key's waiters.
        groups: Vec<GroupShare>,
    },
    /// Ask the waiter's policy what to do while the key is held, and report the answer with
    /// [`Event::Backoff`](super::Event::Backoff).
    Backoff {
        /// The waiter that waits for the key.
        waiter: WaiterId,
        /// The key that is held.
        key: Key,
        /// What the policy learns about the key.
        contention: Contention,
    },
    /// The waiter has left its queues, with this verdict for its client.
    Finish {
        /// The waiter that has left.
        waiter: WaiterId,
        /// The answer to its client.
        verdict: Verdict,
    },
    /// The answer to an [`Event::Release`](super::Event::Release).
    Released {
        /// The release that is answered.
        id: ReleaseId,
        /// The store's outcome, or why the store did not answer.
        result: Result<Outcome, String>,
    },
    /// Notify a proxy that one of its waiters is next. If that proxy has ended, report [`Event::PeerGone`](super::Event::PeerGone). If
    /// it is this proxy, report [`Event::Orphan`](super::Event::Orphan): the table knows no such waiter.
    NotifyPeer {
        /// The key that the waiter may ask for.
        key: Key,
        /// The waiter and its proxy.
        next_waiter: NextWaiter,
    },
    /// The lease is over or lost: stop renewing it.
    Gone {
        /// Identifies the lease.
        nonce: u64,
    },
    /// A change for watchers and metrics.
    Note(Note),
}

/// A waiter that a policy may choose as the next one.
#[derive(Clone, Copy, Debug)]
pub struct Candidate {
    /// Identifies the waiter.
    pub waiter: WaiterId,
    /// The [`Waiter::rank`](super::Waiter::rank): lower ranks go first.
    pub rank: i32,
    /// How long the waiter has been waiting, in milliseconds.
    pub waited_ms: u32,
}

/// How much of a key one group of waiters has and wants.
#[derive(Clone, Debug)]
pub struct GroupShare {
    /// The name of the group, as in [`Waiter::group`](super::Waiter::group).
    pub group: Box<str>,
    /// How many waiters of the key belong to the group.
    pub waiting: u32,
    /// How many of the key's last 64 grants on this proxy went to the group.
    pub recent_grants: u32,
}

/// What a policy's `backoff` hook learns about a held key.
#[derive(Clone, Debug)]
pub struct Contention {
    /// How often the store was asked for this waiter; at least 1.
    pub attempt: u32,
    /// How long the waiter has been waiting, in milliseconds.
    pub waited_ms: u32,
    /// How long the waiter may still wait, in milliseconds.
    pub wait_left_ms: u32,
    /// How long until the key may be free, in milliseconds.
    pub holder_left_ms: u32,
    /// The owner of the lease that blocks the waiter; empty if it is not known.
    pub holder: Box<str>,
    /// How many waiters the key has on this proxy.
    pub waiters: u32,
    /// How long the waiter has paused between its last two polls, in milliseconds.
    pub last_sleep_ms: u32,
}

/// The answer that ends a wait.
#[derive(Clone, Debug)]
pub enum Verdict {
    /// The waiter has the keys.
    Granted {
        /// The grant of the store.
        grant: Grant,
        /// The keys that are held.
        keys: Arc<[Key]>,
        /// The `attempt` of the claim; an undelivered grant is undone by it.
        attempt: u64,
        /// The proxy's clock before the store was asked; the lease counts from this moment.
        asked_at: Instant,
        /// How long the waiter waited, in milliseconds.
        waited_ms: u32,
    },
    /// The keys were not free in time.
    Contended {
        /// The holder that blocks the waiter, if it is known.
        holder: Option<HeldBy>,
        /// The waiter's worst position in its queues; 1 is the next.
        position: u32,
        /// When another try makes sense, in milliseconds.
        retry_after_ms: u32,
        /// Why the policy gave up, if it did.
        reason: Option<String>,
    },
    /// The queue, or the global queue, is full.
    TooManyWaiters {
        /// The limit that was reached.
        limit: u32,
    },
    /// A `once` request whose work was done before; this is its outcome.
    Done(StoredValue),
    /// The request id was used before: with another body, or, if `ended`, for a lease that has ended.
    RequestReused {
        /// Whether the lease that the request id got has ended.
        ended: bool,
    },
    /// The key has the highest number of holders, or the owner the highest number of levels, that a record can
    /// hold.
    Full,
    /// The store did not answer.
    Unavailable {
        /// The cause.
        why: String,
    },
    /// The proxy stops and takes no new waiters.
    ShuttingDown,
}

/// A change of a lease, for watchers and metrics. `held_ms` is the time since this proxy learned of the lease.
#[derive(Clone, Debug)]
pub enum Note {
    /// A new grant. `from_release`: the same batch released the lease before it.
    Granted {
        /// The key that was granted.
        key: Key,
        /// The owner that the client named.
        owner: Box<str>,
        /// The fencing token of the grant.
        token: Token,
        /// Whether the same batch released the lease before it.
        from_release: bool,
    },
    /// A lease was released. `handed_off`: the same batch granted the key to the next waiter.
    Released {
        /// The key that was released.
        key: Key,
        /// The owner of the lease.
        owner: Box<str>,
        /// The fencing token of the lease.
        token: Token,
        /// How long this proxy knew of the lease, in milliseconds.
        held_ms: u32,
        /// Whether the same batch granted the key to the next waiter.
        handed_off: bool,
    },
    /// A lease reached its end without a release.
    Expired {
        /// The key of the lease.
        key: Key,
        /// The owner of the lease.
        owner: Box<str>,
        /// The fencing token of the lease.
        token: Token,
        /// How long this proxy knew of the lease, in milliseconds.
        held_ms: u32,
    },
    /// The holder found the lease lost, or the session that held it is gone.
    Lost {
        /// The key of the lease.
        key: Key,
        /// The owner of the lease.
        owner: Box<str>,
        /// The fencing token of the lease.
        token: Token,
        /// How long this proxy knew of the lease, in milliseconds.
        held_ms: u32,
    },
}
