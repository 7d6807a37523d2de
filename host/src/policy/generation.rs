//! One live (component, settings) pair. Its calls run under limits, and its faults are counted.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use serde_json::{Map, Value};

use super::check::{self, Checked};
use super::module::Module;
use super::{
    Backoff, Contention, Digest, Expiring, Fault, FaultKind, Hook, Plan, PlanError, PlanRequest, QueueView,
    RefusalResponse, Renewal, ResponseContention, bindings, clamp,
};
use crate::clock;
use crate::config::Limits;
use crate::lock::Mode;
use crate::telemetry::Metrics;

/// After a call that took longer than this, calls run outside the runtime's workers until the policy is fast again.
const SLOW_US: u64 = 1_000;

/// A (component, settings) pair that passed every check. A call runs a fresh instance on the caller's thread, in
/// microseconds, and at most for `engine.time`.
///
/// The hooks other than `plan` return `None` if the component does not export them. [`super::fallback`] then gives
/// the answer, as it does after a [`Fault`].
pub struct Generation {
    name: Box<str>,
    id: Arc<str>,
    number: u64,
    table: Map<String, Value>,
    module: Arc<Module>,
    settings: Vec<u8>,
    limits: Limits,
    metrics: Metrics,
    health: Health,
}

/// A policy's plan for a request whose lock is already held.
pub struct Again {
    /// The plan for the request.
    pub plan: Plan,
    /// The policy would not grant the request now: only the keys of the plan are meaningful.
    pub is_refused: bool,
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
            name: name.into(),
            number,
            table,
            health: Health::new(checked.module.engine().limits()),
            module: checked.module,
            settings: checked.settings,
            limits,
            metrics,
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
        check::hooks(&self.module)
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
        self.health.last.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Plans the lock of a request.
    ///
    /// # Errors
    /// The policy's refusal or its fault: either way, the request gets no lock.
    pub fn plan(&self, request: &PlanRequest) -> Result<Plan, PlanError> {
        let answer = self.ask(Hook::Plan, || self.planned(request));
        answer.map_err(PlanError::Fault)?.map_err(|reason| PlanError::Refused { reason })
    }

    /// Plans a request whose lock is already held. This works even while the hook is suspended, because the answer
    /// must be known once the hook is active again. If the policy refuses the request because its primitive does not
    /// support the mode, the keys are those of the same request in exclusive mode. The call is neither counted nor
    /// measured. `None` if the keys cannot be determined.
    pub fn plan_again(&self, request: &PlanRequest) -> Option<Again> {
        let in_exclusive_mode = || {
            let again = self.named(&PlanRequest { mode: Mode::Exclusive, ..request.clone() })?;
            Some(Again { is_refused: true, ..again })
        };
        self.named(request).or_else(in_exclusive_mode)
    }

    fn named(&self, request: &PlanRequest) -> Option<Again> {
        let plan = self.module.plan(&self.settings, &bindings::request(request)).ok()?.ok()?;
        let plan = clamp::named(plan, &self.limits).ok()?;
        Some(Again { is_refused: clamp::is_possible(&plan).is_err(), plan })
    }

    fn planned(&self, request: &PlanRequest) -> Result<Result<Plan, String>, Fault> {
        match self.module.plan(&self.settings, &bindings::request(request))? {
            Ok(plan) => {
                Ok(Ok(clamp::plan(plan, &self.limits).map_err(|detail| invalid_answer(Hook::Plan, detail))?))
            }
            Err(refusal) => Ok(Err(clamp::reason(refusal.reason))),
        }
    }

    /// Chooses the next waiter of the queue: a valid index.
    pub fn choose(&self, queue: &QueueView) -> Option<Result<usize, Fault>> {
        self.ask_optional(Hook::Choose, || {
            let index =
                self.module.choose(&self.settings, &bindings::queue(queue))?.map(|index| index as usize);
            Some(index.and_then(|index| match queue.waiters.len() {
                len if index < len => Ok(index),
                len => Err(invalid_answer(Hook::Choose, format!("chose waiter {index} of {len}"))),
            }))
        })
    }

    /// Decides how a request waits for a key that another client holds.
    pub fn backoff(&self, contention: &Contention) -> Option<Result<Backoff, Fault>> {
        self.ask_optional(Hook::Backoff, || {
            let answer = self.module.backoff(&self.settings, &bindings::contention(contention))?;
            Some(answer.map(|decision| clamp::backoff(bindings::backoff_answer(decision))))
        })
    }

    /// Decides whether a lease is extended.
    pub fn renewal(&self, expiring: &Expiring) -> Option<Result<Renewal, Fault>> {
        self.ask_optional(Hook::Renewal, || {
            let answer = self.module.renewal(&self.settings, &bindings::expiring(expiring))?;
            let Expiring { held_ms, max_hold_ms, .. } = *expiring;
            let clamped = |answer| clamp::renewal(answer, held_ms, max_hold_ms, &self.limits);
            Some(answer.map(|decision| clamped(bindings::renewal_answer(decision))))
        })
    }

    /// The answer to a guarded request that cannot get its lock.
    pub fn response(
        &self,
        request: &PlanRequest,
        contention: &ResponseContention,
    ) -> Option<Result<RefusalResponse, Fault>> {
        self.ask_optional(Hook::Response, || {
            let (request, contention) = (bindings::request(request), bindings::refused(contention));
            let answer = self.module.response(&self.settings, &request, &contention)?;
            Some(answer.and_then(|answer| {
                clamp::answer(answer).map_err(|detail| invalid_answer(Hook::Response, detail))
            }))
        })
    }

    fn ask_optional<R>(
        &self,
        hook: Hook,
        ask: impl FnOnce() -> Option<Result<R, Fault>>,
    ) -> Option<Result<R, Fault>> {
        let absent = || Fault { hook, kind: FaultKind::Trap, detail: "the hook is absent".to_owned() };
        self.module.has(hook).then(|| self.ask(hook, || ask().unwrap_or_else(|| Err(absent()))))
    }

    fn ask<R>(&self, hook: Hook, ask: impl FnOnce() -> Result<R, Fault>) -> Result<R, Fault> {
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
                self.metrics.policies.call(
                    &self.name,
                    hook.as_str(),
                    Duration::from_micros(end.us_since(start)),
                );
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

fn invalid_answer(hook: Hook, detail: String) -> Fault {
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
    /// The end of the suspension by the proxy's clock; 0 if the hook is not suspended.
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
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(fault.clone());
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
