//! Policies as operators see and replace them.

use std::future::Future;
use std::pin::Pin;

use bytes::Bytes;
use hyper::StatusCode;
use serde::Serialize;
use serde_json::{Value, json};

use super::Admin;
use crate::http::{self, BodyError, Kind, Problem, Request, Response, read_body};
use crate::policy::PolicyStatus;

/// What the policies do for operators.
pub trait PolicyAdmin: Send + Sync + 'static {
    /// Every policy, by name.
    fn status(&self) -> Vec<PolicyStatus>;

    /// Checks a component and makes it the policy's live generation, with the settings that the
    /// policy has. The policy keeps what it had where the component is refused. The live component calls a
    /// change off that is under way.
    fn push(&self, name: &str, component: Bytes) -> PolicyAnswer<Pushed>;

    /// Refuses a component that has more than `max` bytes.
    fn too_large(&self, name: &str, max: usize) -> Refusal;

    /// Brings the generation back that was live before on all proxies, or calls a change off that is under way.
    fn rollback(&self, name: &str) -> PolicyAnswer<Pushed>;
}

pub type PolicyAnswer<T> = Pin<Box<dyn Future<Output = Result<T, Refusal>> + Send>>;

/// What became of a component that was accepted.
#[derive(Clone, Debug)]
pub enum Pushed {
    Live(PolicyStatus),
    /// It is the live generation already.
    Unchanged(PolicyStatus),
    /// It goes live without the caller: these proxies have not followed yet.
    UnderWay {
        policy: PolicyStatus,
        waits_for: Vec<String>,
    },
    /// The live generation stays, and the change to this digest was called off.
    CalledOff {
        policy: PolicyStatus,
        candidate: String,
    },
}

/// Why nothing changed.
#[derive(Clone, Debug)]
pub enum Refusal {
    /// No policy has this name.
    Unknown,
    /// One sentence for the operator.
    Refused(String),
    /// Another change of the policy is under way.
    Busy(String),
    /// Nothing is wrong with the policy, but it cannot be made live now: why.
    Unavailable(String),
}

#[derive(Serialize)]
struct PolicyResponse {
    /// `live`, `unchanged`, `rolled_back`, `called_off`, or `under_way` with a status of 202.
    outcome: &'static str,
    /// Of a change that was called off, what would have gone live.
    #[serde(skip_serializing_if = "Option::is_none")]
    candidate: Option<String>,
    /// Proxies that have not followed yet.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    waits_for: Vec<String>,
    #[serde(flatten)]
    policy: PolicyStatus,
}

pub fn list(admin: &Admin) -> Response {
    let records = admin.fleet.records();
    let policy = |status: PolicyStatus| {
        let record = records.iter().find(|record| record.name == status.name);
        let mut shown = json!(status);
        shown["fleet"] = json!(record);
        shown
    };
    let policies: Vec<Value> = admin.policies.status().into_iter().map(policy).collect();
    http::json(&json!({"policies": policies}))
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
    Ok(pushed.answer("live"))
}

pub async fn roll_back(admin: &Admin, name: &str) -> Result<Response, Problem> {
    let pushed = admin.policies.rollback(name).await.map_err(|refusal| admin.refused(name, refusal))?;
    Ok(pushed.answer("rolled_back"))
}

impl Pushed {
    /// `live` is what it is called when it has gone live.
    fn answer(self, live: &'static str) -> Response {
        let (outcome, policy, waits_for, candidate) = match self {
            Pushed::Live(policy) => (live, policy, Vec::new(), None),
            Pushed::Unchanged(policy) => ("unchanged", policy, Vec::new(), None),
            Pushed::UnderWay { policy, waits_for } => ("under_way", policy, waits_for, None),
            Pushed::CalledOff { policy, candidate } => ("called_off", policy, Vec::new(), Some(candidate)),
        };
        let mut response = http::json(&PolicyResponse { outcome, candidate, waits_for, policy });
        if outcome == "under_way" {
            *response.status_mut() = StatusCode::ACCEPTED;
        }
        response
    }
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
            Refusal::Busy(why) => {
                Problem::new(Kind::Conflict, why).with("policy", name).retry_after_ms(1_000)
            }
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
