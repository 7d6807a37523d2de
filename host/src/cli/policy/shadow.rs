//! `policy shadow`: a component is asked beside the live version of a proxy, and decides nothing.

use std::io::IsTerminal;
use std::time::Duration;

use bytes::Bytes;
use clap::Args;
use hyper::Method;
use serde_json::Value;

use super::compared;
use super::{PUSH_TIMEOUT, tools};
use crate::cli::client::{Client, encode_path};
use crate::cli::failure::Failure;
use crate::cli::{Options, args, output};
use crate::replay::{Failing, PlanDiff};

/// The arguments of `policy shadow`.
#[derive(Args, Debug)]
pub struct ShadowArgs {
    /// Name of the policy, as in config.toml
    name: String,
    /// The component: a file, or builtin:NAME. Without it, the report of the shadow that runs, or has run last
    #[arg(value_name = "FILE")]
    source: Option<String>,
    /// For which share of the keys the component is asked
    #[arg(long, value_name = "PERCENT", value_parser = args::percent, default_value = "10%", requires = "source")]
    share: f64,
    /// How long
    #[arg(long = "for", value_name = "TIME", value_parser = args::duration_ms, default_value = "10m", requires = "source")]
    length: u32,
    /// Return at once; the shadow goes on, and the command without FILE shows its report
    #[arg(long, requires = "source", conflicts_with = "fail_on")]
    detach: bool,
    /// End the shadow that runs, and show its report
    #[arg(long, conflicts_with = "source")]
    stop: bool,
    /// Exit with 7 if the component does this: lost-exclusion, refused, fault. Several with commas
    #[arg(long, value_name = "CONDITIONS", value_parser = Failing::parse, value_delimiter = ',')]
    fail_on: Vec<Failing>,
}

/// How often the proxy is asked whether the shadow is over.
const LOOK: Duration = Duration::from_secs(1);
/// How many looks in a row may fail.
const FAILURES: u32 = 5;
/// The progress is shown once in so many looks.
const PROGRESS: u64 = 10;

/// Runs `policy shadow`.
pub async fn run(args: &ShadowArgs, options: &Options) -> Result<(), Failure> {
    if args.fail_on.iter().any(Failing::is_of_a_run) {
        let why = "--fail-on: a shadow grants nothing, so it has no waits and no leases; see `policy replay`";
        return Err(Failure::Usage(why.to_owned()));
    }
    let client = Client::new(&options.admin, options)?;
    let path = format!("/v1/policies/{}/shadow", encode_path(&args.name));
    let report = match &args.source {
        None if args.stop => client.call(Method::DELETE, &path, Bytes::new(), PUSH_TIMEOUT).await?,
        None => client.get(&path).await?,
        Some(source) => {
            let component = tools::component(source)?.1.into();
            let begin = format!("{path}?share={}&for_ms={}", args.share, args.length);
            let begun = client.call(Method::PUT, &begin, component, PUSH_TIMEOUT).await?;
            if args.detach { begun } else { until_over(&client, &path).await? }
        }
    };
    let failed = failed(&report, &args.fail_on)?;
    if options.json {
        let mut report = report;
        report["failed"] = serde_json::json!(failed);
        output::json(&report);
    } else {
        print(&report)?;
    }
    Failure::unless_met(&failed)
}

/// Waits for the end of the shadow. Ctrl-C ends it.
async fn until_over(client: &Client, path: &str) -> Result<Value, Failure> {
    let shows = std::io::stderr().is_terminal();
    let brief = format!("{path}?plans=false");
    let interrupted = tokio::signal::ctrl_c();
    tokio::pin!(interrupted);
    let (mut looks, mut failures) = (0_u64, 0);
    loop {
        looks += 1;
        let looked = async {
            tokio::time::sleep(LOOK).await;
            client.get(&brief).await
        };
        let report = tokio::select! {
            _ = &mut interrupted => {
                return client.call(Method::DELETE, path, Bytes::new(), PUSH_TIMEOUT).await;
            }
            report = looked => report,
        };
        let report = match report {
            Ok(report) => report,
            Err(failure) if failures < FAILURES && failure.is_of_the_server() => {
                failures += 1;
                continue;
            }
            Err(failure) => {
                output::complain("the shadow goes on; the command without FILE shows its report");
                return Err(failure);
            }
        };
        failures = 0;
        if report["state"] != "running" {
            return client.get(path).await;
        }
        if shows && looks.is_multiple_of(PROGRESS) {
            output::complain(&progress(&report));
        }
    }
}

