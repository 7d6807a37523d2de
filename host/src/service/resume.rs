//! Continuing a lease that this proxy or another one has granted.

use super::context::{Service, ServiceContext};
use super::errors::LeaseError;
use super::hold::{Hold, Terms};
use super::lease::Lease;
use super::tag;
use crate::lock::record::Holder;
use crate::lock::{LeaseRef, Primitive, Token};
use crate::policy::OnLoss;
use crate::store::StoreError;

impl Service {
    /// As [`Service::hold`], for a lease that any proxy has granted. Its longest hold counts from the grant.
    ///
    /// # Errors
    /// [`LeaseError`]: the lease is lost, or the store did not answer.
    pub async fn resume(&self, lease: LeaseRef) -> Result<Hold, LeaseError> {
        let shared = &self.shared;
        let Stored { holder, held_ms, tokens } = stored(shared, &lease).await?;
        let terms = terms(shared, &holder);
        // The rest of the longest hold, as at every other renewal; 0 only checks whether the lease still lasts.
        let ttl_ms = terms.ttl_ms.min(terms.max_hold_ms.saturating_sub(held_ms));
        let renewed = self.renew(lease.clone(), Some(ttl_ms)).await?;
        let lease = Lease {
            primitive: primitive(&lease, &holder),
            lease,
            resource: holder.tag.resource.to_string(),
            owner: holder.owner.into(),
            mode: holder.mode,
            tokens,
            ttl_ms: terms.ttl_ms,
            valid_until: renewed.valid_until,
            waited_ms: 0,
            policy: holder.tag.policy,
            levels: holder.levels.len() as u32,
        };
        Ok(Hold::new(self.clone(), lease, terms, Some(held_ms)))
    }
}

/// A lease as the store knows it.
struct Stored {
    /// The holder in the record of the first key.
    holder: Holder,
    held_ms: u32,
    /// One token for each key.
    tokens: Vec<Token>,
}

async fn stored(shared: &ServiceContext, lease: &LeaseRef) -> Result<Stored, LeaseError> {
    let mut first = None;
    let mut tokens = Vec::with_capacity(lease.keys.len());
    for key in &*lease.keys {
        let stored = shared.store.read(key.clone()).await?.ok_or(LeaseError::Lost)?;
        if stored.delegation().is_some() {
            // Another proxy knows the leases of the key, and does not answer.
            return Err(StoreError::unknown().into());
        }
        let holders = stored.record.holders.into_iter();
        let mut own = holders.filter(|holder| holder.nonce == lease.nonce && holder.over_at() > stored.now);
        let holder = own.next().ok_or(LeaseError::Lost)?;
        if !lease.is_allowed(&holder.tag.principal) {
            return Err(LeaseError::Forbidden);
        }
        tokens.push(holder.token);
        let held_ms = stored.now.ms_since(holder.since);
        first.get_or_insert((holder, held_ms));
    }
    let (holder, held_ms) = first.ok_or(LeaseError::Lost)?;
    Ok(Stored { holder, held_ms, tokens })
}

/// The policy's current terms for the lease. If the policy is gone, refuses or fails, the lease is renewed as
/// the built-in hooks would do, within the limits of this proxy.
fn terms(shared: &ServiceContext, holder: &Holder) -> Terms {
    let generation = shared.policies.get(shared.policy_of_tag(&holder.tag));
    let request = tag::request(&holder.tag, &holder.owner, holder.mode);
    let plan = generation.as_ref().and_then(|generation| generation.plan(&request).ok());
    let (max_hold_ms, on_loss, labels) = match plan {
        Some(plan) => (plan.max_hold_ms, plan.on_loss, plan.labels),
        None => (shared.limits.max_hold_ms, OnLoss::default(), Vec::new()),
    };
    Terms { generation, ttl_ms: holder.ttl_ms, max_hold_ms, on_loss, labels }
}

fn primitive(lease: &LeaseRef, holder: &Holder) -> Primitive {
    match Primitive::of_space(lease.keys[0].space()) {
        Some(primitive) => primitive,
        None if holder.keep_ms.is_some() => Primitive::Once,
        None => Primitive::Lease,
    }
}
