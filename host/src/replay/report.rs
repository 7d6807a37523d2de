//! Two runs side by side.

use std::collections::BTreeMap;

use serde::Serialize;

use super::diff::PlanDiff;
use super::load::Load;
use super::plans::Plans;
use super::world::Run;

/// The quantiles at which a distribution of waits is given.
const POINTS: [f64; 11] = [0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 0.999, 1.0];

/// What the candidate changes.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// How long the recording is, in milliseconds.
    pub span_ms: u64,
    /// How the plans differ.
    #[serde(flatten)]
    pub plans: PlanDiff,
    /// How many leases were held at the same time in the candidate's run, although the recorded policy excludes that.
    pub overlaps: u64,
    /// Some of them, as pairs of resources.
    pub overlap_examples: Vec<[String; 2]>,
    /// The requests as they were recorded.
    pub recorded: BTreeMap<String, usize>,
    /// The recorded policy, in virtual time.
    pub before: Side,
    /// The candidate.
    pub after: Side,
    /// The waits, by group. The first group has all requests.
    pub groups: Vec<Group>,
    /// What a reader has to know of the recording.
    pub notes: Vec<String>,
    /// The conditions by which the candidate fails, in words.
    pub failed: Vec<String>,
}

/// The run of one policy.
#[derive(Clone, Debug, Serialize)]
pub struct Side {
    /// The policy and the beginning of its digest.
    pub policy: String,
    /// What became of the requests.
    pub outcomes: BTreeMap<&'static str, usize>,
    /// How many calls of the policy failed, by hook and kind.
    pub faults: BTreeMap<String, u64>,
    /// The first fault, in words.
    pub fault: Option<String>,
    /// Leases that ended while their holders still used them.
    pub outlived: u64,
    /// Jain's index of the groups' shares of granted requests: 1 if all groups get the same share of what they ask for.
    pub jain: f64,
}

/// The waits of a group of requests.
#[derive(Clone, Debug, Serialize)]
pub struct Group {
    /// The name; empty for all requests, or for those without a group.
    pub name: String,
    /// How many requests.
    pub requests: usize,
    /// The waits as they were recorded.
    pub recorded: Waits,
    /// Under the recorded policy, in virtual time.
    pub before: Waits,
    /// Under the candidate.
    pub after: Waits,
}

/// How long requests waited for their locks.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Waits {
    /// How many requests were sent.
    pub asked: usize,
    /// How many were granted.
    pub granted: usize,
    /// The median of the granted ones, in milliseconds.
    pub p50_ms: f64,
    /// The 99th percentile of the granted ones.
    pub p99_ms: f64,
    /// The longest wait, granted or not.
    pub max_ms: f64,
    /// The distribution of the granted ones at [`Waits::points`].
    pub distribution_ms: Vec<f64>,
}

impl Waits {
    /// The quantiles at which a distribution is given.
    pub fn points() -> &'static [f64] {
        &POINTS
    }

    /// The waits of requests: whether each was granted, and how long it waited, in microseconds.
    pub fn of(waits: &[Wait]) -> Waits {
        let (mut granted, mut longest_us) = (Vec::new(), 0);
        for &(is_granted, us) in waits {
            longest_us = longest_us.max(us);
            if is_granted {
                granted.push(us);
            }
        }
        granted.sort_unstable();
        let at = |part: f64| {
            let last = granted.len().saturating_sub(1);
            ms(granted.get((last as f64 * part).round() as usize).copied().unwrap_or_default())
        };
        Waits {
            asked: waits.len(),
            granted: granted.len(),
            p50_ms: at(0.5),
            p99_ms: at(0.99),
            max_ms: ms(longest_us),
            distribution_ms: POINTS.iter().map(|part| at(*part)).collect(),
        }
    }
}

fn ms(us: u64) -> f64 {
    us as f64 / 1_000.0
}

/// Why a candidate is not good enough.
#[derive(Clone, Debug, PartialEq)]
pub enum Failing {
    /// Requests exclude each other no more.
    LostExclusion,
    /// Leases were held at the same time that excluded each other before.
    Overlap,
    /// A call of the candidate failed.
    Fault,
    /// The candidate refuses what was not refused.
    Refused,
    /// The 99th percentile of a group is this many times that of the recorded policy.
    P99(f64),
}

