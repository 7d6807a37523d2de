//! The proxy's own decisions for hooks that a policy leaves out, for policies that want to change only some of them.

use crate::{Random, backoff, fairness, renewal, response};

/// The shortest sleep of [`contended`], in milliseconds.
const SHORTEST_SLEEP: u32 = 10;
/// The width of the random range of [`contended`]'s first sleep. Each attempt doubles it.
const FIRST_SPREAD: u32 = 50;
/// The largest width.
const LONGEST_SPREAD: u32 = 2_000;

/// Chooses the waiter with the lowest rank, and within a rank the one that arrived first.
pub fn choose(queue: &fairness::Queue) -> u32 {
    // `min_by_key` returns the first of equal elements, and waiters are in order of arrival within a rank.
    let best = queue.waiters.iter().enumerate().min_by_key(|(_, waiter)| waiter.rank);
    best.map_or(0, |(index, _)| index as u32)
}

/// Exponential back-off with full jitter, from 50 ms to 2 s. A release on the same proxy wakes the first waiter at
/// once, however long it would sleep.
pub fn contended(contention: &backoff::Contention) -> backoff::Decision {
    let doublings = contention.attempt.saturating_sub(1).min(16);
    let spread = FIRST_SPREAD.saturating_mul(1 << doublings).min(LONGEST_SPREAD);
    backoff::Decision::Poll(SHORTEST_SLEEP + Random::new(contention.seed).between(0, spread - 1))
}

/// Extends the lease by its ttl while the client is alive, until the longest hold.
pub fn renewal_due(expiring: &renewal::Expiring) -> renewal::Decision {
    match expiring.max_hold.saturating_sub(expiring.held) {
        left if left > 0 && expiring.client_alive => renewal::Decision::Extend(expiring.ttl.min(left)),
        _ => renewal::Decision::Lapse,
    }
}

/// Answers 423 Locked.
pub fn response(contention: &response::Contention) -> response::Answer {
    response::Answer {
        status: 423,
        retry_after: contention.retry_after,
        headers: Vec::new(),
        detail: "another request holds the lock".to_owned(),
    }
}
