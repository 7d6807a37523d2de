//! Why a request has no effect, in a form that each front renders in its own protocol.

use serde_json::Value;

use crate::lock::Call;

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
    /// What helps the client. Each front adds it to the detail in the words of its protocol.
    pub hint: Option<Hint>,
}

/// What helps a client whose request was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hint {
    /// The client should make this call instead.
    Call(Call),
    /// The readiness of the proxy says why.
    Readiness,
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
    /// The client has not proved who it is.
    Unauthenticated,
    /// The client may not do this.
    Forbidden,
    /// The client has sent more requests than it may.
    TooManyRequests,
    /// The action of an operator cannot be recorded.
    AuditUnavailable,
    /// The lease has ended.
    Lost,
    /// The request id was used before: with another request, or for a lease that has ended.
    RequestIdReused,
    /// The store cannot be reached, or the proxy may not grant locks yet.
    StoreUnavailable,
    /// The rules of the proxy are not those of its store.
    RulesDiffer,
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
            Code::Unauthenticated => "unauthenticated",
            Code::Forbidden => "forbidden",
            Code::TooManyRequests => "too_many_requests",
            Code::AuditUnavailable => "audit_unavailable",
            Code::Lost => "lost",
            Code::RequestIdReused => "request_id_reused",
            Code::StoreUnavailable => "store_unavailable",
            Code::RulesDiffer => "rules_differ",
            Code::ShuttingDown => "shutting_down",
        }
    }
}

impl Refusal {
    /// A refusal without further facts.
    pub fn new(code: Code, detail: impl Into<String>) -> Refusal {
        Refusal { code, detail: detail.into(), retry_after_ms: None, fields: Vec::new(), hint: None }
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

    /// Says what helps the client.
    pub fn hint(mut self, hint: Hint) -> Refusal {
        self.hint = Some(hint);
        self
    }

    /// Says when the client should ask again.
    pub fn retry_after_ms(mut self, ms: u32) -> Refusal {
        self.retry_after_ms = Some(ms);
        self
    }
}
