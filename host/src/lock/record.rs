//! The durable state of a key, and the effect of each operation on it.
//!
//! A store reads the records of an operation's keys under its own locks, calls [`apply`], and writes back the
//! changed records, all in one transaction. So the decisions made here hold on every server and in every proxy,
//! and can be tested without either.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{Key, LeaseRef, Mode, ServerTime, Token};

mod decide;
mod doubt;
mod env;
mod global_queue;
mod outcome;
mod replay;
mod tag;

pub use decide::apply;
pub use doubt::Doubt;
pub use env::Env;
pub use outcome::{Denial, Grant, HeldBy, Outcome, Version};
pub use replay::{BATCH_ID_KEPT_US, BatchId, MAX_BATCH_IDS, Tried, run};
pub use tag::{HttpView, RESERVED, Tag};

/// How many ended grants with a request id a key remembers, to tell a repeated call from a new one.
pub const ENDED_KEPT: usize = 8;
/// How many ended grants without a request id a key remembers, for a caller that repeats its release.
pub const NAMELESS_KEPT: usize = 1;
/// How many commits with a request id a key remembers, to tell a repeated commit from a conflict.
pub const COMMITS_KEPT: usize = 32;
/// The most holders that one key can have at a time.
pub const MAX_HOLDERS: usize = 1024;
/// How many callers that repeat the request of one grant can still undo that grant. If more callers repeat it,
/// the grant stays until it is released or ends.
pub const MAX_REPEATS: usize = 8;
/// The error text for [`Outcome::Unknown`].
pub const UNKNOWN: &str =
    "it is not known whether the operation was applied: the answer was lost, or the server lost writes";
/// The most places in the global queue of a key.
pub const MAX_GLOBAL_QUEUE: usize = 1_000;
/// How far the store's clock may be set forward without being noticed, in microseconds. After a lease has ended
/// by that clock, it is respected for this long, because its holder may still count on it.
pub const UNNOTICED_US: u64 = 100_000;
/// How long a place in the global queue lasts if its proxy does not extend it, and how long a free key is
/// reserved for the proxy of the next waiter.
pub const PLACE_MS: u32 = 5_000;
/// How often a key is granted to others before it is the turn of a proxy that waits for it. A handoff to
/// another proxy takes longer than a handoff within a proxy.
pub const TURN_AFTER: u32 = 16;
/// The most proxies whose waiting for one key is noted, if the key has no global queue. Other proxies poll.
pub const MAX_WANTED: usize = 64;
/// How long the note that a proxy waits lasts if the proxy does not renew it. A proxy asks for a held key twice
/// in that time.
pub const WANTED_MS: u32 = 60_000;
/// The deepest re-entrance of one holder.
pub const MAX_LEVELS: usize = 64;

/// The durable state of one key.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Record {
    /// The last token that was granted.
    pub token: Token,
    /// The leases of the key, including ended leases that have not been removed yet.
    pub holders: Vec<Holder>,
    /// No grants before this moment (lock-at-least, lock-delay).
    pub not_before: ServerTime,
    /// The last grants that ended and the last commits, oldest first. [`ENDED_KEPT`], [`NAMELESS_KEPT`] and
    /// [`COMMITS_KEPT`] bound the number of each kind.
    pub ended: Vec<Ended>,
    /// The value that a `once` or `version` primitive stored with the key.
    pub kept: Option<StoredValue>,
    /// The global queue: waiters of all proxies, the first one first. At most [`MAX_GLOBAL_QUEUE`].
    pub global_queue: Vec<GlobalPlace>,
    /// The batches that recently changed the record, the last one of each connection. At most
    /// [`MAX_BATCH_IDS`].
    pub batch_ids: Vec<BatchId>,
    /// The proxies that wait for the key without a global queue, in order of arrival. At most [`MAX_WANTED`].
    pub wanted: Vec<Wanted>,
}

/// A waiter's place in the global queue of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GlobalPlace {
    /// The [`GlobalTicket::number`] of the waiter.
    pub ticket: u64,
    /// The proxy of the waiter.
    pub proxy: Arc<str>,
    /// Lower ranks go first.
    pub rank: i32,
    /// When the waiter first joined a global queue; the same in the queues of all its keys. 0 if an earlier
    /// version of the program wrote the place.
    pub joined: ServerTime,
    /// The client has a request id and can repeat the request on another proxy, which then finds the place
    /// again. So the place outlives its proxy, until it expires.
    pub returns: bool,
    /// The place expires at this moment, unless its proxy extends it.
    pub until: ServerTime,
}

