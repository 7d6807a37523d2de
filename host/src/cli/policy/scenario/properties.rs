//! Properties: what must hold for all requests of a scenario, and for variations of them.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use super::check::Check;
use super::file::{Part, Properties};
use crate::lock::{Key, Mode};
use crate::policy::{Plan, PlanRequest};
use crate::replay::{Planned, conflict, in_words};

/// The most requests that a property is checked with.
const MOST: usize = 10_000;
/// How many values of each label are tried at most.
const VALUES: usize = 32;

/// A request with its plan.
type Asked = (PlanRequest, Arc<Plan>);

/// Checks the properties. `requests`: those of the scenario; `plan` asks the policy.
pub fn check(
    properties: &Properties,
    requests: &[PlanRequest],
    plan: impl Fn(&PlanRequest) -> Planned,
) -> Vec<Check> {
    let Properties { never_share, always_exclude, keys_ignore } = properties;
    let mut checks = Vec::new();
    if never_share.is_empty() && always_exclude.is_empty() && keys_ignore.is_empty() {
        return checks;
    }
    let (requests, mut is_cut) = distinct(requests);
    let values = values(&requests);
    let (varied, also_cut) = with_each_label(&requests, &values);
    is_cut |= also_cut;
    let mut failed = None;
    let mut asked: Vec<Asked> = Vec::new();
    for request in varied {
        match plan(&request) {
            Planned::Plan(plan) => asked.push((request, plan)),
            Planned::Refused(_) => {}
            Planned::Fault => {
                failed = failed.or_else(|| Some(format!("the policy fails for {}", in_words(&request))));
            }
        }
    }
    let of = |name: &str, part: &Part, fault: Option<String>| {
        let fault = fault.or_else(|| failed.clone());
        let fault = fault.or_else(|| asked.is_empty().then(|| "no request has a plan".to_owned()));
        let cut = || {
            format!("not all requests were tried: there are more than {MOST}, or {VALUES} values of a label")
        };
        let fault = fault.or_else(|| is_cut.then(cut));
        let found = fault.clone().unwrap_or_else(|| format!("{} requests", asked.len()));
        Check { what: format!("{name} {}", String::from(part.clone())), found, is_met: fault.is_none() }
    };
    for part in never_share {
        checks.push(of("never_share", part, shared(&asked, part, &values, &plan)));
    }
    for part in always_exclude {
        checks.push(of("always_exclude", part, beside_each_other(&asked, part)));
    }
    for part in keys_ignore {
        checks.push(of("keys_ignore", part, dependent(&asked, part, &values, &plan)));
    }
    checks
}

/// The requests without those that differ in nothing but their owner and seed, and whether there are too many.
fn distinct(requests: &[PlanRequest]) -> (Vec<PlanRequest>, bool) {
    let mut seen = BTreeSet::new();
    let is_new = |request: &&PlanRequest| {
        let PlanRequest { resource, mode, ttl_ms, wait_ms, labels, http, .. } = request;
        seen.insert(format!("{resource:?} {mode:?} {ttl_ms:?} {wait_ms:?} {labels:?} {http:?}"))
    };
    let mut distinct: Vec<PlanRequest> = requests.iter().filter(is_new).take(MOST + 1).cloned().collect();
    let is_cut = distinct.len() > MOST;
    distinct.truncate(MOST);
    (distinct, is_cut)
}

/// The values that the requests have of each label.
fn values(requests: &[PlanRequest]) -> BTreeMap<String, BTreeSet<String>> {
    let mut values: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (name, value) in requests.iter().flat_map(|request| &request.labels) {
        let values = values.entry(name.clone()).or_default();
        if values.len() <= VALUES {
            values.insert(value.clone());
        }
    }
    values
}

/// The requests, and each of them with each value of each label; and whether there are too many.
fn with_each_label(
    requests: &[PlanRequest],
    values: &BTreeMap<String, BTreeSet<String>>,
) -> (Vec<PlanRequest>, bool) {
    let variations = requests.iter().flat_map(|request| {
        let of_label = move |(name, values): (&String, &BTreeSet<String>)| {
            values.iter().map(|value| with_label(request, name, Some(value))).collect::<Vec<_>>()
        };
        values.iter().flat_map(of_label).collect::<Vec<_>>()
    });
    let all: Vec<PlanRequest> = requests.iter().cloned().chain(variations).take(MOST * 4).collect();
    let (distinct, is_cut) = distinct(&all);
    (distinct, is_cut || all.len() == MOST * 4 || values.values().any(|values| values.len() > VALUES))
}

fn with_label(request: &PlanRequest, name: &str, value: Option<&str>) -> PlanRequest {
    let mut labels: Vec<(String, String)> =
        request.labels.iter().filter(|(known, _)| known != name).cloned().collect();
    labels.extend(value.map(|value| (name.to_owned(), value.to_owned())));
    labels.sort();
    PlanRequest { labels, ..request.clone() }
}

