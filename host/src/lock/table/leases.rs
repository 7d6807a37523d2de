//! The leases that this proxy knows.

use super::charge::Charge;
use super::views::Standing;
use crate::lock::maps::HashMap;
use crate::lock::record::Claim;
use crate::lock::{Instant, Key, LeaseRef, Token};

/// The running leases that this proxy has granted or renewed.
#[derive(Debug, Default)]
pub(super) struct Leases {
    pub by_nonce: HashMap<u64, Lease>,
}

/// A running lease.
#[derive(Debug)]
pub(super) struct Lease {
    pub claim: Claim,
    pub tokens: Vec<Token>,
    pub since: Instant,
    pub until: Instant,
    /// What the lease occupies of the limits of its client.
    pub charge: Charge,
}

impl Leases {
    pub fn len(&self) -> usize {
        self.by_nonce.len()
    }

    pub fn standing(&self) -> impl Iterator<Item = (Standing, &Claim)> {
        self.by_nonce.iter().map(|(nonce, lease)| {
            let Lease { since, until, .. } = *lease;
            (Standing::Lease { nonce: *nonce, since, until }, &lease.claim)
        })
    }

    /// The leases that hold a key.
    pub fn of(&self, key: &Key) -> Vec<u64> {
        let holds = |lease: &Lease| lease.claim.keys.contains(key);
        self.by_nonce.iter().filter(|(_, lease)| holds(lease)).map(|(nonce, _)| *nonce).collect()
    }

    pub fn claim(&self, nonce: u64) -> Option<&Claim> {
        self.by_nonce.get(&nonce).map(|lease| &lease.claim)
    }

    /// A reference by nonce alone, because the tokens may have been raised.
    pub fn named(&self, nonce: u64) -> Option<LeaseRef> {
        self.claim(nonce).map(|claim| LeaseRef {
            keys: claim.keys.clone(),
            nonce,
            token: None,
            principal: None,
        })
    }

    pub fn ends_at(&self, nonce: u64) -> Option<Instant> {
        self.by_nonce.get(&nonce).map(|lease| lease.until)
    }
}

impl Lease {
    pub fn keyed_tokens(&self) -> impl Iterator<Item = (Key, Token)> {
        self.claim.keys.iter().cloned().zip(self.tokens.iter().copied())
    }
}
