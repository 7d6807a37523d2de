//! The durable state of a key.

use std::num::NonZero;
use std::sync::Arc;

use super::Tag;
use crate::lock::{Mode, ServerTime, Token};

/// How many ended grants with a request id a key remembers, to tell a repeated call from a new one.
pub const ENDED_KEPT: usize = 8;
/// How many ended grants without a request id a key remembers, for a caller that repeats its release.
pub const NAMELESS_KEPT: usize = 1;
/// How many commits with a request id a key remembers, to tell a repeated commit from a conflict.
pub const COMMITS_KEPT: usize = 32;
/// The most holders that one key can have at a time.
pub const MAX_HOLDERS: usize = 1024;
/// The deepest re-entrance of one holder.
pub const MAX_LEVELS: usize = 64;
/// How many callers that repeat the request of one grant can still undo that grant. If more callers repeat it,
/// the grant stays until it is released or ends.
pub const MAX_REPEATS: usize = 8;
/// The most places in the global queue of a key.
pub const MAX_GLOBAL_QUEUE: usize = 1_000;
/// The most proxies whose waiting for one key is noted, if the key has no global queue. Other proxies poll.
pub const MAX_WANTED: usize = 64;
/// The most connections whose last batch id a record keeps.
pub const MAX_BATCH_IDS: usize = 32;
/// How far the store's clock may be set forward without being noticed, in microseconds. After a lease has ended
/// by that clock, it is respected for this long, because its holder may still count on it.
pub const UNNOTICED_US: u64 = 100_000;

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
    /// For the primitive `once`: how long its outcome is stored, in milliseconds.
    pub keep_ms: Option<NonZero<u32>>,
    /// The `attempt` of the last release that gave up a level.
    pub released_by: Option<NonZero<u64>>,
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
    /// The [`Claim::fingerprint`](super::Claim::fingerprint).
    pub fingerprint: u64,
}

/// A grant or a commit that is over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended {
    /// The nonce of the grant, or the `attempt` of the commit.
    pub nonce: u64,
    /// The `attempt` of the release that ended the grant; `None` if it was not released.
    pub released_by: Option<NonZero<u64>>,
    /// The request id, if the client gave one; it is used up.
    pub request: Option<Box<str>>,
    /// Set for an [`Op::Commit`](super::Op::Commit): the answer if the commit is repeated.
    pub committed: Option<Committed>,
}

/// A commit that was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Committed {
    /// The new version.
    pub version: Token,
    /// The [`Commit::fingerprint`](super::Commit::fingerprint).
    pub fingerprint: u64,
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

/// A waiter's place in the global queue of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GlobalPlace {
    /// The [`GlobalTicket::number`](super::GlobalTicket::number) of the waiter.
    pub ticket: u64,
    /// The proxy of the waiter.
    pub proxy: Arc<str>,
    /// Lower ranks go first.
    pub rank: i32,
    /// When the waiter first joined a global queue; the same in the queues of all its keys. `None` if an
    /// earlier version of the program wrote the place.
    pub joined: Option<ServerTime>,
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

/// Identifies one batch of one connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchId {
    /// A random number of the connection.
    pub writer: u64,
    /// Rises with every batch of the connection; approximately the store's time.
    pub at: ServerTime,
}

impl Record {
    /// The latest moment at which a holder, a delay or a stored value of the record ends, if nothing changes
    /// it.
    pub fn until(&self) -> ServerTime {
        let ends = self.holders.iter().map(Holder::free_at);
        ends.chain(self.kept.iter().map(|kept| kept.until)).fold(self.not_before, ServerTime::max)
    }
}

impl Holder {
    /// Whether the lease accepts the token: the client may have been told of it.
    pub(super) fn accepts(&self, token: Token) -> bool {
        self.lowest_token <= token && token <= self.token
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
    pub(super) fn order(&self) -> (i32, Option<ServerTime>, u64) {
        (self.rank, self.joined, self.ticket)
    }
}
