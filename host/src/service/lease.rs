//! Leases that any proxy may have granted: renewing, releasing, and forcibly releasing them.

use std::sync::Arc;

use tokio::sync::oneshot;

use super::context::Service;
use super::errors::LeaseError;
use super::message::Msg;
use crate::lock::record::{Left, Op, Outcome, Release};
use crate::lock::{Instant, Key, LeaseRef, Mode, Primitive, Space, Token};
use crate::random;
use crate::store::StoreError;

/// A grant, as reported to its client.
#[derive(Clone, Debug)]
pub struct Lease {
    /// Identifies the lease in the store.
    pub lease: LeaseRef,
    /// The resource of the request.
    pub resource: String,
    /// The owner that the client named.
    pub owner: String,
    /// How the keys are held.
    pub mode: Mode,
    /// One fencing token for each key of `lease.keys`.
    pub tokens: Vec<Token>,
    /// The lease time, in milliseconds.
    pub ttl_ms: u32,
    /// The holder may count on the lease until this moment, and not after.
    pub valid_until: Instant,
    /// How long the request waited, in milliseconds.
    pub waited_ms: u32,
    /// The policy generation that planned the lease: `name@sha256:` and 12 digits.
    pub policy: Arc<str>,
    /// The primitive that guards the keys.
    pub primitive: Primitive,
    /// How many levels the owner holds; more than 1 only under a re-entrant policy.
    pub levels: u32,
}

/// A renewal that the store has made.
#[derive(Clone, Copy, Debug)]
pub struct Renewed {
    /// The holder may count on the lease until this moment, and not after.
    pub valid_until: Instant,
    /// How long the lease lasted at the renewal, in milliseconds.
    pub ttl_ms: u32,
}

impl Lease {
    /// For how many whole milliseconds the holder may still count on the lease.
    pub fn left_ms(&self, now: Instant) -> u32 {
        self.valid_until.ms_since(now)
    }
}

/// The answer to a release that was sent.
pub(super) type Releasing = oneshot::Receiver<Result<Outcome, String>>;

/// A new release.
pub(super) fn new_release(lease: LeaseRef, outcome: Option<Left>) -> Release {
    Release { lease, attempt: random::within(1..u64::MAX), outcome }
}

impl Service {
    /// Extends a lease that any proxy has granted, by `ttl_ms` milliseconds or, with `None`, by the lease time
    /// of the grant.
    ///
    /// # Errors
    /// [`LeaseError`]: the lease is lost, or the store did not answer.
    pub async fn renew(&self, lease: LeaseRef, ttl_ms: Option<u32>) -> Result<Renewed, LeaseError> {
        self.renew_before(lease, ttl_ms, self.shared.store_deadline()).await
    }

    /// As [`Service::renew`], for a caller that needs the answer by `deadline`.
    pub(super) async fn renew_before(
        &self,
        lease: LeaseRef,
        ttl_ms: Option<u32>,
        deadline: Instant,
    ) -> Result<Renewed, LeaseError> {
        let result = self.ask_renewal(&lease, ttl_ms, deadline).await;
        let outcome = match &result {
            Ok(_) => "renewed",
            Err(LeaseError::Lost) => "lost",
            Err(LeaseError::Forbidden) => "forbidden",
            Err(LeaseError::Store(_)) => "store_unavailable",
        };
        self.shared.metrics.leases.renewal(outcome);
        result
    }

    async fn ask_renewal(
        &self,
        lease: &LeaseRef,
        ttl_ms: Option<u32>,
        deadline: Instant,
    ) -> Result<Renewed, LeaseError> {
        let (done, answer) = oneshot::channel();
        let op = Op::Renew { lease: lease.clone(), ttl_ms };
        let tell = Box::new(move |result| drop(done.send(result)));
        self.shared.store.submit_renewal(op, deadline, tell);
        let reply = answer.await.unwrap_or_else(|_| Err(StoreError::stopped()))?;
        match reply.outcomes.first() {
            Some(Outcome::Renewed { left_us }) => {
                let until = reply.asked_at.plus_us(*left_us);
                self.shared.tell(Msg::Renewed { nonce: lease.nonce, until });
                let ttl_ms = u32::try_from(left_us / 1_000).unwrap_or(u32::MAX);
                Ok(Renewed { valid_until: self.shared.less_drift(reply.asked_at, *left_us), ttl_ms })
            }
            Some(Outcome::Unknown) => Err(LeaseError::Store(StoreError::unknown())),
            Some(Outcome::Forbidden) => Err(LeaseError::Forbidden),
            _ => {
                self.shared.tell(Msg::NotFound(lease.clone()));
                Err(LeaseError::Lost)
            }
        }
    }

    /// Gives up one level of a lease that any proxy has granted.
    ///
    /// # Errors
    /// [`LeaseError`]: the lease is lost, or the store did not answer.
    pub async fn release(&self, lease: LeaseRef) -> Result<(), LeaseError> {
        self.released(self.begin_release(new_release(lease, None))).await
    }

    /// Sends a release. The release is sent when this returns, so a drain waits for it.
    pub(super) fn begin_release(&self, release: Release) -> Releasing {
        let (reply, answer) = oneshot::channel();
        self.shared.tell(Msg::Release { release, reply });
        answer
    }

    pub(super) async fn released(&self, answer: Releasing) -> Result<(), LeaseError> {
        let result = match answer.await {
            Ok(Ok(Outcome::Released { .. })) => Ok(()),
            Ok(Ok(Outcome::Forbidden)) => Err(LeaseError::Forbidden),
            Ok(Ok(_)) => Err(LeaseError::Lost),
            Ok(Err(why)) => Err(LeaseError::Store(StoreError::Unavailable { why })),
            Err(_) => Err(LeaseError::Store(StoreError::stopped())),
        };
        self.shared.metrics.leases.release(match &result {
            Ok(()) => "released",
            Err(LeaseError::Lost) => "lost",
            Err(LeaseError::Forbidden) => "forbidden",
            Err(LeaseError::Store(_)) => "store_unavailable",
        });
        result
    }

    /// Takes a key away from its holders, whose next call finds the lease lost, and returns how many holders
    /// there were.
    ///
    /// # Errors
    /// If a key space does not answer and no holder was found in another one.
    pub async fn force_release(&self, key: Key) -> Result<u32, StoreError> {
        let (mut holders, mut failed) = (0, None);
        for space in Space::ALL {
            match self.force_release_in(key.clone().within(space)).await {
                Ok(here) => holders += here,
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        match failed {
            Some(error) if holders == 0 => Err(error),
            _ => Ok(holders),
        }
    }

    async fn force_release_in(&self, key: Key) -> Result<u32, StoreError> {
        if key.space() != Space::Table && self.shared.store.read(key.clone()).await?.is_none() {
            return Ok(0);
        }
        let outcome = self.shared.ask(Op::Force { key: key.clone() }).await?;
        self.shared.tell(Msg::Taken(key));
        match outcome {
            Outcome::Forced { holders } => Ok(holders),
            _ => Ok(0),
        }
    }
}
