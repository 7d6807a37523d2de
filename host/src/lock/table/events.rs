//! What goes into a [`Table`](super::Table) and what comes out.

use std::sync::Arc;

use crate::lock::record::{Claim, Grant, HeldBy, NextWaiter, Op, Outcome, Release, StoredValue};
use crate::lock::{Instant, Key, Mode, ServerTime, Token};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WaiterId(pub u64);

/// Names a flight: an [`Action::Submit`] and the [`Event::Completed`] that answers it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SubmissionId(pub u64);

/// Names a caller's release.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReleaseId(pub u64);

/// An acquire that wants a place in the queues of its keys.
#[derive(Clone, Debug)]
pub struct Waiter {
    pub id: WaiterId,
    pub claim: Claim,
    pub rank: i32,
    pub group: Box<str>,
    pub wait_ms: u32,
    pub max_waiters: u32,
    /// Whether its policy has a `fairness` hook.
    pub asks_choice: bool,
    /// Whether its policy has a `backoff` hook.
    pub asks_backoff: bool,
    /// Random bits for back-off.
    pub seed: u32,
}

#[derive(Clone, Debug)]
pub enum Event {
    Enqueue(Box<Waiter>),
    /// The waiter's client is gone. A grant that is under way is undone.
    Cancel(WaiterId),
    Release {
        id: ReleaseId,
        release: Release,
    },
    /// A store's answer to an [`Action::Submit`].
    Completed {
        ticket: SubmissionId,
        result: Result<Answered, Unheard>,
    },
    /// The answer to an [`Action::Choose`]; `None` where the policy failed or made no sense.
    Chosen {
        key: Key,
        choice: u64,
        waiter: Option<WaiterId>,
    },
    /// The answer to an [`Action::Backoff`].
    Backoff {
        waiter: WaiterId,
        key: Key,
        decision: Next,
    },
    /// A lease was renewed past the queues, on this or on another proxy.
    Renewed {
        nonce: u64,
        until: Instant,
    },
    /// A lease was found lost, or the session that it rested on is gone.
    Lost {
        nonce: u64,
    },
    /// A grant whose caller was gone before it could be told.
    Undelivered {
        nonce: u64,
        keys: Arc<[Key]>,
        attempt: u64,
        ttl_ms: u32,
    },
    /// An operator took the key from its holders.
    Taken(Key),
    /// Somebody else freed the key, as far as is known.
    Wake(Key),
    /// A proxy whose waiter is next is not there any more.
    PeerGone {
        peer: Arc<str>,
        key: Key,
    },
    /// It is the turn of this proxy, which was not known to be waiting.
    Orphan {
        key: Key,
        next_waiter: NextWaiter,
    },
    /// The waiter's keys have changed with its policy; it keeps its place in the order of arrival. The
    /// claim has an `attempt` of its own.
    Replan {
        waiter: WaiterId,
        claim: Box<Claim>,
    },
    /// Answers every waiter and takes no more.
    Shutdown,
}

/// What the store said, with the proxy's clock before it was asked.
#[derive(Clone, Debug)]
pub struct Answered {
    pub outcomes: Vec<Outcome>,
    pub asked_at: Instant,
    /// The store's clock when it decided.
    pub now: ServerTime,
}

/// The store did not say what became of a group.
#[derive(Clone, Debug)]
pub struct Unheard {
    pub why: String,
    /// Whether the store may have carried it out.
    pub sent: bool,
}

/// What a waiter at the head does about a key that is held elsewhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    Poll { after_ms: u32 },
    WakeUp,
    GiveUp { reason: String },
}

#[derive(Clone, Debug)]
pub enum Action {
    /// Run the operations as one, and say how it went with [`Event::Completed`].
    Submit {
        ticket: SubmissionId,
        ops: Vec<Op>,
    },
    /// Ask the policy of `candidates[0]` which of them is next, and say so with [`Event::Chosen`].
    Choose {
        key: Key,
        choice: u64,
        candidates: Vec<Candidate>,
        groups: Vec<GroupShare>,
    },
    /// Ask the waiter's policy what to do about a held key, and say so with [`Event::Backoff`].
    Backoff {
        waiter: WaiterId,
        key: Key,
        contention: Contention,
    },
    /// The waiter has left its queues.
    Finish {
        waiter: WaiterId,
        verdict: Verdict,
    },
    Released {
        id: ReleaseId,
        result: Result<Outcome, String>,
    },
    /// Tell a proxy that it is the turn of one of its waiters. If it is not there, say so with
    /// [`Event::PeerGone`]; if it is this one, which knows no such waiter, with [`Event::Orphan`].
    NotifyPeer {
        key: Key,
        next_waiter: NextWaiter,
    },
    /// Whoever keeps this lease alive need not try any more.
    Gone {
        nonce: u64,
    },
    /// Something that watchers and metrics want to know.
    Note(Note),
}

#[derive(Clone, Copy, Debug)]
pub struct Candidate {
    pub waiter: WaiterId,
    pub rank: i32,
    pub waited_ms: u32,
}

#[derive(Clone, Debug)]
pub struct GroupShare {
    pub group: Box<str>,
    pub waiting: u32,
    pub recent_grants: u32,
}

#[derive(Clone, Debug)]
pub struct Contention {
    pub attempt: u32,
    pub waited_ms: u32,
    pub wait_left_ms: u32,
    pub holder_left_ms: u32,
    pub holder: Box<str>,
    pub waiters: u32,
    pub last_sleep_ms: u32,
}

/// What a waiter is told.
#[derive(Clone, Debug)]
pub enum Verdict {
    Granted {
        grant: Grant,
        keys: Arc<[Key]>,
        /// The claim's, by which an undelivered grant is undone.
        attempt: u64,
        asked_at: Instant,
        waited_ms: u32,
    },
    Contended {
        holder: Option<HeldBy>,
        position: u32,
        retry_after_ms: u32,
        reason: Option<String>,
    },
    TooManyWaiters {
        limit: u32,
    },
    /// A `once` request that was done before.
    Done(StoredValue),
    RequestReused {
        ended: bool,
    },
    /// The key has as many holders, or the owner as many levels, as a record can hold.
    Full,
    Unavailable {
        why: String,
    },
    ShuttingDown,
}

#[derive(Clone, Debug)]
pub enum Note {
    /// `from_release`: in the same step in which the lease before it was released.
    Granted {
        key: Key,
        owner: Box<str>,
        token: Token,
        from_release: bool,
    },
    Released {
        key: Key,
        owner: Box<str>,
        token: Token,
        held_ms: u32,
        handed_off: bool,
    },
    Expired {
        key: Key,
        owner: Box<str>,
        token: Token,
        held_ms: u32,
    },
    /// Found lost by its holder, or lost with the session that it rested on.
    Lost {
        key: Key,
        owner: Box<str>,
        token: Token,
        held_ms: u32,
    },
}

/// Where a claim stands on this proxy.
#[derive(Clone, Copy, Debug)]
pub enum Standing {
    Waiter {
        id: WaiterId,
    },
    /// This proxy has known the lease `since` then. Unless another proxy has renewed it, it ends at `until`.
    Lease {
        nonce: u64,
        since: Instant,
        until: Instant,
    },
}

/// One place in a queue, for those who look.
#[derive(Clone, Debug)]
pub struct Queued {
    pub waiter: WaiterId,
    pub owner: Box<str>,
    pub mode: Mode,
    pub rank: i32,
    pub group: Box<str>,
    pub waited_ms: u32,
}
