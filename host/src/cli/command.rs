//! `run`: a lock for as long as a command runs.
//!
//! The lease is renewed at a third of its ttl. Where that fails, it is tried again until the command
//! must be told to stop (TERM), so that it can be made to (KILL) before the lease ends.

use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::client::Client;
use super::failure::Failure;
use super::{AcquireArgs, Options, locks};
use crate::clock;
use crate::lock::Instant;

mod child;
mod once;

use child::{Child, Output};
pub use once::{OnceArgs, run as once};

#[derive(Args, Debug)]
pub struct RunArgs {
    #[command(flatten)]
    pub acquire: AcquireArgs,
    /// The command and its arguments, after --
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub command: Vec<String>,
}

/// The longest that a command has between TERM and KILL.
const MAX_GRACE_MS: u32 = 5_000;
/// As [`MAX_GRACE_MS`], where the lease is lost already.
const LOST_GRACE_MS: u32 = 1_000;
const RELEASE_TIMEOUT: Duration = Duration::from_secs(5);

/// The exit code of the command.
pub async fn run(args: RunArgs, options: &Options) -> Result<u8, Failure> {
    let client = Client::new(&options.server)?;
    let mut signals = Signals::new()?;
    let asked = clock::now();
    let body = args.acquire.to_json();
    let lease = tokio::select! {
        lease = client.post("/v1/acquire", &body, locks::timeout_of(&args.acquire)) => lease?,
        // Leaving closes the connection, which leaves the queue.
        signal = signals.next() => return Ok(128 + signal.as_raw() as u8),
    };
    let mut lease = Held::new(&lease, asked)?;
    let mut child = start(&args.command, &lease, &client, Output::Passed).await?;
    let code = supervise(&mut child, &mut lease, &client, &mut signals).await?;
    lease.release(&client).await;
    Ok(code)
}

/// Starts the command; the lease of one that cannot be run is given up.
async fn start(command: &[String], lease: &Held, client: &Client, output: Output) -> Result<Child, Failure> {
    let child = Child::spawn(command, &lease.environment(), output);
    if child.is_err() {
        lease.release(client).await;
    }
    child
}

/// Keeps the lease alive until the command has ended: its exit code. A command whose lease is lost is
/// stopped.
async fn supervise(
    child: &mut Child,
    lease: &mut Held,
    client: &Client,
    signals: &mut Signals,
) -> Result<u8, Failure> {
    let lost = loop {
        tokio::select! {
            code = child.wait() => return code,
            lost = lease.keep(client) => break lost,
            signal = signals.next() => child.signal(signal),
        }
    };
    eprintln!("lockkeeper: {}; stopping the command", lost.reason);
    child.stop(lost.kill_at).await;
    if !lost.certain {
        lease.release(client).await;
    }
    Err(Failure::Lost(lost.reason))
}

/// The lease, and when something must happen to it.
struct Held {
    id: String,
    token: Value,
    key: String,
    ttl_ms: u32,
    renew_at: Instant,
    valid_until: Instant,
    /// Why the last renewal failed, since one succeeded.
    last_fault: Option<String>,
}

/// The lease cannot be relied on.
struct Lost {
    reason: String,
    /// The proxy said so; otherwise it could only not be asked.
    certain: bool,
    kill_at: Instant,
}

impl Held {
    fn new(grant: &Value, asked: Instant) -> Result<Held, Failure> {
        let number = |name: &str| grant[name].as_u64().and_then(|number| u32::try_from(number).ok());
        let (Some(id), Some(ttl_ms), Some(left_ms)) =
            (grant["lease_id"].as_str(), number("ttl_ms"), number("expires_in_ms"))
        else {
            return Err(Failure::Other(format!("the proxy's grant makes no sense: {grant}")));
        };
        // The proxy counted from its answer, which is at least the wait after the question.
        let granted = asked.plus_ms(number("waited_ms").unwrap_or_default());
        let mut held = Held {
            id: id.to_owned(),
            token: grant["token"].clone(),
            key: grant["keys"][0].as_str().unwrap_or_default().to_owned(),
            ttl_ms,
            renew_at: granted,
            valid_until: granted,
            last_fault: None,
        };
        held.extend(granted, ttl_ms, left_ms);
        Ok(held)
    }

