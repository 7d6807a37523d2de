//! `cargo xtask sim`: the simulation.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::Result;

use crate::{paths, steps, wasm};

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
    wasm::ensure()?;
    let built = steps::status(&mut steps::cargo(&BUILD))?;
    if !built.success() {
        return Ok(ExitCode::from(steps::code(built)));
    }
    let mut sim = Command::new(program(&paths::target()));
    Ok(ExitCode::from(steps::code(steps::status(sim.args(&args.options))?)))
}

/// Builds the simulation. With the whole workspace, so that what it depends on is built as for the tests; the program itself
/// is compiled to be faster than there, as it searches for longer than it is built.
pub const BUILD: [&str; 8] = [
    "build",
    "--workspace",
    "--features",
    "lockkeeper/simulation",
    "--bin",
    "lockkeeper-sim",
    "--config",
    "profile.dev.package.lockkeeper.opt-level=2",
];

/// What [`BUILD`] makes in a target folder.
pub fn program(target: &Path) -> PathBuf {
    target.join("debug").join("lockkeeper-sim")
}
