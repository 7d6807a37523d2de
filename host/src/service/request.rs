//! A lock request, as a front passes it to the service.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use sha2::{Digest, Sha256};

use super::principal::{self, Principal};
use crate::auth::{OverLimit, Quota};
use crate::lock::Mode;
use crate::lock::table::Charge;
use crate::policy::{Plan, PlanRequest};
use crate::random;

/// A lock request of an application.
#[derive(Clone, Debug)]
pub struct Request {
    /// Who asks.
    pub principal: Principal,
    /// What to lock; its policy names the keys.
    pub resource: String,
    /// The future holder; the front makes up a name if the client gives none.
    pub owner: String,
    /// How to hold the lock. The `limit` of permits is 0 here, because the policy sets it.
    pub mode: Mode,
    /// The lease time that the client wants, in milliseconds.
    pub ttl_ms: Option<u32>,
    /// How long the client wants to wait, in milliseconds.
    pub wait_ms: Option<u32>,
    /// Identifies the request when the client repeats it.
    pub request_id: Option<String>,
    /// Names and values for the policy.
    pub labels: Vec<(String, String)>,
}

impl Request {
    /// The request in the form that its policy gets.
    pub(super) fn for_policy(&self) -> PlanRequest {
        PlanRequest {
            resource: self.resource.clone(),
            owner: self.owner.clone(),
            mode: self.mode,
            ttl_ms: self.ttl_ms,
            wait_ms: self.wait_ms,
            labels: self
                .labels
                .iter()
                .cloned()
                .chain(self.principal.name().map(|name| principal::label(&name)))
                .collect(),
            http: self.principal.routed().map(|routed| routed.http.clone()),
            seed: random::number(),
        }
    }

    /// The request id as the store knows it: two authenticated clients can use the same id.
    pub(super) fn scoped_id(&self) -> Option<String> {
        let id = self.request_id.as_deref()?;
        Some(match self.principal.name() {
            // No name of a principal has a slash.
            Some(name) => format!("{name}/{id}"),
            None => id.to_owned(),
        })
    }

    /// What the acquire occupies of the limits of its client, besides a request in progress. A waiting acquire already
    /// counts as the lease that it may become, so it is not refused for a limit after its wait.
    ///
    /// # Errors
    /// The client is over one of its limits.
    pub(super) fn charge(&self, plan: &Plan) -> Result<Charge, OverLimit> {
        let client = match &self.principal {
            Principal::Client(client) => client,
            Principal::Anonymous(place) => return Ok(Charge { request: place.clone(), lease: None }),
            Principal::Application(_) => return Ok(Charge::default()),
        };
        let waiter = client.take(Quota::Waiters)?;
        // A repeated request gets the lease of the first one, and a re-entrant owner gets its own lease again.
        let repeated = self.request_id.as_deref().map(|id| self.fingerprint(&[id]));
        let reentrant = plan.reentrant.then(|| {
            let mut hash = DefaultHasher::new();
            (&*plan.keys, &self.owner, plan.mode).hash(&mut hash);
            hash.finish()
        });
        let lease = client.take_lease(repeated.into_iter().chain(reentrant).collect())?;
        Ok(Charge { request: Some(Arc::new((waiter, client.clone()))), lease: Some(Arc::new(lease)) })
    }

    /// A hash of everything that must be equal in two requests with one id: all of the request but the wait, and
    /// `more`.
    pub(super) fn fingerprint(&self, more: &[&str]) -> u64 {
        let mut hash = Sha256::new();
        let mode = match self.mode {
            Mode::Exclusive => 0,
            Mode::Shared => 1,
            Mode::Permits { count, .. } => u64::from(count) + 2,
        };
        let ttl = self.ttl_ms.map_or(u64::MAX, u64::from);
        hash.update(mode.to_le_bytes());
        hash.update(ttl.to_le_bytes());
        let labels = self.labels.iter().flat_map(|(name, value)| [name, value]);
        let texts = [&self.resource, &self.owner].into_iter().chain(labels).map(String::as_str);
        let principal = self.principal.name();
        for text in texts.chain(more.iter().copied()).chain(principal.as_deref()) {
            hash.update((text.len() as u64).to_le_bytes());
            hash.update(text.as_bytes());
        }
        let digest: [u8; 32] = hash.finalize().into();
        u64::from_le_bytes([
            digest[0], digest[1], digest[2], digest[3], digest[4], digest[5], digest[6], digest[7],
        ])
    }
}
