//! The lock of a guarded request: the proxy acquires it and keeps it while the upstream works.

use super::acquire::acquire;
use super::context::Service;
use super::errors::AcquireError;
use super::hold::Hold;
use super::request::Request;
use crate::lock::Call;
use crate::lock::record::StoredValue;
use crate::policy::{RefusalResponse, ResponseContention};

/// The result of [`Service::guard`].
pub enum Guarded {
    /// The request has its lock. If the primitive is `once`, the request is the first one and reports its
    /// outcome with [`Keeping::finish`](super::Keeping::finish).
    Held(Box<Hold>),
    /// The request was done before, with this outcome.
    Done(StoredValue),
}

impl Service {
    /// Waits for the lock of a guarded request, with the primitive that its policy chose.
    ///
    /// # Errors
    /// [`AcquireError`]: why there is no lock.
    pub async fn guard(&self, request: &Request) -> Result<Guarded, AcquireError> {
        match acquire(&self.shared, request, Call::Guard).await {
            Ok((lease, planned)) => {
                Ok(Guarded::Held(Box::new(Hold::new(self.clone(), lease, planned.into(), None))))
            }
            Err(AcquireError::Done(kept)) => Ok(Guarded::Done(kept)),
            Err(error) => Err(error),
        }
    }

    /// The response to a guarded request that was denied its lock after `waited_ms` milliseconds, as its policy
    /// words it; `None` for any error other than [`AcquireError::Contended`].
    pub fn refusal(
        &self,
        request: &Request,
        error: &AcquireError,
        waited_ms: u32,
    ) -> Option<RefusalResponse> {
        let AcquireError::Contended { key, holder, position, retry_after_ms, .. } = error else {
            return None;
        };
        let contention = ResponseContention {
            key: key.clone(),
            holder: holder.as_ref().map(|holder| holder.owner.to_string()).unwrap_or_default(),
            position: *position,
            waited_ms,
            retry_after_ms: *retry_after_ms,
        };
        let generation = self.shared.policies.get(self.shared.policy_for(request));
        let answer = generation.and_then(|live| live.response(&request.for_policy(), &contention));
        Some(answer.and_then(Result::ok).unwrap_or_else(|| contention.fallback()))
    }
}
