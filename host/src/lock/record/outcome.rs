//! The results of operations.

use std::sync::Arc;

use super::{Holder, Record, StoredValue};
use crate::lock::{Key, Mode, ServerTime, Token};

/// The error text for [`Outcome::Unknown`].
pub const UNKNOWN: &str =
    "it is not known whether the operation was applied: the answer was lost, or the server lost writes";

/// The result of an [`Op`](super::Op).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The claim has its keys.
    Granted(Grant),
    /// An [`Op::Rejoin`](super::Op::Rejoin) found no grant of its claim.
    Absent,
    /// An acquire or a commit was denied because of a key.
    Held(Denial),
    /// A `once` claim found the outcome of work that was done before.
    Done(StoredValue),
    /// The request id was used before: with another body, or, if `ended`, for a lease that has ended.
    RequestReused {
        /// Whether the lease that the request id got has ended.
        ended: bool,
    },
    /// The owner has [`MAX_LEVELS`](super::MAX_LEVELS) levels, or the key [`MAX_HOLDERS`](super::MAX_HOLDERS) holders.
    Full,
    /// The global queue of the key has [`MAX_GLOBAL_QUEUE`](super::MAX_GLOBAL_QUEUE) places.
    Crowded,
    /// The lease was renewed or raised.
    Renewed {
        /// What is left of the lease, in microseconds, at the moment of [`Env::now`](super::Env::now).
        left_us: u64,
    },
    /// The release took effect.
    Released {
        /// How many levels the owner still holds.
        levels_left: u32,
    },
    /// The lease is unknown, has expired, or belongs to another holder.
    Lost,
    /// The lease belongs to another authenticated client. Nothing has changed.
    Forbidden,
    /// The key was taken away from this many holders.
    Forced {
        /// How many holders lost the key.
        holders: u32,
    },
    /// The answer to an [`Op::Abandon`](super::Op::Abandon), whether or not there was a grant to undo.
    Abandoned,
    /// The next waiter, if the key is free.
    GlobalQueue {
        /// The waiter that would be granted the key now if it asked.
        next_waiter: Option<NextWaiter>,
    },
    /// The answer to an [`Op::Read`](super::Op::Read).
    Version(Version),
    /// The commit made this version.
    Committed {
        /// The new version.
        version: Token,
    },
    /// The key no longer has the version that the caller read; this is the current one.
    Conflict(Version),
    /// The claim has its key, which was delegated to the proxy.
    Delegated(Box<Delegated>),
    /// The delegation lasts longer.
    Extended {
        /// How long it lasts, in microseconds.
        left_us: u64,
        /// Whether another proxy waits for the key.
        is_wanted: bool,
    },
    /// The delegation has ended, and its record was put back.
    Restored {
        /// The next waiter, if the key is free.
        next_waiter: Option<NextWaiter>,
    },
    /// Another proxy decides about the key. Nothing has changed, but that the record may note that the claim's proxy waits.
    Elsewhere {
        /// The key.
        key: Key,
        /// That proxy.
        proxy: Arc<str>,
    },
    /// The answer was lost and the records do not tell whether the operation was applied, or they do not tell
    /// whether the lease is over: see [`Env::may_be_taken`](super::Env::may_be_taken).
    Unknown,
}

/// A key's version and its stored value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Version {
    /// The version: the last token of the key, and at least [`Env::renamed`](super::Env::renamed).
    pub version: Token,
    /// The stored value, if there is one that has not expired.
    pub kept: Option<StoredValue>,
}

/// A new grant, or an earlier one that was found again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    /// Identifies the lease together with its keys.
    pub nonce: u64,
    /// The only key of the grant, if the claim was for any of its keys.
    pub chosen: Option<Key>,
    /// One token for each key, in the order of the keys. All tokens are equal, except in leases that an earlier
    /// version of the program granted.
    pub tokens: Vec<Token>,
    /// What is left of the lease, in microseconds, at the moment of [`Env::now`](super::Env::now).
    pub left_us: u64,
    /// How many levels the owner holds now.
    pub levels: u32,
    /// Whether the grant existed before: it was made for the same request, or is the owner's own lease.
    pub repeated: bool,
}

/// Why a claim was denied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Denial {
    /// The key that was not free.
    pub key: Key,
    /// The rule that denied the claim.
    pub cause: Cause,
    /// The holder that blocks the claim the longest; `None` if only a delay blocks it.
    pub holder: Option<HeldBy>,
    /// Microseconds until the first change that may make the key free for this claim, unless a holder releases
    /// it earlier.
    pub free_in_us: u64,
    /// Set if the key is free but reserved for this waiter.
    pub next_waiter: Option<NextWaiter>,
    /// When the claim joined the global queues of its keys, if it did.
    pub joined: Option<ServerTime>,
}

/// The rule by which a key is denied to a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// A running lease excludes the claim.
    Held,
    /// Running leases leave fewer permits than the claim asks for.
    Permits {
        /// How many permits they have.
        used: u32,
        /// How many permits the claim counts in total.
        limit: u32,
    },
    /// No lease runs, but the key stays blocked: for the lock delay of a lease that ended without a release, or for the
    /// shortest time of a lease that was released early.
    Delay,
    /// A lease has ended by the store's clock, which is in doubt.
    ClockInDoubt,
    /// The store's server has just taken over: leases of the server before it may still run.
    FailOver,
    /// Another waiter is ahead in the global queue.
    GlobalQueue,
    /// It is another proxy's turn, after the key was granted to others [`TURN_AFTER`](super::TURN_AFTER) times.
    Turn,
    /// The key is delegated to another proxy, which has not given it back.
    Delegated,
    /// Another session of the server has the key. The store does not know the holder.
    OtherSession,
    /// The members of a quorum are divided among claims.
    Divided,
}

/// The waiter that would be granted a key now if it asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NextWaiter {
    /// The proxy of the waiter.
    pub proxy: Arc<str>,
    /// The ticket of its place in the global queue; `None` if any waiter of the proxy may ask.
    pub ticket: Option<u64>,
}

/// A holder that blocks a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldBy {
    /// The owner that the client named.
    pub owner: Box<str>,
    /// The id of the last request that the lease was granted to, if the client gave one.
    pub request: Option<Box<str>>,
    /// How the key is held.
    pub mode: Mode,
    /// The fencing token of the lease.
    pub token: Token,
    /// When the lease was granted.
    pub since: ServerTime,
    /// When the lease ends.
    pub until: ServerTime,
}

impl From<&Holder> for HeldBy {
    fn from(holder: &Holder) -> HeldBy {
        let Holder { owner, mode, token, since, until, .. } = holder;
        let request = holder.levels.last().and_then(|level| level.request.clone());
        HeldBy { owner: owner.clone(), request, mode: *mode, token: *token, since: *since, until: *until }
    }
}

/// A record that was delegated, and the grant of the claim that asked for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delegated {
    /// The grant, which the record has.
    pub grant: Grant,
    /// The record without the delegation.
    pub record: Record,
    /// The last of the delegation's tokens; the first one is above the record's.
    pub last_token: Token,
    /// How much longer the delegation lasts from the moment of the decision on, in microseconds.
    pub left_us: u64,
    /// Whether another proxy waits for the key.
    pub is_wanted: bool,
}