/// The note that a proxy waits for a key: it was denied the key, which has no global queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// The proxy that waits.
    pub proxy: Arc<str>,
    /// When the proxy was first denied the key.
    pub since: ServerTime,
    /// How often the key has been granted to other proxies since then.
    pub passed: u32,
    /// The note expires at this moment, unless the proxy renews it.
    pub until: ServerTime,
}

/// The position of a claim among the claims of all proxies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GlobalTicket {
    /// A number unique to the waiter, which it keeps as long as it waits, even if its keys change. If the
    /// request has an id, the number is derived from the request: the same request on another proxy has the
    /// same ticket.
    pub number: u64,
    /// Lower ranks go first; within a rank, the waiter that reached the store first.
    pub rank: i32,
    /// When it joined, if the store has reported it.
    pub joined: Option<ServerTime>,
    /// See [`GlobalPlace::returns`].
    pub returns: bool,
}

/// A change of the global queue of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GlobalQueueChange {
    /// No change, only a probe: which waiter is next?
    Look,
    /// Remove the place of a waiter that no longer waits on this proxy, unless another proxy has taken the
    /// place over. Without a ticket: remove the note that the proxy waits.
    Leave {
        /// The proxy of the waiter.
        proxy: Arc<str>,
        /// The [`GlobalTicket::number`] of the waiter, if it has a place in the global queue.
        ticket: Option<u64>,
    },
    /// Extend the places with these tickets.
    Keep {
        /// The [`GlobalTicket::number`] of each waiter.
        tickets: Vec<u64>,
    },
    /// The proxy has ended: remove the note that it waits, and its places to which no client can return.
    Evict {
        /// The proxy that has ended.
        proxy: Arc<str>,
    },
}

/// The waiter that would be granted a key now if it asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NextWaiter {
    /// The proxy of the waiter.
    pub proxy: Arc<str>,
    /// The ticket of its place in the global queue; `None` if any waiter of the proxy may ask.
    pub ticket: Option<u64>,
}

/// A value that stays although no lease holds the key: the outcome of a `once`, or the value of a committed
/// version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredValue {
    /// JSON text.
    pub value: Box<str>,
    /// When the value was stored.
    pub since: ServerTime,
    /// The value counts as absent from this moment on. The largest time means "until it is replaced".
    pub until: ServerTime,
    /// The nonce of the lease, or the attempt of the commit, that stored the value.
    pub nonce: u64,
    /// Whether an API client or a guarded request stored the value.
    pub origin: Origin,
}

/// Where a stored value came from. A value stored by an API client is never returned as an application's
/// answer, and vice versa.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Origin {
    /// A client of the API.
    #[default]
    Api,
    /// The answer to a guarded request.
    Route,
}

/// The outcome of a `once`, as its holder reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Left {
    /// JSON text.
    pub value: Box<str>,
    /// Whether the holder is an API client or a guarded request.
    pub origin: Origin,
}

/// One grant of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// The `attempt` of the claim that made the grant. It identifies the lease.
    pub nonce: u64,
    /// The owner that the client named.
    pub owner: Box<str>,
    /// How the key is held.
    pub mode: Mode,
    /// The fencing token of the grant.
    pub token: Token,
    /// The same as `token`, unless a quorum has raised the token. A client that asked twice may know a lower
    /// token from before, so the lease accepts every token from this one up to `token`.
    pub lowest_token: Token,
    /// How many keys the lease holds, including this one.
    pub keys: u32,
    /// When the lease was granted.
    pub since: ServerTime,
    /// When the lease ends.
    pub until: ServerTime,
    /// The lease time at the grant, in milliseconds. A renewal uses it by default.
    pub ttl_ms: u32,
    /// After a release the key stays blocked until this moment.
    pub at_least_until: ServerTime,
    /// After an expiry the key stays blocked for this long, in milliseconds.
    pub delay_ms: u32,
    /// How long the outcome of a `once` is stored, in milliseconds.
    pub keep_ms: u32,
    /// The `attempt` of the last release that gave up a level; 0 if there was none.
    pub released_by: u64,
    /// One level for each acquire of the owner that it has not released; never empty.
    pub levels: Vec<Level>,
    /// What is stored with the lease for display and for a policy change.
    pub tag: Tag,
}

/// One acquire of a holder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Level {
    /// The attempts of the claims that were answered with this level; more than one if a request was repeated.
    /// The level is undone when the last of these claims is abandoned. At most [`MAX_REPEATS`].
    pub attempts: Vec<u64>,
    /// The request id, if the client gave one.
    pub request: Option<Box<str>>,
    /// The [`Claim::fingerprint`].
    pub fingerprint: u64,
}

