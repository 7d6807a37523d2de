//! The part of a request that is stored with its lease, so that any proxy can ask a policy about the lease again.

use std::sync::Arc;

use super::principal;
use super::request::Request;
use crate::lock::record::{Claim, Tag};
use crate::lock::table::HeldLease;
use crate::lock::{Key, Mode};
use crate::policy::{Plan, PlanRequest};

/// The tag of a lease that the policy generation with this id plans.
pub(super) fn tag(request: &Request, policy: &Arc<str>, plan: &Plan) -> Tag {
    // Most resources are their keys. A proxy may know a million leases.
    let same = plan.keys.iter().map(Key::text).find(|text| ***text == *request.resource);
    let label = |(name, value): &(String, String)| (name.as_str().into(), value.as_str().into());
    Tag {
        resource: same.cloned().unwrap_or_else(|| request.resource.as_str().into()),
        policy: policy.clone(),
        labels: request.labels.iter().map(label).collect(),
        asked_mode: differs(request.mode, plan.mode).then_some(request.mode),
        http: request.principal.routed().map(|routed| routed.http.clone()),
        principal: request.principal.name(),
        delegated_to: None,
    }
}

/// Whether the policy was asked for another mode than it planned. The limit of permits is the policy's own.
fn differs(asked: Mode, planned: Mode) -> bool {
    match (planned, asked) {
        (Mode::Permits { count: planned, .. }, Mode::Permits { count: asked, .. }) => planned != asked,
        (planned, asked) => std::mem::discriminant(&planned) != std::mem::discriminant(&asked),
    }
}

/// The part of a claim's request that decides its keys, as far as it is stored with a lease.
pub(super) fn request_of(claim: &Claim) -> PlanRequest {
    request(&claim.tag, &claim.owner, claim.mode)
}

/// As [`request_of`], of a lease.
pub(super) fn request_of_lease(lease: &HeldLease) -> PlanRequest {
    request(&lease.tag, &lease.owner, lease.mode)
}

/// The request of a lease, as far as it is stored with the lease.
pub(super) fn request(tag: &Tag, owner: &str, lease_mode: Mode) -> PlanRequest {
    let mode = match tag.asked_mode.unwrap_or(lease_mode) {
        Mode::Permits { count, .. } => Mode::Permits { count, limit: 0 },
        mode => mode,
    };
    let labels = tag.labels.iter().map(|(name, value)| (name.to_string(), value.to_string()));
    PlanRequest {
        resource: tag.resource.to_string(),
        owner: owner.to_owned(),
        mode,
        ttl_ms: None,
        wait_ms: None,
        labels: labels.chain(tag.principal.as_deref().map(principal::label)).collect(),
        http: tag.http.clone(),
        seed: 0,
    }
}

/// The policy that planned the guarded request. Its route may have another policy by now.
pub(super) fn policy(tag: &Tag) -> Option<&str> {
    tag.http.as_ref().map(|_| tag.policy.split_once('@').map_or(&*tag.policy, |(name, _)| name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guarded_request_has_the_policy_of_its_lease() {
        let mut tag = Tag { policy: "orders@sha256:12".into(), http: Some(<_>::default()), ..Tag::default() };
        assert_eq!(policy(&tag), Some("orders"));
        tag.http = None;
        assert_eq!(policy(&tag), None);
    }
}
