//! `cargo xtask torture`: real proxies, servers and clients, with faults at random.

use std::process::ExitCode;

use anyhow::Result;

use crate::steps::{self, Progress};
use crate::{servers, wasm};

/// Breaks a real server, real proxies and the connections between them at random, under load, and checks each grant.
///
/// Proxies and the server are killed, paused and stopped in order; connections are cut, stalled, killed, or lose an answer;
/// the server is read-only or has too few connections; a policy is replaced. Ends with exit code 0 if no lock had two
/// holders, each token was above the ones before, no lease was lost before its end, locks were granted again after each
/// round of faults, and nothing was held in the end.
#[derive(clap::Args)]
pub struct Args {
    /// For how long.
    #[arg(long, value_name = "M", default_value_t = 10.0, value_parser = minutes)]
    minutes: f64,
    /// The database server.
    #[arg(long, value_enum, default_value = "mysql")]
    server: servers::Kind,
    /// Which faults, in which order; what they meet differs from run to run. Without it, another seed each time.
    #[arg(long, value_name = "S")]
    seed: Option<u64>,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let mut progress = Progress::new(2);
    progress.next("getting the database server");
    wasm::ensure()?;
    servers::ensure(args.server, false)?;
    let seed = args.seed.unwrap_or_else(|| std::process::id().into());
    progress.next(&format!("{} minutes of faults, with the seed {seed}", args.minutes));
    let mut test = steps::cargo(&["test", "--workspace", "--test", "it", "--"]);
    test.args(["--ignored", "--nocapture", "torture::"]);
    test.env("LOCKKEEPER_TORTURE_SERVER", args.server.dir());
    test.env("LOCKKEEPER_TORTURE_MINUTES", args.minutes.to_string());
    test.env("LOCKKEEPER_TORTURE_SEED", seed.to_string());
    Ok(ExitCode::from(steps::code(steps::status(&mut test)?)))
}

fn minutes(text: &str) -> Result<f64, String> {
    let bound = || "a number of minutes above 0, 10,000 at most".to_owned();
    text.parse().ok().filter(|minutes| 0.0 < *minutes && *minutes <= 10_000.0).ok_or_else(bound)
}
