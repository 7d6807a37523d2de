//! `policy bench`: what the calls of a policy cost.

use std::collections::BTreeMap;

use clap::Args;
use serde::Serialize;
use serde_json::json;

use super::scenario::source::{self, RequestArgs};
use super::{tools, trial};
use crate::cli::failure::Failure;
use crate::cli::output;
use crate::clock;
use crate::config::Limits;

/// The runs go on for this long, in microseconds, so that the times of a few calls mean something.
const LEAST_US: u64 = 1_000_000;

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
    us_p50: u64,
    us_p99: u64,
}

/// Runs `policy bench`.
pub fn run(args: &BenchArgs, as_json: bool) -> Result<(), Failure> {
    let given = args.settings.as_deref().map(trial::settings).transpose()?;
    let candidate = source::candidate(&args.policy, given.clone().unwrap_or_default())?;
    let mut costs: BTreeMap<&'static str, Vec<(u64, u64)>> = BTreeMap::new();
    let (mut requests, mut runs, mut id, mut fault) = (0, 0, String::new(), None);
    let sources = source::sources(&args.policy, &args.requests)?;
    let limits = sources.first().map_or_else(Limits::default, |source| source.limits.clone());
    let alone = tools::Alone::measured(limits)?;
    let began = clock::now();
    while runs == 0 || clock::now().us_since(began) < LEAST_US {
        for source in &sources {
            let settings = source.settings.as_ref().filter(|_| given.is_none());
            let policy = alone.load(&candidate.with(settings))?;
            // Those of the checks.
            alone.take_costs();
            let (plans, run) = policy.run(&source.load);
            fault = fault.or(plans.fault).or(run.fault);
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
        true => output::json(&json!({"policy": id, "requests": requests, "hooks": rows, "fault": fault})),
        false => print(&id, requests, &rows),
    }
    if let Some(fault) = fault {
        return Err(Failure::Fault(format!("the policy has failed: {fault}")));
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
fn row(hook: &'static str, costs: Vec<(u64, u64)>, runs: usize) -> Row {
    let (mut fuel, mut us): (Vec<u64>, Vec<u64>) = costs.into_iter().unzip();
    fuel.sort_unstable();
    us.sort_unstable();
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
        let cells = [*calls as u64, *fuel_p50, *fuel_max, *us_p50, *us_p99].map(|cell| cell.to_string());
        std::iter::once((*hook).to_owned()).chain(cells).collect::<Vec<_>>()
    };
    let headings = ["HOOK", "CALLS", "FUEL P50", "MAX", "TIME P50 US", "P99"];
    output::table(&headings, &rows.iter().map(cells).collect::<Vec<_>>());
    if rows.iter().any(|row| row.hook == "plan" && row.calls < requests) {
        output::line("plans of equal requests are remembered, so there are fewer calls than requests");
    }
}
