//! The listing and replacement of policies by operators.

use std::str::FromStr;

use bytes::Bytes;
use hyper::StatusCode;
use serde::Serialize;
use serde_json::{Value, json};

use super::Admin;
use crate::config::Verb;
use crate::fleet::{PushError, Pushed};
use crate::fronts::Code;
use crate::http::{self, BodyError, Kind, Problem, Query, Request, Response, read_body};
use crate::policy::{CanaryGuard, CanaryTerms, PolicyStatus};
use crate::service::Principal;

/// A policy component that the proxy refuses to make live.
const POLICY_REFUSED: Kind = Kind::new("refused", 422, "The policy was refused");

#[derive(Serialize)]
struct PolicyResponse {
    /// `live`, `unchanged`, `rolled_back`, `called_off`, `canary`, or `under_way` (with status 202).
    outcome: &'static str,
    /// The digest of the component that would have gone live, if the change was cancelled.
    #[serde(skip_serializing_if = "Option::is_none")]
    candidate: Option<String>,
    /// Proxies that have not followed yet.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    waits_for: Vec<String>,
    #[serde(flatten)]
    policy: PolicyStatus,
}

/// `GET /v1/policies`: every policy on this proxy that the client may see, with its record in the store.
pub fn list(admin: &Admin, principal: &Principal) -> Response {
    let records = admin.fleet.records();
    let policy = |status: PolicyStatus| {
        let record = records.iter().find(|record| record.name == status.name);
        let mut shown = json!(status);
        shown["fleet"] = json!(record);
        shown
    };
    let may_see = |status: &PolicyStatus| principal.may(Verb::PolicyRead, &status.name);
    let policies: Vec<Value> = admin.fleet.policies().into_iter().filter(may_see).map(policy).collect();
    http::json(&json!({"policies": policies}))
}

/// `PUT /v1/policies/{name}`: makes the component in the body live.
pub async fn push(
    admin: &Admin,
    principal: &Principal,
    name: &str,
    request: Request,
) -> Result<Response, Problem> {
    if let Some(query) = request.uri().query().filter(|query| !query.is_empty()) {
        return Err(Problem::invalid("query", format!("`{query}`: a push takes no parameters")));
    }
    let component = component(admin, principal, name, request).await?;
    let pushed =
        admin.fleet.push(name, component).await.map_err(|error| admin.refused(principal, name, error))?;
    Ok(answer(pushed, "live"))
}

/// `PUT /v1/policies/{name}/canary`: lets the component in the body decide for a share of the policy's keys.
pub async fn canary(
    admin: &Admin,
    principal: &Principal,
    name: &str,
    request: Request,
) -> Result<Response, Problem> {
    let terms = terms(request.uri().query())?;
    let component = component(admin, principal, name, request).await?;
    let begun = admin.fleet.canary(name, component, &terms).await;
    let (policy, waits_for) = begun.map_err(|error| admin.refused(principal, name, error))?;
    Ok(http::json(&PolicyResponse { outcome: "canary", candidate: None, waits_for, policy }))
}

/// The terms of a canary, from the query of its request.
fn terms(query: Option<&str>) -> Result<CanaryTerms, Problem> {
    let known = ["share", "steps", "every_ms", "faults", "refused", "ungranted", "p99"];
    let query = Query::parse(query, &known)?;
    let share = query.text("share").ok_or_else(|| Problem::invalid("share", "is missing"))?;
    let steps = query.text("steps").unwrap_or_default();
    let steps = steps.split(',').filter(|step| !step.is_empty());
    let guard = CanaryGuard::default();
    let terms = CanaryTerms {
        share: parsed("share", share)?,
        steps: steps.map(|step| parsed("steps", step)).collect::<Result<_, _>>()?,
        every_ms: given(&query, "every_ms", 0)?,
        guard: CanaryGuard {
            faults: given(&query, "faults", guard.faults)?,
            refused: given(&query, "refused", guard.refused)?,
            ungranted: given(&query, "ungranted", guard.ungranted)?,
            p99: given(&query, "p99", guard.p99)?,
        },
    };
    terms.check().map_err(|(field, why)| Problem::invalid(field, why))?;
    Ok(terms)
}

