//! When to try again.

use std::time::Duration;

use crate::random;

/// Delays between attempts: doubled each time, up to one second, with jitter.
pub struct Backoff(Duration);

impl Backoff {
    /// Begins with the shortest delay.
    pub fn new() -> Backoff {
        Backoff(Duration::from_millis(10))
    }

    /// The next delay.
    pub fn next(&mut self) -> Duration {
        let now = self.0;
        self.0 = (now * 2).min(Duration::from_secs(1));
        now.mul_f64(random::within(0.5..1.0))
    }
}

/// Decides whether a try is worth it. After a failure the next few batches read first; every further failure
/// in a row doubles their number.
#[derive(Default)]
pub struct OptimisticThrottle {
    skip: u32,
    penalty: u32,
}

impl OptimisticThrottle {
    const WORST: u32 = 64;

    /// Whether the next batch is worth a try.
    pub fn try_now(&mut self) -> bool {
        self.skip = self.skip.saturating_sub(1);
        self.skip == 0
    }

    /// Notes how a try ended.
    pub fn note(&mut self, applied: bool) {
        self.penalty = if applied { 0 } else { (self.penalty * 2).clamp(1, OptimisticThrottle::WORST) };
        self.skip = self.penalty;
    }
}
