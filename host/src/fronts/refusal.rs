//! Why a request has no effect, for clients: the errors of the service in a form that each front renders in its own
//! protocol. HTTP renders it in `problem`.

use serde_json::{Value, json};

use super::{mode, time};
use crate::lock::record::HeldBy;
use crate::service::{AcquireError, LeaseError};
use crate::store::StoreError;

/// After a refusal because of the store, a client should ask again after this time.
const RETRY_AFTER_MS: u32 = 1_000;

/// Why a request has no effect.
#[derive(Clone, Debug)]
pub struct Refusal {
    /// The reason, for programs.
    pub code: Code,
    /// The reason, for people.
    pub detail: String,
    /// After how many milliseconds the client should ask this proxy again; `None` if another try makes no sense.
    pub retry_after_ms: Option<u32>,
    /// Facts that belong to the reason, for programs.
    pub fields: Vec<(&'static str, Value)>,
}

/// The reason of a refusal, for programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// A field or the form of the request is invalid.
    Invalid,
    /// Another client holds the lock, and the request waits no longer.
    Contended,
    /// Another change came first or is in progress, or the work was already done.
    Conflict,
    /// The policy refused the request.
    Refused,
    /// The policy failed, or asks for a primitive that the store does not support.
    PolicyFault,
    /// The queue is full.
    TooManyWaiters,
    /// The lock has as many holders as it can have.
    TooManyHolders,
    /// The lease has ended.
    Lost,
    /// The request id was used before: with another request, or for a lease that has ended.
    RequestIdReused,
    /// The store cannot be reached, or the proxy may not grant locks yet.
    StoreUnavailable,
    /// The proxy is shutting down.
    ShuttingDown,
}

impl Code {
    /// The name of the code. It never changes.
    pub fn slug(self) -> &'static str {
        match self {
            Code::Invalid => "invalid",
            Code::Contended => "contended",
            Code::Conflict => "conflict",
            Code::Refused => "refused",
            Code::PolicyFault => "policy_fault",
            Code::TooManyWaiters => "too_many_waiters",
            Code::TooManyHolders => "too_many_holders",
            Code::Lost => "lost",
            Code::RequestIdReused => "request_id_reused",
            Code::StoreUnavailable => "store_unavailable",
            Code::ShuttingDown => "shutting_down",
        }
    }
}

impl Refusal {
    /// A refusal without further facts.
    pub fn new(code: Code, detail: impl Into<String>) -> Refusal {
        Refusal { code, detail: detail.into(), retry_after_ms: None, fields: Vec::new() }
    }

    /// A refusal of an invalid field of the request, with the reason.
    pub fn invalid(field: impl Into<String>, detail: impl AsRef<str>) -> Refusal {
        let field = field.into();
        Refusal::new(Code::Invalid, format!("{field}: {}", detail.as_ref())).with("field", field)
    }

    /// Adds a fact.
    pub fn with(mut self, name: &'static str, value: impl Into<Value>) -> Refusal {
        self.fields.push((name, value.into()));
        self
    }

    /// Says when the client should ask again.
    pub fn retry_after_ms(mut self, ms: u32) -> Refusal {
        self.retry_after_ms = Some(ms);
        self
    }
}

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
            AcquireError::Invalid { field, .. } => Refusal::new(Code::Invalid, detail).with("field", field),
            AcquireError::RequestReused { ended } => {
                Refusal::new(Code::RequestIdReused, detail).with("field", "request_id").with("ended", ended)
            }
            AcquireError::Done(_) | AcquireError::Conflict(_) => Refusal::new(Code::Conflict, detail),
            AcquireError::Store(error) => error.into(),
            AcquireError::NotYet { .. } => {
                Refusal::new(Code::StoreUnavailable, detail).retry_after_ms(RETRY_AFTER_MS)
            }
            // Another proxy can serve the client, and keeps the client's place in the global queue only for a moment.
            AcquireError::ShuttingDown => Refusal::new(Code::ShuttingDown, detail).with("retry_after_ms", 0),
        }
    }
}

impl From<LeaseError> for Refusal {
    fn from(error: LeaseError) -> Refusal {
        let detail = error.to_string();
        match error {
            LeaseError::Lost => Refusal::new(Code::Lost, detail),
            LeaseError::Invalid { field, .. } => Refusal::new(Code::Invalid, detail).with("field", field),
            LeaseError::Store(error) => error.into(),
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
        "since": time::rfc3339(holder.since.0),
        "until": time::rfc3339(holder.until.0),
    })
}
