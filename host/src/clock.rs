//! The only caller of the clock.

use crate::lock::Instant;

/// Now, on the clock that goes on while the machine sleeps: a lease ends on the server during
/// a suspend, too.
pub fn now() -> Instant {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Instant(time.tv_sec as u64 * 1_000_000 + time.tv_nsec as u64 / 1_000)
}

/// Microseconds since 1970 by this machine's wall clock. For logs and for people only: no lock
/// depends on it.
pub fn wall_us() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| since.as_micros() as u64)
}

/// Microseconds of processor time that the calling thread has used.
pub fn thread_us() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec as u64 * 1_000_000 + time.tv_nsec as u64 / 1_000
}

/// Sleeps until a moment of [`now`].
pub async fn sleep_until(at: Instant) {
    let left = std::time::Duration::from_micros(at.us_since(now()));
    tokio::time::sleep(left).await;
}
