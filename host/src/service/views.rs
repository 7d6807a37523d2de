//! The locks, their holders, the decisions about them and their changes, in the form that the fronts show.

use std::sync::{Arc, OnceLock};

use bytes::Bytes;

use super::principal::Principal;
use crate::config::Verb;
use crate::lock::record::{Holder, StoredValue};
use crate::lock::table::{Rule, Why};
use crate::lock::{Key, Mode, Token};
use crate::store::Stored;

/// One page of locks.
#[derive(Clone, Debug)]
pub struct LockPage {
    /// The locks in byte order of their keys.
    pub locks: Vec<LockEntry>,
    /// Whether more locks follow after the last one.
    pub more: bool,
    /// The stores whose locks may be missing here, and why.
    pub unheard: Vec<String>,
}

/// A key that is held or has a stored value, as `GET /v1/locks` shows it. Times are microseconds since 1970 on
/// the store's clock.
#[derive(Clone, Debug)]
pub struct LockEntry {
    /// The key that is held or has a stored value.
    pub key: Key,
    /// The last token of the key.
    pub token: Token,
    /// The leases that have not ended.
    pub holders: Vec<HolderEntry>,
    /// The value that a `once` or a commit stored with the key.
    pub kept: Option<StoredValue>,
}

/// One lease of a key.
#[derive(Clone, Debug)]
pub struct HolderEntry {
    /// The resource that the client named; `None` if the reader may not read it.
    pub resource: Option<String>,
    /// The owner that the client named.
    pub owner: String,
    /// The authenticated client that took the lease, if it was authenticated.
    pub principal: Option<Arc<str>>,
    /// How the key is held.
    pub mode: Mode,
    /// The fencing token of the lease.
    pub token: Token,
    /// When the lease was granted, in microseconds since 1970 by the store's clock.
    pub since_us: u64,
    /// When the lease ends, in microseconds since 1970 by the store's clock.
    pub until_us: u64,
    /// How long ago the lease was granted, in milliseconds.
    pub held_ms: u32,
    /// How long the lease still lasts, in milliseconds.
    pub left_ms: u32,
    /// How many levels the owner holds.
    pub levels: u32,
    /// The policy generation that planned the lease.
    pub policy: String,
}

/// One key, its queue on this proxy, and the last decisions about it.
#[derive(Clone, Debug)]
pub struct LockView {
    /// The holders and the stored value of the key.
    pub entry: LockEntry,
    /// The waiters in the order of their positions.
    pub queue: Vec<QueueEntry>,
    /// How long the key is held, from its last holds on this proxy; `None` if there are too few.
    pub held: Option<Spread>,
    /// Whether clients of other proxies wait, too, outside a global queue. They are not in the queue, and no estimate
    /// counts them.
    pub others_wait: bool,
    /// The last decisions, newest last.
    pub decisions: Vec<Decision>,
}

/// A waiter in a queue.
#[derive(Clone, Debug)]
pub struct QueueEntry {
    /// 1 is the next.
    pub position: u32,
    /// The owner that the client named.
    pub owner: String,
    /// How the key is to be held.
    pub mode: Mode,
    /// The rank that the policy assigned; lower ranks go first.
    pub rank: i32,
    /// The group that the policy assigned, for its `fairness` hook.
    pub group: String,
    /// How long the waiter has been waiting, in milliseconds.
    pub waited_ms: u32,
    /// How long the waiter may still wait, in milliseconds.
    pub wait_left_ms: u32,
    /// What decides which waiter is next.
    pub rule: Rule,
    /// The position in the global queue over all proxies, if the waiter has a place there; 1 is the next.
    pub global_position: Option<u32>,
    /// Why the waiter waits; `None` if the cause is another key, which the reader may not read.
    pub why: Option<Why>,
    /// [`QueueEntry::why`] as a sentence.
    pub text: String,
    /// How long the waiter still waits.
    pub estimate: Estimate,
    /// What the policy decided.
    pub plan: PlanEntry,
}