impl Failing {
    /// Parses a condition: `lost-exclusion`, `overlap`, `fault`, `refused`, or `p99:1.2x`.
    ///
    /// # Errors
    /// It is none of these.
    pub fn parse(text: &str) -> Result<Failing, String> {
        Ok(match text {
            "lost-exclusion" => Failing::LostExclusion,
            "overlap" => Failing::Overlap,
            "fault" => Failing::Fault,
            "refused" => Failing::Refused,
            _ => {
                let factor = text.strip_prefix("p99:").and_then(|rest| rest.strip_suffix('x')?.parse().ok());
                let factor = factor.filter(|factor: &f64| factor.is_finite() && *factor > 0.0);
                Failing::P99(factor.ok_or("must be lost-exclusion, overlap, fault, refused or p99:1.2x")?)
            }
        })
    }

    /// Whether the condition is about a run: about waits, or about leases.
    pub fn is_of_a_run(&self) -> bool {
        matches!(self, Failing::Overlap | Failing::P99(_))
    }

    /// Whether the plans of the candidate fail by this condition, and how, in words.
    pub fn of_plans(&self, plans: &PlanDiff) -> Option<String> {
        match self {
            Failing::LostExclusion if plans.lost_exclusion > 0 => Some(format!(
                "pairs of resources that no longer exclude each other: {}",
                plans.lost_exclusion
            )),
            Failing::LostExclusion if plans.not_compared > 0 => Some(format!(
                "requests that a policy failed to plan, so that they were not compared: {}",
                plans.not_compared
            )),
            Failing::LostExclusion if plans.is_partial => {
                Some("not all pairs of requests were compared: there are too many".to_owned())
            }
            Failing::Refused if plans.newly_refused > 0 => Some(format!(
                "requests that the candidate refuses and the policy before it does not: {}",
                plans.newly_refused
            )),
            _ => None,
        }
    }

    /// Whether the candidate fails by this condition, and how, in words.
    pub fn of(&self, report: &Report) -> Option<String> {
        match self {
            Failing::Overlap if report.overlaps > 0 => Some(format!(
                "times that two leases were held together that excluded each other: {}",
                report.overlaps
            )),
            Failing::Fault if !report.after.faults.is_empty() => Some("the candidate has failed".to_owned()),
            Failing::P99(factor) => report.groups.iter().find_map(|group| group.is_slower(*factor)),
            _ => self.of_plans(&report.plans),
        }
    }
}

impl Group {
    /// How the group is worse off, in words, if it is. If fewer of its requests are granted, its waits say nothing.
    fn is_slower(&self, factor: f64) -> Option<String> {
        let Group { name, before, after, .. } = self;
        let name = if name.is_empty() { "all requests" } else { name };
        let share = |waits: &Waits| waits.granted as f64 / waits.asked.max(1) as f64;
        if share(after) < share(before) - SHARE {
            let (before, after) = (share(before) * 100.0, share(after) * 100.0);
            return Some(format!("of {name}, {after:.1} % are granted, and {before:.1} % before"));
        }
        // A ratio of very short waits says little.
        let (before, after) = (before.p99_ms.max(SHORT_MS), after.p99_ms);
        (after > before * factor).then(|| {
            format!(
                "the 99th percentile of {name} is {after:.1} ms, which is over {factor} times {before:.1} ms"
            )
        })
    }
}

/// By how much the granted share of a group may fall.
const SHARE: f64 = 0.01;
/// A shorter wait under the recorded policy counts as one of this length, in milliseconds.
const SHORT_MS: f64 = 1.0;

/// One policy with its answers and its run.
pub struct Replayed<'a> {
    /// The policy and the beginning of its digest.
    pub id: String,
    /// Its answers.
    pub plans: &'a Plans,
    /// Its run.
    pub run: &'a Run,
}

