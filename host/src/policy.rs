//! Policies: WebAssembly components that decide how locks behave.
//!
//! A [`Generation`] is one (component, settings) pair that passed every check. A call of a hook runs a fresh instance
//! under limits, on the caller's thread, in microseconds. [`Policies`] holds the live generation of each policy by
//! name. This module depends neither on MySQL nor on the queues.

mod bindings;
mod budget;
mod builtin;
mod check;
mod clamp;
mod engine;
pub mod fallback;
mod form;
mod generation;
mod generations;
mod module;
mod rejection;
mod scaffold;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

pub use builtin::builtin;
pub use check::{Report, check_file, load_file};
pub use engine::{Engine, EngineError};
pub use generation::{Again, Generation};
pub use generations::{ActivePolicy, Policies, Prepared};
pub use module::Digest;
pub use rejection::Rejection;
pub use scaffold::{ScaffoldError, scaffold};

use crate::config::{PolicyConfig, PolicySource};
use crate::lock::record::HttpView;
use crate::lock::{Key, Mode, Primitive};

/// The files of the policies that are loaded from files, by the policy's name.
pub fn files(configs: &[PolicyConfig]) -> BTreeMap<String, PathBuf> {
    let file = |config: &PolicyConfig| match &config.source {
        PolicySource::File(path) => Some((config.name.clone(), path.clone())),
        PolicySource::Builtin(_) => None,
    };
    configs.iter().filter_map(file).collect()
}

/// An application's lock request as a policy sees it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PlanRequest {
    /// The name that the application asks to lock.
    pub resource: String,
    /// The name of the client that would hold the lock.
    pub owner: String,
    /// The `limit` of permits is 0 here: the policy sets it.
    pub mode: Mode,
    /// The requested length of the lease.
    pub ttl_ms: Option<u32>,
    /// The requested longest wait.
    pub wait_ms: Option<u32>,
    /// The request's labels, as names and values.
    pub labels: Vec<(String, String)>,
    /// Set only for a guarded request.
    pub http: Option<Arc<HttpView>>,
    /// Random bits, for policies that need a choice without a pattern.
    pub seed: u32,
}

/// A policy's plan for the lock of a request, with every value inside the host's limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Sorted and unique, at least one.
    pub keys: Arc<[Key]>,
    /// Whether any one free key is enough, instead of all of them.
    pub any: bool,
    /// The mechanism of the lock.
    pub primitive: Primitive,
    /// The primitive to use if the store does not support `primitive`.
    pub second: Option<Primitive>,
    /// Whether the global queue over all proxies orders the waiters.
    pub global_order: bool,
    /// How the keys are held. For permits, with the total that the policy sets.
    pub mode: Mode,
    /// The length of the lease.
    pub ttl_ms: u32,
    /// The longest wait in the queue; 0 does not wait.
    pub wait_ms: u32,
    /// Lower ranks go first; the order of arrival decides within a rank.
    pub rank: i32,
    /// The group that the `fairness` hook assigns the waiter to.
    pub group: Box<str>,
    /// At least 1.
    pub weight: u32,
    /// Whether an owner that holds the keys is granted them again, with a count.
    pub reentrant: bool,
    /// The longest queue of a key that the request may join.
    pub max_waiters: u32,
    /// The keys stay taken for at least this long after the grant, even if they are released earlier.
    pub lock_at_least_ms: u32,
    /// How long the outcome of a `once` is stored; 0 for other primitives.
    pub keep_ms: u32,
    /// The keys stay taken for this long after a lease that ended without a release.
    pub lock_delay_ms: u32,
    /// The longest time that the proxy keeps the lease of a held connection alive.
    pub max_hold_ms: u32,
    /// The effect on a guarded request if its lease is lost.
    pub on_loss: OnLoss,
    /// Labels that later hooks see.
    pub labels: Vec<(Box<str>, Box<str>)>,
}

/// The effect on a guarded request if its lease is lost while the upstream works.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnLoss {
    /// The request continues; the loss is logged and counted.
    #[default]
    Finish,
    /// The request continues, and its answer reports the loss.
    Mark,
    /// The request is cut off.
    Cut,
}

/// Why there is no plan. Either way the request is refused: policies fail closed.
#[derive(Clone, Debug)]
pub enum PlanError {
    /// The policy refused the request, for this reason.
    Refused {
        /// The policy's reason, which the client sees.
        reason: String,
    },
    /// The policy failed.
    Fault(Fault),
}