/// A grant or a commit that is over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended {
    /// The nonce of the grant, or the `attempt` of the commit.
    pub nonce: u64,
    /// The `attempt` of the release that ended the grant; 0 if it was not released.
    pub released_by: u64,
    /// The request id, if the client gave one; it is used up.
    pub request: Option<Box<str>>,
    /// Set for an [`Op::Commit`]: the answer if the commit is repeated.
    pub committed: Option<Committed>,
}

/// A commit that was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Committed {
    /// The new version.
    pub version: Token,
    /// The [`Commit::fingerprint`].
    pub fingerprint: u64,
}

/// An acquire, as sent to the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// The keys: sorted, without duplicates, at least one.
    pub keys: Arc<[Key]>,
    /// The proxy that sends the claim.
    pub proxy: Arc<str>,
    /// Whether the claim waits if it is denied. A claim that does not wait takes no place in the global queue,
    /// does not count as passing other waiters, and leaves no note that its proxy waits.
    pub waits: bool,
    /// Grant any one of the keys that is free, instead of all keys.
    pub any: bool,
    /// A random number that no other claim has. It stays the same when the claim is sent again because its
    /// answer was lost.
    pub attempt: u64,
    /// The owner that the client named.
    pub owner: Box<str>,
    /// The request id, if the client gave one.
    pub request: Option<Box<str>>,
    /// A hash of the request, to detect a request id that is reused with another body.
    pub fingerprint: u64,
    /// How the keys are to be held.
    pub mode: Mode,
    /// The lease time, in milliseconds.
    pub ttl_ms: u32,
    /// The keys stay blocked for this long after the grant, even if the lease is released, in milliseconds.
    pub at_least_ms: u32,
    /// The keys stay blocked for this long after an expiry, in milliseconds.
    pub delay_ms: u32,
    /// Whether the claim adds a level to a lease that its owner already has.
    pub reentrant: bool,
    /// For the primitive `once`: how long the outcome is stored, in milliseconds. While an outcome is stored,
    /// the key is not granted. 0 for every other primitive.
    pub keep_ms: u32,
    /// Set if the claim waits in the global queue.
    pub global: Option<GlobalTicket>,
    /// What is stored with the lease for display and for a policy change.
    pub tag: Tag,
}

/// Gives up a lease, or one level of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Release {
    /// The lease to give up.
    pub lease: LeaseRef,
    /// A random number that no other release has. It stays the same when the release is sent again because its
    /// answer was lost.
    pub attempt: u64,
    /// The outcome of a `once`, which is stored for the claim's `keep_ms`.
    pub outcome: Option<Left>,
}

/// A new version of a key, made only if the version has not changed since the caller read it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Commit {
    /// The key to change.
    pub key: Key,
    /// The version that the caller read.
    pub version: Token,
    /// The new value as JSON text; `None` stores no value.
    pub value: Option<Box<str>>,
    /// A random number that no other commit has.
    pub attempt: u64,
    /// The request id, if the client gave one.
    pub request: Option<Box<str>>,
    /// A hash of the request, to detect a request id that is reused with another body.
    pub fingerprint: u64,
}

/// An operation of a store on its records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Op {
    /// Grant all keys or none; see [`Claim::any`] for the exception.
    Acquire(Claim),
    /// Find the grant that this claim already has: by its request id, or because its owner holds the keys. This
    /// never makes a new grant, so it may be asked without regard to a queue.
    Rejoin(Claim),
    /// Extend the lease to end `ttl_ms` milliseconds from now; with `None`, the lease time of the grant from
    /// now. A renewal never shortens the lease.
    Renew {
        /// The lease to renew.
        lease: LeaseRef,
        /// How long the lease lasts from now, in milliseconds; `None` for the lease time of the grant.
        ttl_ms: Option<u32>,
    },
    /// Let the lease accept these tokens, too, one for each of its keys; new grants get higher tokens. If the
    /// lease already accepts them, or for [`Token::ANY`], the operation only returns how long the lease still
    /// lasts.
    Raise {
        /// The lease that accepts the tokens.
        lease: LeaseRef,
        /// The tokens, in the order of the lease's keys.
        tokens: Vec<Token>,
    },
    /// Give up one level. Giving up the last level ends the lease.
    Release(Release),
    /// Undo the grant that the claim `attempt` may have got, if no other call was answered with it.
    Abandon {
        /// The keys of the claim.
        keys: Arc<[Key]>,
        /// The [`Claim::attempt`] of the claim.
        attempt: u64,
    },
    /// Take the key away from its holders; the token rises.
    Force {
        /// The key to take away.
        key: Key,
    },
    /// Change the global queue of the key, and find the next waiter.
    GlobalQueue {
        /// The key of the global queue.
        key: Key,
        /// What to change.
        change: GlobalQueueChange,
    },
    /// Read the key's version and its stored value.
    Read {
        /// The key to read.
        key: Key,
    },
    /// Make a new version if the key still has the version that the caller read.
    Commit(Commit),
}

