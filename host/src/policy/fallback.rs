//! What holds where a policy leaves a hook out, or fails at it. Pure.

use super::{Answer, Backoff, Contention, Expiring, QueueView, Renewal, ResponseContention};

const FIRST_SLEEP_MS: u32 = 20;
const LONGEST_SLEEP_MS: u32 = 1_000;

/// The lowest rank, and the first to arrive within it: an index into `waiters`; 0 where it is empty.
pub fn choose(queue: &QueueView) -> usize {
    // `min_by_key` keeps the first of equals, and the view is in order of arrival within a rank.
    let best = queue.waiters.iter().enumerate().min_by_key(|(_, waiter)| waiter.rank);
    best.map_or(0, |(index, _)| index)
}

/// Exponential with full jitter, and never longer than the holder's lease.
pub fn backoff(contention: &Contention) -> Backoff {
    let doublings = contention.attempt.saturating_sub(1).min(16);
    let mut ceiling = FIRST_SLEEP_MS.saturating_mul(1 << doublings).min(LONGEST_SLEEP_MS);
    if contention.holder_left_ms > 0 {
        ceiling = ceiling.min(contention.holder_left_ms.saturating_add(1));
    }
    super::clamp::backoff(Backoff::Poll { after_ms: 1 + spread(contention.seed, ceiling) })
}

/// Extends by the ttl while the client is alive, up to the longest hold.
pub fn renewal(expiring: &Expiring) -> Renewal {
    match expiring.max_hold_ms.saturating_sub(expiring.held_ms) {
        left_ms if left_ms > 0 && expiring.client_alive => {
            Renewal::Extend { ttl_ms: expiring.ttl_ms.min(left_ms) }
        }
        _ => Renewal::Lapse,
    }
}

/// 423 Locked.
pub fn response(contention: &ResponseContention) -> Answer {
    Answer {
        status: 423,
        retry_after_ms: contention.retry_after_ms,
        headers: Vec::new(),
        detail: "another request holds the lock".to_owned(),
    }
}

/// A number below `bound` that neighbouring seeds do not share (splitmix64).
fn spread(seed: u32, bound: u32) -> u32 {
    let mut mixed = u64::from(seed).wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((((mixed ^ (mixed >> 31)) >> 32) * u64::from(bound)) >> 32) as u32
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::lock::Key;

    fn contention(attempt: u32, holder_left_ms: u32, seed: u32) -> Contention {
        Contention {
            key: Key::new("a").unwrap(),
            attempt,
            waited_ms: 0,
            wait_left_ms: 1_000,
            holder_left_ms,
            holder: String::new(),
            waiters: 1,
            last_sleep_ms: 0,
            labels: Arc::from([]),
            seed,
        }
    }

    #[test]
    fn sleeps_grow_to_a_ceiling_and_end_with_the_holder() {
        let longest = |attempt, left| {
            let sleeps = (0..2_000).map(|seed| match backoff(&contention(attempt, left, seed)) {
                Backoff::Poll { after_ms } => after_ms,
                other => panic!("{other:?}"),
            });
            sleeps.max().unwrap()
        };
        assert_eq!(longest(1, 0), 20);
        assert!((75..=80).contains(&longest(3, 0)));
        assert!((900..=1_000).contains(&longest(u32::MAX, 0)));
        assert!((25..=31).contains(&longest(9, 30)));
    }

    #[test]
    fn leases_of_the_living_are_extended_up_to_the_longest_hold() {
        let due = |held_ms, client_alive| {
            renewal(&Expiring {
                key: Key::new("a").unwrap(),
                owner: String::new(),
                ttl_ms: 10,
                renewals: 0,
                held_ms,
                max_hold_ms: 25,
                waiters: 0,
                client_alive,
                labels: Arc::from([]),
            })
        };
        assert_eq!(due(5, true), Renewal::Extend { ttl_ms: 10 });
        assert_eq!(due(20, true), Renewal::Extend { ttl_ms: 5 });
        assert_eq!(due(25, true), Renewal::Lapse);
        assert_eq!(due(5, false), Renewal::Lapse);
    }
}
