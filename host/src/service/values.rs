//! The primitives that keep a value with a key: `once` and `version`.

use std::sync::Arc;

use super::acquire::{self, Call, Planned};
use super::{AcquireError, Hold, Lease, LeaseError, RefusalResponse, Request, Service, new_release};
use crate::lock::record::{self, Left, Op, Origin, Outcome, StoredValue, Version};
use crate::lock::{Key, LeaseRef, Token};
use crate::policy::{ResponseContention, fallback};
use crate::random;

/// What a `once` has come to.
#[derive(Clone, Debug)]
pub enum Begun {
    /// Nobody has done it: whoever holds this lease does, and says so with [`Service::finish`].
    First(Box<Lease>),
    /// Somebody has, and left this.
    Done(StoredValue),
}

/// A key's version, as its client is told of it.
#[derive(Clone, Debug)]
pub struct Versioned {
    pub key: Key,
    pub version: Version,
    /// `name@sha256:` and 12 digits.
    pub policy: Arc<str>,
}

/// A commit that was made.
#[derive(Clone, Debug)]
pub struct Committed {
    pub key: Key,
    pub version: Token,
    /// `name@sha256:` and 12 digits.
    pub policy: Arc<str>,
}

/// What a guarded request has come to.
pub enum Guarded {
    /// It has its lock. Where the primitive is `once` it is the first, and leaves its outcome with
    /// [`Keeping::finish`](super::Keeping::finish).
    Held(Box<Hold>),
    /// It was done before, and left this.
    Done(StoredValue),
}

impl Service {
    /// Waits for the lock of a guarded request, by whichever primitive its policy chose.
    pub async fn guard(&self, request: &Request) -> Result<Guarded, AcquireError> {
        match acquire::acquire(&self.shared, request, Call::Guard).await {
            Ok((lease, planned)) => {
                Ok(Guarded::Held(Box::new(Hold::new(self.clone(), lease, planned.into(), None))))
            }
            Err(AcquireError::Done(kept)) => Ok(Guarded::Done(kept)),
            Err(error) => Err(error),
        }
    }

    /// What a guarded request is answered that was contended for `waited_ms`, in its policy's words;
    /// `None` for any other error.
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

    /// The first to ask is granted a lease; those that ask meanwhile wait for it, as long as their plan
    /// allows, and hear the outcome. A lease that ends without one makes the next waiter the first.
    pub async fn begin(&self, request: Request) -> Result<Begun, AcquireError> {
        match acquire::acquire(&self.shared, &request, Call::Once).await {
            Ok((lease, _)) => Ok(Begun::First(Box::new(lease))),
            Err(AcquireError::Done(kept)) => Ok(Begun::Done(kept)),
            Err(error) => Err(error),
        }
    }

    /// Ends the lease that [`Service::begin`] gave, and keeps `outcome`, which is JSON text, for as long
    /// as the policy said. May be repeated.
    pub async fn finish(&self, lease: LeaseRef, outcome: Box<str>) -> Result<(), LeaseError> {
        let outcome = Left { value: outcome, origin: Origin::Api };
        self.released(self.begin_release(new_release(lease, Some(outcome)))).await
    }

    /// The version that a commit must name.
    pub async fn read_version(&self, request: &Request) -> Result<Versioned, AcquireError> {
        loop {
            let planned = self.versioned(request).await?;
            let key = planned.plan.keys[0].clone();
            let outcome = self.shared.ask(Op::Read { key: key.clone() }).await?;
            // Meanwhile the key may have got another name, whose version is as high.
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

    /// Makes a new version, with `value` (JSON text) kept with it, if nobody has since `read` was read.
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

    /// The plan names one key.
    async fn versioned(&self, request: &Request) -> Result<Planned, AcquireError> {
        // Before it goes by the policies of its fleet, a proxy may name other keys.
        acquire::opened(&self.shared).await?;
        acquire::planned(&self.shared, self.shared.policy_for(request), request, Call::Version)
    }
}
