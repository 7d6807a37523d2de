//! Policies as operators see and replace them.

use std::future::Future;
use std::pin::Pin;

use bytes::Bytes;
use serde::Serialize;
use serde_json::json;

use super::Admin;
use crate::http::{self, BodyError, Kind, Problem, Request, Response, read_body};
use crate::policy::PolicyStatus;

/// What the policies do for operators.
pub trait PolicyAdmin: Send + Sync + 'static {
    /// Every policy, by name.
    fn status(&self) -> Vec<PolicyStatus>;

    /// Checks a component and makes it the policy's live generation, with the settings that the
    /// policy has. The policy keeps what it had where the component is refused.
    fn push(&self, name: &str, component: Bytes) -> PolicyAnswer<Pushed>;

    /// Refuses a component that has more than `max` bytes.
    fn too_large(&self, name: &str, max: usize) -> Refusal;

    /// Brings the generation before the live one back.
    fn rollback(&self, name: &str) -> PolicyAnswer<PolicyStatus>;
}

pub type PolicyAnswer<T> = Pin<Box<dyn Future<Output = Result<T, Refusal>> + Send>>;

/// What became of a component that was accepted.
#[derive(Clone, Debug)]
pub enum Pushed {
    Live(PolicyStatus),
    /// It is the live generation already.
    Unchanged(PolicyStatus),
}

/// Why nothing changed.
#[derive(Clone, Debug)]
pub enum Refusal {
    /// No policy has this name.
    Unknown,
    /// One sentence for the operator.
    Refused(String),
    /// Nothing is wrong with the policy, but it cannot be made live now: why.
    Unavailable(String),
}

#[derive(Serialize)]
struct Answer {
    /// `live`, `unchanged` or `rolled_back`.
    outcome: &'static str,
    #[serde(flatten)]
    policy: PolicyStatus,
}

pub fn list(admin: &Admin) -> Response {
    http::json(&json!({"policies": admin.policies.status()}))
}

pub async fn push(admin: &Admin, name: &str, request: Request) -> Result<Response, Problem> {
    if let Some(query) = request.uri().query().filter(|query| !query.is_empty()) {
        return Err(Problem::invalid("query", format!("`{query}`: a push takes no parameters")));
    }
    let limit = admin.max_component_bytes;
    let component = match read_body(request, limit, admin.http.body_timeout).await {
        // Not read to its end, and refused as any other component, so that it is on record.
        Err(BodyError::TooLarge { .. }) => return Err(admin.too_large(name, limit)),
        read => read?,
    };
    if component.is_empty() {
        return Err(Problem::invalid("body", "is empty; send the component"));
    }
    let pushed =
        admin.policies.push(name, component).await.map_err(|refusal| admin.refused(name, refusal))?;
    let answer = match pushed {
        Pushed::Live(policy) => Answer { outcome: "live", policy },
        Pushed::Unchanged(policy) => Answer { outcome: "unchanged", policy },
    };
    Ok(http::json(&answer))
}

pub async fn roll_back(admin: &Admin, name: &str) -> Result<Response, Problem> {
    let policy = admin.policies.rollback(name).await.map_err(|refusal| admin.refused(name, refusal))?;
    Ok(http::json(&Answer { outcome: "rolled_back", policy }))
}

impl Admin {
    /// 413, for the connection is closed.
    fn too_large(&self, name: &str, limit: usize) -> Problem {
        match self.policies.too_large(name, limit) {
            Refusal::Refused(why) => {
                Problem::new(Kind::TooLarge, why).with("bound", limit).with("policy", name)
            }
            unknown => self.refused(name, unknown),
        }
    }

    fn refused(&self, name: &str, refusal: Refusal) -> Problem {
        match refusal {
            Refusal::Refused(why) => Problem::new(Kind::PolicyRefused, why).with("policy", name),
            Refusal::Unavailable(why) => Problem::new(Kind::StoreUnavailable, why).with("policy", name),
            Refusal::Unknown => {
                let known: Vec<String> =
                    self.policies.status().into_iter().map(|policy| policy.name).collect();
                let detail = format!("no policy is named `{name}`; there are {}", known.join(", "));
                Problem::new(Kind::NotFound, detail).with("known", known)
            }
        }
    }
}
