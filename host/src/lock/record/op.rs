//! The operations of a store on its records.

use std::num::NonZero;
use std::sync::Arc;

use super::{Origin, Record, Tag};
use crate::lock::{Key, LeaseRef, Mode, ServerTime, Token};

/// An operation of a store on its records; its result is an [`Outcome`](super::Outcome).
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
    /// Let the lease accept these tokens, too; new grants get higher tokens. If the lease already accepts them, or
    /// without tokens, the operation only returns how long the lease still lasts.
    Raise {
        /// The lease that accepts the tokens.
        lease: LeaseRef,
        /// One token for each of the lease's keys, in their order.
        tokens: Option<Vec<Token>>,
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
    /// Grant the claim, and let the proxy decide about its key from now on. The answer is
    /// [`Outcome::Delegated`](super::Outcome::Delegated), or that of [`Op::Acquire`] if the key is not delegated.
    Delegate(Box<Delegate>),
    /// Extend a delegation.
    Extend(Extend),
    /// End a delegation, and put its record back.
    Restore(Box<Restore>),
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
    /// the key is not granted. `None` for every other primitive.
    pub keep_ms: Option<NonZero<u32>>,
    /// Set if the claim waits in the global queue.
    pub global: Option<GlobalTicket>,
    /// Set if the key may be delegated to the proxy.
    pub delegable: Option<Delegable>,
    /// What is stored with the lease for display and for a policy change.
    pub tag: Tag,
}

/// When a key is delegated to the proxy that claims it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delegable {
    /// See [`Delegate::rules`].
    pub rules: Arc<str>,
    /// When it is worth while.
    pub when: When,
}

/// When the delegation of a key is worth while.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// If clients wait for the key, or it is granted often.
    Contended,
    /// Always.
    Always,
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
    /// See [`GlobalPlace::returns`](super::GlobalPlace::returns).
    pub returns: bool,
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

/// The outcome of a `once`, as its holder reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Left {
    /// JSON text.
    pub value: Box<str>,
    /// Whether the holder is an API client or a guarded request.
    pub origin: Origin,
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

/// A claim whose key is to be delegated to the proxy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delegate {
    /// The claim, for one key.
    pub claim: Claim,
    /// A random number that no lease and no other delegation has.
    pub nonce: u64,
    /// Names what the proxy grants by, such as the version of a policy: proxies that grant by the same rules give the same
    /// keys to the same requests.
    pub rules: Box<str>,
    /// How long the delegation lasts after the claim's lease, in milliseconds.
    pub extra_ms: u32,
    /// How many tokens the delegation has.
    pub tokens: u64,
}

/// A longer life, or more tokens, for a delegation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Extend {
    /// The key.
    pub key: Key,
    /// The [`Delegate::nonce`].
    pub nonce: u64,
    /// How long the delegation lasts from now, at least, in milliseconds.
    pub ttl_ms: u32,
    /// The last of its tokens, at least.
    pub last_token: Token,
}

/// The end of a delegation: its record goes back to the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Restore {
    /// The key.
    pub key: Key,
    /// The delegation.
    pub nonce: u64,
    /// The record as it is now in the proxy's memory.
    pub record: Record,
    /// The time by the clock of that record.
    pub at: ServerTime,
    /// How often the key was granted while other proxies may have waited.
    pub passed: u32,
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
            Op::Delegate(asked) => &asked.claim.keys,
            Op::Force { key }
            | Op::Extend(Extend { key, .. })
            | Op::GlobalQueue { key, .. }
            | Op::Read { key }
            | Op::Commit(Commit { key, .. }) => std::slice::from_ref(key),
            Op::Restore(asked) => std::slice::from_ref(&asked.key),
        }
    }
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
