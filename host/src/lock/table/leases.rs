//! The leases that this proxy knows.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::charge::Part;
use super::queue::Known;
use crate::lock::maps::HashMap;
use crate::lock::record::{HeldBy, Tag};
use crate::lock::{Instant, Key, LeaseRef, Mode, ServerTime, Token};

/// A running lease, as the proxy that granted it knows it. A proxy may know a million leases, so they are kept small.
#[derive(Debug)]
pub struct HeldLease {
    /// The keys: sorted, without duplicates, at least one.
    pub keys: Arc<[Key]>,
    /// The owner that the client named.
    pub owner: Box<str>,
    /// How the keys are held.
    pub mode: Mode,
    /// What is stored with the lease.
    pub tag: Tag,
    /// When this proxy learned of the lease.
    pub since: Instant,
    /// When the lease ends, by this proxy's clock, unless another proxy has renewed it.
    pub until: Instant,
    pub(super) request: Option<Box<str>>,
    pub(super) tokens: Tokens,
    /// When the lease was granted, by the store's clock.
    pub(super) granted: ServerTime,
    /// The group of the waiter that was granted the lease.
    pub(super) group: Box<str>,
    /// What the lease occupies of the limits of its client.
    pub(super) charge: Part,
}

// The allocator rounds up to 320 bytes beyond that.
const _: () = assert!(size_of::<HeldLease>() <= 256);

/// The tokens of a lease, one for each key.
#[derive(Debug)]
pub(super) enum Tokens {
    One(Token),
    Each(Box<[Token]>),
}

impl From<&[Token]> for Tokens {
    fn from(tokens: &[Token]) -> Tokens {
        match tokens {
            [token] => Tokens::One(*token),
            tokens => Tokens::Each(tokens.into()),
        }
    }
}

/// The running leases that this proxy has granted or renewed.
#[derive(Debug, Default)]
pub(super) struct Leases {
    by_nonce: HashMap<u64, Box<HeldLease>>,
    /// The exclusive lease that was granted last on a key. Other leases may share the key, and have a queue.
    on_key: HashMap<Key, u64>,
    ends: BTreeSet<(Instant, u64)>,
}

impl Leases {
    pub fn len(&self) -> usize {
        self.by_nonce.len()
    }

    pub fn get(&self, nonce: u64) -> Option<&HeldLease> {
        self.by_nonce.get(&nonce).map(|lease| &**lease)
    }

    pub fn iter(&self) -> impl Iterator<Item = (u64, &HeldLease)> {
        self.by_nonce.iter().map(|(nonce, lease)| (*nonce, &**lease))
    }

    /// Adds a lease that is not known yet.
    pub fn insert(&mut self, nonce: u64, lease: HeldLease) {
        for key in lease.keys.iter().filter(|_| lease.mode == Mode::Exclusive) {
            self.on_key.insert(key.clone(), nonce);
        }
        self.ends.insert((lease.until, nonce));
        self.by_nonce.insert(nonce, Box::new(lease));
    }

    /// Extends a lease, if it is known and would end earlier. Returns its keys then.
    pub fn extend(&mut self, nonce: u64, until: Instant) -> Option<Arc<[Key]>> {
        let lease = self.by_nonce.get_mut(&nonce).filter(|lease| lease.until < until)?;
        self.ends.remove(&(lease.until, nonce));
        self.ends.insert((until, nonce));
        lease.until = until;
        Some(lease.keys.clone())
    }

    pub fn remove(&mut self, nonce: u64) -> Option<HeldLease> {
        let lease = self.by_nonce.remove(&nonce)?;
        self.ends.remove(&(lease.until, nonce));
        for key in &*lease.keys {
            if self.on_key.get(key) == Some(&nonce) {
                self.on_key.remove(key);
            }
        }
        Some(*lease)
    }

    /// The store says which lease holds a key. If this proxy knows another one, that one was released elsewhere.
    pub fn note_holder(&mut self, key: &Key, holder: Token) {
        let is_known =
            |lease: &HeldLease| lease.keyed_tokens().any(|(held, token)| held == *key && token == holder);
        if self.last_on(key).is_some_and(|lease| !is_known(lease)) {
            self.on_key.remove(key);
        }
    }

    /// The leases that hold a key.
    pub fn of(&self, key: &Key) -> Vec<u64> {
        self.iter().filter(|(_, lease)| lease.keys.contains(key)).map(|(nonce, _)| nonce).collect()
    }

    /// The exclusive lease that was granted last on a key, if it runs as far as this proxy knows.
    pub fn last_on(&self, key: &Key) -> Option<&HeldLease> {
        self.get(*self.on_key.get(key)?)
    }

    /// A reference by nonce alone, because the tokens may have been raised.
    pub fn named(&self, nonce: u64) -> Option<LeaseRef> {
        let keys = self.get(nonce)?.keys.clone();
        Some(LeaseRef { keys, nonce, token: None, principal: None })
    }

    pub fn ends_at(&self, nonce: u64) -> Option<Instant> {
        self.get(nonce).map(|lease| lease.until)
    }

    /// When the next lease ends.
    pub fn next_end(&self) -> Option<Instant> {
        self.ends.first().map(|(at, _)| *at)
    }

    /// The lease whose end is next, which is not named again unless it is extended.
    pub fn pop_end(&mut self) -> Option<u64> {
        self.ends.pop_first().map(|(_, nonce)| nonce)
    }
}

impl HeldLease {
    pub(super) fn keyed_tokens(&self) -> impl Iterator<Item = (Key, Token)> {
        let tokens = match &self.tokens {
            Tokens::One(token) => std::slice::from_ref(token),
            Tokens::Each(tokens) => tokens,
        };
        self.keys.iter().cloned().zip(tokens.iter().copied())
    }

    /// The lease as waiters for the key see it.
    pub(super) fn known_on(&self, key: &Key) -> Option<Known> {
        let (_, token) = self.keyed_tokens().find(|(held, _)| held == key)?;
        let held_by = HeldBy {
            owner: self.owner.clone(),
            request: self.request.clone(),
            mode: self.mode,
            token,
            since: self.granted,
            until: self.granted.plus_us(self.until.us_since(self.since)),
        };
        Some(Known::own(held_by, self.until))
    }
}
