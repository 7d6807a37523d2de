//! The events that go into a [`Table`](super::Table), and the actions that come out.

use std::sync::Arc;

use crate::lock::record::{Claim, Grant, HeldBy, NextWaiter, Op, Outcome, Release, StoredValue};
use crate::lock::{Instant, Key, Mode, ServerTime, Token};

/// Identifies a waiter. The caller chooses the number; it must never repeat on one table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WaiterId(pub u64);

/// Identifies an in-flight batch: an [`Action::Submit`] and the [`Event::Completed`] that answers it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SubmissionId(pub u64);

/// Identifies a release: an [`Event::Release`] and the [`Action::Released`] that answers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReleaseId(pub u64);

/// An acquire that enters the queues of its keys. [`Action::Finish`] answers it, unless [`Event::Cancel`] comes first.
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
}

/// Something that happened outside the table. [`Table::handle_event`](super::Table::handle_event) processes it.
#[derive(Clone, Debug)]
pub enum Event {
    /// A waiter arrives. [`Action::Finish`] answers it.
    Enqueue(Box<Waiter>),
    /// The waiter's client is gone. A grant that is in flight is undone.
    Cancel(WaiterId),
    /// A holder gives up a lease. [`Action::Released`] answers it.
    Release {
        /// Identifies the release in its answer.
        id: ReleaseId,
        /// The release, as sent to the store.
        release: Release,
    },
    /// The store's answer to an [`Action::Submit`].
    Completed {
        /// The batch that is answered.
        ticket: SubmissionId,
        /// The outcomes, or why there are none.
        result: Result<Answered, Unheard>,
    },
    /// The answer to an [`Action::Choose`]; `waiter` is `None` if the policy failed or gave an invalid answer.
    Chosen {
        /// The key whose next waiter was chosen.
        key: Key,
        /// The `choice` of the [`Action::Choose`]; an answer to an older choice is ignored.
        choice: u64,
        /// The candidate that is next.
        waiter: Option<WaiterId>,
    },
    /// The answer to an [`Action::Backoff`].
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

/// Something that the caller of the table must do: see [`Table::poll_action`](super::Table::poll_action).
#[derive(Clone, Debug)]
pub enum Action {
    /// Run the operations as one group in the store, and report the answer with [`Event::Completed`].
    Submit {
        /// Identifies the batch in its answer.
        ticket: SubmissionId,
        /// The operations, in order.
        ops: Vec<Op>,
    },
    /// Ask the policy of `candidates[0]` which candidate is next, and report the answer with [`Event::Chosen`].
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
    /// [`Event::Backoff`].
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
    /// The answer to an [`Event::Release`].
    Released {
        /// The release that is answered.
        id: ReleaseId,
        /// The store's outcome, or why the store did not answer.
        result: Result<Outcome, String>,
    },
    /// Notify a proxy that one of its waiters is next. If that proxy has ended, report [`Event::PeerGone`]. If
    /// it is this proxy, report [`Event::Orphan`]: the table knows no such waiter.
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
    /// The [`Waiter::rank`]: lower ranks go first.
    pub rank: i32,
    /// How long the waiter has been waiting, in milliseconds.
    pub waited_ms: u32,
}

/// How much of a key one group of waiters has and wants.
#[derive(Clone, Debug)]
pub struct GroupShare {
    /// The name of the group, as in [`Waiter::group`].
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
    /// The last pause between two polls, in milliseconds; 0 if there was none.
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
    /// The [`Waiter::rank`]: lower ranks go first.
    pub rank: i32,
    /// The [`Waiter::group`].
    pub group: Box<str>,
    /// How long the waiter has been waiting, in milliseconds.
    pub waited_ms: u32,
}
