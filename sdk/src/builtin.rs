//! What the proxy answers where a policy leaves a hook out, for policies that want to change only
//! part of it.

use crate::{Random, backoff, fairness, renewal, response};

/// No sleep of [`contended`] is shorter than this, in milliseconds.
const SHORTEST_SLEEP: u32 = 10;
/// The width of the first sleep of [`contended`]; each attempt doubles it.
const FIRST_SPREAD: u32 = 50;
/// The width of the longest.
const LONGEST_SPREAD: u32 = 2_000;

/// The lowest rank, and the first to arrive within it.
pub fn choose(queue: &fairness::Queue) -> u32 {
    // `min_by_key` keeps the first of equals, and the view is in order of arrival within a rank.
    let best = queue.waiters.iter().enumerate().min_by_key(|(_, waiter)| waiter.rank);
    best.map_or(0, |(index, _)| index as u32)
}

/// Exponential with full jitter, from 50 ms to 2 s: a release on the same proxy wakes the first waiter
/// at once, whatever it sleeps.
pub fn contended(contention: &backoff::Contention) -> backoff::Decision {
    let doublings = contention.attempt.saturating_sub(1).min(16);
    let spread = FIRST_SPREAD.saturating_mul(1 << doublings).min(LONGEST_SPREAD);
    backoff::Decision::Poll(SHORTEST_SLEEP + Random::new(contention.seed).between(0, spread - 1))
}

/// Extends by the ttl while the client is alive, up to the longest hold.
pub fn renewal_due(expiring: &renewal::Expiring) -> renewal::Decision {
    match expiring.max_hold.saturating_sub(expiring.held) {
        left if left > 0 && expiring.client_alive => renewal::Decision::Extend(expiring.ttl.min(left)),
        _ => renewal::Decision::Lapse,
    }
}

/// 423 Locked.
pub fn response(contention: &response::Contention) -> response::Answer {
    response::Answer {
        status: 423,
        retry_after: contention.retry_after,
        headers: Vec::new(),
        detail: "another request holds the lock".to_owned(),
    }
}
