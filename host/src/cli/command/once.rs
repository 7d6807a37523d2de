//! `once`: a command that runs the first time, and whose outcome answers from then on.

use std::io::Write as _;
use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};

use super::child::Output;
use super::{Held, Signals, start, supervise};
use crate::cli::args::{duration_ms, label};
use crate::cli::client::{CALL_TIMEOUT, Client};
use crate::cli::failure::Failure;
use crate::cli::{AcquireArgs, Mode, Options, locks};
use crate::clock;

#[derive(Args, Debug)]
pub struct OnceArgs {
    /// What is done once, e.g. orders/42/pay
    pub resource: String,
    /// How long the lease lives without renewal while the command runs [default: the policy's]
    #[arg(long, value_parser = duration_ms, value_name = "TIME")]
    pub ttl: Option<u32>,
    /// How long to wait for somebody else who is doing it [default: the policy's]
    #[arg(long, value_parser = duration_ms, value_name = "TIME")]
    pub wait: Option<u32>,
    /// Who does it; by default user@host and the number of this process
    #[arg(long)]
    pub owner: Option<String>,
    /// What the policy should know; may be given several times
    #[arg(long = "label", value_parser = label, value_name = "NAME=VALUE")]
    pub labels: Vec<(String, String)>,
    /// Keep the outcome of a command that fails, too; otherwise the next call runs it again
    #[arg(long)]
    pub keep_failure: bool,
    /// The command and its arguments, after --
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub command: Vec<String>,
}

/// Of the command's standard output, this much is kept.
const MAX_OUTPUT_BYTES: usize = 8_192;
const FINISH_ATTEMPTS: u32 = 5;
const FINISH_PAUSE: Duration = Duration::from_millis(500);

/// The exit code of the command, of this run or of the one that was kept.
pub async fn run(args: OnceArgs, options: &Options) -> Result<u8, Failure> {
    let client = Client::new(&options.server)?;
    let mut signals = Signals::new()?;
    let OnceArgs { resource, ttl, wait, owner, labels, keep_failure, command } = args;
    let acquire = AcquireArgs { resource, ttl, wait, mode: Mode::Exclusive, owner, labels, request_id: None };
    let asked = clock::now();
    let body = acquire.to_json();
    let answer = tokio::select! {
        answer = client.post("/v1/once/begin", &body, locks::timeout_of(&acquire)) => answer?,
        signal = signals.next() => return Ok(128 + signal.as_raw() as u8),
    };
    if answer["state"] == "done" {
        return Ok(replay(&answer["outcome"]));
    }
    let mut lease = Held::new(&answer, asked)?;
    let mut child = start(&command, &lease, &client, Output::Kept(MAX_OUTPUT_BYTES)).await?;
    let code = supervise(&mut child, &mut lease, &client, &mut signals).await?;
    if code != 0 && !keep_failure {
        lease.release(&client).await;
        return Ok(code);
    }
    let (stdout, cut) = child.output().await;
    let mut outcome = json!({ "code": code, "stdout": stdout });
    if cut {
        outcome["cut"] = true.into();
    }
    finish(&client, &lease, &outcome).await?;
    Ok(code)
}

/// Prints what the first run printed.
fn replay(outcome: &Value) -> u8 {
    let stdout = outcome["stdout"].as_str().map_or_else(|| outcome.to_string() + "\n", str::to_owned);
    let _ = std::io::stdout().write_all(stdout.as_bytes());
    if outcome["cut"] == true {
        eprintln!("lockkeeper: only the beginning of the output was kept");
    }
    outcome["code"].as_u64().and_then(|code| u8::try_from(code).ok()).unwrap_or(0)
}

/// The work is done, so nothing that passes may keep its outcome from being stored.
async fn finish(client: &Client, lease: &Held, outcome: &Value) -> Result<(), Failure> {
    let body = json!({ "lease_id": lease.id, "outcome": outcome });
    let mut attempt = 1;
    loop {
        match client.post("/v1/once/finish", &body, CALL_TIMEOUT).await {
            Ok(_) => return Ok(()),
            Err(failure) if failure.code() == 5 && attempt < FINISH_ATTEMPTS => {
                attempt += 1;
                tokio::time::sleep(FINISH_PAUSE).await;
            }
            Err(failure) => {
                eprintln!("lockkeeper: the command has run, and its outcome could not be kept");
                return Err(failure);
            }
        }
    }
}
