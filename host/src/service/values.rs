//! The primitives that store a value with a key: `once` and `version`.

use std::sync::Arc;

use super::acquire::{self, Call, Planned};
use super::{AcquireError, Hold, Lease, LeaseError, RefusalResponse, Request, Service, new_release};
use crate::lock::record::{self, Left, Op, Origin, Outcome, StoredValue, Version};
use crate::lock::{Key, LeaseRef, Token};
use crate::policy::{ResponseContention, fallback};
use crate::random;

/// The result of [`Service::begin`].
#[derive(Clone, Debug)]
pub enum Begun {
    /// The work has not been done. The holder of this lease does it, and reports the outcome with
    /// [`Service::finish`].
    First(Box<Lease>),
    /// The work has been done, with this outcome.
    Done(StoredValue),
}

/// A key's version, as reported to its client.
#[derive(Clone, Debug)]
pub struct Versioned {
    /// The key that the policy named.
    pub key: Key,
    /// The version and its stored value.
    pub version: Version,
    /// The policy generation that named the key: `name@sha256:` and 12 digits.
    pub policy: Arc<str>,
}

/// A commit that was made.
#[derive(Clone, Debug)]
pub struct Committed {
    /// The key that the policy named.
    pub key: Key,
    /// The new version.
    pub version: Token,
    /// The policy generation that named the key: `name@sha256:` and 12 digits.
    pub policy: Arc<str>,
}

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
        match acquire::acquire(&self.shared, request, Call::Guard).await {
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
        let answer = generation.and_then(|live| live.response(&acquire::asked(request), &contention));
        Some(answer.and_then(Result::ok).unwrap_or_else(|| fallback::response(&contention)))
    }

    /// Begins a `once`. The first caller gets a lease; callers that come meanwhile wait for it, as long as
    /// their plan allows, and get the outcome. If a lease ends without an outcome, the next waiter becomes the
    /// first.
    ///
    /// # Errors
    /// [`AcquireError`]: why there is neither a lease nor an outcome.
    pub async fn begin(&self, request: Request) -> Result<Begun, AcquireError> {
        match acquire::acquire(&self.shared, &request, Call::Once).await {
            Ok((lease, _)) => Ok(Begun::First(Box::new(lease))),
            Err(AcquireError::Done(kept)) => Ok(Begun::Done(kept)),
            Err(error) => Err(error),
        }
    }

    /// Ends the lease that [`Service::begin`] returned, and stores `outcome`, which is JSON text, for as long
    /// as the policy said. The call may be repeated.
    ///
    /// # Errors
    /// [`LeaseError`]: the lease is lost, or the store did not answer.
    pub async fn finish(&self, lease: LeaseRef, outcome: Box<str>) -> Result<(), LeaseError> {
        let outcome = Left { value: outcome, origin: Origin::Api };
        self.released(self.begin_release(new_release(lease, Some(outcome)))).await
    }

    /// Reads the version that a commit must name.
    ///
    /// # Errors
    /// [`AcquireError`]: why there is no version.
    pub async fn read_version(&self, request: &Request) -> Result<Versioned, AcquireError> {
        loop {
            let planned = self.versioned(request).await?;
            let key = planned.plan.keys[0].clone();
            let outcome = self.shared.ask(Op::Read { key: key.clone() }).await?;
            // Meanwhile the resource may have got another key, whose version is as high.
            if !planned.is_current(&self.shared) {
                continue;
            }
            return match outcome {
                Outcome::Version(version) => {
                    Ok(Versioned { key, version, policy: planned.generation.id().clone() })
                }
                other => unreachable!("a read is answered with {other:?}"),
            };
        }
    }

    /// Makes a new version and stores `value` (JSON text) with it, if the key's version is still `read`.
    ///
    /// # Errors
    /// [`AcquireError::Conflict`] if the key has another version by now; other values if the commit could not
    /// be made.
    pub async fn commit(
        &self,
        request: &Request,
        read: Token,
        value: Option<Box<str>>,
    ) -> Result<Committed, AcquireError> {
        let planned = self.versioned(request).await?;
        let (key, policy) = (planned.plan.keys[0].clone(), planned.generation.id().clone());
        let commit_key = key.clone();
        let commit = record::Commit {
            key: key.clone(),
            version: read,
            fingerprint: acquire::fingerprint(
                request,
                &[&read.0.to_string(), value.as_deref().unwrap_or("")],
            ),
            value,
            attempt: random::within(1..u64::MAX),
            request: request.request_id.as_deref().map(Into::into),
        };
        let resource = || request.resource.clone();
        let result = match self.shared.ask(Op::Commit(commit)).await? {
            Outcome::Committed { version } => Ok(Committed { key, version, policy }),
            Outcome::Conflict(version) => Err(AcquireError::Conflict(version)),
            Outcome::RequestReused { ended } => Err(AcquireError::RequestReused { ended }),
            Outcome::Held(denial) => Err(AcquireError::Contended {
                resource: resource(),
                key: commit_key,
                holder: denial.holder.map(Box::new),
                position: 0,
                retry_after_ms: u32::try_from(denial.free_in_us / 1_000).unwrap_or(u32::MAX).max(1),
                reason: None,
            }),
            _ => Err(AcquireError::TooManyHolders { resource: resource() }),
        };
        self.shared.metrics.commit(result.as_ref().map_or_else(AcquireError::slug, |_| "committed"));
        result
    }

    /// Plans a request for a version. The plan names one key.
    async fn versioned(&self, request: &Request) -> Result<Planned, AcquireError> {
        // Before a proxy applies the policies of its fleet, it may name other keys.
        acquire::opened(&self.shared).await?;
        acquire::planned(&self.shared, self.shared.policy_for(request), request, Call::Version)
    }
}
