//! `policy bench`: what the calls of a policy cost.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;
use serde_json::json;

use super::scenario::source::{self, RequestArgs};
use super::{tools, trial};
use crate::cli::failure::Failure;
use crate::cli::output;

/// The runs go on for this long, so that the times of a few calls mean something.
const LEAST: Duration = Duration::from_secs(1);

/// The arguments of `policy bench`.
#[derive(Args, Debug)]
pub struct BenchArgs {
    /// The policy: the folder of its crate, a component file, or builtin:NAME
    #[arg(value_name = "POLICY")]
    policy: String,
    #[command(flatten)]
    requests: RequestArgs,
    /// The settings as JSON, or @FILE [default: those of the scenario or the recording]
    #[arg(long, value_name = "JSON")]
    settings: Option<String>,
    /// Exit with 7 if a call uses more fuel than this
    #[arg(long, value_name = "FUEL")]
    max_fuel: Option<u64>,
}

/// What the calls of a hook cost.
#[derive(Serialize)]
struct Row {
    hook: &'static str,
    /// How many calls were made in one run.
    calls: usize,
    fuel_p50: u64,
    fuel_max: u64,
    us_p50: f64,
    us_p99: f64,
}

/// Runs `policy bench`.
pub fn run(args: &BenchArgs, as_json: bool) -> Result<(), Failure> {
    let given = args.settings.as_deref().map(trial::settings).transpose()?;
    let candidate = source::candidate(&args.policy, given.clone().unwrap_or_default())?;
    let mut costs: BTreeMap<&'static str, Vec<(u64, f64)>> = BTreeMap::new();
    let (mut requests, mut runs, mut id) = (0, 0, String::new());
    let sources = source::sources(&args.policy, &args.requests)?;
    let began = Instant::now();
    while runs == 0 || began.elapsed() < LEAST {
        for source in &sources {
            let alone = tools::Alone::measured(source.limits.clone())?;
            let settings = source.settings.as_ref().filter(|_| given.is_none());
            let policy = alone.load(&candidate.with(settings))?;
            // Those of the checks.
            alone.take_costs();
            policy.run(&source.load);
            for cost in alone.take_costs() {
                costs.entry(cost.hook.as_str()).or_default().push((cost.fuel, cost.us));
            }
            requests += source.load.requests.len();
            id = policy.id().to_owned();
        }
        runs += 1;
    }
    let rows: Vec<Row> = costs.into_iter().map(|(hook, costs)| row(hook, costs, runs)).collect();
    let requests = requests / runs;
    match as_json {
        true => output::json(&json!({"policy": id, "requests": requests, "hooks": rows})),
        false => print(&id, requests, &rows),
    }
    let over = |row: &&Row| args.max_fuel.is_some_and(|max| row.fuel_max > max);
    match rows.iter().find(over) {
        None => Ok(()),
        Some(row) => Err(Failure::Unmet(format!(
            "a call of {} uses {} fuel, which is over --max-fuel",
            row.hook, row.fuel_max
        ))),
    }
}

/// `costs`: the fuel and the time of each call.
fn row(hook: &'static str, costs: Vec<(u64, f64)>, runs: usize) -> Row {
    let (mut fuel, mut us): (Vec<u64>, Vec<f64>) = costs.into_iter().unzip();
    fuel.sort_unstable();
    us.sort_unstable_by(f64::total_cmp);
    let at = |part: f64| ((fuel.len() - 1) as f64 * part).round() as usize;
    Row {
        hook,
        calls: fuel.len() / runs,
        fuel_p50: fuel[at(0.5)],
        fuel_max: fuel[at(1.0)],
        us_p50: us[at(0.5)],
        us_p99: us[at(0.99)],
    }
}

fn print(id: &str, requests: usize, rows: &[Row]) {
    output::line(&format!("{id}: {requests} requests"));
    let cells = |row: &Row| {
        let Row { hook, calls, fuel_p50, fuel_max, us_p50, us_p99 } = row;
        let us = |us: &f64| format!("{us:.1}");
        let [calls, fuel_p50, fuel_max] = [calls.to_string(), fuel_p50.to_string(), fuel_max.to_string()];
        vec![(*hook).to_owned(), calls, fuel_p50, fuel_max, us(us_p50), us(us_p99)]
    };
    let headings = ["HOOK", "CALLS", "FUEL P50", "MAX", "TIME P50 US", "P99"];
    output::table(&headings, &rows.iter().map(cells).collect::<Vec<_>>());
    if rows.iter().any(|row| row.hook == "plan" && row.calls < requests) {
        output::line("plans of equal requests are remembered, so there are fewer calls than requests");
    }
}
