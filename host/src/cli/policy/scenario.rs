//! `policy test`: what a policy makes of the requests of scenario files.
//!
//! | what | file |
//! | --- | --- |
//! | the format of a scenario file | `file` |
//! | bounds, such as `"<20ms"` | `bound` |
//! | the requests, as a run sends them | `load` |
//! | plans and outcomes | `check` |
//! | properties | `properties` |
//! | finds and reads scenario files and recordings | `source` |

use std::path::PathBuf;

use clap::Args;
use serde::Serialize;
use serde_json::json;

use super::{tools, trial};
use crate::cli::failure::Failure;
use crate::cli::output;
use crate::config::Limits;
use crate::policy::PlanRequest;

mod bound;
mod check;
mod file;
mod load;
mod properties;
pub mod source;

use check::{Became, Check};
use file::File;

/// The arguments of `policy test`.
#[derive(Args, Debug)]
pub struct TestArgs {
    /// The policy: the folder of its crate, a component file, or builtin:NAME
    #[arg(value_name = "POLICY")]
    policy: String,
    /// Scenario files, or folders of them [default: the folder `scenarios` beside the component, or in the crate]
    #[arg(value_name = "SCENARIO")]
    scenarios: Vec<PathBuf>,
    /// The settings as JSON, or @FILE, for scenarios without settings
    #[arg(long, value_name = "JSON", default_value = "{}")]
    settings: String,
}

/// What came of a scenario.
#[derive(Serialize)]
struct Tested {
    file: PathBuf,
    about: Option<String>,
    policy: String,
    checks: Vec<Check>,
    requests: Vec<Became>,
    /// The first fault of the policy, in words.
    fault: Option<String>,
}

/// Runs `policy test`.
pub fn run(args: &TestArgs, as_json: bool) -> Result<(), Failure> {
    let files = source::files(&args.policy, &args.scenarios)?;
    let settings = trial::settings(&args.settings)?;
    let candidate = source::candidate(&args.policy, settings)?;
    let alone = tools::Alone::new(Limits::default())?;
    let mut tested = Vec::new();
    for path in files {
        let file = source::read(&path)?;
        let policy = alone.load(&candidate.with(file.settings.as_ref()))?;
        let done = test(&policy, file, path.clone()).map_err(|why| source::wrong(&path, &why))?;
        if !as_json {
            print(&done);
        }
        tested.push(done);
    }
    let checks = || tested.iter().flat_map(|tested| &tested.checks);
    let (all, failed) = (checks().count(), checks().filter(|check| !check.is_met).count());
    match as_json {
        true => output::json(&json!({"scenarios": tested, "checks": all, "failed": failed})),
        false => output::line(&format!("\nscenarios: {}, checks: {all}, failed: {failed}", tested.len())),
    }
    match failed {
        0 => Ok(()),
        _ => Err(Failure::Unmet(format!("{failed} of {all} checks failed"))),
    }
}

fn test(policy: &tools::Loaded, file: File, path: PathBuf) -> Result<Tested, String> {
    check::expectations(&file)?;
    let script = load::script(&file)?;
    let mut checks = check::plans(&file, |request| policy.plan(request))?;
    let (mut requests, mut fault) = (Vec::new(), None);
    if !file.requests.is_empty() {
        let (plans, run) = policy.run(&script.load);
        checks.append(&mut check::outcomes(&file, &script, &run)?);
        requests = check::became(&file, &script, &run);
        fault = plans.fault.or(run.fault);
    }
    let mut asked: Vec<PlanRequest> =
        script.load.requests.iter().map(|arrival| arrival.request.clone()).collect();
    for case in &file.plan {
        asked.push(load::planned(case)?);
    }
    checks.extend(check::fault(&file, fault.clone()));
    checks.append(&mut properties::check(&file.properties, &asked, |request| policy.plan(request)));
    if checks.is_empty() {
        return Err("it checks nothing: add [[expect]], [[plan]] or [properties]".to_owned());
    }
    let File { about, .. } = file;
    Ok(Tested { file: path, about, policy: policy.id().to_owned(), checks, requests, fault })
}

fn print(tested: &Tested) {
    let about = tested.about.as_ref().map(|about| format!(": {about}")).unwrap_or_default();
    output::line(&format!("{}{about}", tested.file.display()));
    for Check { what, found, is_met } in &tested.checks {
        output::line(&format!("  {} {what} ({found})", if *is_met { "ok  " } else { "FAIL" }));
    }
    if let Some(fault) = &tested.fault {
        output::line(&format!("  the policy failed; the first fault: {fault}"));
    }
    let row = |Became { name, sent, outcomes, waits }: &Became| {
        let others = outcomes.iter().filter(|(outcome, _)| **outcome != "granted");
        let others: Vec<String> = others.map(|(outcome, count)| format!("{outcome} {count}")).collect();
        let ms = |ms: f64| format!("{ms:.1}");
        let mut row = vec![format!("  {name}"), sent.to_string(), waits.granted.to_string()];
        row.extend([ms(waits.p50_ms), ms(waits.p99_ms), ms(waits.max_ms), others.join(", ")]);
        row
    };
    let rows: Vec<Vec<String>> = tested.requests.iter().map(row).collect();
    if !rows.is_empty() {
        let headings = ["  REQUESTS", "SENT", "GRANTED", "WAIT P50 MS", "P99", "MAX", "OTHER OUTCOMES"];
        output::table(&headings, &rows);
    }
}
