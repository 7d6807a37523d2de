//! `GET /live`, `/ready` and `/metrics`.

use hyper::StatusCode;
use hyper::header::{ACCEPT, CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use serde_json::{Value, json};

use super::Admin;
use crate::http::{self, Body, Request, Response, Told};
use crate::policy::PolicyStatus;
use crate::store::Health;
use crate::telemetry;

/// `GET /ready`: 200 if locks can be granted, otherwise 503 with the reasons.
pub fn ready(admin: &Admin) -> Response {
    let health = admin.service.store_health();
    let trouble = admin.fleet.trouble();
    let others = admin.metrics.troubles.now().into_iter().chain(admin.fleet.warning()).collect();
    let (ready, body) =
        readiness(&health, trouble, &admin.fleet.policies(), others, admin.stop.is_cancelled());
    let mut response = http::json(&body);
    if !ready {
        response.extensions_mut().insert(Told);
        *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
        response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
    }
    response
}

/// `GET /metrics`, in the format that the client accepts: OpenMetrics or Prometheus text.
pub fn metrics(admin: &Admin, request: &Request) -> Response {
    let text = admin.metrics.encode();
    let accepts_open_metrics =
        request.headers().get_all(ACCEPT).iter().any(|accept| {
            accept.to_str().is_ok_and(|accept| accept.contains("application/openmetrics-text"))
        });
    let (text, kind) = if accepts_open_metrics {
        (text, "application/openmetrics-text; version=1.0.0; charset=utf-8")
    } else {
        (telemetry::to_prometheus(&text), "text/plain; version=0.0.4; charset=utf-8")
    };
    let mut response = Response::new(Body::full(text));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

fn readiness(
    health: &Health,
    fleet: Option<String>,
    policies: &[PolicyStatus],
    others: Vec<String>,
    stopping: bool,
) -> (bool, Value) {
    let mut reasons = Vec::new();
    if stopping {
        reasons.push("the proxy is shutting down".to_owned());
    }
    let (store, warnings) = match health {
        Health::Ready { server, warnings } => (Some(server), warnings.clone()),
        Health::Unavailable { why } => {
            reasons.push(format!("the store is unavailable: {why}"));
            (None, Vec::new())
        }
    };
    reasons.extend(fleet);
    // If a policy's last load was refused, the generation before it still serves.
    let troubles = policies
        .iter()
        .filter_map(|policy| Some(format!("policy {}: {}", policy.name, policy.last_error.as_ref()?)));
    let warnings: Vec<String> = warnings.into_iter().chain(troubles).chain(others).collect();
    let ready = reasons.is_empty();
    let status = if ready { "ready" } else { "not ready" };
    (ready, json!({"status": status, "reasons": reasons, "store": store, "warnings": warnings}))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readiness_gives_every_reason() {
        let up = Health::Ready { server: "MySQL 9.7.4".into(), warnings: vec!["sync_binlog is 0".into()] };
        let (ready, body) = readiness(&up, None, &[], vec!["config.toml:2".to_owned()], false);
        assert!(ready);
        assert_eq!(body["store"], "MySQL 9.7.4");
        assert_eq!(body["warnings"], json!(["sync_binlog is 0", "config.toml:2"]));

        let down = Health::Unavailable { why: "refused".into() };
        let (ready, body) = readiness(&down, Some("not a member".to_owned()), &[], Vec::new(), true);
        assert!(!ready);
        let reasons =
            json!(["the proxy is shutting down", "the store is unavailable: refused", "not a member"]);
        assert_eq!(body["reasons"], reasons);
    }
}
