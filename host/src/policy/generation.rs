//! One live (component, settings) pair. Its calls run under limits, and its faults are counted.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use arc_swap::ArcSwapOption;
use bytes::Bytes;
use serde_json::{Map, Value};

use super::check::{self, Checked};
use super::hooks::naming::PlanCache;
use super::hooks::reads::Reads;
use super::module::Module;
use super::observer::Observer;
use super::push_guard::{Answered, Answers};
use super::{Digest, Fault, FaultKind, Hook, Manifest, Plan, PlanError, PlanRequest};
use crate::clock;
use crate::config::Limits;
use crate::mutex::Mutex;
use crate::telemetry::{CachedPlans, CallTimes, Metrics};

/// After a call that took longer than this, calls run outside the runtime's workers until the policy is fast again.
const SLOW_US: u64 = 1_000;

/// A (component, settings) pair that passed every check. A call runs a fresh instance on the caller's thread, in
/// microseconds, and at most for `engine.time`.
///
/// The calls are in the files of the hooks. Those other than `plan` return `None` if the component does not export
/// the hook. The proxy then decides itself, as it does after a [`Fault`].
pub struct Generation {
    name: Box<str>,
    id: Arc<str>,
    rules: Box<str>,
    number: u64,
    table: Map<String, Value>,
    pub(super) module: Arc<Module>,
    pub(super) settings: Vec<u8>,
    pub(super) reads: Reads,
    /// `None` if the policy has to be asked about each request.
    pub(super) plans: Option<PlanCache>,
    cached: CachedPlans,
    pub(super) limits: Limits,
    metrics: Metrics,
    /// The times of the calls, at the indexes of their hooks.
    calls: [CallTimes; Hook::ALL.len()],
    health: Health,
    pub(super) observer: ArcSwapOption<Box<dyn Observer>>,
    answers: Answers,
}

impl Generation {
    pub(super) fn new(
        name: &str,
        number: u64,
        table: Map<String, Value>,
        checked: Checked,
        limits: Limits,
        metrics: Metrics,
    ) -> Generation {
        Generation {
            id: format!("{name}@sha256:{}", checked.module.digest().short()).into(),
            rules: format!("{name}@{}+{}", checked.module.digest(), Digest::of(&checked.settings).short())
                .into(),
            name: name.into(),
            number,
            table,
            health: Health::new(checked.module.engine().limits()),
            module: checked.module,
            settings: checked.settings,
            limits,
            plans: checked.reads.repeat().then(PlanCache::new),
            reads: checked.reads,
            cached: metrics.policies.cached(name),
            calls: Hook::ALL.map(|hook| metrics.policies.calls(name, hook.as_str())),
            metrics,
            observer: ArcSwapOption::empty(),
            answers: Answers::default(),
        }
    }

    pub(super) fn module(&self) -> &Arc<Module> {
        &self.module
    }

    /// The policy's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The id that clients see: `name@sha256:` and 12 hex digits.
    pub fn id(&self) -> &Arc<str> {
        &self.id
    }

    /// Names the component and its settings: generations with the same text plan alike. Begins with the policy's name and
    /// an `@`.
    pub fn rules(&self) -> &str {
        &self.rules
    }

    /// The digest of the component.
    pub fn digest(&self) -> Digest {
        self.module.digest()
    }

    /// The bytes of the component.
    pub fn component(&self) -> Bytes {
        self.module.component().clone()
    }

    /// A number that increases with every load of this policy since the proxy started.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// The settings table.
    pub fn settings(&self) -> &Map<String, Value> {
        &self.table
    }

