//! The durable state of a key, and what each operation makes of it.
//!
//! A store reads the records of an operation's keys under its own locks, calls [`apply`], and
//! writes back the records that changed, all in one transaction. So what is decided here holds on
//! every server and in every proxy, and can be tested without either.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{Key, LeaseRef, Mode, ServerTime, Token};

mod decide;
mod doubt;
mod env;
mod global_queue;
mod replay;

pub use decide::apply;
pub use doubt::Doubt;
pub use env::Env;
pub use replay::{BATCH_ID_KEPT_US, BatchId, MAX_BATCH_IDS, Tried, run};

/// Ended grants with a request id that a key remembers, to tell a repeated call from a new one.
pub const ENDED_KEPT: usize = 8;
/// The same of those without a request id: for a release that its caller repeats.
pub const NAMELESS_KEPT: usize = 1;
/// Commits with a request id that a key remembers, to tell a repeated one from a conflict.
pub const COMMITS_KEPT: usize = 32;
/// The most holders that one key has at a time.
pub const MAX_HOLDERS: usize = 1024;
/// Callers that may be told of one grant by repeating its request and can still undo it; with more,
/// the grant stays until it is released or ends.
pub const MAX_REPEATS: usize = 8;
/// What a caller hears where an operation came to [`Outcome::Unknown`].
pub const UNKNOWN: &str =
    "nothing tells what became of it: an answer was lost, or writes that a server had not passed on";
/// The longest line of a key over all proxies.
pub const MAX_GLOBAL_QUEUE: usize = 1_000;
/// How far the store's clock may be set forward without anybody noticing: a lease that has ended by it is
/// respected for as long, as its holder may count on.
pub const UNNOTICED_US: u64 = 100_000;
/// How long a place in line is kept without a word from its proxy, and how long a free key is kept for the proxy
/// whose turn it is.
pub const PLACE_MS: u32 = 5_000;
/// How often a key is granted past a proxy that waits for it before it is that proxy's turn. A handoff to
/// another proxy takes longer than one within a proxy.
pub const TURN_AFTER: u32 = 16;
/// Proxies that wait for one key without a line, beside each other. Others poll.
pub const MAX_WANTED: usize = 64;
/// How long a proxy's mark stays without a word from it. A proxy asks for a held key twice in that time.
pub const WANTED_MS: u32 = 60_000;
/// The deepest re-entrance of one holder.
pub const MAX_LEVELS: usize = 64;

/// The durable state of one key.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Record {
    /// The last token that was given out.
    pub token: Token,
    pub holders: Vec<Holder>,
    /// Nobody is granted the key before this moment (lock-at-least, lock-delay).
    pub not_before: ServerTime,
    /// The last grants that ended and the last commits, oldest first: so many of each kind as [`ENDED_KEPT`],
    /// [`NAMELESS_KEPT`] and [`COMMITS_KEPT`] say.
    pub ended: Vec<Ended>,
    /// What the primitives `once` and `version` keep with the key.
    pub kept: Option<StoredValue>,
    /// Those who wait for the key in an order that holds over all proxies, the first one first. At most
    /// [`MAX_GLOBAL_QUEUE`].
    pub global_queue: Vec<GlobalPlace>,
    /// The batches that changed the record of late, the last one of each connection. At most [`MAX_BATCH_IDS`].
    pub batch_ids: Vec<BatchId>,
    /// The other proxies that wait for the key without a line, the one that came first first. At most
    /// [`MAX_WANTED`].
    pub wanted: Vec<Wanted>,
}

/// A waiter's place in the line of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GlobalPlace {
    pub ticket: u64,
    /// Whose waiter it is.
    pub proxy: Arc<str>,
    pub rank: i32,
    /// When the waiter joined its first line, the same in the lines of all its keys. 0 where an earlier version of
    /// this program wrote the place.
    pub joined: ServerTime,
    /// Its client has a request id, and finds the place again when it repeats the request on another proxy. So
    /// the place outlives its proxy until it ends by itself.
    pub returns: bool,
    /// From then on it is passed over, unless its proxy has asked for it to be kept.
    pub until: ServerTime,
}

/// The mark of a proxy that has been denied a key for which there is no line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    pub proxy: Arc<str>,
    pub since: ServerTime,
    /// How often the key was granted to other proxies since.
    pub passed: u32,
    pub until: ServerTime,
}

