//! `policy diff`: how two policies differ.

use clap::Args;
use serde_json::{Map, Value, json};

use super::scenario::source::{self, RequestArgs, Source};
use super::{compared, tools, trial};
use crate::cli::failure::Failure;
use crate::cli::output;
use crate::config::Limits;
use crate::replay::{Failing, Load};

/// The arguments of `policy diff`.
#[derive(Args, Debug)]
pub struct DiffArgs {
    /// The policy that is compared with: the folder of its crate, a component file, or builtin:NAME
    #[arg(value_name = "BEFORE")]
    before: String,
    /// The candidate
    #[arg(value_name = "CANDIDATE")]
    candidate: String,
    #[command(flatten)]
    requests: RequestArgs,
    /// The settings of both as JSON, or @FILE [default: those of the scenarios or of the recording]
    #[arg(long, value_name = "JSON")]
    settings: Option<String>,
    /// The settings of the policy before, if they are others
    #[arg(long, value_name = "JSON")]
    before_settings: Option<String>,
    /// Exit with 7 if the candidate does this: lost-exclusion, refused, fault. Several with commas
    #[arg(long, value_name = "CONDITIONS", value_parser = Failing::parse, value_delimiter = ',')]
    fail_on: Vec<Failing>,
}

/// Runs `policy diff`.
pub fn run(args: &DiffArgs, as_json: bool) -> Result<(), Failure> {
    if args.fail_on.iter().any(Failing::is_of_a_run) {
        let why = "--fail-on: no request is run, so there are no waits and no leases; see `policy replay`";
        return Err(Failure::Usage(why.to_owned()));
    }
    let sources = source::sources(&args.candidate, &args.requests)?;
    let settings = match &args.settings {
        Some(text) => trial::settings(text)?,
        None => of_all(&sources)?,
    };
    let given = |text| trial::settings_of("--before-settings", text);
    let before_settings = args.before_settings.as_deref().map(given).transpose()?;
    let limits = sources.first().map_or_else(Limits::default, |source| source.limits.clone());
    let alone = tools::Alone::new(limits)?;
    let before_settings = before_settings.unwrap_or_else(|| settings.clone());
    let before = alone.load(&source::candidate(&args.before, before_settings)?)?;
    let after = alone.load(&source::candidate(&args.candidate, settings)?)?;
    let requests: Vec<_> = sources.into_iter().flat_map(|source| source.load.requests).collect();
    let (diff, [before_fault, fault]) = before.compared(&after, &Load::made(requests, 0, 0));
    let failed_by = |condition: &Failing| match condition {
        Failing::Fault => fault.as_ref().map(|fault| format!("the candidate has failed: {fault}")),
        condition => condition.of_plans(&diff),
    };
    let failed: Vec<String> = args.fail_on.iter().filter_map(failed_by).collect();
    let only = |one: &tools::Loaded, other: &tools::Loaded| {
        let others = other.hooks();
        one.hooks().into_iter().filter(|hook| !others.contains(hook)).collect::<Vec<_>>()
    };
    let (new, gone) = (only(&after, &before), only(&before, &after));
    if as_json {
        output::json(&json!({
            "before": before.id(),
            "candidate": after.id(),
            "new_hooks": new,
            "removed_hooks": gone,
            "plans": diff,
            "before_fault": before_fault,
            "fault": fault,
            "failed": failed,
        }));
    } else {
        output::line(&format!("before:    {}, decides {}", before.id(), before.hooks().join(", ")));
        output::line(&format!("candidate: {}, decides {}", after.id(), after.hooks().join(", ")));
        for (what, hooks) in [("newly decides", new), ("no longer decides", gone)] {
            if !hooks.is_empty() {
                output::line(&format!("the candidate {what} {}", hooks.join(", ")));
            }
        }
        compared::exclusion(&diff, None);
        compared::plans(&diff);
        for (which, fault) in [("the policy before", &before_fault), ("the candidate", &fault)] {
            if let Some(fault) = fault {
                output::line(&format!("{which} has failed; the first fault: {fault}"));
            }
        }
    }
    Failure::unless_met(&failed)
}

/// The settings that all scenarios have in common.
fn of_all(sources: &[Source]) -> Result<Map<String, Value>, Failure> {
    let mut settings = sources.iter().map(|source| source.settings.clone().unwrap_or_default());
    let first = settings.next().unwrap_or_default();
    match settings.all(|other| other == first) {
        true => Ok(first),
        false => Err(Failure::Usage(
            "the scenarios have different settings: name some of them, or give --settings".to_owned(),
        )),
    }
}
