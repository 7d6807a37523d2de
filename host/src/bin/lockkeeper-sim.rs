//! `cargo xtask sim`: searches for a run in which a promise is broken.

use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use lockkeeper::simulation::search::{Search, search};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Runs proxies, servers and clients in one thread and in virtual time, and checks what clients are told.
///
/// Each seed is one run, and the same seed gives the same run. Ends with exit code 1 at the first promise that is
/// broken, after it has looked for a smaller run that breaks it as well.
#[derive(Parser)]
#[command(name = "sim", bin_name = "cargo xtask sim")]
struct Args {
    /// Search for this many minutes of processor time. On a busy machine that takes longer.
    #[arg(long, value_name = "M", conflicts_with = "seeds")]
    minutes: Option<f64>,
    /// How many seeds to run. Without this and --minutes: one if --seed is given, and 100 otherwise.
    #[arg(long, value_name = "N")]
    seeds: Option<u64>,
    /// The first seed; the next ones are each one higher. Chosen at random where it is left out.
    #[arg(long, value_name = "S")]
    seed: Option<u64>,
    /// Print all that happens in the run, not only the last of it.
    #[arg(long)]
    all: bool,
    /// Print what the proxies log in the run that fails: in the smallest one that was found, unless --no-shrink is given.
    #[arg(long)]
    log: bool,
    /// Print the run that fails as it was found, and look for no smaller one.
    #[arg(long)]
    no_shrink: bool,
}

const DEFAULT_SEEDS: u64 = 100;

fn main() -> ExitCode {
    let args = Args::parse();
    let seeds = args.seeds.unwrap_or(match (args.minutes, args.seed) {
        (Some(_), _) => u64::MAX,
        (None, Some(_)) => 1,
        (None, None) => DEFAULT_SEEDS,
    });
    let keeps = search(&Search {
        first: args.seed.unwrap_or_else(|| rand::random_range(1..1_000_000_000)),
        seeds,
        limit: args.minutes.map_or(Duration::MAX, |minutes| Duration::from_secs_f64(minutes * 60.0)),
        tells_all: args.all,
        tells_each: args.seed.is_some() && seeds <= 10,
        logs: args.log,
        shrinks: !args.no_shrink,
    });
    if keeps { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
