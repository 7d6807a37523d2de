//! A request as a policy sees it.

use std::sync::Arc;

use crate::lock::Mode;
use crate::lock::record::HttpView;
use crate::policy::bindings::{self, types};

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

impl PlanRequest {
    /// A request for exclusive use that names nothing but its resource and its owner.
    pub fn plain(resource: &str, owner: &str) -> PlanRequest {
        PlanRequest {
            resource: resource.to_owned(),
            owner: owner.to_owned(),
            mode: Mode::Exclusive,
            ttl_ms: None,
            wait_ms: None,
            labels: Vec::new(),
            http: None,
            seed: 0,
        }
    }

    pub(in crate::policy) fn to_wit(&self) -> types::Request {
        types::Request {
            name: self.resource.clone(),
            owner: self.owner.clone(),
            mode: bindings::mode(self.mode),
            ttl: self.ttl_ms,
            wait: self.wait_ms,
            labels: pairs(&self.labels),
            http: self.http.as_deref().map(http),
            seed: self.seed,
        }
    }
}

fn http(from: &HttpView) -> types::HttpRequest {
    types::HttpRequest {
        method: from.method.clone(),
        path: from.path.clone(),
        captures: pairs(&from.captures),
        query: pairs(&from.query),
        headers: pairs(&from.headers),
        body: from.body.clone(),
    }
}

fn pairs(from: &[(String, String)]) -> Vec<types::Label> {
    from.iter().map(|(name, value)| bindings::label(name, value)).collect()
}