/// How a claim stands in line with those of other proxies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GlobalTicket {
    /// A number that no other waiter has. StoredValue as long as it waits, whatever becomes of its keys. Made of the
    /// request where that has an id: the same request on another proxy has the same ticket.
    pub number: u64,
    /// Lower ranks go first; within a rank, the waiter of which the store heard first.
    pub rank: i32,
    /// When it joined, as far as the store has told.
    pub joined: Option<ServerTime>,
    /// See [`GlobalPlace::returns`].
    pub returns: bool,
}

/// What is done to the line of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GlobalQueueChange {
    /// Nothing: whose turn is it?
    Look,
    /// The place of a waiter that waits no more on this proxy, unless another proxy has taken the place over. Without
    /// a ticket: the proxy's mark.
    Leave { proxy: Arc<str>, ticket: Option<u64> },
    /// These are still there.
    Keep { tickets: Vec<u64> },
    /// The proxy is gone: its mark, and the places that no client can return to.
    Evict { proxy: Arc<str> },
}

/// The waiter that could have a key now, if it asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NextWaiter {
    pub proxy: Arc<str>,
    /// Of its place in line; `None` where any waiter of the proxy may ask.
    pub ticket: Option<u64>,
}

/// A value that stays when nobody holds the key: the outcome of a `once`, or what was committed with
/// a version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredValue {
    /// JSON text.
    pub value: Box<str>,
    pub since: ServerTime,
    /// From then on it counts as absent. The largest time stands for "until it is replaced".
    pub until: ServerTime,
    /// The lease or the commit that left it.
    pub nonce: u64,
    pub origin: Origin,
}

/// Which way a kept value came in: what a client of the API left is never told as an application's answer, nor the
/// other way round.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Origin {
    #[default]
    Api,
    /// It is the answer to a guarded request.
    Route,
}

/// The outcome of a `once`, as its holder leaves it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Left {
    /// JSON text.
    pub value: Box<str>,
    pub origin: Origin,
}

/// One grant of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// The `attempt` of the claim that made the grant; part of the lease's identity.
    pub nonce: u64,
    pub owner: Box<str>,
    pub mode: Mode,
    pub token: Token,
    /// The same, unless a quorum has raised the token. A client that asked twice may have been told of a lower one
    /// before, so the lease goes by all tokens from this one on.
    pub lowest_token: Token,
    /// How many keys the lease holds; this record is one of them.
    pub keys: u32,
    pub since: ServerTime,
    pub until: ServerTime,
    /// The time that the lease was granted for, and is renewed for unless asked otherwise.
    pub ttl_ms: u32,
    /// After a release the key stays taken until this moment.
    pub at_least_until: ServerTime,
    /// After an expiry the key stays taken this long.
    pub delay_ms: u32,
    /// The claim's: how long the outcome is kept.
    pub keep_ms: u32,
    /// The `attempt` of the last release that gave up a level; 0 where there was none.
    pub released_by: u64,
    /// One for each time the owner was granted the key and has not released it; never empty.
    pub levels: Vec<Level>,
    pub tag: Tag,
}

/// One acquire that a holder rests on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Level {
    /// The claims that were answered with this level: more than one where a request was repeated.
    /// It is undone when the last of them is abandoned. At most [`MAX_REPEATS`].
    pub attempts: Vec<u64>,
    /// The request id, where the client gave one.
    pub request: Option<Box<str>>,
    pub fingerprint: u64,
}

/// What decisions do not look at: kept so that a holder can be shown, and planned again when its
/// policy is replaced.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tag {
    pub resource: Box<str>,
    /// `name@sha256:digest` of the policy generation that planned the lease.
    pub policy: Box<str>,
    pub labels: Vec<(Box<str>, Box<str>)>,
}

/// A grant that is over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended {
    pub nonce: u64,
    /// The `attempt` of the release that ended it; 0 where it was not released.
    pub released_by: u64,
    /// Its request id, where the client gave one: that id is used up.
    pub request: Option<Box<str>>,
    /// Set where it was no grant but an [`Op::Commit`]: what is answered when it comes again.
    pub committed: Option<Committed>,
}