impl Report {
    /// Compares two runs. `group`: the group of each request, by its place.
    pub fn new(
        load: &Load,
        before: &Replayed<'_>,
        after: &Replayed<'_>,
        group: impl Fn(usize) -> String,
        notes: Vec<String>,
    ) -> Report {
        let groups = Groups::of(load, group);
        let rows = [groups.waits(before.run), groups.waits(after.run), groups.recorded(load)];
        let all = |n: usize| rows[n].iter().flatten().copied().collect::<Vec<_>>();
        let of_all = (String::new(), load.requests.len(), [all(0), all(1), all(2)]);
        let of_each = groups
            .names
            .iter()
            .enumerate()
            .filter(|_| groups.names.len() > 1)
            .map(|(at, (name, count))| (name.clone(), *count, [0, 1, 2].map(|n| rows[n][at].clone())));
        let told = |(name, requests, [before, after, recorded]): (String, usize, [Vec<Wait>; 3])| Group {
            name,
            requests,
            recorded: Waits::of(&recorded),
            before: Waits::of(&before),
            after: Waits::of(&after),
        };
        let resource = |n: usize| load.requests[n].request.resource.clone();
        let overlaps = &after.run.overlaps;
        let mut recorded = BTreeMap::new();
        load.requests.iter().for_each(|asked| *recorded.entry(asked.outcome.clone()).or_default() += 1);
        Report {
            plans: PlanDiff::new(load, before.plans, after.plans),
            span_ms: load.requests.last().map_or(0, |last| last.at_us / 1_000),
            overlaps: overlaps.count,
            overlap_examples: overlaps.examples.iter().map(|(a, b)| [resource(*a), resource(*b)]).collect(),
            recorded,
            before: side(before, &rows[0]),
            after: side(after, &rows[1]),
            groups: std::iter::once(of_all).chain(of_each).map(told).collect(),
            notes,
            failed: Vec::new(),
        }
    }
}

/// Whether a request was granted, and how long it waited, in microseconds.
type Wait = (bool, u64);

/// The groups of the requests.
struct Groups {
    /// Their names, and how many recorded requests each has.
    names: Vec<(String, usize)>,
    /// The group of each request of the load, as a place in `names`.
    of: Vec<usize>,
}

impl Groups {
    fn of(load: &Load, group: impl Fn(usize) -> String) -> Groups {
        let all: Vec<String> = (0..load.requests.len()).map(group).collect();
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        all.iter().for_each(|name| *counts.entry(name).or_default() += 1);
        let places: BTreeMap<&str, usize> = counts.keys().enumerate().map(|(at, name)| (*name, at)).collect();
        let of = all.iter().map(|name| places[name.as_str()]).collect();
        Groups { names: counts.into_iter().map(|(name, count)| (name.to_owned(), count)).collect(), of }
    }

    /// The waits of each group in a run.
    fn waits(&self, run: &Run) -> Vec<Vec<Wait>> {
        self.each(run.done.iter().map(|done| (done.n, (done.outcome == "granted", done.waited_us))))
    }

    /// The recorded waits of each group.
    fn recorded(&self, load: &Load) -> Vec<Vec<Wait>> {
        let asked = load.requests.iter().enumerate();
        self.each(asked.map(|(n, asked)| (n, (asked.outcome == "granted", asked.waited_us))))
    }

    fn each(&self, waits: impl Iterator<Item = (usize, Wait)>) -> Vec<Vec<Wait>> {
        let mut each = vec![Vec::new(); self.names.len()];
        waits.for_each(|(n, wait)| each[self.of[n]].push(wait));
        each
    }
}

/// `waits`: those of each group.
fn side(tried: &Replayed<'_>, waits: &[Vec<Wait>]) -> Side {
    let mut outcomes = BTreeMap::new();
    tried.run.done.iter().for_each(|done| *outcomes.entry(done.outcome).or_default() += 1);
    let planned = tried.plans.faults.iter().map(|(kind, count)| (format!("plan: {kind}"), *count));
    let others = tried.run.faults.iter().map(|((hook, kind), count)| (format!("{hook}: {kind}"), *count));
    let share = |waits: &Vec<Wait>| {
        waits.iter().filter(|(is_granted, _)| *is_granted).count() as f64 / waits.len().max(1) as f64
    };
    let shares: Vec<f64> = waits.iter().map(share).collect();
    Side {
        policy: tried.id.clone(),
        outcomes,
        faults: planned.chain(others).collect(),
        fault: tried.plans.fault.clone().or_else(|| tried.run.fault.clone()),
        outlived: tried.run.outlived,
        jain: jain(&shares),
    }
}

/// Jain's index of fairness: 1 if all shares are equal, and 1 by their number if one has all.
pub fn jain(shares: &[f64]) -> f64 {
    let (sum, squares) = (shares.iter().sum::<f64>(), shares.iter().map(|share| share * share).sum::<f64>());
    if squares > 0.0 { sum * sum / (shares.len() as f64 * squares) } else { 1.0 }
}