/// The value that a request has in this part.
fn value(request: &PlanRequest, part: &Part) -> String {
    match part {
        Part::Resource => request.resource.clone(),
        Part::Owner => request.owner.clone(),
        Part::Mode => format!("{:?}", request.mode),
        Part::Ttl => format!("{:?}", request.ttl_ms),
        Part::Wait => format!("{:?}", request.wait_ms),
        Part::Seed => request.seed.to_string(),
        Part::Label(name) => {
            let label = request.labels.iter().find(|(known, _)| known == name);
            label.map(|(_, value)| value.clone()).unwrap_or_default()
        }
    }
}

/// Two requests that differ in the part and have a key in common.
fn shared(
    asked: &[Asked],
    part: &Part,
    values: &BTreeMap<String, BTreeSet<String>>,
    plan: impl Fn(&PlanRequest) -> Planned,
) -> Option<String> {
    let mut of_key: HashMap<Key, PlanRequest> = HashMap::new();
    let mut clash = |request: &PlanRequest, plan: &Plan| {
        plan.keys.iter().find_map(|key| {
            let first = of_key.entry(key.clone()).or_insert_with(|| request.clone());
            let differs = value(first, part) != value(request, part);
            let named = |request: &PlanRequest| match part {
                Part::Label(_) | Part::Resource | Part::Mode => in_words(request),
                part => format!(
                    "{} with {} {:?}",
                    in_words(request),
                    String::from(part.clone()),
                    value(request, part)
                ),
            };
            differs.then(|| format!("{} and {} have the key {}", named(first), named(request), key.as_str()))
        })
    };
    if let Some(found) = asked.iter().find_map(|(request, plan)| clash(request, plan)) {
        return Some(found);
    }
    // The requests of a file may have one value only.
    asked.iter().flat_map(|(request, _)| variations(request, part, values)).find_map(|other| {
        let planned = plan(&other);
        clash(&other, planned.plan()?)
    })
}

/// Two requests that agree in the part and can be granted at the same time, although one of them is exclusive.
fn beside_each_other(asked: &[Asked], part: &Part) -> Option<String> {
    let mut of_value: HashMap<String, Vec<&Asked>> = HashMap::new();
    for asked in asked {
        of_value.entry(value(&asked.0, part)).or_default().push(asked);
    }
    let mut of_value: Vec<_> = of_value.into_iter().collect();
    of_value.sort_by(|one, other| one.0.cmp(&other.0));
    // Plans with the same keys exclude the same ones, so each is compared once.
    for (_, mut asked) in of_value {
        let mut seen = BTreeSet::new();
        asked.retain(|(request, plan)| {
            seen.insert(format!("{:?} {:?} {:?}", plan.keys, plan.mode, request.mode))
        });
        for (at, (request, plan)) in asked.iter().enumerate() {
            for (other, other_plan) in &asked[at..] {
                let exclusive = [request, other].iter().any(|request| request.mode == Mode::Exclusive);
                if exclusive && !conflict(plan, other_plan) {
                    return Some(format!(
                        "{} and {} can be granted together",
                        in_words(request),
                        in_words(other)
                    ));
                }
            }
        }
    }
    None
}

/// A request whose keys change with the part.
fn dependent(
    asked: &[Asked],
    part: &Part,
    values: &BTreeMap<String, BTreeSet<String>>,
    plan: impl Fn(&PlanRequest) -> Planned,
) -> Option<String> {
    for (request, before) in asked {
        for other in variations(request, part, values) {
            let planned = plan(&other);
            let Some(after) = planned.plan() else { continue };
            if after.keys != before.keys {
                let keys = |plan: &Plan| {
                    format!("{:?}", plan.keys.iter().map(|key| key.as_str()).collect::<Vec<_>>())
                };
                let (was, is) = (value(request, part), value(&other, part));
                let (before, after) = (keys(before), keys(after));
                return Some(format!(
                    "{}: {before} with {was:?}, and {after} with {is:?}",
                    in_words(request)
                ));
            }
        }
    }
    None
}

/// The request with other values of the part.
fn variations(
    request: &PlanRequest,
    part: &Part,
    values: &BTreeMap<String, BTreeSet<String>>,
) -> Vec<PlanRequest> {
    let with = |change: &dyn Fn(&mut PlanRequest)| {
        let mut other = request.clone();
        change(&mut other);
        other
    };
    match part {
        Part::Resource => vec![with(&|other| other.resource.push_str("-other"))],
        Part::Owner => vec![with(&|other| other.owner.push_str("-other"))],
        Part::Mode => vec![
            with(&|other| other.mode = Mode::Exclusive),
            with(&|other| other.mode = Mode::Shared),
            with(&|other| other.mode = Mode::Permits { count: 1, limit: 0 }),
        ],
        Part::Ttl => [None, Some(1_000), Some(7_777)].map(|ms| with(&|other| other.ttl_ms = ms)).to_vec(),
        Part::Wait => [None, Some(0), Some(7_777)].map(|ms| with(&|other| other.wait_ms = ms)).to_vec(),
        Part::Seed => [0, 1, 7, 0x8000_0001, u32::MAX].map(|seed| with(&|other| other.seed = seed)).to_vec(),
        Part::Label(name) => {
            let known = values.get(name).into_iter().flatten().map(String::as_str);
            let others = known.chain(["another"]).map(Some).chain([None]);
            others.map(|value| with_label(request, name, value)).collect()
        }
    }
}
