//! What the proxy hands to the writer.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::line::StoreTimes;
use crate::lock::{Key, Token};
use crate::policy::{Generation, Plan, PlanRequest};

/// The buckets of the store's times: each is longer by this factor than the one before.
const FACTOR: f64 = 1.1;
/// How many there are; the last one has all times over 20 s.
const BUCKETS: usize = 178;

/// What the proxy counts and the writer reads.
#[derive(Default)]
pub struct Counts {
    pub dropped: AtomicU64,
    pub times: Times,
}

/// What becomes a line.
pub enum Entry {
    Asked(Box<Asked>),
    Ended { at_us: u64, key: Key, token: Token, how: &'static str, held_ms: u32 },
    Close,
}

/// A request with its answer.
pub struct Asked {
    pub at_us: u64,
    pub request: PlanRequest,
    pub generation: Arc<Generation>,
    pub plan: Option<Plan>,
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

    /// The times since the last call, if there are any.
    pub fn take(&self) -> Option<StoreTimes> {
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
        (total > 0).then(|| StoreTimes { mean_us: sum_us / total, p50_us: at(0.5), p99_us: at(0.99) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_percentiles_are_near_the_times() {
        let times = Times::default();
        assert_eq!(times.take(), None);
        (1..=99).for_each(|_| times.count(1_000));
        (1..=3).for_each(|_| times.count(50_000));
        let StoreTimes { mean_us, p50_us, p99_us } = times.take().unwrap();
        assert_eq!(mean_us, (99 * 1_000 + 3 * 50_000) / 102);
        assert!((900..1_100).contains(&p50_us) && (45_000..55_000).contains(&p99_us), "{p50_us} {p99_us}");
        assert_eq!(times.take(), None);
    }
}
