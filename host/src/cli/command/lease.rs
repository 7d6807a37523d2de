//! The lease of a command: its end, and its renewal.
//!
//! The lease is renewed after a third of its ttl. If that fails, the renewal is repeated until the command must be
//! asked to stop (TERM). This happens early enough to kill the command (KILL) before the lease ends. All times
//! count from before the request to the proxy. A lock that ends with its proxy is also renewed as soon as the
//! proxy may be gone.

use std::cell::{Cell, RefCell};
use std::convert::Infallible;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::Notify;

use crate::cli::client::encode_query;
use crate::cli::failure::Failure;
use crate::cli::output;
use crate::cli::servers::Servers;
use crate::cli::stream::Lines;
use crate::clock;
use crate::lock::Instant;

/// The longest time between TERM and KILL.
const MAX_GRACE_MS: u32 = 5_000;
/// As [`MAX_GRACE_MS`], if the lease is already lost.
const LOST_GRACE_MS: u32 = 1_000;
/// The pause between two event streams of a proxy.
const WATCH_PAUSE: Duration = Duration::from_secs(1);

/// The lease and its deadlines. The renewing future shares this with the code that acts on the deadlines.
pub struct Held {
    pub id: String,
    token: Value,
    key: String,
    times: Cell<Times>,
    renew_at: Cell<Instant>,
    /// Notifies that the lease was extended.
    extended: Notify,
    /// Notifies that the lease must be renewed earlier than planned.
    sooner: Notify,
    /// The error of the last renewal, if it failed.
    last_fault: RefCell<Option<String>>,
}

#[derive(Clone, Copy)]
struct Times {
    ttl_ms: u32,
    valid_until: Instant,
}

/// The lease can no longer be relied on.
pub struct Lost {
    pub reason: String,
    /// Whether the proxy said so. Otherwise the proxy could not be asked.
    pub certain: bool,
    pub kill_at: Instant,
}

impl Held {
    /// The lease of a grant that was asked for at `asked`.
    pub fn new(grant: &Value, asked: Instant) -> Result<Held, Failure> {
        let number = |name: &str| grant[name].as_u64().and_then(|number| u32::try_from(number).ok());
        let (Some(id), Some(ttl_ms), Some(left_ms)) =
            (grant["lease_id"].as_str(), number("ttl_ms"), number("expires_in_ms"))
        else {
            return Err(Failure::Other(format!("the proxy's grant makes no sense: {grant}")));
        };
        // The proxy counted from its answer, which came at least `waited_ms` after the question.
        let granted = asked.plus_ms(number("waited_ms").unwrap_or_default());
        let held = Held {
            id: id.to_owned(),
            token: grant["token"].clone(),
            key: grant["keys"][0].as_str().unwrap_or_default().to_owned(),
            times: Cell::new(Times { ttl_ms, valid_until: granted }),
            renew_at: Cell::new(granted),
            extended: Notify::new(),
            sooner: Notify::new(),
            last_fault: RefCell::new(None),
        };
        held.extend(granted, ttl_ms, left_ms);
        Ok(held)
    }

