//! The one loop: requests in, policy and store asked, leases out.
//!
//! Fronts call [`Service`]; it is cheap to clone. What is decided about locks is decided in
//! [`crate::lock`]; this module carries events to it and its actions to the policies, the store,
//! the timers and the callers.

use std::sync::Arc;

use crate::lock::record::HeldBy;
use crate::lock::{Instant, Key, LeaseRef, Mode, Token};
use crate::store::{Health, StoreError};

/// What an application asks for.
#[derive(Clone, Debug)]
pub struct Request {
    pub resource: String,
    /// Who will hold the lock; the front makes one up where the client gives none.
    pub owner: String,
    /// `limit` of permits is 0: the policy sets it.
    pub mode: Mode,
    pub ttl_ms: Option<u32>,
    pub wait_ms: Option<u32>,
    pub request_id: Option<String>,
    pub labels: Vec<(String, String)>,
}

/// A grant, as its client is told of it.
#[derive(Clone, Debug)]
pub struct Lease {
    pub lease: LeaseRef,
    pub resource: String,
    pub owner: String,
    pub mode: Mode,
    /// One for each key of `lease.keys`.
    pub tokens: Vec<Token>,
    pub ttl_ms: u32,
    /// The holder may be certain of the lease until this moment, and not after.
    pub valid_until: Instant,
    pub waited_ms: u32,
    /// `name@sha256:` and 12 digits.
    pub policy: Arc<str>,
    pub primitive: &'static str,
    /// How often the owner holds it; over 1 only under a re-entrant policy.
    pub levels: u32,
}

/// Why an acquire got no lease.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AcquireError {
    #[error("`{resource}` is held")]
    Contended {
        resource: String,
        holder: Option<HeldBy>,
        /// Place in the queue when the wait ended, 1 for the next; 0 where it never queued.
        position: u32,
        retry_after_ms: u32,
        /// Set where the policy gave up before the wait was over.
        reason: Option<String>,
    },
    #[error("the policy refused: {reason}")]
    Refused { reason: String },
    /// The policy failed at naming, which fails closed. `reason` is a stable slug.
    #[error("the policy `{policy}` could not decide: {detail}")]
    PolicyFault { policy: String, reason: &'static str, detail: String },
    #[error("{resource} has {limit} waiters, which is the policy's limit")]
    TooManyWaiters { resource: String, limit: u32 },
    /// `detail` names the field and its bound.
    #[error("{field}: {detail}")]
    Invalid { field: &'static str, detail: String },
    #[error("the request id was used before, {}", if *ended { "and its lease has ended" } else { "with another body" })]
    RequestReused { ended: bool },
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("the proxy is shutting down")]
    ShuttingDown,
}

