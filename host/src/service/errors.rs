//! Why a call fails.

use std::sync::Arc;

use crate::auth::OverLimit;
use crate::config::Verb;
use crate::lock::record::{HeldBy, StoredValue, Version};
use crate::lock::{Call, Key};
use crate::store::StoreError;

/// Why an acquire got no lease.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AcquireError {
    /// The keys were not free in time.
    #[error("`{resource}` is {}", match holder {
        Some(_) => "held",
        None => "reserved for other waiters, or not granted for a while, as after a change of the store's server",
    })]
    Contended {
        /// The resource of the request.
        resource: String,
        /// The first key of the request.
        key: Key,
        /// The holder that blocks the request, if it is known.
        holder: Option<Box<HeldBy>>,
        /// The position in the queue when the wait ended or would have begun; 1 is the next.
        position: u32,
        /// When another try makes sense, in milliseconds.
        retry_after_ms: u32,
        /// Set if the policy gave up before the wait was over.
        reason: Option<String>,
    },
    /// The policy refused the request.
    #[error("the policy refused: {reason}")]
    Refused {
        /// The policy's reason, for the client.
        reason: String,
    },
    /// The policy failed to name the keys, so nothing is granted. `reason` is a stable slug.
    #[error("the policy `{policy}` could not decide: {detail}")]
    PolicyFault {
        /// The name of the policy.
        policy: String,
        /// The kind of the fault.
        reason: &'static str,
        /// The fault in words.
        detail: String,
    },
    /// The queue, the global queue, or the proxy has no room for another waiter.
    #[error("{resource} has {limit} waiters, which is the policy's limit")]
    TooManyWaiters {
        /// The resource of the request.
        resource: String,
        /// The limit that was reached.
        limit: u32,
    },
    /// The key has the highest number of holders, or the owner the highest number of levels, that a record can
    /// hold.
    #[error("{resource} has as many holders, or its owner as many levels, as one key can have")]
    TooManyHolders {
        /// The resource of the request.
        resource: String,
    },
    /// The client may not do this to the resource, or to a key that the policy names for it.
    #[error("you may not {} `{resource}`", verb.as_str())]
    Forbidden {
        /// What the client may not do.
        verb: Verb,
        /// The resource of the request.
        resource: String,
    },
    /// The policy guards the resource with a primitive that is asked for by another call.
    #[error("resource: its policy `{policy}` guards it with `{primitive}`")]
    WrongCall {
        /// The name of the policy.
        policy: String,
        /// The name of the primitive.
        primitive: &'static str,
        /// The call that asks for the primitive.
        expected: Call,
    },
    /// The store lacks the primitive that the policy asks for, and the policy names no second choice.
    #[error("the policy `{policy}` asks for the primitive `{primitive}`, which is not available: {why}")]
    NoPrimitive {
        /// The name of the policy.
        policy: String,
        /// The name of the primitive.
        primitive: &'static str,
        /// Why the store lacks the primitive.
        why: String,
    },
    /// A `once` that was done before: its outcome instead of a lease. Only [`Service::begin`](super::Service::begin) and
    /// [`Service::guard`](super::Service::guard) get it.
    #[error("it was done before")]
    Done(StoredValue),
    /// The key no longer has the version that the caller read. Only [`Service::commit`](super::Service::commit) gets it.
    #[error("the version is now {version}", version = .0.version)]
    Conflict(Version),
    /// The request id was used before: with another body, or, if `ended`, for a lease that has ended.
    #[error("the request id was used before, {}", if *ended { "and its lease has ended" } else { "with another body" })]
    RequestReused {
        /// Whether the lease that the request id got has ended.
        ended: bool,
    },
    /// The client is over one of its limits.
    #[error(transparent)]
    OverLimit(#[from] OverLimit),
    /// The store did not answer.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The store answers, and other proxies may grant the key, but this proxy cannot grant it at the moment.
    #[error("no lock is granted yet: {why}")]
    NotYet {
        /// Why the proxy cannot grant the key.
        why: String,
    },
    /// The store answers, but this proxy has not joined its fleet. Its readiness says why.
    #[error("no lock is granted yet: the proxy is not in the fleet yet")]
    NotJoined,
    /// The rules of this proxy, by which clients are judged, are not those of its store.
    #[error("this proxy grants no lock: {why}")]
    RulesDiffer {
        /// Why the proxy may not judge its clients.
        why: Arc<str>,
    },
    /// The proxy stops and takes no new requests.
    #[error("the proxy is shutting down")]
    ShuttingDown,
}

impl AcquireError {
    /// A stable name for metrics.
    pub fn slug(&self) -> &'static str {
        match self {
            AcquireError::Contended { .. } => "contended",
            AcquireError::Refused { .. } => "refused",
            AcquireError::PolicyFault { .. } => "policy_fault",
            AcquireError::TooManyWaiters { .. } => "too_many_waiters",
            AcquireError::TooManyHolders { .. } => "too_many_holders",
            AcquireError::Forbidden { .. } => "forbidden",
            AcquireError::WrongCall { .. } => "invalid",
            AcquireError::RequestReused { .. } => "request_id_reused",
            AcquireError::Conflict(_) => "conflict",
            AcquireError::NoPrimitive { .. } => "no_primitive",
            AcquireError::Done(_) => "done",
            AcquireError::OverLimit(_) => "over_limit",
            AcquireError::Store(_) => "store_unavailable",
            AcquireError::NotYet { .. } | AcquireError::NotJoined => "not_yet",
            AcquireError::RulesDiffer { .. } => "rules_differ",
            AcquireError::ShuttingDown => "shutting_down",
        }
    }
}

/// Why a list of locks cannot be answered.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ListError {
    /// The client may read none of the keys that were read for it, and there are more.
    #[error("none of the {read} keys that come next is one that you may read: ask for a longer prefix")]
    TooManyKeys {
        /// How many keys were read.
        read: usize,
    },
    /// The store did not answer.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Why a renewal or release had no effect.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LeaseError {
    /// The lease is unknown, has expired, or was taken away.
    #[error("the lease is unknown, has expired, or was taken away")]
    Lost,
    /// The lease belongs to another client, or the client may no longer lock its keys.
    #[error("the lease belongs to another client, or you may no longer lock its keys")]
    Forbidden,
    /// The store did not answer; the lease may have been renewed or released.
    #[error(transparent)]
    Store(#[from] StoreError),
}
