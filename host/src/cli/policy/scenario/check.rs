//! Whether a policy meets what a scenario expects.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::Value;

use super::bound::{Bound, Unit};
use super::file::{Expect, File, PlanCase};
use super::load::{self, Script};
use crate::policy::PlanRequest;
use crate::replay::{Done, OUTCOMES, Planned, Run, Waits};

/// Something that a policy meets or does not meet.
#[derive(Debug, Serialize)]
pub struct Check {
    /// What is expected.
    pub what: String,
    /// What was found.
    pub found: String,
    pub is_met: bool,
}

/// What became of the requests of a kind.
#[derive(Debug, Serialize)]
pub struct Became {
    /// The name of the kind.
    pub name: String,
    /// How many requests were sent.
    pub sent: usize,
    pub outcomes: BTreeMap<&'static str, usize>,
    #[serde(flatten)]
    pub waits: Waits,
}

/// What became of each kind of requests.
pub fn became(file: &File, script: &Script, run: &Run) -> Vec<Became> {
    let of = |(kind, requests): (usize, &super::file::Requests)| {
        let done: Vec<&Done> = run.done.iter().filter(|done| script.of[done.n].0 == kind).collect();
        let mut outcomes = BTreeMap::new();
        done.iter().for_each(|done| *outcomes.entry(done.outcome).or_default() += 1);
        let waits = waits(&done);
        Became { name: requests.name.clone(), sent: done.len(), outcomes, waits }
    };
    file.requests.iter().enumerate().map(of).collect()
}

fn waits(done: &[&Done]) -> Waits {
    Waits::of(&done.iter().map(|done| (done.outcome == "granted", done.waited_us)).collect::<Vec<_>>())
}

/// Checks the plans of a file. `plan` asks the policy.
///
/// # Errors
/// In words: what is wrong with the file.
pub fn plans(file: &File, plan: impl Fn(&PlanRequest) -> Planned) -> Result<Vec<Check>, String> {
    let of = |case: &PlanCase| {
        let request = load::planned(case)?;
        let what = format!("the plan of {}", request.resource);
        let planned = plan(&request);
        let one = |check| Ok(vec![check]);
        match (&case.refused, planned) {
            (Some(_), _) if !case.is.is_empty() => {
                Err(format!("{what}: `is` and `refused` exclude each other"))
            }
            (None, _) if case.is.is_empty() => Err(format!("{what}: it needs `is` or `refused`")),
            (Some(text), Planned::Refused(reason)) => {
                let is_met = reason.contains(&**text);
                one(Check { what: format!("{what} is refused: {text}"), found: reason.to_string(), is_met })
            }
            (Some(text), planned) => {
                let found = told(&planned);
                one(Check { what: format!("{what} is refused: {text}"), found, is_met: false })
            }
            (None, Planned::Plan(plan)) => {
                let parts = plan.to_json();
                let part = |(name, wanted): (&String, &Value)| match parts.get(name) {
                    Some(found) => Ok(Check {
                        what: format!("{what}: {name} is {wanted}"),
                        found: found.to_string(),
                        is_met: found == wanted,
                    }),
                    None => {
                        let known: Vec<&str> = parts.keys().map(String::as_str).collect();
                        Err(format!("{what}: no plan has `{name}`; it has {}", known.join(", ")))
                    }
                };
                case.is.iter().map(part).collect()
            }
            (None, planned) => {
                one(Check { what: format!("{what} is made"), found: told(&planned), is_met: false })
            }
        }
    };
    let checks: Result<Vec<Vec<Check>>, String> = file.plan.iter().map(of).collect();
    Ok(checks?.into_iter().flatten().collect())
}

fn told(planned: &Planned) -> String {
    match planned {
        Planned::Plan(plan) => Value::Object(plan.to_json()).to_string(),
        Planned::Refused(reason) => format!("refused: {reason}"),
        Planned::Fault => "the policy failed".to_owned(),
    }
}

/// Checks that the expectations name requests and outcomes that exist.
///
/// # Errors
/// In words: what is wrong with the file.
pub fn expectations(file: &File) -> Result<(), String> {
    let known: Vec<&str> = file.requests.iter().map(|requests| requests.name.as_str()).collect();
    for expect in &file.expect {
        if known.is_empty() {
            return Err("expect: there are no [[requests]]".to_owned());
        }
        if let Some(name) = expect.of.list().into_iter().flatten().find(|name| !known.contains(name)) {
            return Err(format!(
                "expect: no requests have the name `{name}`; there are {}",
                known.join(", ")
            ));
        }
        if expect.of.list().is_some_and(|names| names.is_empty()) {
            return Err("expect: `of` has no name".to_owned());
        }
        if let Some(outcome) = expect.outcomes.keys().find(|outcome| !OUTCOMES.contains(&outcome.as_str())) {
            return Err(format!("expect: `{outcome}` is no outcome; there are {}", OUTCOMES.join(", ")));
        }
    }
    Ok(())
}

