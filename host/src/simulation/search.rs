//! The search: makes one run after another. If a run breaks a promise, it looks for a smaller run that breaks it as
//! well.

use std::collections::BTreeMap;
use std::panic;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use super::conditions;
use super::options::Options;
use super::world::{Failed, run};
use crate::clock;
use crate::coverage;
use crate::lock::table::simulation as table;

/// The options of a search.
pub struct Search {
    /// The first seed. Each further run uses the next higher seed.
    pub first: u64,
    /// The largest number of runs.
    pub seeds: u64,
    /// No run starts after the search has used this much processor time.
    pub limit: Duration,
    /// Print the whole history of a run, not only the part before a failure.
    pub tells_all: bool,
    /// Print the fingerprint of each run.
    pub tells_each: bool,
    /// Print the log of the proxies in the smallest run that fails.
    pub logs: bool,
    /// Look for a smaller run that also fails.
    pub shrinks: bool,
}

/// The number of runs of the lock table alone before each run of whole proxies. They take a sixth of the time.
/// Their grants are not counted.
const TABLES: u64 = 200;
const PROGRESS: Duration = Duration::from_secs(5);

/// Runs the search and prints its results. Returns whether no promise was broken.
pub fn search(search: &Search) -> bool {
    println!("the first seed is {}", search.first);
    tell_panics();
    if !meets_conditions() {
        return false;
    }
    let (began, mut told) = (worked(), worked());
    let mut total = Total::default();
    for seed in (search.first..).take(usize::try_from(search.seeds).unwrap_or(usize::MAX)) {
        if worked() - began >= search.limit {
            break;
        }
        SEED.store(seed, Ordering::Relaxed);
        if !tables_hold(seed) {
            total.print(worked() - began);
            return false;
        }
        match run(&Options { tells_all: search.tells_all, ..Options::of(seed) }) {
            Ok(report) => {
                if search.tells_each {
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
                total.print(worked() - began);
                println!("seed {seed} fails, fingerprint {:016x}", failed.fingerprint);
                let failed = if search.shrinks { shrunk(*failed) } else { *failed };
                if search.logs {
                    let log =
                        tracing_subscriber::fmt().with_env_filter("lockkeeper=debug").with_target(false);
                    log.with_timer(Virtual).with_ansi(false).init();
                    let _ = run(&failed.options);
                }
                print_failed(seed, &failed, search.shrinks);
                return false;
            }
        }
        if HAS_PANICKED.load(Ordering::Relaxed) {
            return false;
        }
        if worked() - told >= PROGRESS {
            told = worked();
            println!("{} seeds, {} grants checked", total.seeds, total.grants);
        }
    }
    total.print(worked() - began);
    true
}

/// Runs all conditions on the simulated server. Returns whether they are met.
fn meets_conditions() -> bool {
    let unmet = conditions::ALL.iter().find(|(_, meet)| panic::catch_unwind(meet).is_err());
    if let Some((name, _)) = unmet {
        println!("\nBROKEN: the condition {name} is not met: it panics as said above");
    }
    unmet.is_none()
}

/// Runs the lock table alone for this seed. Returns whether all promises are kept, and prints the events of the first
/// run that breaks one.
fn tables_hold(seed: u64) -> bool {
    let mut seeds = (0..TABLES).map(|n| seed.wrapping_mul(TABLES).wrapping_add(n));
    IS_OF_TABLE.store(true, Ordering::Relaxed);
    let failed = seeds.find(|seed| panic::catch_unwind(|| table::run(*seed, false)).is_err());
    IS_OF_TABLE.store(false, Ordering::Relaxed);
    if let Some(seed) = failed {
        drop(panic::take_hook());
        let _ = panic::catch_unwind(|| table::run(seed, true));
    }
    failed.is_none()
}

/// The seed of the current run; 0 before the first run.
static SEED: AtomicU64 = AtomicU64::new(0);

/// Whether the current run is one of the lock table alone.
static IS_OF_TABLE: AtomicBool = AtomicBool::new(false);

/// Whether the current run has panicked.
static HAS_PANICKED: AtomicBool = AtomicBool::new(false);

/// Makes a panic count as a failure, even if it ends only one task of the run.
fn tell_panics() {
    let hook = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        let seed = SEED.load(Ordering::Relaxed);
        HAS_PANICKED.store(true, Ordering::Relaxed);
        let what = if IS_OF_TABLE.load(Ordering::Relaxed) { "the lock table alone" } else { "a panic" };
        if seed > 0 {
            println!(
                "seed {seed} fails\n\nBROKEN: {what}: {info}\n\nseed {seed}: cargo xtask sim --seed {seed}"
            );
        }
        hook(info);
    }));
}

/// The processor time that the search has used. It is used instead of elapsed time, so that a search on a busy
/// machine does as much as one on a quiet machine.
fn worked() -> Duration {
    Duration::from_micros(clock::thread_us())
}

/// A timer for log lines that shows the virtual time of the run.
struct Virtual;

impl tracing_subscriber::fmt::time::FormatTime for Virtual {
    fn format_time(&self, to: &mut tracing_subscriber::fmt::format::Writer<'_>) -> std::fmt::Result {
        let since = clock::now().us_since(clock::simulated::BEGINNING);
        write!(to, "{:>12.6} s ", since as f64 / 1e6)
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
        println!(
            "{} seeds, {} grants checked in {:.0} s of one core: {:.0} a minute",
            self.seeds,
            self.grants,
            took.as_secs_f64(),
            self.grants as f64 * 60.0 / took.as_secs_f64().max(1e-3)
        );
        for (kind, count) in &self.counts {
            println!("{count:>10}  {kind}");
        }
        println!("branches of the program:");
        for (branch, times) in coverage::times() {
            println!("{times:>10}  {}", branch.name());
        }
    }
}

/// The longest search for a smaller run.
const SHRINKING: Duration = Duration::from_secs(120);

/// The number of seeds that are tried for each smaller run.
const SEEDS_EACH: u64 = 4;
const SEEDS_APART: u64 = 1 << 40;

/// The smallest run found that also breaks a promise: it has fewer clients, proxies, resources and faults.
fn shrunk(mut failed: Failed) -> Failed {
    println!("looking for a smaller run, for {} s of one core at most", SHRINKING.as_secs());
    let began = worked();
    loop {
        let mut smaller = failed.options.smaller(failed.at).into_iter().flat_map(with_other_seeds);
        match smaller
            .find_map(|options| if worked() - began < SHRINKING { run(&options).err() } else { None })
        {
            Some(smaller) => failed = *smaller,
            None => return failed,
        }
    }
}

/// The run with its own seed and with others. Leaving anything out shifts all later events, so one seed is not
/// enough.
fn with_other_seeds(options: Options) -> impl Iterator<Item = Options> {
    let seed = options.seed;
    (0..SEEDS_EACH).map(move |n| Options { seed: seed + n * SEEDS_APART, ..options.clone() })
}

fn print_failed(seed: u64, failed: &Failed, is_shrunk: bool) {
    println!("\nBROKEN: {}\n", failed.violation.0);
    println!("{}", failed.time_line);
    println!(
        "seed {seed}: cargo xtask sim --seed {seed}\n{}: {}",
        if is_shrunk { "the smallest run that was found" } else { "the run" },
        failed.options
    );
}
