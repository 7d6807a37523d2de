//! `policy replay`: what another policy would have done with recorded requests.

use std::path::PathBuf;

use clap::Args;
use serde_json::{Map, Value};

use super::compared::{self, short};
use super::{tools, trial};
use crate::cli::args;
use crate::cli::failure::Failure;
use crate::cli::output;
use crate::recording::{RecordedPolicy, Recording};
use crate::replay::{Arrivals, Failing, Group, Report, Waits, page};

/// The arguments of `policy replay`.
#[derive(Args, Debug)]
pub struct ReplayArgs {
    /// The candidate: a file, or builtin:NAME
    #[arg(value_name = "FILE")]
    candidate: String,
    /// The folder of the recording, which is recording.dir of the proxy
    #[arg(long, value_name = "DIR")]
    recording: PathBuf,
    /// The policy whose requests are replayed [default: the only one of the recording]
    #[arg(long, value_name = "NAME")]
    policy: Option<String>,
    /// The candidate's settings as JSON, or @FILE [default: those that were recorded last]
    #[arg(long, value_name = "JSON")]
    settings: Option<String>,
    /// Compare with this component instead of the one that was recorded last: a file, or builtin:NAME
    #[arg(long, value_name = "FILE")]
    against: Option<String>,
    /// The settings of --against as JSON, or @FILE [default: those that were recorded last]
    #[arg(long, value_name = "JSON", requires = "against")]
    against_settings: Option<String>,
    /// When requests arrive: open, as they were recorded; closed, each owner's next request as long after its last as it was
    #[arg(long, value_name = "HOW", value_parser = arrivals, default_value = "open")]
    arrivals: Arrivals,
    /// How long the store takes, e.g. 2ms [default: as the recorded store did]
    #[arg(long, value_name = "TIME", value_parser = args::duration_ms)]
    store: Option<u32>,
    /// What the waits are grouped by: group, the group of the recorded plan; owner; resource; or label:NAME
    #[arg(long, value_name = "WHAT", value_parser = By::parse, default_value = "group")]
    by: By,
    /// Exit with 7 if the candidate does this: lost-exclusion, overlap, fault, refused, or p99:1.2x. Several with commas
    #[arg(long, value_name = "CONDITIONS", value_parser = Failing::parse, value_delimiter = ',')]
    fail_on: Vec<Failing>,
    /// Also write the report as an HTML page with plots
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

/// What the waits are grouped by.
#[derive(Clone, Debug, PartialEq)]
enum By {
    Group,
    Owner,
    Resource,
    Label(String),
}

impl By {
    fn parse(text: &str) -> Result<By, String> {
        match text {
            "group" => Ok(By::Group),
            "owner" => Ok(By::Owner),
            "resource" => Ok(By::Resource),
            _ => match text.strip_prefix("label:") {
                Some(name) if !name.is_empty() => Ok(By::Label(name.to_owned())),
                _ => Err("must be group, owner, resource or label:NAME".to_owned()),
            },
        }
    }
}

fn arrivals(text: &str) -> Result<Arrivals, String> {
    match text {
        "open" => Ok(Arrivals::Open),
        "closed" => Ok(Arrivals::Closed),
        _ => Err("must be open or closed".to_owned()),
    }
}

/// Runs `policy replay`.
pub fn run(args: &ReplayArgs, as_json: bool) -> Result<(), Failure> {
    let recording = crate::recording::read(&args.recording, args.policy.as_deref())
        .map_err(|error| Failure::Usage(error.to_string()))?;
    let last = recording.generations.last().ok_or_else(|| {
        Failure::Usage("the recording does not say which policy planned the requests".to_owned())
    })?;
    let settings = |given: &Option<String>| match given {
        Some(text) => trial::settings(text),
        None => Ok(last.settings.clone()),
    };
    let before = match &args.against {
        Some(source) => chosen(source, settings(&args.against_settings)?)?,
        None => recorded(last)?,
    };
    let after = chosen(&args.candidate, settings(&args.settings)?)?;
    let question = tools::Replay {
        recording: &recording,
        before,
        after,
        arrivals: args.arrivals,
        store_us: args.store.map(|ms| u64::from(ms) * 1_000),
        notes: notes(&recording, args),
    };
    let by = |n: usize| group_of(&recording, &args.by, n);
    let mut report = tools::replay(question, by)?;
    report.failed = args.fail_on.iter().filter_map(|condition| condition.of(&report)).collect();
    if let Some(file) = &args.html {
        std::fs::write(file, page(&report))
            .map_err(|error| Failure::Other(format!("cannot write {}: {error}", file.display())))?;
    }
    match as_json {
        true => {
            let value = serde_json::to_value(&report).map_err(|error| Failure::Other(error.to_string()))?;
            output::json(&value);
        }
        false => print(&report),
    }
    Failure::unless_met(&report.failed)
}

fn chosen(source: &str, settings: Map<String, Value>) -> Result<tools::Candidate, Failure> {
    let (name, component) = tools::component(source)?;
    Ok(tools::Candidate { name, component, settings })
}

fn recorded(policy: &RecordedPolicy) -> Result<tools::Candidate, Failure> {
    let name = policy.id.split('@').next().unwrap_or_default().to_owned();
    Ok(tools::Candidate {
        name,
        component: super::read(&policy.component)?,
        settings: policy.settings.clone(),
    })
}

fn group_of(recording: &Recording, by: &By, n: usize) -> String {
    let ask = &recording.asks[n];
    match by {
        By::Group => ask.plan.as_ref().map(|plan| plan.group.to_string()).unwrap_or_default(),
        By::Owner => ask.owner.to_string(),
        By::Resource => ask.resource.to_string(),
        By::Label(wanted) => {
            let label = ask.labels.iter().find(|(name, _)| name == wanted);
            label.map(|(_, value)| value.to_string()).unwrap_or_default()
        }
    }
}

/// What a reader has to know of the recording.
fn notes(recording: &Recording, args: &ReplayArgs) -> Vec<String> {
    let header = &recording.header;
    let mut notes = Vec::new();
    if header.share < 1.0 {
        notes.push(format!(
            "{:.0} % of the keys of the recorded policy were recorded: waits for keys that the candidate shares among more \
             resources are too short",
            header.share * 100.0
        ));
    }
    notes.push(format!("not recorded as sent: {}", header.masked.join(", ")));
    if recording.starts > 1 && header.masked.iter().any(|what| what.contains("resource")) {
        notes.push(format!(
            "{} starts of proxies: equal names of two starts differ, because they are masked",
            recording.starts
        ));
    }
    if recording.dropped > 0 {
        notes.push(format!("{} lines are missing from the recording", recording.dropped));
    }
    if recording.generations.len() > 1 && args.against.is_none() {
        notes.push(format!(
            "the policy was replaced during the recording; all requests are replayed with {}",
            recording.generations.last().map_or("", |last| &last.id)
        ));
    }
    if recording.asks.iter().any(|ask| ask.http.as_ref().is_some_and(|http| http.had_body)) {
        notes.push(
            "the policy saw bodies of requests, which are not recorded: plans that read them differ"
                .to_owned(),
        );
    }
    if recording.store.is_empty() && args.store.is_none() {
        notes.push("the recording does not say how long the store took: 1 ms is assumed".to_owned());
    }
    notes
}

fn print(report: &Report) {
    let seconds = report.span_ms as f64 / 1_000.0;
    output::line(&format!("replayed {} requests of {seconds:.1} s", report.plans.requests));
    for note in &report.notes {
        output::line(&format!("note: {note}"));
    }
    output::line(&format!("before:    {}", report.before.policy));
    output::line(&format!("candidate: {}", report.after.policy));
    compared::exclusion(&report.plans, Some((report.overlaps, &report.overlap_examples)));
    compared::plans(&report.plans);
    output::line("\nOUTCOMES");
    outcomes(report);
    output::line("\nWAITS IN MS, OF GRANTED REQUESTS");
    let rows: Vec<Vec<String>> = report.groups.iter().map(row).collect();
    output::table(
        &[
            "GROUP",
            "REQUESTS",
            "RECORDED P50",
            "P99",
            "BEFORE P50",
            "P99",
            "MAX",
            "CANDIDATE P50",
            "P99",
            "MAX",
        ],
        &rows,
    );
    if report.groups.len() > 1 {
        let (before, after) = (report.before.jain, report.after.jain);
        output::line(&format!(
            "Jain's index of the granted shares: {before:.3} before, {after:.3} with the candidate"
        ));
    }
}

fn outcomes(report: &Report) {
    let of = |counts: &std::collections::BTreeMap<&'static str, usize>, name: &str| {
        counts.get(name).copied().unwrap_or_default().to_string()
    };
    let mut names: Vec<&str> = report.recorded.keys().map(String::as_str).collect();
    names.extend(report.before.outcomes.keys().chain(report.after.outcomes.keys()));
    names.sort_unstable();
    names.dedup();
    let row = |name: &&str| {
        let recorded = report.recorded.get(*name).copied().unwrap_or_default().to_string();
        vec![
            (*name).to_owned(),
            recorded,
            of(&report.before.outcomes, name),
            of(&report.after.outcomes, name),
        ]
    };
    let mut rows: Vec<Vec<String>> = names.iter().map(row).collect();
    let (before, after) = (report.before.outlived, report.after.outlived);
    if before + after > 0 {
        rows.push(vec![
            "lease ended in use".to_owned(),
            "-".to_owned(),
            before.to_string(),
            after.to_string(),
        ]);
    }
    output::table(&["OUTCOME", "RECORDED", "BEFORE", "CANDIDATE"], &rows);
    for side in [&report.before, &report.after] {
        for (kind, count) in &side.faults {
            output::line(&format!("fault of {}: {kind}, {count} times", side.policy));
        }
        if let Some(fault) = &side.fault {
            output::line(&format!("  the first: {fault}"));
        }
    }
}

fn row(group: &Group) -> Vec<String> {
    let name = if group.name.is_empty() { "(all)".to_owned() } else { short(&group.name) };
    let Group { recorded, before, after, .. } = group;
    let ms = |ms: f64| format!("{ms:.1}");
    let of = |waits: &Waits| [ms(waits.p50_ms), ms(waits.p99_ms), ms(waits.max_ms)];
    let mut row = vec![name, group.requests.to_string(), ms(recorded.p50_ms), ms(recorded.p99_ms)];
    row.extend(of(before));
    row.extend(of(after));
    row
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_waits_are_grouped_by_is_named() {
        assert_eq!(By::parse("label:tenant"), Ok(By::Label("tenant".to_owned())));
        assert_eq!(By::parse("group"), Ok(By::Group));
        assert!(By::parse("label:").unwrap_err().contains("label:NAME"));
    }
}