/// A policy must not fail, unless the file expects that it does.
pub fn fault(file: &File, fault: Option<String>) -> Option<Check> {
    let is_expected = file.expect.iter().any(|expect| expect.outcomes.contains_key("policy_fault"));
    let found = fault.filter(|_| !is_expected)?;
    Some(Check { what: "the policy does not fail".to_owned(), found, is_met: false })
}

/// Compares the outcomes of a scenario with its expectations.
///
/// # Errors
/// In words: what is wrong with the file.
pub fn outcomes(file: &File, script: &Script, run: &Run) -> Result<Vec<Check>, String> {
    if run.done.len() > load::MOST {
        return Err(format!("requests: at most {} requests are sent; shorten `until`", load::MOST));
    }
    let checks: Result<Vec<Vec<Check>>, String> =
        file.expect.iter().map(|expect| expected(file, script, run, expect)).collect();
    Ok(checks?.into_iter().flatten().collect())
}

fn expected(file: &File, script: &Script, run: &Run, expect: &Expect) -> Result<Vec<Check>, String> {
    let named = expect.of.list();
    let is_meant = |done: &&Done| {
        let name = file.requests[script.of[done.n].0].name.as_str();
        named.as_ref().is_none_or(|names| names.contains(&name))
    };
    let done: Vec<&Done> = run.done.iter().filter(is_meant).collect();
    let name = named.as_ref().map_or_else(|| "all requests".to_owned(), |names| names.join(", "));
    let mut checks = Vec::new();
    let mut check = |figure: &str, bound: &Bound, value: f64, found: String| {
        let what = format!("{name}: {figure} {bound}");
        checks.push(Check { what, found, is_met: bound.holds(value) });
    };
    let Expect {
        of: _,
        wait_p50,
        wait_p99,
        wait_max,
        granted,
        outcomes,
        share,
        held_together,
        outlived,
        jain,
    } = expect;
    let waits = waits(&done);
    // Waits of nothing say nothing.
    let is_none = waits.granted == 0;
    for (figure, bound, ms) in [
        ("wait_p50", wait_p50, waits.p50_ms),
        ("wait_p99", wait_p99, waits.p99_ms),
        ("wait_max", wait_max, waits.max_ms),
    ] {
        match bound {
            Some(bound) if is_none && figure != "wait_max" => check(figure, bound, f64::NAN, NONE.to_owned()),
            Some(bound) => check(figure, bound, ms, format!("{ms:.1} ms")),
            None => {}
        }
    }
    let mut count = |figure: &str, bound: &Bound, count: usize| {
        let value = match bound.unit {
            Unit::Percent => count as f64 * 100.0 / done.len().max(1) as f64,
            Unit::Number | Unit::Time => count as f64,
        };
        check(figure, bound, value, format!("{count} of {}", done.len()));
    };
    if let Some(bound) = granted {
        count("granted", bound, waits.granted);
    }
    for (outcome, bound) in outcomes {
        count(outcome, bound, done.iter().filter(|done| done.outcome == outcome).count());
    }
    if let Some(bound) = outlived {
        count("outlived", bound, done.iter().filter(|done| done.is_outlived).count());
    }
    if let Some(bound) = share {
        let all = run.done.iter().filter(|done| done.outcome == "granted").count();
        let percent = waits.granted as f64 * 100.0 / all.max(1) as f64;
        check("share", bound, percent, format!("{percent:.1}%"));
    }
    if let Some(bound) = held_together {
        let most = most_together(&done);
        check("held_together", bound, most as f64, most.to_string());
    }
    if let Some(bound) = jain {
        match is_none {
            true => check("jain", bound, f64::NAN, NONE.to_owned()),
            false => {
                let jain = fairness(script, &done);
                check("jain", bound, jain, format!("{jain:.3}"));
            }
        }
    }
    match checks.is_empty() {
        true => Err("expect: it has no bound, such as wait_p99 = \"<20ms\"".to_owned()),
        false => Ok(checks),
    }
}

/// What is found where there is nothing to measure.
const NONE: &str = "none was granted";

/// The most leases that were held at the same time.
fn most_together(done: &[&Done]) -> usize {
    let granted = done.iter().filter(|done| done.outcome == "granted" && done.used_us > 0);
    let changes = granted.flat_map(|done| {
        let from = done.at_us + done.waited_us;
        // At the same moment, ends come first.
        [(from, 1), (from + done.used_us, -1)]
    });
    let mut changes: Vec<(u64, i64)> = changes.collect();
    changes.sort_unstable();
    let (mut now, mut most) = (0, 0);
    for (_, change) in changes {
        now += change;
        most = most.max(now);
    }
    usize::try_from(most).unwrap_or_default()
}

/// Jain's index of the numbers of grants of the clients.
fn fairness(script: &Script, done: &[&Done]) -> f64 {
    let mut grants: BTreeMap<(usize, u32), f64> = BTreeMap::new();
    for done in done {
        *grants.entry(script.of[done.n]).or_default() += f64::from(u8::from(done.outcome == "granted"));
    }
    crate::replay::jain(&grants.into_values().collect::<Vec<_>>())
}
