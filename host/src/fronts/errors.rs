//! Maps the service's errors to problems for clients.

use serde_json::json;

use super::{mode, time};
use crate::http::{Kind, Problem};
use crate::lock::record::HeldBy;
use crate::service::{AcquireError, LeaseError};
use crate::store::StoreError;

/// After a refusal because of the store, a client should ask again after this time.
const RETRY_AFTER_MS: u32 = 1_000;

impl From<AcquireError> for Problem {
    fn from(error: AcquireError) -> Problem {
        let detail = error.to_string();
        match error {
            AcquireError::Contended { holder, position, retry_after_ms, reason, .. } => {
                let mut problem = Problem::new(Kind::Contended, detail)
                    .with("holder", holder.as_deref().map(held_by))
                    .with("position", position)
                    .with("retry_after_ms", retry_after_ms)
                    .retry_after_ms(retry_after_ms);
                if let Some(reason) = reason {
                    problem = problem.with("reason", reason);
                }
                problem
            }
            AcquireError::Refused { reason } => Problem::new(Kind::Refused, detail).with("reason", reason),
            AcquireError::PolicyFault { policy, reason, .. } => {
                Problem::new(Kind::PolicyFault, detail).with("policy", policy).with("reason", reason)
            }
            AcquireError::NoPrimitive { policy, primitive, .. } => Problem::new(Kind::PolicyFault, detail)
                .with("policy", policy)
                .with("primitive", primitive)
                .with("reason", "no_primitive"),
            AcquireError::TooManyWaiters { limit, .. } => {
                Problem::new(Kind::TooManyWaiters, detail).with("bound", limit).retry_after_ms(RETRY_AFTER_MS)
            }
            AcquireError::TooManyHolders { .. } => {
                Problem::new(Kind::TooManyHolders, detail).retry_after_ms(RETRY_AFTER_MS)
            }
            AcquireError::Invalid { field, .. } => Problem::new(Kind::Invalid, detail).with("field", field),
            AcquireError::RequestReused { ended } => {
                Problem::new(Kind::RequestIdReused, detail).with("field", "request_id").with("ended", ended)
            }
            AcquireError::Done(_) | AcquireError::Conflict(_) => Problem::new(Kind::Conflict, detail),
            AcquireError::Store(error) => error.into(),
            AcquireError::NotYet { .. } => {
                Problem::new(Kind::StoreUnavailable, detail).retry_after_ms(RETRY_AFTER_MS)
            }
            // Another proxy can serve the client, and keeps the client's place in the global queue only for a moment.
            AcquireError::ShuttingDown => Problem::new(Kind::ShuttingDown, detail).with("retry_after_ms", 0),
        }
    }
}

impl From<LeaseError> for Problem {
    fn from(error: LeaseError) -> Problem {
        let detail = error.to_string();
        match error {
            LeaseError::Lost => Problem::new(Kind::Lost, detail),
            LeaseError::Invalid { field, .. } => Problem::new(Kind::Invalid, detail).with("field", field),
            LeaseError::Store(error) => error.into(),
        }
    }
}

impl From<StoreError> for Problem {
    fn from(error: StoreError) -> Problem {
        Problem::new(Kind::StoreUnavailable, error.to_string()).retry_after_ms(RETRY_AFTER_MS)
    }
}

fn held_by(holder: &HeldBy) -> serde_json::Value {
    json!({
        "owner": holder.owner,
        "mode": mode::Shown(holder.mode).to_value(),
        "token": holder.token.0,
        "since": time::rfc3339(holder.since.0),
        "until": time::rfc3339(holder.until.0),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lock::{Mode, ServerTime, Token};

    #[test]
    fn contention_says_who_where_and_when() {
        let holder = HeldBy {
            owner: "worker-1".into(),
            request: None,
            mode: Mode::Shared,
            token: Token(17),
            since: ServerTime(0),
            until: ServerTime(10_000_000),
        };
        let error = AcquireError::Contended {
            resource: "r".into(),
            key: crate::lock::Key::new("r").unwrap(),
            holder: Some(Box::new(holder)),
            position: 3,
            retry_after_ms: 2_500,
            reason: None,
        };
        let problem = Problem::from(error);
        let body = serde_json::to_value(&problem).unwrap();
        assert_eq!(body["type"], "contended");
        assert_eq!(body["status"], 409);
        assert_eq!(body["holder"]["owner"], "worker-1");
        assert_eq!(body["holder"]["until"], "1970-01-01T00:00:10.000Z");
        assert_eq!((body["position"].as_u64(), body["retry_after_ms"].as_u64()), (Some(3), Some(2_500)));
        assert_eq!(problem.into_response().headers()["retry-after"], "3");
    }

    #[test]
    fn each_error_has_its_slug_and_status() {
        let store = || StoreError::Unavailable { why: "down".into() };
        let cases: [(Problem, &str, u16); 9] = [
            (AcquireError::Refused { reason: "no".into() }.into(), "refused", 403),
            (
                AcquireError::PolicyFault { policy: "p".into(), reason: "trap", detail: "x".into() }.into(),
                "policy_fault",
                500,
            ),
            (AcquireError::TooManyWaiters { resource: "r".into(), limit: 5 }.into(), "too_many_waiters", 429),
            (AcquireError::RequestReused { ended: true }.into(), "request_id_reused", 409),
            (AcquireError::Store(store()).into(), "store_unavailable", 503),
            (AcquireError::NotYet { why: "soon".into() }.into(), "store_unavailable", 503),
            (AcquireError::ShuttingDown.into(), "shutting_down", 503),
            (LeaseError::Lost.into(), "lost", 410),
            (LeaseError::Invalid { field: "ttl_ms", detail: "x".into() }.into(), "invalid", 400),
        ];
        for (problem, slug, status) in cases {
            let body = serde_json::to_value(&problem).unwrap();
            assert_eq!((body["type"].as_str(), body["status"].as_u64()), (Some(slug), Some(status.into())));
            // A client should not ask a stopping proxy again, but may ask another proxy at once.
            let says_when = matches!(status, 503 | 429) && slug != "shutting_down";
            assert_eq!(problem.into_response().headers().contains_key("retry-after"), says_when, "{slug}");
        }
    }
}
