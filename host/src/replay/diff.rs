//! How the plans of two policies differ.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::exclusion::{Exclusion, Pair};
use super::load::Load;
use super::plans::{Planned, Plans};

/// How many examples are given of each change of the plans.
const EXAMPLES: usize = 3;

/// How the plans of two policies for the same requests differ.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct PlanDiff {
    /// How many requests were planned.
    pub requests: usize,
    /// The pairs of resources that exclude each other under the first policy, and not under the second.
    pub lost_exclusion: usize,
    /// Some of them.
    pub lost_examples: Vec<PairText>,
    /// The pairs of resources that exclude each other under the second policy, and not under the first.
    pub new_exclusion: usize,
    /// Some of them.
    pub new_examples: Vec<PairText>,
    /// Whether some pairs were not compared, so that the numbers of pairs are lower bounds.
    pub is_partial: bool,
    /// Requests that were not compared, because a policy failed to plan them.
    pub not_compared: usize,
    /// How many requests have another plan.
    pub changed_plans: usize,
    /// What differs, the most frequent change first.
    pub changes: Vec<PlanChange>,
    /// Requests that the second policy refuses, and the first does not.
    pub newly_refused: usize,
    /// Requests that the first policy refuses, and the second does not.
    pub no_longer_refused: usize,
}

/// Two requests, in words.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct PairText {
    /// The requests.
    pub requests: [String; 2],
    /// Their keys under the first policy.
    pub before: [String; 2],
    /// Their keys under the second.
    pub after: [String; 2],
}

/// A part of the plans that changes.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct PlanChange {
    /// The part of the plan.
    pub field: String,
    /// How many requests have another value.
    pub requests: usize,
    /// Examples: the resource, the old value and the new value.
    pub examples: Vec<[String; 3]>,
}

impl PlanDiff {
    /// Compares the plans of two policies for the requests of a load.
    pub fn new(load: &Load, before: &Plans, after: &Plans) -> PlanDiff {
        let exclusion = Exclusion::between(load, before, after);
        let refused = |planned: &Planned| matches!(planned, Planned::Refused(_));
        let changed_to = |was: bool, is: bool| {
            let pairs = before.all.iter().zip(&after.all);
            pairs.filter(|(a, b)| refused(a) == was && refused(b) == is).count()
        };
        let failed = |planned: &Planned| matches!(planned, Planned::Fault);
        let pairs = before.all.iter().zip(&after.all);
        let not_compared = pairs.filter(|(before, after)| failed(before) || failed(after)).count();
        let (changed_plans, changes) = changes(load, before, after);
        PlanDiff {
            requests: load.requests.len(),
            lost_exclusion: exclusion.lost,
            lost_examples: exclusion.lost_examples.into_iter().map(PairText::of).collect(),
            new_exclusion: exclusion.new,
            new_examples: exclusion.new_examples.into_iter().map(PairText::of).collect(),
            is_partial: exclusion.is_partial,
            not_compared,
            changed_plans,
            changes,
            newly_refused: changed_to(false, true),
            no_longer_refused: changed_to(true, false),
        }
    }
}

impl PairText {
    fn of(pair: Pair) -> PairText {
        PairText { requests: pair.names, before: pair.before, after: pair.after }
    }
}

/// How many requests have another plan, and what differs.
fn changes(load: &Load, before: &Plans, after: &Plans) -> (usize, Vec<PlanChange>) {
    let mut found: BTreeMap<String, PlanChange> = BTreeMap::new();
    let mut changed = 0;
    for (n, (before, after)) in before.all.iter().zip(&after.all).enumerate() {
        let (Some(before), Some(after)) = (before.plan(), after.plan()) else { continue };
        if before == after {
            continue;
        }
        changed += 1;
        let resource = &load.requests[n].request.resource;
        for ((field, was), is) in before.to_json().into_iter().zip(after.to_json().into_values()) {
            if was == is {
                continue;
            }
            let new = || PlanChange { field: field.clone(), requests: 0, examples: Vec::new() };
            let change = found.entry(field.clone()).or_insert_with(new);
            change.requests += 1;
            let seen: BTreeSet<&str> = change.examples.iter().map(|example| example[0].as_str()).collect();
            if change.examples.len() < EXAMPLES && !seen.contains(resource.as_str()) {
                change.examples.push([resource.clone(), in_words(&was), in_words(&is)]);
            }
        }
    }
    let mut found: Vec<PlanChange> = found.into_values().collect();
    found.sort_by_key(|change| std::cmp::Reverse(change.requests));
    (changed, found)
}

/// A part of a plan, in words.
fn in_words(part: &Value) -> String {
    match part {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        Value::Array(all) => all.iter().map(in_words).collect::<Vec<_>>().join(" and "),
        Value::Object(all) => {
            let pairs = all.iter().map(|(name, value)| format!("{name}={}", in_words(value)));
            pairs.collect::<Vec<_>>().join(", ")
        }
        other => other.to_string(),
    }
}
