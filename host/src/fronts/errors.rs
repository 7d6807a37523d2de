//! The errors of the service as refusals: the one place that says what a client is told of each error.

use serde_json::{Value, json};

use super::mode;
use super::refusal::{Code, Hint, Refusal};
use crate::auth::{OverLimit, Quota, Unauthenticated};
use crate::clock;
use crate::lock::record::HeldBy;
use crate::service::{AcquireError, LeaseError, ListError};
use crate::store::StoreError;

/// After a refusal because of the store, a client should ask again after this time.
const RETRY_AFTER_MS: u32 = 1_000;

impl From<AcquireError> for Refusal {
    fn from(error: AcquireError) -> Refusal {
        let detail = error.to_string();
        match error {
            AcquireError::Contended { holder, position, retry_after_ms, reason, .. } => {
                let mut refusal = Refusal::new(Code::Contended, detail)
                    .with("holder", holder.as_deref().map(held_by))
                    .with("position", position)
                    .with("retry_after_ms", retry_after_ms)
                    .retry_after_ms(retry_after_ms);
                if let Some(reason) = reason {
                    refusal = refusal.with("reason", reason);
                }
                refusal
            }
            AcquireError::Refused { reason } => Refusal::new(Code::Refused, detail).with("reason", reason),
            AcquireError::PolicyFault { policy, reason, .. } => {
                Refusal::new(Code::PolicyFault, detail).with("policy", policy).with("reason", reason)
            }
            AcquireError::NoPrimitive { policy, primitive, .. } => Refusal::new(Code::PolicyFault, detail)
                .with("policy", policy)
                .with("primitive", primitive)
                .with("reason", "no_primitive"),
            AcquireError::TooManyWaiters { limit, .. } => {
                Refusal::new(Code::TooManyWaiters, detail).with("bound", limit).retry_after_ms(RETRY_AFTER_MS)
            }
            AcquireError::TooManyHolders { .. } => {
                Refusal::new(Code::TooManyHolders, detail).retry_after_ms(RETRY_AFTER_MS)
            }
            AcquireError::Forbidden { verb, resource } => {
                Refusal::new(Code::Forbidden, detail).with("verb", verb.as_str()).with("resource", resource)
            }
            AcquireError::WrongCall { expected, .. } => {
                Refusal::new(Code::Invalid, detail).with("field", "resource").hint(Hint::Call(expected))
            }
            AcquireError::RequestReused { ended } => {
                Refusal::new(Code::RequestIdReused, detail).with("field", "request_id").with("ended", ended)
            }
            AcquireError::Done(_) | AcquireError::Conflict(_) => Refusal::new(Code::Conflict, detail),
            AcquireError::OverLimit(error) => error.into(),
            AcquireError::Store(error) => error.into(),
            AcquireError::NotYet { .. } => {
                Refusal::new(Code::StoreUnavailable, detail).retry_after_ms(RETRY_AFTER_MS)
            }
            AcquireError::NotJoined => Refusal::new(Code::StoreUnavailable, detail)
                .retry_after_ms(RETRY_AFTER_MS)
                .hint(Hint::Readiness),
            AcquireError::RulesDiffer { .. } => {
                Refusal::new(Code::RulesDiffer, detail).retry_after_ms(RETRY_AFTER_MS).hint(Hint::Readiness)
            }
            // Another proxy can serve the client, and keeps the client's place in the global queue only for a moment.
            AcquireError::ShuttingDown => Refusal::new(Code::ShuttingDown, detail).with("retry_after_ms", 0),
        }
    }
}

impl From<Unauthenticated> for Refusal {
    fn from(error: Unauthenticated) -> Refusal {
        Refusal::new(Code::Unauthenticated, error.to_string())
    }
}

impl From<OverLimit> for Refusal {
    fn from(error: OverLimit) -> Refusal {
        let refusal = Refusal::new(Code::TooManyRequests, error.to_string());
        let refusal = refusal.with("limit", error.name()).with("bound", error.limit());
        let retry_after_ms = match error {
            OverLimit::Rate { retry_after_ms, .. } | OverLimit::Guesses { retry_after_ms, .. } => {
                retry_after_ms
            }
            OverLimit::Count { quota: Quota::InProgress | Quota::Waiters, .. } => RETRY_AFTER_MS,
            // Nobody knows when the client ends one.
            OverLimit::Count { quota: Quota::Watchers | Quota::Leases, .. } => return refusal,
        };
        refusal.with("retry_after_ms", retry_after_ms).retry_after_ms(retry_after_ms)
    }
}

impl From<LeaseError> for Refusal {
    fn from(error: LeaseError) -> Refusal {
        let detail = error.to_string();
        match error {
            LeaseError::Lost => Refusal::new(Code::Lost, detail),
            LeaseError::Forbidden => Refusal::new(Code::Forbidden, detail),
            LeaseError::Store(error) => error.into(),
        }
    }
}

impl From<ListError> for Refusal {
    fn from(error: ListError) -> Refusal {
        match error {
            ListError::TooManyKeys { .. } => Refusal::invalid("prefix", error.to_string()),
            ListError::Store(error) => error.into(),
        }
    }
}

impl From<StoreError> for Refusal {
    fn from(error: StoreError) -> Refusal {
        Refusal::new(Code::StoreUnavailable, error.to_string()).retry_after_ms(RETRY_AFTER_MS)
    }
}

fn held_by(holder: &HeldBy) -> Value {
    json!({
        "owner": holder.owner,
        "mode": mode::Shown(holder.mode).to_value(),
        "token": holder.token.0,
        "since": clock::rfc3339(holder.since.0),
        "until": clock::rfc3339(holder.until.0),
    })
}