/// A commit that was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Committed {
    /// The version that it made.
    pub version: Token,
    /// The [`Commit::fingerprint`].
    pub fingerprint: u64,
}

/// An acquire, as the store is asked for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// Sorted, each once, at least one.
    pub keys: Arc<[Key]>,
    /// The proxy that asks.
    pub proxy: Arc<str>,
    /// Whether it waits where it is denied. One that does not takes no place in line, goes past nobody, and leaves
    /// no mark.
    pub waits: bool,
    /// Grant one of the keys that is free, not all of them.
    pub any: bool,
    /// A random number that no other claim has. StoredValue when the same claim is sent again because its
    /// answer was lost.
    pub attempt: u64,
    pub owner: Box<str>,
    pub request: Option<Box<str>>,
    /// A hash of what was asked, to notice a request id that comes back with another body.
    pub fingerprint: u64,
    pub mode: Mode,
    pub ttl_ms: u32,
    pub at_least_ms: u32,
    pub delay_ms: u32,
    pub reentrant: bool,
    /// The primitive `once`: how long the outcome is kept, and while one is kept the key is not granted.
    /// 0 for every other primitive.
    pub keep_ms: u32,
    /// Set where the order of waiters holds over all proxies.
    pub global: Option<GlobalTicket>,
    pub tag: Tag,
}

/// Gives up a lease, or one level of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Release {
    pub lease: LeaseRef,
    /// A random number that no other release has, kept when this one is sent again because its answer
    /// was lost.
    pub attempt: u64,
    /// The outcome of a `once`: it is kept for the claim's `keep_ms`.
    pub outcome: Option<Left>,
}

/// A change that is made only if nobody else made one first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Commit {
    pub key: Key,
    /// The version that was read.
    pub version: Token,
    /// JSON text to keep; `None` keeps nothing.
    pub value: Option<Box<str>>,
    /// A random number that no other commit has.
    pub attempt: u64,
    pub request: Option<Box<str>>,
    /// A hash of what was asked, to notice a request id that comes back with another body.
    pub fingerprint: u64,
}

/// What a store can be asked to do to its records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Op {
    /// Grant all keys or none.
    Acquire(Claim),
    /// The grant that this claim has already: by its request id, or because its owner holds the keys.
    /// Never a new one, so it may be asked past a queue.
    Rejoin(Claim),
    /// Let the lease end `ttl_ms` from now, or, with `None`, the time from now that it was granted
    /// for; never earlier than it would have.
    Renew {
        lease: LeaseRef,
        ttl_ms: Option<u32>,
    },
    /// Have the lease go by these tokens, too, one for each of its keys: new ones are above them. Where it does
    /// already, and for [`Token::ANY`], it only tells what is left of the lease.
    Raise {
        lease: LeaseRef,
        tokens: Vec<Token>,
    },
    /// Give up one level; the last one ends the lease.
    Release(Release),
    /// Undo the grant that the claim `attempt` may have been given, if nobody else was answered with it.
    Abandon {
        keys: Arc<[Key]>,
        attempt: u64,
    },
    /// Take the key from whoever holds it; the token moves on.
    Force {
        key: Key,
    },
    GlobalQueue {
        key: Key,
        change: GlobalQueueChange,
    },
    /// The key's version and what is kept with it.
    Read {
        key: Key,
    },
    /// Make a new version if the key's version is still the one that was read.
    Commit(Commit),
}

impl Op {
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

/// What became of an [`Op`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    Granted(Grant),
    /// A [`Op::Rejoin`] found no grant of its own.
    Absent,
    /// An acquire or a commit found a key taken.
    Held(Denial),
    /// A `once` claim found that it was done before.
    Done(StoredValue),
    /// The request id was used with another body, or its lease has ended.
    RequestReused {
        ended: bool,
    },
    /// The owner is at [`MAX_LEVELS`], or the key at [`MAX_HOLDERS`].
    Full,
    /// The key's line is at [`MAX_GLOBAL_QUEUE`].
    Crowded,
    /// Renewed, or raised.
    Renewed {
        /// What is left of the lease, in microseconds, at the moment of [`Env::now`].
        left_us: u64,
    },
    Released {
        /// Levels that the owner still holds.
        levels_left: u32,
    },
    /// The lease is unknown, has expired, or belongs to another.
    Lost,
    /// How many holders were put out.
    Forced {
        holders: u32,
    },
    Abandoned,
    /// The first in line, if the key is free.
    GlobalQueue {
        next_waiter: Option<NextWaiter>,
    },
    Version(Version),
    Committed {
        version: Token,
    },
    /// The version is not the one that was read.
    Conflict(Version),
    /// The answer was lost, and nothing tells whether the operation was carried out. Or nothing tells whether the
    /// lease is over: see [`Env::may_be_taken`].
    Unknown,
}

