//! Shadows: a component is compared with the live version on the calls of this proxy.

use super::{Admin, policies};
use crate::fronts::Code;
use crate::http::{self, Kind, Problem, Query, Request, Response};
use crate::service::Principal;
use crate::shadow::{ShadowError, ShadowTerms};

/// `PUT /v1/policies/{name}/shadow`: asks the component in the body what the live version is asked.
pub async fn begin(
    admin: &Admin,
    principal: &Principal,
    name: &str,
    request: Request,
) -> Result<Response, Problem> {
    let query = Query::parse(request.uri().query(), &["share", "for_ms"])?;
    let terms = ShadowTerms {
        share: policies::given(&query, "share", DEFAULT_SHARE)?,
        for_ms: policies::given(&query, "for_ms", DEFAULT_MS)?,
    };
    terms.check().map_err(|(field, why)| Problem::invalid(field, why))?;
    let component = policies::component(admin, principal, name, request).await?;
    let loaded = admin.fleet.load_beside(name, component).await;
    let (live, candidate) = loaded.map_err(|error| admin.refused(principal, name, error))?;
    admin.shadows.begin(&live, candidate, terms).map_err(|error| match error {
        ShadowError::Busy => Problem::new(Code::Conflict, error.to_string()).with("policy", name),
        ShadowError::Thread(_) => Problem::new(Kind::OVERLOADED, error.to_string()),
    })?;
    report(admin, name, None).await
}

/// The share of the keys and the length of a shadow, if they are not given.
const DEFAULT_SHARE: f64 = 10.0;
const DEFAULT_MS: u64 = 600_000;

/// `GET /v1/policies/{name}/shadow`: what the shadow of the policy has seen, also after its end. With `plans=false`, the plans are
/// not compared.
pub async fn report(admin: &Admin, name: &str, query: Option<&str>) -> Result<Response, Problem> {
    let query = Query::parse(query, &["plans"])?;
    let with_plans = policies::given(&query, "plans", true)?;
    let (shadows, policy) = (admin.shadows.clone(), name.to_owned());
    // The comparison of many plans takes a moment.
    let report = tokio::task::spawn_blocking(move || shadows.report(&policy, with_plans)).await;
    let report =
        report.map_err(|error| Problem::new(Kind::OVERLOADED, format!("the report failed: {error}")))?;
    match report {
        Some(report) => Ok(http::json(&report)),
        None => {
            Err(Problem::new(Kind::NOT_FOUND, format!("policy `{name}` has had no shadow on this proxy")))
        }
    }
}

/// `DELETE /v1/policies/{name}/shadow`: ends the shadow of the policy, and says what it has seen.
pub async fn end(admin: &Admin, name: &str) -> Result<Response, Problem> {
    admin.shadows.end(name);
    report(admin, name, None).await
}
