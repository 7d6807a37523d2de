//! `run`: holds a lock while a command runs.
//!
//! Actions on the lease or the command come before messages, because the reader of our output may be slow or gone.
//! [`lease`] decides when the command must end, [`child`] starts and stops it, and [`guard`] is a process that
//! ends the command if this process cannot.

use clap::Args;

use serde_json::Value;

use super::failure::Failure;
use super::servers::Servers;
use super::{AcquireArgs, Options};
use crate::lock::{Instant, Primitive};

mod child;
mod group;
pub mod guard;
mod lease;
mod once;
mod passing;
mod signals;
mod terminal;

use child::{Change, Child, Output};
pub use lease::sleep_until;
use lease::{Held, Lost};
pub use once::{OnceArgs, run as once};
use signals::Signals;

/// The arguments of `run`.
#[derive(Args, Debug)]
pub struct RunArgs {
    #[command(flatten)]
    pub acquire: AcquireArgs,
    /// The command and its arguments, after --
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub command: Vec<String>,
}

/// Runs the command under a lock and returns its exit code.
pub async fn run(args: RunArgs, options: &Options) -> Result<u8, Failure> {
    let servers = Servers::new(options)?;
    let mut signals = Signals::new()?;
    let body = args.acquire.to_json();
    let (grant, asked) = tokio::select! {
        granted = servers.acquire("/v1/acquire", &body, args.acquire.wait) => granted?,
        // Returning closes the connection, so the request leaves the queue.
        code = signals.end() => return Ok(code),
    };
    let lease = held(&grant, asked, &servers)?;
    let mut child = start(&args.command, &lease, &servers, Output::Passed).await?;
    let code = supervise(&mut child, &lease, &servers, &mut signals).await?;
    lease.release(&servers).await;
    Ok(code)
}

/// The lease of a grant. Any server can renew it, unless the lock depends on one server's database session.
fn held(grant: &Value, asked: Instant, servers: &Servers) -> Result<Held, Failure> {
    if rests_on_a_session(grant) {
        servers.stay();
    }
    Held::new(grant, asked)
}

/// Whether the lock ends with its proxy. Proxies of earlier versions only name the primitive.
pub fn rests_on_a_session(grant: &Value) -> bool {
    let primitive = grant["primitive"].as_str().and_then(Primitive::from_name);
    grant["ends_with"] == "session" || primitive.is_some_and(|primitive| primitive.space().rests_on_session())
}

/// Starts the command. If it cannot be run, the lease is released.
async fn start(
    command: &[String],
    lease: &Held,
    servers: &Servers,
    output: Output,
) -> Result<Child, Failure> {
    let child = Child::spawn(command, &lease.environment(), output, lease.kill_at());
    if child.is_err() {
        lease.release(servers).await;
    }
    child
}

/// Keeps the lease alive until the command has ended, and returns the command's exit code. If the lease is lost, the
/// command is stopped.
async fn supervise(
    child: &mut Child,
    lease: &Held,
    servers: &Servers,
    signals: &mut Signals,
) -> Result<u8, Failure> {
    let mut lost = watch(child, lease, servers, signals).await?;
    if let Err(lost) = &mut lost {
        let is_gone = child.stop(lost.kill_at).await;
        if is_gone && !lost.certain {
            lease.release(servers).await;
        }
        lost.reason.push_str(if is_gone {
            "; the command was stopped"
        } else {
            "; the command does not end"
        });
    }
    lost.map_err(|lost| Failure::Lost(lost.reason))
}

/// Waits for the command's exit code, or for a reason to stop the command.
async fn watch(
    child: &mut Child,
    lease: &Held,
    servers: &Servers,
    signals: &mut Signals,
) -> Result<Result<u8, Lost>, Failure> {
    let keep = lease.keep(servers);
    tokio::pin!(keep);
    // A stopped command does no work, so its lease is not renewed.
    let mut is_stopped = false;
    loop {
        tokio::select! {
            lost = &mut keep, if !is_stopped => return Ok(Err(lost)),
            () = sleep_until(lease.stop_at()), if is_stopped => {
                return Ok(Err(lease.gone("the command was stopped for longer than its lease lasts".to_owned())));
            }
            () = lease.extended() => if !child.may_live_until(lease.kill_at()) {
                return Ok(Err(lease.gone("the lease was extended after the time of the command's guard".to_owned())));
            },
            signal = signals.next() => child.signal(signal),
            change = child.change() => match change? {
                Change::Ended(_) if child.may_have_been_killed() => {
                    return Ok(Err(lease.gone("it ended before the command was seen to end".to_owned())));
                }
                Change::Ended(code) => return Ok(Ok(code)),
                Change::Stopped(signal) => {
                    is_stopped = true;
                    child.stopped(signal);
                }
                Change::Continued => {
                    is_stopped = false;
                    lease.renew_now();
                }
            },
        }
    }
}
