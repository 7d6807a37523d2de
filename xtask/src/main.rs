//! `cargo xtask`: the developer's command. Everything that takes more than one step to set up,
//! check or measure is a subcommand here; CI runs the same ones.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

mod bench;
mod deny;
mod dist;
mod example;
mod fuzz;
mod languages;
mod mutate;
mod paths;
mod sbom;
mod servers;
mod settings;
mod sim;
mod steps;
mod test;
mod torture;
mod up;
mod upgrade;
mod wasm;

/// Sets up, checks and measures Lockkeeper.
///
/// On a clean machine with git and rustup: `cargo xtask up` builds everything and starts a proxy,
/// `cargo xtask test` runs everything that CI checks.
#[derive(Parser)]
#[command(bin_name = "cargo xtask", max_term_width = 100)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Up(up::Args),
    Test(test::Args),
    Dist(dist::Args),
    Sbom(sbom::Args),
    Bench(bench::Args),
    Sim(sim::Args),
    Fuzz(fuzz::Args),
    Mutate(mutate::Args),
    Example(example::Args),
    Servers(servers::Args),
    Upgrade(upgrade::Args),
    Torture(torture::Args),
    #[command(hide = true)]
    Announce(up::announce::Args),
}

fn main() -> ExitCode {
    let result = match Args::parse().command {
        Command::Up(args) => up::run(&args),
        Command::Test(args) => test::run(&args),
        Command::Dist(args) => dist::run(&args),
        Command::Sbom(args) => sbom::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Sim(args) => sim::run(&args),
        Command::Fuzz(args) => fuzz::run(&args),
        Command::Mutate(args) => mutate::run(&args),
        Command::Example(args) => example::run(&args),
        Command::Servers(args) => servers::run(&args),
        Command::Upgrade(args) => upgrade::run(&args),
        Command::Torture(args) => torture::run(&args),
        Command::Announce(args) => up::announce::run(&args),
    };
    match result {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