/// Why a renewal or release did nothing.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LeaseError {
    #[error("the lease is unknown, has expired, or was taken away")]
    Lost,
    #[error("{field}: {detail}")]
    Invalid { field: &'static str, detail: String },
    #[error(transparent)]
    Store(#[from] StoreError),
}

#[derive(Clone, Copy, Debug)]
pub struct Renewed {
    pub valid_until: Instant,
    pub ttl_ms: u32,
}

/// What a held connection is told.
#[derive(Clone, Debug)]
pub enum HoldEvent {
    Renewed(Renewed),
    /// The lease is over, or can no longer be relied on; nothing follows.
    Lost {
        reason: String,
    },
}

/// A held key, as `GET /v1/locks` shows it. Times are microseconds since 1970 on the store's clock.
#[derive(Clone, Debug)]
pub struct LockEntry {
    pub key: Key,
    pub token: Token,
    pub holders: Vec<HolderEntry>,
}

#[derive(Clone, Debug)]
pub struct HolderEntry {
    pub resource: String,
    pub owner: String,
    pub mode: Mode,
    pub token: Token,
    pub since_us: u64,
    pub until_us: u64,
    pub left_ms: u32,
    pub levels: u32,
    pub policy: String,
}

/// One key with its queue on this proxy and the last decisions about it.
#[derive(Clone, Debug)]
pub struct LockView {
    pub entry: LockEntry,
    /// In the order of their places.
    pub queue: Vec<QueueEntry>,
    /// Newest last.
    pub decisions: Vec<Decision>,
}

#[derive(Clone, Debug)]
pub struct QueueEntry {
    pub position: u32,
    pub owner: String,
    pub mode: Mode,
    pub rank: i32,
    pub group: String,
    pub waited_ms: u32,
}

/// What was decided about a key, and by whom.
#[derive(Clone, Debug)]
pub struct Decision {
    /// Microseconds since 1970, this machine's clock.
    pub at_us: u64,
    pub hook: &'static str,
    /// The policy generation, or `built-in`.
    pub by: Arc<str>,
    pub what: String,
}

/// What happened to a key, for those who watch.
#[derive(Clone, Debug)]
pub struct Notice {
    pub key: Key,
    pub kind: NoticeKind,
    pub owner: Box<str>,
    pub token: Token,
    /// Microseconds since 1970, this machine's clock.
    pub at_us: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoticeKind {
    Granted,
    Released,
    Expired,
    /// Released by one and granted to the next in one step; `owner` and `token` are the new holder's.
    HandedOff,
    /// Taken away by an operator.
    Forced,
}

/// Everything that a front can ask. Cheap to clone.
#[derive(Clone)]
pub struct Service {}

/// A lease that the proxy keeps alive. Dropping it releases the lease.
pub struct Hold {
    pub lease: Lease,
}

impl Service {
    /// Waits for the lease, at most as long as the plan allows. Dropping the future leaves the
    /// queue; a grant that was under way then is released at once.
    pub async fn acquire(&self, _request: Request) -> Result<Lease, AcquireError> {
        unimplemented!()
    }

    /// Extends a lease of any proxy. `ttl_ms` is the policy's where it is `None`.
    pub async fn renew(&self, _lease: LeaseRef, _ttl_ms: Option<u32>) -> Result<Renewed, LeaseError> {
        unimplemented!()
    }

    /// Gives up one level of a lease of any proxy.
    pub async fn release(&self, _lease: LeaseRef) -> Result<(), LeaseError> {
        unimplemented!()
    }

    /// As [`Service::acquire`]; the lease is then renewed until the [`Hold`] is dropped.
    pub async fn hold(&self, _request: Request) -> Result<Hold, AcquireError> {
        unimplemented!()
    }

    /// Held keys with this prefix, in byte order; whether there are more.
    pub async fn list(
        &self,
        _prefix: String,
        _after: Option<Key>,
        _limit: usize,
    ) -> Result<(Vec<LockEntry>, bool), StoreError> {
        unimplemented!()
    }

    /// A key, or the keys that a resource's policy makes of it; `None` where nothing is known of it.
    pub async fn show(&self, _name: &str) -> Result<Option<LockView>, StoreError> {
        unimplemented!()
    }

    /// What happens from now on to keys with this prefix. A reader that falls behind by more than
    /// `limits.watch_buffer` notices misses the oldest and is told how many.
    pub fn watch(&self) -> tokio::sync::broadcast::Receiver<Notice> {
        unimplemented!()
    }

    /// Takes a key from its holders: their next call finds it lost. How many there were.
    pub async fn force_release(&self, _key: Key) -> Result<u32, StoreError> {
        unimplemented!()
    }

    pub fn store_health(&self) -> Health {
        unimplemented!()
    }

    /// Refuses new acquires, answers every waiter, and waits until nothing is under way.
    pub async fn drain(&self) {
        unimplemented!()
    }
}

impl Hold {
    /// The next thing that the client should be told. After [`HoldEvent::Lost`] nothing follows.
    pub async fn next(&mut self) -> HoldEvent {
        unimplemented!()
    }
}
