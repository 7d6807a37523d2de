//! Refusals as HTTP problems.

use super::refusal::{Code, Hint, Refusal};
use crate::http::{Kind, Problem};
use crate::lock::Call;
use crate::service::{AcquireError, LeaseError, ListError};
use crate::store::StoreError;

impl From<Code> for Kind {
    fn from(code: Code) -> Kind {
        let (status, title) = match code {
            Code::Invalid => return Kind::INVALID,
            Code::Contended => (409, "The lock is held"),
            Code::Conflict => (409, "Somebody else changed it first"),
            Code::Refused => (403, "The policy refused the request"),
            Code::PolicyFault => (500, "The policy could not decide"),
            Code::TooManyWaiters => (429, "Too many are waiting for this lock"),
            Code::TooManyHolders => (429, "The lock has as many holders as it can have"),
            Code::Unauthenticated => (401, "The client has not proved who it is"),
            Code::Forbidden => (403, "The client may not do this"),
            Code::TooManyRequests => (429, "The client has sent more requests than it may"),
            Code::AuditUnavailable => (503, "The action cannot be recorded"),
            Code::Lost => (410, "The lease is lost"),
            Code::RequestIdReused => (409, "The request id was used before"),
            Code::StoreUnavailable => (503, "The store is unavailable"),
            Code::RulesDiffer => (503, "The rules of the proxy are not those of its store"),
            Code::ShuttingDown => (503, "The proxy is shutting down"),
        };
        Kind::new(code.slug(), status, title)
    }
}

impl From<Refusal> for Problem {
    fn from(refusal: Refusal) -> Problem {
        let detail = refusal.detail + refusal.hint.map_or("", words);
        let problem = Problem::new(refusal.code, detail);
        let problem =
            refusal.fields.into_iter().fold(problem, |problem, (name, value)| problem.with(name, value));
        match refusal.retry_after_ms {
            Some(ms) => problem.retry_after_ms(ms),
            None => problem,
        }
    }
}

/// The hint in the words of the HTTP API, which continue the detail.
fn words(hint: Hint) -> &'static str {
    match hint {
        Hint::Call(Call::Acquire | Call::Guard) => {
            ": call /v1/acquire or /v1/hold (`lockkeeper acquire`, `hold` or `run`)"
        }
        Hint::Call(Call::Once) => ": call /v1/once/begin (`lockkeeper once`)",
        Hint::Call(Call::Version) => {
            ": call /v1/versions/read and /v1/versions/commit (`lockkeeper version`)"
        }
        Hint::Readiness => "; its /ready says why",
    }
}

impl From<AcquireError> for Problem {
    fn from(error: AcquireError) -> Problem {
        Refusal::from(error).into()
    }
}

impl From<LeaseError> for Problem {
    fn from(error: LeaseError) -> Problem {
        Refusal::from(error).into()
    }
}

impl From<ListError> for Problem {
    fn from(error: ListError) -> Problem {
        Refusal::from(error).into()
    }
}

impl From<StoreError> for Problem {
    fn from(error: StoreError) -> Problem {
        Refusal::from(error).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lock::record::HeldBy;
    use crate::lock::{Mode, ServerTime, Token};

    #[test]
    fn a_contended_problem_names_the_holder_position_and_retry_time() {
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
    fn problem_details_use_the_terms_of_the_api() {
        let (policy, primitive, expected) = ("p".into(), "once", Call::Once);
        let problem = Problem::from(AcquireError::WrongCall { policy, primitive, expected });
        let body = serde_json::to_value(&problem).unwrap();
        assert_eq!((&body["type"], &body["field"]), (&"invalid".into(), &"resource".into()));
        let call = "call /v1/once/begin (`lockkeeper once`)";
        assert_eq!(body["detail"], format!("resource: its policy `p` guards it with `once`: {call}"));
        let why = "no lock is granted yet: the proxy is not in the fleet yet; its /ready says why";
        assert_eq!(Problem::from(AcquireError::NotJoined).detail(), why);
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
            (
                AcquireError::WrongCall { policy: "p".into(), primitive: "once", expected: Call::Once }
                    .into(),
                "invalid",
                400,
            ),
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