    /// The environment variables that describe the lease to the command.
    pub fn environment(&self) -> [(&'static str, String); 3] {
        [
            ("LOCKKEEPER_LEASE_ID", self.id.clone()),
            ("LOCKKEEPER_KEY", self.key.clone()),
            ("LOCKKEEPER_TOKEN", self.token.to_string()),
        ]
    }

    /// Renews the lease until a renewal fails for good. Renewals stop while this future is not polled.
    pub async fn keep(&self, servers: &Servers) -> Lost {
        if !servers.is_fixed() {
            return self.renew(servers).await;
        }
        tokio::select! {
            lost = self.renew(servers) => lost,
            never = self.watch(servers) => match never {},
        }
    }

    /// Renews a lock that ends with its proxy whenever the proxy may have ended: if the proxy's event stream breaks
    /// or reports a loss. Without a stream, it renews once a second.
    async fn watch(&self, servers: &Servers) -> Infallible {
        let path = format!("/v1/watch?prefix={}", encode_query(&self.key));
        loop {
            if let Ok(events) = servers.stream(&path).await {
                let mut lines = Lines::new(events);
                while let Ok(Some(line)) = lines.next().await {
                    if matches!(&*line, "event: lost" | "event: forced" | "event: lagged") {
                        self.renew_now();
                    }
                }
            }
            self.renew_now();
            tokio::time::sleep(WATCH_PAUSE).await;
        }
    }

    async fn renew(&self, servers: &Servers) -> Lost {
        loop {
            self.until_due().await;
            let now = clock::now();
            if now >= self.stop_at() {
                let why = self
                    .last_fault
                    .take()
                    .unwrap_or_else(|| "this process had no time to renew it".to_owned());
                return self.gone(format!("the lease could not be renewed: {why}"));
            }
            let body = json!({"lease_id": self.id});
            let renewal = servers.post("/v1/renew", &body, self.patience(now, servers.count()));
            let left = Duration::from_micros(self.stop_at().us_since(now));
            let Ok(answer) = tokio::time::timeout(left, renewal).await else {
                self.last_fault.replace(Some("no server answered in time".to_owned()));
                continue;
            };
            match answer {
                Ok(renewed) => {
                    let number =
                        |name: &str| renewed[name].as_u64().and_then(|number| u32::try_from(number).ok());
                    let ttl_ms = number("ttl_ms").unwrap_or(self.times.get().ttl_ms);
                    self.extend(now, ttl_ms, number("expires_in_ms").unwrap_or_default());
                }
                Err(failure) if failure.code() == 4 => {
                    let kill_at = clock::now().plus_ms(LOST_GRACE_MS).min(self.kill_at());
                    return Lost { reason: failure.to_string(), certain: true, kill_at };
                }
                // If the lock ends with its proxy, the lock is free by now.
                Err(failure @ Failure::NoProxy { .. }) if servers.is_fixed() => {
                    let kill_at = clock::now().plus_ms(LOST_GRACE_MS).min(self.kill_at());
                    let reason = format!("it ends with its proxy: {failure}");
                    return Lost { reason, certain: true, kill_at };
                }
                Err(failure) => {
                    self.last_fault.replace(Some(failure.to_string()));
                    let pause = (self.times.get().ttl_ms / 10).clamp(20, 1_000);
                    self.renew_at.set(clock::now().plus_ms(pause));
                }
            }
        }
    }

    async fn until_due(&self) {
        loop {
            let due = self.renew_at.get().min(self.stop_at());
            if clock::now() >= due {
                return;
            }
            tokio::select! {
                () = sleep_until(due) => {}
                () = self.sooner.notified() => {}
            }
        }
    }

    /// The loss of a lease about which the proxy could not be asked.
    pub fn gone(&self, reason: String) -> Lost {
        Lost { reason, certain: false, kill_at: self.kill_at() }
    }

    /// Returns when the lease is extended and all deadlines move.
    pub async fn extended(&self) {
        self.extended.notified().await;
    }

    /// Requests an immediate renewal.
    pub fn renew_now(&self) {
        self.renew_at.set(clock::now());
        self.sooner.notify_one();
    }

    /// Releases the lease. Call this when nothing works under the lease any more, because its message may block.
    pub async fn release(&self, servers: &Servers) {
        let body = json!({"lease_id": self.id});
        if let Err(failure) = servers.post_once("/v1/release", &body).await {
            output::complain(&format!("the lock was not released and ends with its lease: {failure}"));
        }
    }

    /// Records an extension. `from` is the time at which the proxy was asked; it may be later only if that is
    /// certain.
    fn extend(&self, from: Instant, ttl_ms: u32, left_ms: u32) {
        self.times.set(Times { ttl_ms, valid_until: from.plus_ms(left_ms) });
        self.renew_at.set(from.plus_ms(ttl_ms / 3));
        self.last_fault.replace(None);
        self.extended.notify_one();
    }

    /// The end of the lease.
    pub fn valid_until(&self) -> Instant {
        self.times.get().valid_until
    }

    /// The time to send TERM to the command.
    pub fn stop_at(&self) -> Instant {
        before(self.valid_until(), (self.times.get().ttl_ms / 3).min(MAX_GRACE_MS))
    }

    /// The time to send KILL to the command.
    pub fn kill_at(&self) -> Instant {
        before(self.valid_until(), (self.times.get().ttl_ms / 20).min(500))
    }

    /// The time-out of a renewal on one of `servers` servers. It leaves time to try again if a server hangs.
    fn patience(&self, now: Instant, servers: usize) -> Duration {
        let left = self.stop_at().us_since(now).max(1_000);
        let each = u64::from(self.times.get().ttl_ms / 4) / servers as u64;
        Duration::from_micros(left.min(each.max(100) * 1_000))
    }
}

fn before(moment: Instant, ms: u32) -> Instant {
    Instant(moment.0.saturating_sub(u64::from(ms) * 1_000))
}

/// Sleeps in short pieces, because timers pause while the machine sleeps but leases do not.
pub async fn sleep_until(at: Instant) {
    while clock::now() < at {
        clock::sleep_until(at.min(clock::now().plus_ms(1_000))).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(ttl_ms: u32, left_ms: u32) -> Held {
        let grant = json!({
            "lease_id": "x", "token": 7, "keys": ["k"], "ttl_ms": ttl_ms, "expires_in_ms": left_ms,
            "waited_ms": 500,
        });
        Held::new(&grant, Instant(0)).unwrap()
    }

    #[test]
    fn the_renewal_stop_kill_and_end_times_of_a_lease_are_in_order() {
        for ttl_ms in [100, 1_000, 10_000, 3_600_000] {
            let lease = held(ttl_ms, ttl_ms - ttl_ms / 50);
            let times = [lease.renew_at.get(), lease.stop_at(), lease.kill_at(), lease.valid_until()];
            assert!(times.is_sorted_by(|a, b| a < b), "{ttl_ms}: {times:?}");
        }
    }

    #[test]
    fn a_lease_counts_from_its_request_plus_the_wait() {
        let lease = held(10_000, 9_900);
        assert_eq!(lease.valid_until(), Instant(10_400_000));
        assert_eq!(lease.renew_at.get(), Instant(3_833_000));
        assert_eq!(lease.environment()[2], ("LOCKKEEPER_TOKEN", "7".to_owned()));
    }
}
