//! The only module that reads the clock.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use crate::lock::Instant;

mod format;

pub use format::{rfc3339, rfc3339_us};

/// The current time, on the clock that keeps running while the machine is suspended, because leases on the
/// server also end during a suspend. If a hypervisor pauses the machine without telling it, this clock stands
/// still. A holder then counts on its lease for that much longer than the server does, as in any process that
/// cannot know of a pause; the fencing token protects against this.
pub fn now() -> Instant {
    #[cfg(any(test, feature = "simulation"))]
    if let Some(now) = simulated::now() {
        return now;
    }
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Instant(time.tv_sec as u64 * 1_000_000 + time.tv_nsec as u64 / 1_000)
}

/// The time of a simulation, which follows the time of its runtime.
#[cfg(any(test, feature = "simulation"))]
pub mod simulated {
    use std::cell::Cell;

    use crate::lock::Instant;

    thread_local! {
        /// The runtime's time at the begin of the simulation.
        static BEGAN: Cell<Option<tokio::time::Instant>> = const { Cell::new(None) };
    }

    /// Starts the simulated clock again. No other test may use this thread meanwhile.
    pub fn begin() {
        BEGAN.set(Some(tokio::time::Instant::now()));
    }

    /// Ends the simulation: the thread uses the machine's clock again.
    pub fn end() {
        BEGAN.set(None);
    }

    /// The time at which a simulation begins, some time after the start of the machine.
    pub const BEGINNING: Instant = Instant(1_000_000_000);

    /// The simulated time; `None` if this thread does not simulate.
    pub fn now() -> Option<Instant> {
        let began = BEGAN.get()?;
        Some(BEGINNING.plus_us(began.elapsed().as_micros() as u64))
    }
}

/// Microseconds since 1970 by this machine's wall clock. For logs and display only: no lock depends on it.
pub fn wall_us() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| since.as_micros() as u64)
}

/// Microseconds of processor time that the calling thread has used.
pub fn thread_us() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec as u64 * 1_000_000 + time.tv_nsec as u64 / 1_000
}

/// A moment that tasks share without a lock: an `Option<Instant>`.
#[derive(Debug)]
pub struct AtomicInstant {
    /// Microseconds; 0 for `None`. [`now`] never returns 0.
    us: AtomicU64,
}

impl AtomicInstant {
    /// A moment that may not be known yet.
    pub fn new(at: Option<Instant>) -> AtomicInstant {
        AtomicInstant { us: AtomicU64::new(us_of(at)) }
    }

    /// The moment, if it is known.
    pub fn get(&self) -> Option<Instant> {
        Some(Instant(self.us.load(Relaxed))).filter(|at| at.0 > 0)
    }

    /// Forgets the moment.
    pub fn clear(&self) {
        self.us.store(us_of(None), Relaxed);
    }

    /// Sets the moment, unless a later one is known.
    pub fn postpone(&self, at: Instant) {
        self.us.fetch_max(us_of(Some(at)), Relaxed);
    }

    /// Sets the moment, unless one is known.
    pub fn set_once(&self, at: Instant) {
        let _ = self.us.compare_exchange(us_of(None), us_of(Some(at)), Relaxed, Relaxed);
    }
}

fn us_of(at: Option<Instant>) -> u64 {
    at.map_or(0, |at| at.0)
}

/// The longest single sleep. The runtime's timers do not advance while the machine is suspended.
const NAP: Duration = Duration::from_secs(1);

/// Sleeps until a moment of [`now`]. If the machine was suspended, the sleep ends within a second after the
/// machine continues, once the moment has passed.
pub async fn sleep_until(at: Instant) {
    while let Some(nap) = nap(now(), at) {
        tokio::time::sleep(nap).await;
    }
}

/// How long to sleep before the clock is checked again; `None` if the moment has come.
fn nap(now: Instant, at: Instant) -> Option<Duration> {
    let left = Duration::from_micros(at.us_since(now));
    (!left.is_zero()).then(|| left.min(NAP))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sleeper_reads_the_clock_at_least_once_a_second() {
        let now = Instant(5_000_000);
        assert_eq!(nap(now, now.plus_ms(3_600_000)), Some(Duration::from_secs(1)));
        assert_eq!(nap(now, now.plus_ms(20)), Some(Duration::from_millis(20)));
        assert_eq!(nap(now, now), None);
        assert_eq!(nap(now, Instant(0)), None);
    }
}
