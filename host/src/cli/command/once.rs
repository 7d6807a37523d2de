//! `once`: runs a command the first time, and replays its outcome on later calls.

use std::io::Write as _;
use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};

use super::child::Output;
use super::lease::sleep_until;
use super::passing::StoredValue;
use super::{Held, Signals, held, start, supervise};
use crate::cli::args::{duration_ms, label};
use crate::cli::client::CALL_TIMEOUT;
use crate::cli::failure::Failure;
use crate::cli::servers::Servers;
use crate::cli::{AcquireArgs, Mode, Options, output};
use crate::clock;

/// The arguments of `once`.
#[derive(Args, Debug)]
pub struct OnceArgs {
    /// The work to do once, e.g. orders/42/pay
    pub resource: String,
    /// Time after which an unrenewed lease ends while the command runs [default: the policy's]
    #[arg(long, value_parser = duration_ms, value_name = "TIME")]
    pub ttl: Option<u32>,
    /// Longest wait for another call that is doing the work [default: the policy's]
    #[arg(long, value_parser = duration_ms, value_name = "TIME")]
    pub wait: Option<u32>,
    /// Name of the holder (default: user@host and the process id)
    #[arg(long)]
    pub owner: Option<String>,
    /// A label for the policy; may be given several times
    #[arg(long = "label", value_parser = label, value_name = "NAME=VALUE")]
    pub labels: Vec<(String, String)>,
    /// Also keep the outcome of a command that fails; otherwise the next call runs the command again
    #[arg(long)]
    pub keep_failure: bool,
    /// The command and its arguments, after --
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub command: Vec<String>,
}

/// The size of the command's standard output that is kept.
const MAX_OUTPUT_BYTES: usize = 8_192;
const FINISH_PAUSE: Duration = Duration::from_millis(500);
/// How long storing the outcome is tried after a signal.
const FINISH_AFTER_SIGNAL_MS: u32 = 2_000;

/// Returns the exit code of the command, from this run or from the stored outcome.
pub async fn run(args: OnceArgs, options: &Options) -> Result<u8, Failure> {
    let servers = Servers::new(options)?;
    let mut signals = Signals::new()?;
    let OnceArgs { resource, ttl, wait, owner, labels, keep_failure, command } = args;
    let acquire = AcquireArgs { resource, ttl, wait, mode: Mode::Exclusive, owner, labels, request_id: None };
    let body = acquire.to_json();
    let (answer, asked) = tokio::select! {
        answer = servers.acquire("/v1/once/begin", &body, wait) => answer?,
        code = signals.end() => return Ok(code),
    };
    if answer["state"] == "done" {
        return Ok(replay(&answer["outcome"]));
    }
    let lease = held(&answer, asked, &servers)?;
    let mut child = start(&command, &lease, &servers, Output::StoredValue(MAX_OUTPUT_BYTES)).await?;
    let code = supervise(&mut child, &lease, &servers, &mut signals).await?;
    let output = child.output();
    let result = match output {
        _ if code != 0 && !keep_failure => {
            lease.release(&servers).await;
            (Ok(()), output)
        }
        Some(mut passing) => {
            let outcome = outcome(code, &passing.kept().await);
            (finish(&servers, &lease, outcome, &mut signals).await, Some(passing))
        }
        None => (finish(&servers, &lease, outcome(code, &StoredValue::default()), &mut signals).await, None),
    };
    let (finished, output) = result;
    if let Some(passing) = output {
        passing.end();
        // The outcome is stored, so a slow reader of the output does no harm.
        tokio::select! {
            () = passing.passed() => {}
            _ = signals.end() => {}
        }
    }
    finished.map(|()| code)
}

fn outcome(code: u8, kept: &StoredValue) -> Value {
    let mut outcome = json!({ "code": code, "stdout": String::from_utf8_lossy(&kept.bytes) });
    if kept.cut {
        outcome["cut"] = true.into();
    }
    outcome
}

/// The outcome, with its output cut so that the JSON fits into `bytes`: a byte of output may need six bytes of JSON.
/// `None` if there is nothing to cut.
fn fitted(mut outcome: Value, bytes: usize) -> Option<Value> {
    outcome["cut"] = true.into();
    loop {
        let over = outcome.to_string().len().saturating_sub(bytes);
        let Value::String(stdout) = &mut outcome["stdout"] else { return None };
        if over == 0 {
            return Some(outcome);
        }
        let rest = stdout.len().checked_sub(over.div_ceil(6))?;
        stdout.truncate(stdout.floor_char_boundary(rest));
    }
}

/// Prints the output of the first run and returns its exit code.
fn replay(outcome: &Value) -> u8 {
    let stdout = outcome["stdout"].as_str().map_or_else(|| outcome.to_string() + "\n", str::to_owned);
    let _ = std::io::stdout().write_all(stdout.as_bytes());
    if outcome["cut"] == true {
        output::complain("only the beginning of the output was kept");
    }
    outcome["code"].as_u64().and_then(|code| u8::try_from(code).ok()).unwrap_or(0)
}

/// Stores the outcome. The work is done, so the lease is renewed until the outcome is stored. The attempts end only
/// when the lease ends, when the proxy refuses, or when they fail for a while after a signal.
async fn finish(
    servers: &Servers,
    lease: &Held,
    outcome: Value,
    signals: &mut Signals,
) -> Result<(), Failure> {
    let finished = repeat_finish(servers, lease, outcome);
    let kept = async {
        // The lease may seem lost because an earlier attempt stored the outcome and ended the lease. The next answer
        // tells.
        lease.keep(servers).await;
        std::future::pending::<()>().await;
    };
    let given_up = async {
        signals.end().await;
        sleep_until(clock::now().plus_ms(FINISH_AFTER_SIGNAL_MS)).await;
    };
    let result = tokio::select! {
        result = finished => result,
        () = kept => Ok(()),
        () = given_up => Err(Failure::Other("a signal came before the outcome was stored".to_owned())),
    };
    if result.is_err() {
        output::complain("the command has run, and its outcome could not be kept");
    }
    result
}

async fn repeat_finish(servers: &Servers, lease: &Held, mut outcome: Value) -> Result<(), Failure> {
    loop {
        let body = json!({ "lease_id": lease.id, "outcome": outcome });
        let failure = match servers.post("/v1/once/finish", &body, CALL_TIMEOUT).await {
            Ok(_) => return Ok(()),
            Err(failure) => failure,
        };
        if let Some(bound) = failure.bound_of("outcome") {
            outcome = fitted(outcome, bound).ok_or(failure)?;
        } else if failure.code() == 5 && clock::now() < lease.valid_until() {
            tokio::time::sleep(FINISH_PAUSE).await;
        } else {
            return Err(failure);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outcome_is_truncated_to_the_size_that_the_proxy_keeps() {
        for text in ["x", "\0", "\u{FFFD}", "\u{1F512}\n"] {
            let outcome = json!({"code": 7, "stdout": text.repeat(8_192 / text.len())});
            for bytes in [64, 65, 100, 1_000, 4_000] {
                let fitted = fitted(outcome.clone(), bytes).unwrap();
                let length = fitted.to_string().len();
                assert!(length <= bytes && length + 12 > bytes, "{length} of {bytes}");
                assert_eq!((&fitted["code"], &fitted["cut"]), (&json!(7), &json!(true)));
                assert!(outcome["stdout"].as_str().unwrap().starts_with(fitted["stdout"].as_str().unwrap()));
            }
        }
        assert_eq!(fitted(json!({"code": 7, "stdout": ""}), 20), None);
    }
}