/// A failed call of a policy. Counted by policy, hook and [`FaultKind::as_str`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("policy hook {hook}: {kind}: {detail}", hook = hook.as_str(), kind = kind.as_str())]
pub struct Fault {
    /// The hook that was called.
    pub hook: Hook,
    /// How the call failed.
    pub kind: FaultKind,
    /// The details, for an operator.
    pub detail: String,
}

/// A function that a policy may export.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Hook {
    /// `naming.plan`: turns a request into a plan.
    Plan,
    /// `fairness.choose`: chooses the next waiter of a key.
    Choose,
    /// `backoff.contended`: decides what a waiter does while another client holds the key.
    Backoff,
    /// `renewal.due`: decides whether an expiring lease is extended.
    Renewal,
    /// `response.contended`: makes the answer to a guarded request that cannot get its lock.
    Response,
    /// `settings.configure`: checks the settings when the policy is loaded.
    Configure,
}

/// How a policy's call failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum FaultKind {
    /// The call exceeded its fuel or its time.
    Time,
    /// The call asked for more memory than its limit.
    Memory,
    /// The call exceeded its stack.
    Stack,
    /// Any other trap.
    Trap,
    /// The answer exceeded the size limit, or its type does not allow it (invalid UTF-8).
    Answer,
    /// The answer was well-formed but invalid: an empty key, an index out of range.
    Value,
    /// The policy failed so often in a row that the proxy did not call it.
    Suspended,
}

/// The queue of a key, as `fairness.choose` sees it.
#[derive(Clone, Debug)]
pub struct QueueView {
    /// The key that became free.
    pub key: Key,
    /// At most 64: the first waiters of each group, in order of rank, then of arrival.
    pub waiters: Vec<WaiterView>,
    /// The groups of the waiters.
    pub groups: Vec<GroupView>,
    /// Random bits, for policies that need a choice without a pattern.
    pub seed: u32,
}

/// A waiter in a [`QueueView`].
#[derive(Clone, Debug)]
pub struct WaiterView {
    /// Lower ranks go first.
    pub rank: i32,
    /// The waiter's group, from its plan.
    pub group: Box<str>,
    /// The weight from the waiter's plan, at least 1.
    pub weight: u32,
    /// The name of the waiting owner.
    pub owner: Box<str>,
    /// How the waiter wants to hold the key.
    pub mode: Mode,
    /// How long the request has waited.
    pub waited_ms: u32,
    /// The labels of the waiter's plan.
    pub labels: Arc<[(Box<str>, Box<str>)]>,
}

/// A group of waiters in a [`QueueView`].
#[derive(Clone, Debug)]
pub struct GroupView {
    /// The name of the group.
    pub group: Box<str>,
    /// The number of the group's waiters in the whole queue, including those that are not shown.
    pub waiting: u32,
    /// The number of the key's recent grants that went to the group.
    pub recent_grants: u32,
}

/// A key that another client holds, as `backoff.contended` sees it.
#[derive(Clone, Debug)]
pub struct Contention {
    /// The key that is held.
    pub key: Key,
    /// 1 for the first attempt that found the key held.
    pub attempt: u32,
    /// How long the request has waited.
    pub waited_ms: u32,
    /// The rest of the longest wait.
    pub wait_left_ms: u32,
    /// The rest of the holder's lease, as far as it is known.
    pub holder_left_ms: u32,
    /// The holder's name.
    pub holder: String,
    /// The number of the key's waiters.
    pub waiters: u32,
    /// The sleep before this attempt.
    pub last_sleep_ms: u32,
    /// The labels of the waiter's plan.
    pub labels: Arc<[(Box<str>, Box<str>)]>,
    /// Random bits, for policies that need a choice without a pattern.
    pub seed: u32,
}

/// The answer of `backoff.contended`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Backoff {
    /// Ask again after this time, or at a notification that comes first.
    Poll {
        /// The time until the next attempt.
        after_ms: u32,
    },
    /// Ask again at a notification, or when the holder's lease ends.
    WakeUp,
    /// Refuse the request, for this reason.
    GiveUp {
        /// The policy's reason, which the client sees.
        reason: String,
    },
}

