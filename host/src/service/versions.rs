//! The primitive `version`: a value with a number that each commit raises.

use std::sync::Arc;

use super::context::Service;
use super::errors::AcquireError;
use super::planning::{self, Planned};
use super::request::Request;
use crate::lock::record::{self, Op, Outcome, Version};
use crate::lock::{Call, Key, Token};
use crate::random;

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

impl Service {
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
        self.shared.rules.check(&request.principal)?;
        let keys = planned.plan.keys.iter().map(Key::as_str);
        planning::check_right(request, planning::LOCK, keys.chain([request.resource.as_str()]))?;
        let (key, policy) = (planned.plan.keys[0].clone(), planned.generation.id().clone());
        let commit_key = key.clone();
        let commit = record::Commit {
            key: key.clone(),
            version: read,
            fingerprint: request.fingerprint(&[&read.0.to_string(), value.as_deref().unwrap_or("")]),
            value,
            attempt: random::within(1..u64::MAX),
            request: request.scoped_id().map(Into::into),
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
        self.shared.metrics.leases.commit(result.as_ref().map_or_else(AcquireError::slug, |_| "committed"));
        result
    }

    /// Plans a request for a version. The plan names one key.
    async fn versioned(&self, request: &Request) -> Result<Planned, AcquireError> {
        // Before a proxy applies the policies of its fleet, it may name other keys.
        self.shared.opened().await?;
        let asked = request.for_policy();
        planning::planned(&self.shared, self.shared.policy_for(request), request, &asked, Call::Version)
    }
}