/// The value of a parameter, or its default.
pub(super) fn given<T: FromStr>(query: &Query, name: &'static str, default: T) -> Result<T, Problem> {
    query.text(name).map_or(Ok(default), |text| parsed(name, text))
}

fn parsed<T: FromStr>(name: &'static str, text: &str) -> Result<T, Problem> {
    text.parse().map_err(|_| Problem::invalid(name, format!("`{text}` is not such a value")))
}

/// `POST /v1/policies/{name}/promote`: makes the canary live.
pub async fn promote(admin: &Admin, principal: &Principal, name: &str) -> Result<Response, Problem> {
    let promoted = admin.fleet.promote(name).await.map_err(|error| admin.refused(principal, name, error))?;
    Ok(answer(promoted, "live"))
}

/// `POST /v1/policies/{name}/abort`: ends a canary, or a change in progress.
pub async fn abort(admin: &Admin, principal: &Principal, name: &str) -> Result<Response, Problem> {
    let ended = admin.fleet.abort(name).await.map_err(|error| admin.refused(principal, name, error))?;
    Ok(answer(ended, "live"))
}

/// The component in the body of a request, whose client may still push it.
pub(super) async fn component(
    admin: &Admin,
    principal: &Principal,
    name: &str,
    request: Request,
) -> Result<Bytes, Problem> {
    let limit = admin.engine.max_component_bytes;
    let component = match read_body(request, limit, admin.access.http.body_timeout).await {
        // The body was not read to its end. It is refused like any other component, so that the refusal is recorded.
        Err(BodyError::TooLarge { .. }) => return Err(admin.too_large(principal, name, limit)),
        read => read?,
    };
    if component.is_empty() {
        return Err(Problem::invalid("body", "is empty; send the component"));
    }
    // The body may have taken a while.
    if !principal.clone().refreshed().is_some_and(|now| now.may(Verb::PolicyPush, name)) {
        let detail = format!("you may no longer {} `{name}`", Verb::PolicyPush.as_str());
        return Err(Problem::new(Code::Forbidden, detail));
    }
    Ok(component)
}

/// `POST /v1/policies/{name}/rollback`.
pub async fn roll_back(admin: &Admin, principal: &Principal, name: &str) -> Result<Response, Problem> {
    let pushed =
        admin.fleet.push_previous(name).await.map_err(|error| admin.refused(principal, name, error))?;
    Ok(answer(pushed, "rolled_back"))
}

/// The answer to the client; `live` is the `outcome` of a change that has gone live.
fn answer(pushed: Pushed, live: &'static str) -> Response {
    let (outcome, policy, waits_for, candidate) = match pushed {
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

impl Admin {
    /// 413 rather than the status of other errors, because the connection is closed.
    fn too_large(&self, principal: &Principal, name: &str, limit: usize) -> Problem {
        match self.fleet.too_large(name, limit) {
            PushError::Refused(why) => {
                Problem::new(Kind::TOO_LARGE, why).with("bound", limit).with("policy", name)
            }
            unknown => self.refused(principal, name, unknown),
        }
    }

    pub(super) fn refused(&self, principal: &Principal, name: &str, error: PushError) -> Problem {
        match error {
            PushError::Refused(why) => Problem::new(POLICY_REFUSED, why).with("policy", name),
            PushError::Busy(why) => {
                Problem::new(Code::Conflict, why).with("policy", name).retry_after_ms(1_000)
            }
            PushError::Overloaded(why) => {
                Problem::new(Kind::OVERLOADED, why).with("policy", name).retry_after_ms(1_000)
            }
            PushError::Unavailable(why) => {
                let detail = format!("{why}; the old policy stays, try again");
                Problem::new(Code::StoreUnavailable, detail).with("policy", name)
            }
            PushError::Unknown => {
                let names = self.fleet.policies().into_iter().map(|policy| policy.name);
                let known: Vec<String> = names.filter(|name| principal.may(Verb::PolicyRead, name)).collect();
                let detail = format!("no policy is named `{name}`; there are {}", known.join(", "));
                Problem::new(Kind::NOT_FOUND, detail).with("known", known)
            }
        }
    }
}