/// A lease near its end that the proxy keeps alive, as `renewal.due` sees it.
#[derive(Clone, Debug)]
pub struct Expiring {
    /// The key of the lease.
    pub key: Key,
    /// The holder's name.
    pub owner: String,
    /// The length of the lease in the holder's plan.
    pub ttl_ms: u32,
    /// The number of renewals so far.
    pub renewals: u32,
    /// The time since the grant.
    pub held_ms: u32,
    /// The longest hold that the plan allows.
    pub max_hold_ms: u32,
    /// The number of the key's waiters.
    pub waiters: u32,
    /// Whether the client's connection still exists.
    pub client_alive: bool,
    /// The labels of the holder's plan.
    pub labels: Arc<[(Box<str>, Box<str>)]>,
}

/// The answer of `renewal.due`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Renewal {
    /// Extend the lease to this length.
    Extend {
        /// The new length of the lease, counted from the renewal.
        ttl_ms: u32,
    },
    /// Let the lease end.
    Lapse,
}

/// A guarded request that cannot get its lock, as `response.contended` sees it.
#[derive(Clone, Debug)]
pub struct ResponseContention {
    /// The key that the request did not get.
    pub key: Key,
    /// The holder's name; empty if it is unknown.
    pub holder: String,
    /// The position in the queue; 1 is next.
    pub position: u32,
    /// How long the request waited.
    pub waited_ms: u32,
    /// How long the proxy suggests to wait before the next request.
    pub retry_after_ms: u32,
}

/// The answer to a guarded request that cannot get its lock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RefusalResponse {
    /// 400 to 599.
    pub status: u16,
    /// How long the client should wait before its next request.
    pub retry_after_ms: u32,
    /// Header names are in lower case; headers that frame the response are not allowed.
    pub headers: Vec<(String, String)>,
    /// The text that the client sees.
    pub detail: String,
}

/// The state of a policy and of its live generation.
#[derive(Clone, Debug, serde::Serialize)]
pub struct PolicyStatus {
    /// The policy's name.
    pub name: String,
    /// `sha256:` and 64 hex digits.
    pub digest: String,
    /// The number of the live generation, which increases with every load since the proxy started.
    pub generation: u64,
    /// The settings table of the live generation.
    pub settings: serde_json::Value,
    /// The hooks that the component exports.
    pub hooks: Vec<&'static str>,
    /// When this generation went live, in microseconds since 1970.
    pub since_us: u64,
    /// The digest that a rollback would restore, from the fleet's record.
    pub previous: Option<String>,
    /// The last refused load, or the last fault.
    pub last_error: Option<String>,
    /// The number of faults since this generation went live.
    pub faults: u64,
}

impl Hook {
    /// All hooks.
    pub const ALL: [Hook; 6] =
        [Hook::Plan, Hook::Choose, Hook::Backoff, Hook::Renewal, Hook::Response, Hook::Configure];

    /// The name of the hook in metrics and messages.
    pub fn as_str(&self) -> &'static str {
        match self {
            Hook::Plan => "plan",
            Hook::Choose => "choose",
            Hook::Backoff => "backoff",
            Hook::Renewal => "renewal",
            Hook::Response => "response",
            Hook::Configure => "configure",
        }
    }
}

impl FaultKind {
    /// A stable slug for metrics and answers.
    pub fn as_str(&self) -> &'static str {
        match self {
            FaultKind::Time => "time",
            FaultKind::Memory => "memory",
            FaultKind::Stack => "stack",
            FaultKind::Trap => "trap",
            FaultKind::Answer => "answer",
            FaultKind::Value => "value",
            FaultKind::Suspended => "suspended",
        }
    }
}

impl Plan {
    /// The same keys, guarded by another primitive.
    pub fn with_primitive(mut self, primitive: Primitive) -> Plan {
        let keys: Vec<Key> = self.keys.iter().map(|key| key.clone().within(primitive.space())).collect();
        self.keys = keys.into();
        self.primitive = primitive;
        self
    }
}

impl OnLoss {
    /// The name in config.toml and in a plan's label.
    pub fn as_str(&self) -> &'static str {
        match self {
            OnLoss::Finish => "finish",
            OnLoss::Mark => "mark",
            OnLoss::Cut => "cut",
        }
    }
}

#[cfg(test)]
mod tests;
