//! What the proxy hands to the writer.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use super::line::StoreTimes;
use crate::lock::{Call, Key, Mode, Primitive, Token};
use crate::policy::{Generation, Plan, PlanRequest};

/// How many lines may wait for the writer.
pub const WAITING: usize = 16_384;
/// The buckets of the store's times: each is longer by this factor than the one before.
const FACTOR: f64 = 1.1;
/// How many there are; the last one has all times over 20 s.
const BUCKETS: usize = 178;

/// What the proxy counts and the writer reads.
#[derive(Default)]
pub struct Counts {
    pub dropped: AtomicU64,
    /// The recording is to end.
    pub is_over: AtomicBool,
    pub times: Times,
}

/// What becomes a line.
pub enum Entry {
    Asked(Box<Asked>),
    Ended { at_us: u64, key: Key, token: Token, how: &'static str, held_us: u64 },
}

/// The parts of a plan that are recorded.
pub struct Kept {
    pub keys: Arc<[Key]>,
    pub primitive: Primitive,
    pub mode: Mode,
    pub ttl_ms: u32,
    pub wait_ms: u32,
    pub group: Box<str>,
}

impl Kept {
    /// These parts of a plan.
    pub fn of(plan: &Plan) -> Kept {
        let Plan { keys, primitive, mode, ttl_ms, wait_ms, group, .. } = plan;
        let (keys, group) = (keys.clone(), group.clone());
        Kept { keys, primitive: *primitive, mode: *mode, ttl_ms: *ttl_ms, wait_ms: *wait_ms, group }
    }
}

/// A request with its answer.
pub struct Asked {
    pub at_us: u64,
    pub call: Call,
    pub request: PlanRequest,
    pub generation: Arc<Generation>,
    pub plan: Option<Kept>,
    pub outcome: &'static str,
    pub reason: Option<String>,
    pub waited_us: u64,
    pub lease: Option<(Key, Token)>,
}

/// A histogram of the store's times.
pub struct Times {
    buckets: [AtomicU64; BUCKETS],
    sum_us: AtomicU64,
}

impl Default for Times {
    fn default() -> Times {
        Times { buckets: std::array::from_fn(|_| AtomicU64::new(0)), sum_us: AtomicU64::new(0) }
    }
}

impl Times {
    /// Counts a time.
    pub fn count(&self, us: u64) {
        let bucket = (us.max(1) as f64).ln() / FACTOR.ln();
        self.buckets[(bucket as usize).min(BUCKETS - 1)].fetch_add(1, Relaxed);
        self.sum_us.fetch_add(us, Relaxed);
    }

    /// The times since the last call, if there are any. `at_us`: now.
    pub fn take(&self, at_us: u64) -> Option<StoreTimes> {
        let counts: Vec<u64> = self.buckets.iter().map(|count| count.swap(0, Relaxed)).collect();
        let (total, sum_us) = (counts.iter().sum::<u64>(), self.sum_us.swap(0, Relaxed));
        let at = |part: f64| {
            let (mut sum, wanted) = (0, (total as f64 * part).ceil() as u64);
            let bucket = counts.iter().position(|count| {
                sum += count;
                sum >= wanted
            });
            FACTOR.powf(bucket.unwrap_or_default() as f64 + 0.5) as u64
        };
        let quantiles_us = StoreTimes::PARTS.map(at);
        (total > 0).then(|| StoreTimes { at_us, mean_us: sum_us / total, quantiles_us })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_percentiles_are_near_the_times() {
        let times = Times::default();
        assert_eq!(times.take(6), None);
        (1..=99).for_each(|_| times.count(1_000));
        (1..=3).for_each(|_| times.count(50_000));
        let StoreTimes { mean_us, quantiles_us, .. } = times.take(7).unwrap();
        assert_eq!(mean_us, (99 * 1_000 + 3 * 50_000) / 102);
        let near = |at: usize, us: u64| quantiles_us[at].abs_diff(us) < us / 10;
        assert!(near(0, 1_000) && near(2, 1_000) && near(5, 50_000), "{quantiles_us:?}");
        assert_eq!(times.take(8), None);
    }
}