/// A key's version, with what is kept with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Version {
    pub version: Token,
    pub kept: Option<StoredValue>,
}

/// A grant, new or found again by its request id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    pub nonce: u64,
    /// Of a claim for any of its keys: the one that it was given, alone.
    pub chosen: Option<Key>,
    /// One for each key, in their order. They are the same number, except in leases that an earlier version
    /// granted.
    pub tokens: Vec<Token>,
    /// What is left of the lease, in microseconds, at the moment of [`Env::now`].
    pub left_us: u64,
    /// Levels that the owner now holds.
    pub levels: u32,
    /// Whether the grant was there before: the same request, or the owner's own lease.
    pub repeated: bool,
}

/// Why a key could not be had.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Denial {
    pub key: Key,
    /// The holder that stands in the way the longest; `None` while only a delay does.
    pub holder: Option<HeldBy>,
    /// Microseconds until the first change that could let this claim in, unless somebody releases.
    pub free_in_us: u64,
    /// The key is free, and this one's.
    pub next_waiter: Option<NextWaiter>,
    /// When the claim joined the lines of its keys, where it did.
    pub joined: Option<ServerTime>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldBy {
    pub owner: Box<str>,
    /// The id of the request that it was granted to last, where the client gave one.
    pub request: Option<Box<str>>,
    pub mode: Mode,
    pub token: Token,
    pub since: ServerTime,
    pub until: ServerTime,
}

impl From<&Holder> for HeldBy {
    fn from(holder: &Holder) -> HeldBy {
        let Holder { owner, mode, token, since, until, .. } = holder;
        let request = holder.levels.last().and_then(|level| level.request.clone());
        HeldBy { owner: owner.clone(), request, mode: *mode, token: *token, since: *since, until: *until }
    }
}

/// The records that an operation works on, with a note of those that changed.
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
    /// The claim for this key alone.
    pub fn of(&self, key: &Key) -> Claim {
        Claim { keys: [key.clone()].into(), any: false, ..self.clone() }
    }

    /// Whether the claim may have its lease already: its request is made again, or it is for one level more.
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
    /// Whether the token is one that the client may have been told of.
    fn goes_by(&self, token: Token) -> bool {
        token == Token::ANY || (self.lowest_token <= token && token <= self.token)
    }

    /// When the holder is certain no more: a little after its lease has ended, as the store's clock may be set forward
    /// by a little unnoticed.
    pub fn over_at(&self) -> ServerTime {
        self.until.plus_us(UNNOTICED_US)
    }

    /// When a holder that does nothing more is out of the way.
    pub fn free_at(&self) -> ServerTime {
        self.over_at().plus_ms(self.delay_ms).max(self.at_least_until)
    }
}

impl GlobalPlace {
    /// Lower goes first.
    fn order(&self) -> (i32, ServerTime, u64) {
        (self.rank, self.joined, self.ticket)
    }
}

impl Record {
    /// The latest moment at which a holder, a delay or a kept value of the record ends, if nobody does
    /// anything.
    pub fn until(&self) -> ServerTime {
        let ends = self.holders.iter().map(Holder::free_at);
        ends.chain(self.kept.iter().map(|kept| kept.until)).fold(self.not_before, ServerTime::max)
    }
}

impl Records {
    /// `None` stands for a key that the store has no row of.
    pub fn insert(&mut self, key: Key, record: Option<Record>) {
        let stored = record.is_some();
        let record = record.unwrap_or_default();
        self.entries.insert(key, Entry { record, stored, changed: false });
    }

    pub fn get(&self, key: &Key) -> Option<&Record> {
        self.entries.get(key).map(|entry| &entry.record)
    }

    /// Each changed record with whether the store has a row of it, in the order of the keys.
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
