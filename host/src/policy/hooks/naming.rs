//! `naming.plan`: turns a request into a plan. Every policy exports this hook.

mod cache;
mod clamp;
mod json;
mod request;

use std::borrow::Cow;
use std::num::NonZero;
use std::sync::Arc;

pub(in crate::policy) use self::cache::PlanCache;
pub use self::request::PlanRequest;
use super::{Definition, Hook, shortened};
use crate::lock::record::{HttpView, When};
use crate::lock::{Key, Mode, Primitive};
use crate::policy::bindings::{naming as wit, types};
use crate::policy::check::Trial;
use crate::policy::generation::invalid_answer;
use crate::policy::module::Module;
use crate::policy::{Fault, FaultKind, Generation, Rejection};

pub(super) const HOOK: Definition =
    Definition { hook: Hook::Plan, name: "plan", interface: "naming", function: "plan", try_out };

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
    /// How long the outcome of a `once` is stored; `None` for other primitives.
    pub keep_ms: Option<NonZero<u32>>,
    /// The keys stay taken for this long after a lease that ended without a release.
    pub lock_delay_ms: u32,
    /// The longest time that the proxy keeps the lease of a held connection alive.
    pub max_hold_ms: u32,
    /// The effect on a guarded request if its lease is lost.
    pub on_loss: OnLoss,
    /// When the proxy grants the keys from its memory, if at all.
    pub delegate: Option<When>,
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

/// A policy's plan for a request whose lock is already held.
pub struct Again {
    /// The plan for the request.
    pub plan: Plan,
    /// The policy would not grant the request now: only the keys of the plan are meaningful.
    pub is_refused: bool,
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

impl Generation {
    /// Plans the lock of a request.
    ///
    /// # Errors
    /// The policy's refusal or its fault: either way, the request gets no lock.
    pub fn plan(&self, request: &PlanRequest) -> Result<Plan, PlanError> {
        let request = self.reads.only(request);
        let refused = |reason| PlanError::Refused { reason };
        if let Some(answer) = self.plans.as_ref().and_then(|plans| plans.get(&request)) {
            self.cached_answer();
            return answer.map_err(refused);
        }
        let answer =
            self.ask(Hook::Plan, || {
                Ok(match ask(&self.module, &self.settings, &request.to_wit())? {
                    Ok(plan) => Ok(clamp::plan(plan, &self.limits)
                        .map_err(|detail| invalid_answer(Hook::Plan, detail))?),
                    Err(refusal) => Err(shortened(refusal.reason)),
                })
            });
        let answer = answer.map_err(PlanError::Fault)?;
        if let Some(plans) = &self.plans {
            plans.insert(request.into_owned(), &answer);
        }
        answer.map_err(refused)
    }

    /// The request without the parts that do not matter for its plan, if the policy lists what it reads.
    pub fn as_read<'a>(&self, request: &'a PlanRequest) -> Cow<'a, PlanRequest> {
        self.reads.only(request)
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
        let request = self.reads.only(request);
        let plan = ask(&self.module, &self.settings, &request.to_wit()).ok()?.ok()?;
        let plan = clamp::named(plan, &self.limits).ok()?;
        Some(Again { is_refused: clamp::is_possible(&plan).is_err(), plan })
    }
}

fn ask(
    module: &Module,
    settings: &[u8],
    request: &types::Request,
) -> Result<Result<wit::LockPlan, wit::Refusal>, Fault> {
    module.ask(Hook::Plan, (settings, request))
}

/// An invalid plan refuses the policy only if all plans are invalid: the policy may expect resource names that the
/// trial requests do not have.
fn try_out(trial: &Trial<'_>) -> Result<Vec<String>, Rejection> {
    let mut notes = Vec::new();
    let mut invalid_answer = None;
    let requests = trial_requests();
    for (what, request) in &requests {
        let ask = |request: &PlanRequest| ask(trial.module, trial.settings, &request.to_wit());
        // The generated types do not implement equality.
        if let Some(part) = trial.reads.unlisted(request, |request| Some(format!("{:?}", ask(request).ok()?)))
        {
            return Err(Rejection::Unlisted { trial: what, part });
        }
        let asked = trial.reads.only(request);
        let answer = trial.twice(what, || ask(&asked))?;
        let Ok(plan) = answer else { continue };
        if let Err(detail) = clamp::plan(plan, trial.limits) {
            notes.push(format!("{what}: {detail}; such requests will be refused"));
            invalid_answer = Some((*what, Fault { hook: Hook::Plan, kind: FaultKind::Value, detail }));
        }
    }
    match invalid_answer.filter(|_| notes.len() == requests.len()) {
        Some((trial, fault)) => Err(Rejection::SelfTest { trial, fault }),
        None => Ok(notes),
    }
}

/// Requests of each kind; the last is guarded.
pub(super) fn trial_requests() -> [(&'static str, PlanRequest); 5] {
    let plain = PlanRequest { seed: 1, ..PlanRequest::plain("trial/1", "trial") };
    let labels = [("tenant", "acme"), ("group", "blue"), ("rank", "1")];
    let labelled = PlanRequest {
        ttl_ms: Some(5_000),
        wait_ms: Some(1_000),
        labels: labels.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec(),
        ..plain.clone()
    };
    let shared = PlanRequest { resource: "trial/ä".to_owned(), mode: Mode::Shared, ..labelled.clone() };
    let guarded =
        PlanRequest { resource: "/trial/1".to_owned(), http: Some(Arc::new(trial_http())), ..plain.clone() };
    let permits = PlanRequest { mode: Mode::Permits { count: 1, limit: 0 }, ..labelled.clone() };
    [
        ("a plain request", plain),
        ("a request with labels", labelled),
        ("a shared one", shared),
        ("permits", permits),
        ("a guarded request", guarded),
    ]
}

fn trial_http() -> HttpView {
    let pairs = |pairs: &[(&str, &str)]| {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    };
    HttpView {
        method: "POST".to_owned(),
        path: "/trial/1".to_owned(),
        captures: pairs(&[("id", "1")]),
        query: pairs(&[("page", "2")]),
        headers: pairs(&[("idempotency-key", "trial-1"), ("x-tenant", "acme")]),
        // Cut off, as on a route that shows only some bytes.
        body: br#"{"id": 1, "items": [{"sku": "A-7"}], "note": "tri"#.to_vec(),
    }
}
