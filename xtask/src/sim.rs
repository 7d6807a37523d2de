//! `cargo xtask sim`: the simulation.

use std::process::ExitCode;

use anyhow::Result;

use crate::steps;

/// Searches for a run of simulated servers, proxies and clients in which a promise is broken.
///
/// Takes the options of the search; `cargo xtask sim --help` lists them once it is built.
#[derive(clap::Args)]
#[command(disable_help_flag = true)]
pub struct Args {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "OPTIONS")]
    options: Vec<String>,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let mut sim = steps::cargo(&["run", "--quiet", "--package", "lockkeeper", "--features", "simulation"]);
    sim.args(["--bin", "lockkeeper-sim", "--"]).args(&args.options);
    Ok(ExitCode::from(steps::code(steps::status(&mut sim)?)))
}