impl Op {
    /// The keys that the operation reads or changes; never empty.
    pub fn keys(&self) -> &[Key] {
        match self {
            Op::Acquire(claim) | Op::Rejoin(claim) => &claim.keys,
            Op::Renew { lease, .. } | Op::Raise { lease, .. } | Op::Release(Release { lease, .. }) => {
                &lease.keys
            }
            Op::Abandon { keys, .. } => keys,
            Op::Force { key }
            | Op::GlobalQueue { key, .. }
            | Op::Read { key }
            | Op::Commit(Commit { key, .. }) => std::slice::from_ref(key),
        }
    }
}

/// The records of an operation, with a note of those that changed.
#[derive(Clone, Debug, Default)]
pub struct Records {
    entries: BTreeMap<Key, Entry>,
}

#[derive(Clone, Debug)]
struct Entry {
    record: Record,
    stored: bool,
    changed: bool,
}

impl Claim {
    /// The same claim for this key alone.
    pub fn of(&self, key: &Key) -> Claim {
        Claim { keys: [key.clone()].into(), any: false, ..self.clone() }
    }

    /// Whether the claim may already have its lease: because its request is a repetition, or because it adds a
    /// level.
    pub fn may_have_its_lease(&self) -> bool {
        self.reentrant || self.request.is_some()
    }
}

impl From<&str> for Left {
    fn from(value: &str) -> Left {
        Left { value: value.into(), origin: Origin::Api }
    }
}

impl Holder {
    /// Whether the lease accepts the token: the client may have been told of it.
    fn goes_by(&self, token: Token) -> bool {
        token == Token::ANY || (self.lowest_token <= token && token <= self.token)
    }

    /// When the holder no longer counts on the lease: [`UNNOTICED_US`] after its end, because the store's clock
    /// may have been set forward unnoticed.
    pub fn over_at(&self) -> ServerTime {
        self.until.plus_us(UNNOTICED_US)
    }

    /// When the holder no longer blocks the key, if it does nothing more.
    pub fn free_at(&self) -> ServerTime {
        self.over_at().plus_ms(self.delay_ms).max(self.at_least_until)
    }
}

impl GlobalPlace {
    /// The sort key of the global queue: lower goes first.
    fn order(&self) -> (i32, ServerTime, u64) {
        (self.rank, self.joined, self.ticket)
    }
}

impl Record {
    /// The latest moment at which a holder, a delay or a stored value of the record ends, if nothing changes
    /// it.
    pub fn until(&self) -> ServerTime {
        let ends = self.holders.iter().map(Holder::free_at);
        ends.chain(self.kept.iter().map(|kept| kept.until)).fold(self.not_before, ServerTime::max)
    }
}

impl Records {
    /// Adds the record of a key; `None` if the store has no row for the key.
    pub fn insert(&mut self, key: Key, record: Option<Record>) {
        let stored = record.is_some();
        let record = record.unwrap_or_default();
        self.entries.insert(key, Entry { record, stored, changed: false });
    }

    /// The record of a key, if it was added.
    pub fn get(&self, key: &Key) -> Option<&Record> {
        self.entries.get(key).map(|entry| &entry.record)
    }

    /// Each changed record, in the order of the keys, and whether the store has a row for it.
    pub fn changed(&self) -> impl Iterator<Item = (&Key, &Record, bool)> {
        self.entries
            .iter()
            .filter(|(_, entry)| entry.changed)
            .map(|(key, entry)| (key, &entry.record, entry.stored))
    }

    fn is_stored(&self, key: &Key) -> bool {
        self.entries.get(key).is_some_and(|entry| entry.stored || entry.changed)
    }

    fn read(&self, key: &Key) -> &Record {
        &self.entries.get(key).expect("the store reads every key of an operation").record
    }

    fn write(&mut self, key: &Key) -> &mut Record {
        let entry = self.entries.get_mut(key).expect("the store reads every key of an operation");
        entry.changed = true;
        &mut entry.record
    }
}

#[cfg(test)]
mod tests;