    /// The hooks that the component exports.
    pub fn hooks(&self) -> Vec<&'static str> {
        check::exported(&self.module)
    }

    /// What the component says of itself.
    pub fn manifest(&self) -> Option<&Manifest> {
        self.module.manifest()
    }

    /// What `plan` reads of a request, by the names of the WIT package; `None` if the component does not say.
    pub fn reads(&self) -> Option<Vec<String>> {
        self.has(Hook::Reads).then(|| self.reads.names())
    }

    /// Whether the component exports the hook. The proxy has built-in answers for hooks that are not exported.
    pub fn has(&self, hook: Hook) -> bool {
        self.module.has(hook)
    }

    /// The number of faults so far.
    pub fn faults(&self) -> u64 {
        self.health.faults.load(Relaxed)
    }

    /// The last fault.
    pub fn last_fault(&self) -> Option<Fault> {
        self.health.last.lock().clone()
    }

    /// A client's request has this answer, which is counted, and told to the observer.
    pub fn answered(&self, request: &PlanRequest, answer: &Result<Plan, PlanError>) {
        self.answers.count(answer);
        self.observed_plan(request, answer);
    }

    /// How the requests of clients were answered so far.
    pub(super) fn answers(&self) -> Answered {
        self.answers.now()
    }

    /// Counts a plan from the cache. It is an answer like that of a call: faults before it are not in a row with later ones.
    pub(super) fn cached_answer(&self) {
        self.health.answered(Hook::Plan);
        self.cached.count();
    }

    /// Frees what only a live generation needs. Calls can still follow, as for the leases of held connections.
    pub(super) fn retire(&self) {
        if let Some(plans) = &self.plans {
            plans.clear();
        }
    }

    /// Asks a hook if the component exports it.
    pub(super) fn ask_optional<R>(
        &self,
        hook: Hook,
        ask: impl FnOnce() -> Result<R, Fault>,
    ) -> Option<Result<R, Fault>> {
        self.has(hook).then(|| self.ask(hook, ask))
    }

    /// Asks a hook, unless it is suspended, and counts and measures the call.
    pub(super) fn ask<R>(&self, hook: Hook, ask: impl FnOnce() -> Result<R, Fault>) -> Result<R, Fault> {
        let start = clock::now();
        if let Some(left_us) = self.health.suspended_for(hook, start.0) {
            self.metrics.policies.fault(&self.name, hook.as_str(), FaultKind::Suspended.as_str());
            let detail = format!("failed too often in a row; not asked for {} ms", left_us.div_ceil(1_000));
            return Err(Fault { hook, kind: FaultKind::Suspended, detail });
        }
        let answer = if self.health.is_slow.load(Relaxed) { aside(ask) } else { ask() };
        let end = clock::now();
        self.health.took(end.us_since(start));
        match &answer {
            Ok(_) => {
                self.health.answered(hook);
                self.calls[hook as usize].took(Duration::from_micros(end.us_since(start)));
            }
            Err(fault) => {
                self.metrics.policies.fault(&self.name, hook.as_str(), fault.kind.as_str());
                if self.health.failed(fault, end.0) {
                    tracing::warn!(policy = &*self.id, %fault, "policy suspended: it failed too often in a row");
                } else {
                    tracing::debug!(policy = &*self.id, %fault, "policy failed");
                }
            }
        }
        answer
    }
}

impl std::fmt::Debug for Generation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Generation")
            .field("id", &self.id)
            .field("number", &self.number)
            .finish_non_exhaustive()
    }
}

/// Runs a call outside the runtime's workers, which serve other tasks meanwhile.
fn aside<R>(ask: impl FnOnce() -> R) -> R {
    let runtime = tokio::runtime::Handle::try_current();
    match runtime.map(|runtime| runtime.runtime_flavor()) {
        Ok(tokio::runtime::RuntimeFlavor::MultiThread) => tokio::task::block_in_place(ask),
        _ => ask(),
    }
}

/// The fault of an answer that is well-formed but invalid.
pub(super) fn invalid_answer(hook: Hook, detail: String) -> Fault {
    Fault { hook, kind: FaultKind::Value, detail }
}

/// Faults in a row, for each hook separately. An invalid answer is cheap and often caused by a single request. So it
/// counts as a fault, but never suspends the hook for other requests.
struct Health {
    to_suspend: u32,
    suspend_us: u64,
    hooks: [HookHealth; Hook::ALL.len()],
    faults: AtomicU64,
    last: Mutex<Option<Fault>>,
    /// Whether the last call took longer than [`SLOW_US`].
    is_slow: AtomicBool,
}

#[derive(Default)]
struct HookHealth {
    in_row: AtomicU32,
    /// The end of the last suspension by the proxy's clock. The hook is not suspended after it.
    until_us: AtomicU64,
}

impl Health {
    fn new(limits: &crate::config::EngineLimits) -> Health {
        Health {
            to_suspend: limits.faults_to_suspend.max(1),
            suspend_us: u64::try_from(limits.suspend.as_micros()).unwrap_or(u64::MAX),
            hooks: Default::default(),
            faults: AtomicU64::new(0),
            last: Mutex::new(None),
            is_slow: AtomicBool::new(false),
        }
    }

    fn took(&self, us: u64) {
        let is_slow = us > SLOW_US;
        if self.is_slow.load(Relaxed) != is_slow {
            self.is_slow.store(is_slow, Relaxed);
        }
    }

    fn suspended_for(&self, hook: Hook, now_us: u64) -> Option<u64> {
        let until_us = self.hooks[hook as usize].until_us.load(Relaxed);
        until_us.checked_sub(now_us).filter(|left_us| *left_us > 0)
    }

    fn answered(&self, hook: Hook) {
        let health = &self.hooks[hook as usize];
        // The common case only reads, so that the cores do not contend for the cache line.
        if health.in_row.load(Relaxed) != 0 {
            health.in_row.store(0, Relaxed);
        }
    }

    /// Counts a fault. Returns whether the hook is now suspended.
    fn failed(&self, fault: &Fault, now_us: u64) -> bool {
        self.faults.fetch_add(1, Relaxed);
        *self.last.lock() = Some(fault.clone());
        if fault.kind == FaultKind::Value {
            return false;
        }
        let health = &self.hooks[fault.hook as usize];
        let suspended = health.in_row.fetch_add(1, Relaxed) + 1 >= self.to_suspend;
        if suspended {
            // After the suspension, one more fault suspends the hook again; one answer resets the count.
            health.in_row.store(self.to_suspend - 1, Relaxed);
            health.until_us.store(now_us.saturating_add(self.suspend_us), Relaxed);
        }
        suspended
    }
}