    fn environment(&self) -> [(&'static str, String); 3] {
        [
            ("LOCKKEEPER_LEASE_ID", self.id.clone()),
            ("LOCKKEEPER_KEY", self.key.clone()),
            ("LOCKKEEPER_TOKEN", self.token.to_string()),
        ]
    }

    /// Renews the lease until that fails. Safe to drop and call again.
    async fn keep(&mut self, client: &Client) -> Lost {
        loop {
            sleep_until(self.renew_at.min(self.stop_at())).await;
            let now = clock::now();
            if now >= self.stop_at() {
                let why = self.last_fault.take().unwrap_or_else(|| "there was no time".to_owned());
                let reason = format!("the lease could not be renewed: {why}");
                return Lost { reason, certain: false, kill_at: self.kill_at() };
            }
            // Before the question is answered, it may be dropped: then it is asked again soon.
            self.renew_at = now.plus_ms((self.ttl_ms / 10).clamp(20, 1_000));
            match client.post("/v1/renew", &json!({"lease_id": self.id}), self.patience(now)).await {
                Ok(renewed) => {
                    let number =
                        |name: &str| renewed[name].as_u64().and_then(|number| u32::try_from(number).ok());
                    let (ttl_ms, left_ms) = (number("ttl_ms"), number("expires_in_ms"));
                    self.extend(now, ttl_ms.unwrap_or(self.ttl_ms), left_ms.unwrap_or_default());
                }
                Err(failure) if failure.code() == 4 => {
                    let kill_at = clock::now().plus_ms(LOST_GRACE_MS).min(self.kill_at());
                    return Lost { reason: failure.to_string(), certain: true, kill_at };
                }
                Err(failure) => self.last_fault = Some(failure.to_string()),
            }
        }
    }

    async fn release(&self, client: &Client) {
        let body = json!({"lease_id": self.id});
        if let Err(failure) = client.post("/v1/release", &body, RELEASE_TIMEOUT).await {
            eprintln!("lockkeeper: the lock was not released and ends with its lease: {failure}");
        }
    }

    /// `from` is when the proxy was asked, or later only where that is certain.
    fn extend(&mut self, from: Instant, ttl_ms: u32, left_ms: u32) {
        self.ttl_ms = ttl_ms;
        self.valid_until = from.plus_ms(left_ms);
        self.renew_at = from.plus_ms(ttl_ms / 3);
        self.last_fault = None;
    }

    fn stop_at(&self) -> Instant {
        before(self.valid_until, (self.ttl_ms / 3).min(MAX_GRACE_MS))
    }

    fn kill_at(&self) -> Instant {
        before(self.valid_until, (self.ttl_ms / 20).min(500))
    }

    /// How long one renewal may take: a proxy that hangs should leave time to ask again.
    fn patience(&self, now: Instant) -> Duration {
        let left = self.stop_at().us_since(now).max(1_000);
        Duration::from_micros(left.min(u64::from(self.ttl_ms / 4).max(100) * 1_000))
    }
}

fn before(moment: Instant, ms: u32) -> Instant {
    Instant(moment.0.saturating_sub(u64::from(ms) * 1_000))
}

/// Sleeps in short pieces: timers stand still while the machine sleeps, leases do not.
async fn sleep_until(at: Instant) {
    while clock::now() < at {
        clock::sleep_until(at.min(clock::now().plus_ms(1_000))).await;
    }
}

/// The signals that are the command's to handle.
struct Signals {
    interrupt: Signal,
    terminate: Signal,
    hang_up: Signal,
}

impl Signals {
    fn new() -> Result<Signals, Failure> {
        let listen =
            |kind| signal(kind).map_err(|error| Failure::Other(format!("cannot handle signals: {error}")));
        Ok(Signals {
            interrupt: listen(SignalKind::interrupt())?,
            terminate: listen(SignalKind::terminate())?,
            hang_up: listen(SignalKind::hangup())?,
        })
    }

    async fn next(&mut self) -> rustix::process::Signal {
        tokio::select! {
            _ = self.interrupt.recv() => rustix::process::Signal::INT,
            _ = self.terminate.recv() => rustix::process::Signal::TERM,
            _ = self.hang_up.recv() => rustix::process::Signal::HUP,
        }
    }
}

#[cfg(test)]
mod tests;