/// The plan of a waiter's policy.
#[derive(Clone, Debug)]
pub struct PlanEntry {
    /// The policy generation that made the plan.
    pub policy: Arc<str>,
    /// The keys that the reader may read.
    pub keys: Vec<Key>,
    /// Whether any one of the keys is enough.
    pub any: bool,
    /// The lease time, in milliseconds.
    pub ttl_ms: u32,
    /// The longest wait, in milliseconds.
    pub wait_ms: u32,
    /// The parts of the request that the policy reads, and the values that the reader may see; `None` if the policy does
    /// not list what it reads.
    pub reads: Option<Vec<(String, Option<String>)>>,
}

/// An estimate of a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Estimate {
    /// From recent holds of the key.
    Within(Spread),
    /// There is none.
    None(NoEstimate),
}

/// Times, from recent holds of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spread {
    /// The 10th percentile, in milliseconds.
    pub low_ms: u32,
    /// The median, in milliseconds.
    pub median_ms: u32,
    /// The 90th percentile, in milliseconds.
    pub high_ms: u32,
    /// How many holds it is from.
    pub holds: u32,
}

/// Why there is no estimate of a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoEstimate {
    /// Too few holds of the key have ended on this proxy.
    TooFewHolds {
        /// How many.
        holds: u32,
    },
    /// The key has been held for longer than nearly all of its recent holds lasted.
    HeldLonger {
        /// How many recent holds are known.
        holds: u32,
    },
    /// Several clients hold permits at the same time.
    Permits,
    /// The waiter wants several keys, or any one of several.
    SeveralKeys,
    /// The order of the waiters is not known: the policy's `fairness` hook chooses.
    Fairness,
    /// Something else than a holder of the key keeps the waiter.
    NotHeld,
}

/// A decision about a key, and its author.
#[derive(Clone, Debug)]
pub struct Decision {
    /// Microseconds since 1970, this machine's clock.
    pub at_us: u64,
    /// The name of the policy hook.
    pub hook: &'static str,
    /// The policy generation that decided, or `built-in`.
    pub by: Arc<str>,
    /// The decision in words.
    pub what: String,
}

/// A change of a key, for watchers.
#[derive(Clone, Debug)]
pub struct Notice {
    /// The key that has changed.
    pub key: Key,
    /// What happened to the key.
    pub kind: NoticeKind,
    /// The owner of the lease; empty for [`NoticeKind::Forced`].
    pub owner: Box<str>,
    /// The fencing token of the lease; `None` for [`NoticeKind::Forced`].
    pub token: Option<Token>,
    /// Microseconds since 1970, this machine's clock.
    pub at_us: u64,
    /// The notice as a front writes it, so that one text serves all its readers.
    pub text: OnceLock<Bytes>,
}

/// The kind of a [`Notice`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoticeKind {
    /// The key was granted.
    Granted,
    /// The holder released its lease, and no waiter got the key in the same step.
    Released,
    /// The lease reached its end without a release.
    Expired,
    /// Released and granted to the next holder in one step; `owner` and `token` are the new holder's.
    HandedOff,
    /// Taken away by an operator.
    Forced,
    /// The holder found the lease lost, or the session that held it is gone.
    Lost,
}

impl LockEntry {
    /// The key with its leases and its value that have not ended, as `reader` may see them. Another resource can have named
    /// the key, too.
    pub(super) fn of(stored: &Stored, reader: &Principal) -> LockEntry {
        let live = stored.record.holders.iter().filter(|holder| holder.over_at() > stored.now);
        let holder = |holder: &Holder| HolderEntry {
            resource: Some(&*holder.tag.resource)
                .filter(|resource| reader.may(Verb::Read, resource))
                .map(str::to_owned),
            owner: holder.owner.to_string(),
            principal: holder.tag.principal.clone(),
            mode: holder.mode,
            token: holder.token,
            since_us: holder.since.0,
            until_us: holder.until.0,
            held_ms: stored.now.ms_since(holder.since),
            left_ms: holder.until.ms_since(stored.now),
            levels: holder.levels.len() as u32,
            policy: holder.tag.policy.to_string(),
        };
        LockEntry {
            key: stored.key.clone(),
            token: stored.record.token,
            holders: live.map(holder).collect(),
            kept: stored.record.kept.clone().filter(|kept| kept.until > stored.now),
        }
    }
}
