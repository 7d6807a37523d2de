//! `cargo xtask sim`: searches for a run in which a promise is broken.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use lockkeeper::clock;
use lockkeeper::lock::Instant;
use lockkeeper::simulation::options::Options;
use lockkeeper::simulation::world::{Failed, run};

/// Runs proxies, servers and clients in one thread and in virtual time, and checks what clients are told.
///
/// Each seed is one run, and the same seed gives the same run. Ends with exit code 1 at the first promise that is
/// broken, after it has looked for a smaller run that breaks it as well.
#[derive(Parser)]
#[command(name = "sim")]
struct Args {
    /// Search for so many minutes.
    #[arg(long, value_name = "M", conflicts_with = "seeds")]
    minutes: Option<f64>,
    /// Run so many seeds. One where neither this nor --minutes is given, and --seed is.
    #[arg(long, value_name = "N")]
    seeds: Option<u64>,
    /// The first seed; the next ones are each one higher. Chosen at random where it is left out.
    #[arg(long, value_name = "S")]
    seed: Option<u64>,
    /// Print all that happens, not only what came before a failure.
    #[arg(long)]
    all: bool,
    /// Print what the proxies log in the smallest run that fails.
    #[arg(long)]
    log: bool,
}

const DEFAULT_SEEDS: u64 = 100;
const PROGRESS: Duration = Duration::from_secs(5);

fn main() -> ExitCode {
    let args = Args::parse();
    let first = args.seed.unwrap_or_else(|| rand::random_range(1..1_000_000_000));
    let seeds = args.seeds.unwrap_or(match (args.minutes, args.seed) {
        (Some(_), _) => u64::MAX,
        (None, Some(_)) => 1,
        (None, None) => DEFAULT_SEEDS,
    });
    let limit = args.minutes.map_or(Duration::MAX, |minutes| Duration::from_secs_f64(minutes * 60.0));
    println!("the first seed is {first}");
    let (began, mut told) = (clock::now(), clock::now());
    let mut total = Total::default();
    for seed in (first..).take(usize::try_from(seeds).unwrap_or(usize::MAX)) {
        if elapsed(began) >= limit {
            break;
        }
        match run(&Options { tells_all: args.all, ..Options::of(seed) }) {
            Ok(report) => {
                if args.seed.is_some() && seeds <= 10 {
                    println!(
                        "seed {seed}: {} grants, fingerprint {:016x}",
                        report.grants, report.fingerprint
                    );
                }
                print!("{}", report.time_line);
                total.seeds += 1;
                total.grants += report.grants;
                for (kind, count) in report.counts {
                    *total.counts.entry(kind).or_default() += count;
                }
            }
            Err(failed) => {
                total.print(elapsed(began));
                println!(
                    "seed {seed} fails, fingerprint {:016x}; looking for a smaller run",
                    failed.fingerprint
                );
                let failed = shrunk(*failed);
                if args.log {
                    let log =
                        tracing_subscriber::fmt().with_env_filter("lockkeeper=debug").with_target(false);
                    log.with_timer(Virtual).with_ansi(false).init();
                    let _ = run(&failed.options);
                }
                print_failed(seed, &failed);
                return ExitCode::FAILURE;
            }
        }
        if elapsed(told) >= PROGRESS {
            told = clock::now();
            println!("{} seeds, {} grants checked", total.seeds, total.grants);
        }
    }
    total.print(elapsed(began));
    ExitCode::SUCCESS
}

fn elapsed(since: Instant) -> Duration {
    Duration::from_micros(clock::now().us_since(since))
}

/// The time of a run.
struct Virtual;

impl tracing_subscriber::fmt::time::FormatTime for Virtual {
    fn format_time(&self, to: &mut tracing_subscriber::fmt::format::Writer<'_>) -> std::fmt::Result {
        write!(to, "{:>12.6} s ", clock::now().0 as f64 / 1e6)
    }
}

#[derive(Default)]
struct Total {
    seeds: u64,
    grants: u64,
    counts: BTreeMap<&'static str, u64>,
}

impl Total {
    fn print(&self, took: Duration) {
        let minutes = took.as_secs_f64() / 60.0;
        let a_minute = self.grants as f64 / minutes.max(1e-6);
        println!(
            "{} seeds, {} grants checked in {:.1} min: {a_minute:.0} a minute",
            self.seeds, self.grants, minutes
        );
        for (kind, count) in &self.counts {
            println!("{count:>10}  {kind}");
        }
    }
}

/// How long a smaller run is looked for.
const SHRINKING: Duration = Duration::from_secs(120);

/// How many seeds each smaller run is tried with.
const SEEDS_EACH: u64 = 4;
const SEEDS_APART: u64 = 1 << 40;

/// The smallest run that was found to break a promise as well: fewer clients, proxies, resources and faults.
fn shrunk(mut failed: Failed) -> Failed {
    let began = clock::now();
    loop {
        let mut smaller = failed.options.smaller(failed.at).into_iter().flat_map(with_other_seeds);
        match smaller.find_map(|options| if elapsed(began) < SHRINKING { run(&options).err() } else { None })
        {
            Some(smaller) => failed = *smaller,
            None => return failed,
        }
    }
}

/// The run, and others of its kind: whatever is left out, all that follows happens at other moments.
fn with_other_seeds(options: Options) -> impl Iterator<Item = Options> {
    let seed = options.seed;
    (0..SEEDS_EACH).map(move |n| Options { seed: seed + n * SEEDS_APART, ..options.clone() })
}

fn print_failed(seed: u64, failed: &Failed) {
    println!("\nBROKEN: {}\n", failed.violation.0);
    println!("{}", failed.time_line);
    println!(
        "seed {seed}: cargo xtask sim --seed {seed}\nthe smallest run that was found: {}",
        failed.options
    );
}
