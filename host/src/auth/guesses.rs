//! Slows clients that guess credentials, without locking out the clients that share their address.

use std::hash::{BuildHasher, Hash, RandomState};
use std::sync::Arc;

use super::limits::{Allowance, OverLimit};
use crate::lock::maps::BoundedMap;
use crate::mutex::Mutex;

/// The most addresses whose refusals are counted, and the most credentials that are remembered.
const MAX_REMEMBERED: usize = 65_536;

/// Counts the credentials that were refused, by the address that they came from. When an address has used up its allowance,
/// [`Guesses::check`] passes only credentials that were accepted from there before. Cheap to clone. `O` is what counts as an
/// address.
pub struct Guesses<O>(Option<Arc<Inner<O>>>);

struct Inner<O> {
    per_second: u32,
    known: Mutex<Known<O>>,
    /// With random keys: clients choose what is hashed.
    hasher: RandomState,
}

struct Known<O> {
    /// The allowances of the addresses that were refused, as far as they are not full.
    refused: BoundedMap<O, Allowance>,
    /// Addresses with the hashes of credentials that were accepted from there.
    accepted: BoundedMap<(O, u64), ()>,
}

impl<O> Clone for Guesses<O> {
    fn clone(&self) -> Guesses<O> {
        Guesses(self.0.clone())
    }
}

impl<O: Copy + Eq + Hash> Guesses<O> {
    /// Allows an address so many refused credentials in a second; with `None`, any number.
    pub fn new(per_second: Option<u32>) -> Guesses<O> {
        Guesses(per_second.map(|per_second| {
            let (refused, accepted) = (BoundedMap::new(MAX_REMEMBERED), BoundedMap::new(MAX_REMEMBERED));
            let known = Mutex::new(Known { refused, accepted });
            Arc::new(Inner { per_second, known, hasher: RandomState::new() })
        }))
    }

    /// Whether the address has an allowance left, or these credentials were accepted from there before.
    ///
    /// # Errors
    /// Too many credentials from this address were refused, and these are not known to be valid.
    pub fn check(&self, from: O, credentials: &impl Hash) -> Result<(), OverLimit> {
        let Some(inner) = &self.0 else { return Ok(()) };
        let known = inner.known.lock();
        let Some(allowance) = known.refused.get(&from) else { return Ok(()) };
        match allowance.has_room(inner.per_second) {
            Err(_) if known.accepted.get(&(from, inner.hasher.hash_one(credentials))).is_some() => Ok(()),
            checked => checked
                .map_err(|retry_after_ms| OverLimit::Guesses { limit: inner.per_second, retry_after_ms }),
        }
    }

    /// Notes that credentials from this address were refused.
    pub fn refused(&self, from: O) {
        let Some(inner) = &self.0 else { return };
        let mut known = inner.known.lock();
        let allowance = known.refused.remove(&from).unwrap_or_default();
        allowance.take_in_any_case(inner.per_second);
        known.refused.insert(from, allowance);
    }

    /// Notes that the credentials were accepted.
    pub fn accepted(&self, from: O, credentials: &impl Hash) {
        let Some(inner) = &self.0 else { return };
        let pair = (from, inner.hasher.hash_one(credentials));
        let mut known = inner.known.lock();
        if known.accepted.get(&pair).is_none() {
            known.accepted.insert(pair, ());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_guesses_is_slowed_and_those_with_valid_credentials_go_on() {
        let guesses = Guesses::new(Some(5));
        let [here, elsewhere] = ["10.0.0.1", "10.0.0.2"];
        let [valid, new, wrong] = ["a", "b", "c"];
        guesses.accepted(here, &valid);
        for _ in 0..5 {
            guesses.check(here, &wrong).unwrap();
            guesses.refused(here);
        }
        let Err(OverLimit::Guesses { limit: 5, retry_after_ms }) = guesses.check(here, &wrong) else {
            panic!("the sixth in a second")
        };
        assert!((1..=200).contains(&retry_after_ms), "{retry_after_ms}");
        assert!(guesses.check(here, &new).is_err(), "nobody knows that they are valid");
        guesses.check(here, &valid).unwrap();
        guesses.check(elsewhere, &wrong).unwrap();
        // What is accepted elsewhere tells nothing about a client here.
        guesses.accepted(elsewhere, &new);
        assert!(guesses.check(here, &new).is_err());
        std::thread::sleep(std::time::Duration::from_millis(u64::from(retry_after_ms) + 1));
        guesses.check(here, &new).unwrap();
    }
}
