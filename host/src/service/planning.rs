//! From a request to the plan of its policy.

use std::sync::Arc;

use super::context::ServiceContext;
use super::errors::AcquireError;
use super::request::Request;
use crate::config::Verb;
use crate::coverage::{Branch, reached};
use crate::lock::{Call, Key, Primitive};
use crate::policy::{Generation, Overlay, Place, Plan, PlanError, PlanRequest};

/// The plan of a granted request.
pub(super) struct Planned {
    /// What decides about the request: the live generation or a canary.
    pub generation: Arc<Generation>,
    /// What the keys are named by.
    pub live: Arc<Generation>,
    /// On which side of a canary the request is.
    pub place: Option<Place>,
    pub plan: Plan,
    /// The version of the generations that named the keys.
    pub version: (u64, Option<u64>),
}

impl Planned {
    /// Whether the same generations still name keys.
    pub fn is_current(&self, shared: &ServiceContext) -> bool {
        let active = shared.policies.active(self.generation.name());
        active.is_none_or(|active| active.version() == self.version)
    }
}

/// The plan by the current generations of the policy. `asked`: the request as the policy sees it.
pub(super) fn planned(
    shared: &ServiceContext,
    policy: &str,
    request: &Request,
    asked: &PlanRequest,
    call: Call,
) -> Result<Planned, AcquireError> {
    let verbs = if call == Call::Version { VERSION } else { LOCK };
    check_right(request, verbs, std::iter::once(request.resource.as_str()))?;
    let active = shared.policies.active(policy).ok_or_else(|| no_policy(policy))?;
    let mut planned = shared.within_reach(policy, plan(&active.live, policy, asked)?)?;
    check_call(call, policy, planned.primitive)?;
    let (mut generation, mut place) = (active.live.clone(), None);
    if let Some(candidate) = &active.candidate {
        // A request that either generation refuses is refused: other proxies may already apply the candidate
        // alone.
        let next = shared.within_reach(policy, plan(candidate, policy, asked)?)?;
        add_keys(&mut planned, &next, call)?;
    }
    check_right(request, verbs, planned.keys.iter().map(Key::as_str))?;
    // While a change is in progress, there is no canary. A version belongs to one key.
    if let Some(canary) = active.canary.as_ref().filter(|_| call != Call::Version) {
        let (overlay, at) = canary.overlay(asked, &planned, |plan| {
            let reached = shared.within_reach(policy, plan.clone());
            reached.is_ok_and(|plan| check_call(call, policy, plan.primitive).is_ok())
        });
        place = Some(at);
        match overlay {
            Overlay::Decides(plan) => {
                reached(Branch::CanaryDecides);
                let names = plan.keys.iter().map(Key::as_str);
                check_right(request, verbs, names).inspect_err(|_| place.iter().for_each(Place::refused))?;
                (planned, generation) = (plan, canary.generation.clone());
            }
            Overlay::Refuses(reason) => return Err(AcquireError::Refused { reason }),
            Overlay::Leaves => {}
        }
    }
    Ok(Planned { generation, live: active.live.clone(), place, plan: planned, version: active.version() })
}

/// Either verb reads a version; a commit is checked for [`LOCK`] besides.
const VERSION: &[Verb] = &[Verb::Acquire, Verb::ReadValue];
/// What a client must be allowed to do with a resource and its keys to lock them.
pub(super) const LOCK: &[Verb] = &[Verb::Acquire];

/// Checks that the client may do one of these to each name. A policy may name other keys than the client's resource.
pub(super) fn check_right<'a>(
    request: &Request,
    verbs: &[Verb],
    mut names: impl Iterator<Item = &'a str>,
) -> Result<(), AcquireError> {
    let may = |name| verbs.iter().any(|verb| request.principal.may(*verb, name));
    if names.all(may) {
        return Ok(());
    }
    Err(AcquireError::Forbidden { verb: verbs[0], resource: request.resource.clone() })
}

/// Checks that the policy's primitive takes the client's call.
fn check_call(call: Call, policy: &str, primitive: Primitive) -> Result<(), AcquireError> {
    if primitive.takes(call) {
        return Ok(());
    }
    let expected = primitive.properties().calls[0];
    Err(AcquireError::WrongCall { policy: policy.to_owned(), primitive: primitive.as_str(), expected })
}

pub(super) fn no_policy(policy: &str) -> AcquireError {
    let detail = "no generation of the policy is live".to_owned();
    AcquireError::PolicyFault { policy: policy.to_owned(), reason: "not_live", detail }
}

/// The plan by one generation.
pub(super) fn plan(generation: &Generation, policy: &str, asked: &PlanRequest) -> Result<Plan, AcquireError> {
    let answer = generation.plan(asked);
    generation.answered(asked, &answer);
    answer.map_err(|error| match error {
        PlanError::Refused { reason } => AcquireError::Refused { reason },
        PlanError::Fault(fault) => AcquireError::PolicyFault {
            policy: policy.to_owned(),
            reason: fault.kind.as_str(),
            detail: fault.detail,
        },
    })
}

/// Adds the keys that the candidate names to the plan. This is not possible for a version, which belongs to one
/// key: with two keys, two clients could commit what they read as one. Nor is it possible for a claim for any
/// one of several keys.
fn add_keys(plan: &mut Plan, next: &Plan, call: Call) -> Result<(), AcquireError> {
    let same = plan.any == next.any && plan.keys == next.keys;
    let any = plan.any || next.any;
    if same || (!any && next.keys.iter().all(|key| plan.keys.contains(key))) {
        return Ok(());
    }
    if any || call == Call::Version {
        let why = "its policy is being replaced by a policy that names other keys; try again in a moment";
        return Err(AcquireError::NotYet { why: why.to_owned() });
    }
    plan.keys = Key::union(&plan.keys, next.keys.iter());
    Ok(())
}

impl ServiceContext {
    /// The plan, with its second choice of primitive if the store lacks the first one.
    pub(super) fn within_reach(&self, policy: &str, plan: Plan) -> Result<Plan, AcquireError> {
        let Some(why) = self.store.lacks(plan.primitive.space()) else { return Ok(plan) };
        match plan.second {
            Some(second) if self.store.lacks(second.space()).is_none() => Ok(plan.with_primitive(second)),
            _ => {
                let (policy, primitive) = (policy.to_owned(), plan.primitive.as_str());
                Err(AcquireError::NoPrimitive { policy, primitive, why })
            }
        }
    }
}
