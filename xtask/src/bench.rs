//! `cargo xtask bench`: the figures that the README quotes.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};

use crate::{paths, servers, steps, wasm};

/// Measures the proxy against the same SQL run directly, against nginx and against Redis, in one run on one server.
///
/// Prints a table and writes target/bench/side_by_side.json. Takes about a quarter of an hour once built; the measurement
/// `held` alone takes half of that.
#[derive(clap::Args)]
pub struct Args {
    /// End with exit code 1 if a target is missed.
    #[arg(long)]
    check: bool,
    /// Shorter rounds: for trying the bench itself, not for figures.
    #[arg(long)]
    quick: bool,
    /// Run only the measurements whose name contains this text.
    #[arg(value_name = "NAME")]
    only: Option<String>,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    wasm::ensure()?;
    servers::ensure(servers::Kind::Mysql, false)?;
    let out = paths::target().join("bench");
    std::fs::create_dir_all(&out).with_context(|| format!("cannot create {}", out.display()))?;
    let mut bench = steps::cargo(&["bench", "--package", "lockkeeper", "--bench", "side_by_side", "--"]);
    bench.arg("--out").arg(out.join("side_by_side.json"));
    bench.args(args.check.then_some("--check")).args(args.quick.then_some("--quick"));
    // Each is compared with one kind of measurement, and fetched for nothing else.
    for (kind, option, measurement) in
        [(servers::Kind::Nginx, "--nginx", "guard"), (servers::Kind::Redis, "--redis", "delegated")]
    {
        let is_measured = args.only.as_deref().is_none_or(|only| measurement.contains(only));
        if let Some(program) = is_measured.then(|| peer(kind)).flatten() {
            bench.arg(option).arg(program);
        }
    }
    bench.args(&args.only);
    Ok(ExitCode::from(steps::code(steps::status(&mut bench)?)))
}

/// A program that the proxy is compared with; without it, the bench leaves that comparison out.
fn peer(kind: servers::Kind) -> Option<PathBuf> {
    if let Some(program) = paths::find_program(kind.daemon()) {
        return Some(program);
    }
    match servers::ensure(kind, false) {
        Ok(program) => Some(program),
        Err(error) => {
            eprintln!("{} will not be measured: {error:#}", kind.name());
            None
        }
    }
}
