//! `fairness`: chooses the next waiter.

use crate::Policy;
use crate::bindings::fairness::exports::lockkeeper::policy::fairness;
pub use fairness::{GroupShare, Queue, Waiter};

/// Chooses the waiter with the lowest rank, and within a rank the one that arrived first.
pub fn choose(queue: &Queue) -> u32 {
    // `min_by_key` returns the first of equal elements, and waiters are in order of arrival within a rank.
    let best = queue.waiters.iter().enumerate().min_by_key(|(_, waiter)| waiter.rank);
    best.map_or(0, |(index, _)| index as u32)
}

impl<P: Policy> fairness::Guest for P {
    fn choose(settings: Vec<u8>, queue: Queue) -> u32 {
        P::choose(&super::settings::decode::<P::Settings>(&settings), &queue)
    }
}