fn progress(report: &Value) -> String {
    let sum = |field: &str| {
        let hooks = report["hooks"].as_array().into_iter().flatten();
        hooks.filter_map(|hook| hook[field].as_u64()).sum::<u64>()
    };
    let seconds = |field: &str| report[field].as_u64().unwrap_or_default() / 1_000;
    format!(
        "{} of {} s: {} calls, {} different, {} failed (Ctrl-C ends the shadow)",
        seconds("ran_ms"),
        seconds("for_ms"),
        sum("calls"),
        sum("different"),
        sum("failed")
    )
}

fn plans(report: &Value) -> Result<PlanDiff, Failure> {
    serde_json::from_value(report["plans"].clone())
        .map_err(|error| Failure::Other(format!("the proxy's answer has no comparison of plans: {error}")))
}

/// The conditions that the component meets, in words.
fn failed(report: &Value, conditions: &[Failing]) -> Result<Vec<String>, Failure> {
    let plans = plans(report)?;
    let met = |condition: &Failing| match condition {
        Failing::Fault => report["fault"].as_str().map(|fault| format!("the component has failed: {fault}")),
        Failing::LostExclusion if report["is_partial"] == true => condition
            .of_plans(&plans)
            .or_else(|| Some("not all requests were compared: there were too many".to_owned())),
        condition => condition.of_plans(&plans),
    };
    let mut failed: Vec<String> = conditions.iter().filter_map(met).collect();
    if !conditions.is_empty() {
        let count = |hook: &Value| hook["calls"].as_u64().unwrap_or_default();
        if report["hooks"].as_array().into_iter().flatten().map(count).sum::<u64>() == 0 {
            failed.push("nothing was compared".to_owned());
        }
        if let Some(state @ ("replaced" | "failed")) = report["state"].as_str() {
            failed.push(format!("the shadow ended early: {state}"));
        }
    }
    Ok(failed)
}

fn print(report: &Value) -> Result<(), Failure> {
    let text = |field: &str| output::shown(&report[field]);
    let seconds = |field: &str| report[field].as_u64().unwrap_or_default() as f64 / 1_000.0;
    output::line(&format!(
        "shadow of {} ({} % of the keys of this proxy): {}, {:.0} of {:.0} s",
        text("policy"),
        report["share"].as_f64().unwrap_or_default(),
        text("state"),
        seconds("ran_ms"),
        seconds("for_ms")
    ));
    output::line(&format!("live:      {}\ncandidate: {}\n", text("live"), text("candidate")));
    let rows: Vec<Vec<String>> = report["hooks"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|hook| {
            let shown = |field: &str| output::shown(&hook[field]);
            vec![shown("hook"), shown("calls"), shown("different"), shown("failed"), shown("live_failed")]
        })
        .collect();
    output::table(&["HOOK", "CALLS", "DIFFERENT", "FAILED", "LIVE FAILED"], &rows);
    for hook in report["hooks"].as_array().into_iter().flatten() {
        if let [asked, live, next] = &hook["example"].as_array().cloned().unwrap_or_default()[..] {
            let [asked, live, next] = [asked, live, next].map(output::shown);
            output::line(&format!("{}, for example {asked}:", output::shown(&hook["hook"])));
            output::line(&format!("  before:    {live}\n  candidate: {next}"));
        }
    }
    if let Some(fault) = report["fault"].as_str() {
        output::line(&format!("the candidate has failed; the first fault: {fault}"));
    }
    let lacking = super::listed(&report["not_compared"], ", ");
    if !lacking.is_empty() {
        output::line(&format!("not compared, because one version does not decide it: {lacking}"));
    }
    if report["dropped"] != 0 {
        output::line(&format!(
            "not compared, because the proxy had no time for it: {} calls",
            output::shown(&report["dropped"])
        ));
    }
    let plans = plans(report)?;
    compared::exclusion(&plans, None);
    compared::plans(&plans);
    if report["is_partial"] == true {
        output::line("there were more different requests than are compared here");
    }
    Ok(())
}
