//! `backoff`: decides what the first waiter does while another request holds the key.

use crate::bindings::backoff::exports::lockkeeper::policy::backoff;
use crate::{Policy, Random};
pub use backoff::{Contention, Decision};

/// The shortest sleep of [`contended`], in milliseconds.
const SHORTEST_SLEEP: u32 = 10;
/// The width of the random range of [`contended`]'s first sleep. Each attempt doubles it.
const FIRST_SPREAD: u32 = 50;
/// The largest width.
const LONGEST_SPREAD: u32 = 2_000;

/// Exponential back-off with full jitter, from 50 ms to 2 s. A release on the same proxy wakes the first waiter at
/// once, however long it would sleep.
pub fn contended(contention: &Contention) -> Decision {
    let doublings = contention.attempt.saturating_sub(1).min(16);
    let spread = FIRST_SPREAD.saturating_mul(1 << doublings).min(LONGEST_SPREAD);
    Decision::Poll(SHORTEST_SLEEP + Random::new(contention.seed).between(0, spread - 1))
}

impl<P: Policy> backoff::Guest for P {
    fn contended(settings: Vec<u8>, contention: Contention) -> Decision {
        P::contended(&super::settings::decode::<P::Settings>(&settings), &contention)
    }
}
