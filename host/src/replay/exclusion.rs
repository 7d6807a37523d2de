//! Finds requests that exclude each other under one policy but not under another.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::load::Load;
use super::plans::Plans;
use crate::lock::{Key, Mode, Primitive};
use crate::policy::{Plan, PlanRequest};

/// How many pairs of kinds of requests are compared for one key. With more, the counts are lower bounds.
const COMPARED: usize = 1_000_000;
/// How many pairs of kinds are compared in all, and how many of these are kept.
const COMPARED_IN_ALL: usize = 50_000_000;
const KEPT: usize = 1_000_000;
/// How many pairs are kept as examples.
const EXAMPLES: usize = 10;

/// The difference between two policies.
#[derive(Debug)]
pub struct Exclusion {
    /// How many pairs of resources exclude each other under the first policy and not under the second.
    pub lost: usize,
    /// Some of them.
    pub lost_examples: Vec<Pair>,
    /// How many pairs of resources exclude each other under the second policy and not under the first.
    pub new: usize,
    /// Some of them.
    pub new_examples: Vec<Pair>,
    /// Not all pairs were compared.
    pub is_partial: bool,
}

/// Two requests, and their keys under each policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pair {
    /// The resources, with what else tells the requests apart.
    pub names: [String; 2],
    /// The keys under the first policy, of each.
    pub before: [String; 2],
    /// The keys under the second policy, of each.
    pub after: [String; 2],
}

/// Whether a plan keeps any other holder from its keys.
fn is_strict(plan: &Plan) -> bool {
    !plan.any || plan.keys.len() == 1
}

/// Whether two holders by these plans cannot be at the same time.
pub fn conflict(a: &Plan, b: &Plan) -> bool {
    let is_beside = match (a.mode, b.mode) {
        (Mode::Shared, Mode::Shared) => true,
        (Mode::Permits { count, limit }, Mode::Permits { count: other, limit: other_limit }) => {
            u64::from(count) + u64::from(other) <= u64::from(limit.min(other_limit))
        }
        _ => false,
    };
    // A version has no holder.
    let has_holders = |plan: &Plan| plan.primitive != Primitive::Version;
    let is_beside = is_beside || !has_holders(a) || !has_holders(b);
    !is_beside && is_strict(a) && is_strict(b) && a.keys.iter().any(|key| b.keys.contains(key))
}

/// Whether request `n` cannot hold its lease while `m` holds its own, by these plans.
pub(super) fn excludes(load: &Load, plans: &Plans, n: usize, m: usize) -> bool {
    let (Some(a), Some(b)) = (plans.all[n].plan(), plans.all[m].plan()) else { return false };
    let is_own = a.reentrant && load.requests[n].request.owner == load.requests[m].request.owner;
    !is_own && conflict(a, b)
}

/// Requests that have equal plans under both policies.
struct Kind<'a> {
    /// The first of them.
    n: usize,
    /// Their resources.
    resources: BTreeSet<&'a str>,
    before: &'a Plan,
    after: &'a Plan,
}

impl Exclusion {
    /// Compares the plans of two policies for the same requests.
    pub fn between(load: &Load, before: &Plans, after: &Plans) -> Exclusion {
        let kinds = kinds(load, before, after);
        let (lost, partial) = pairs(&kinds, |kind| kind.before, |kind| kind.after);
        let (new, also_partial) = pairs(&kinds, |kind| kind.after, |kind| kind.before);
        let (lost, lost_examples) = told(load, &kinds, &lost);
        let (new, new_examples) = told(load, &kinds, &new);
        Exclusion { lost, lost_examples, new, new_examples, is_partial: partial || also_partial }
    }
}

fn kinds<'a>(load: &'a Load, before: &'a Plans, after: &'a Plans) -> Vec<Kind<'a>> {
    let mut places = HashMap::new();
    let mut kinds: Vec<Kind<'a>> = Vec::new();
    for (n, (before, after)) in before.all.iter().zip(&after.all).enumerate() {
        let (Some(before), Some(after)) = (before.plan(), after.plan()) else { continue };
        let place = *places.entry((shape(before), shape(after))).or_insert_with(|| {
            kinds.push(Kind { n, resources: BTreeSet::new(), before, after });
            kinds.len() - 1
        });
        kinds[place].resources.insert(&load.requests[n].request.resource);
    }
    kinds
}

/// What decides whom a plan excludes.
fn shape(plan: &Plan) -> (Vec<Key>, bool, Primitive, (u8, u32, u32)) {
    let mode = match plan.mode {
        Mode::Exclusive => (0, 0, 0),
        Mode::Shared => (1, 0, 0),
        Mode::Permits { count, limit } => (2, count, limit),
    };
    (plan.keys.to_vec(), plan.any, plan.primitive, mode)
}

/// The pairs of kinds that are in conflict by `one` and not by `other`, and whether some were not compared.
fn pairs<'a>(
    kinds: &[Kind<'a>],
    one: impl Fn(&Kind<'a>) -> &'a Plan,
    other: impl Fn(&Kind<'a>) -> &'a Plan,
) -> (BTreeSet<(usize, usize)>, bool) {
    let mut by_key: BTreeMap<&Key, Vec<usize>> = BTreeMap::new();
    for (n, kind) in kinds.iter().enumerate() {
        one(kind).keys.iter().for_each(|key| by_key.entry(key).or_default().push(n));
    }
    let (mut found, mut is_partial, mut in_all) = (BTreeSet::new(), false, 0);
    for group in by_key.values() {
        let mut compared = 0;
        'group: for (at, a) in group.iter().enumerate() {
            // A kind excludes itself: two of its requests.
            for b in &group[at..] {
                (compared, in_all) = (compared + 1, in_all + 1);
                if compared > COMPARED || in_all > COMPARED_IN_ALL || found.len() >= KEPT {
                    is_partial = true;
                    break 'group;
                }
                let (a, b) = (*a.min(b), *a.max(b));
                if conflict(one(&kinds[a]), one(&kinds[b])) && !conflict(other(&kinds[a]), other(&kinds[b])) {
                    found.insert((a, b));
                }
            }
        }
    }
    (found, is_partial)
}

/// How many pairs of resources these are, and some examples. A pair counts once for each pair of kinds that it has.
fn told(load: &Load, kinds: &[Kind<'_>], pairs: &BTreeSet<(usize, usize)>) -> (usize, Vec<Pair>) {
    let count = |(a, b): &(usize, usize)| {
        let (one, other) = (kinds[*a].resources.len(), kinds[*b].resources.len());
        if a == b { one * (one + 1) / 2 } else { one * other }
    };
    let example = |(a, b): &(usize, usize)| {
        let (a, b) = (&kinds[*a], &kinds[*b]);
        Pair {
            names: [a, b].map(|kind| in_words(&load.requests[kind.n].request)),
            before: [keys(a.before), keys(b.before)],
            after: [keys(a.after), keys(b.after)],
        }
    };
    (pairs.iter().map(count).sum(), pairs.iter().take(EXAMPLES).map(example).collect())
}

/// The resource of a request, with its labels and its mode.
pub fn in_words(request: &PlanRequest) -> String {
    let mut more: Vec<String> =
        request.labels.iter().map(|(name, value)| format!("{name}={value}")).collect();
    match request.mode {
        Mode::Exclusive => {}
        Mode::Shared => more.push("shared".to_owned()),
        Mode::Permits { count, .. } => more.push(format!("{count} permits")),
    }
    match more.is_empty() {
        true => request.resource.clone(),
        false => format!("{} ({})", request.resource, more.join(", ")),
    }
}

/// The names of a plan's keys, in words.
fn key_names(plan: &Plan) -> String {
    let keys: Vec<&str> = plan.keys.iter().map(Key::as_str).collect();
    keys.join(if plan.any { " or " } else { " and " })
}

/// The keys of a plan and how they are held, in words.
fn keys(plan: &Plan) -> String {
    let keys = key_names(plan);
    let how = match plan.mode {
        Mode::Exclusive => String::new(),
        Mode::Shared => ", shared".to_owned(),
        Mode::Permits { count, limit } => format!(", {count} of {limit} permits"),
    };
    format!("{keys}{how} by {}", plan.primitive.as_str())
}

/// Leases that were held at the same time, although another policy excludes that.
#[derive(Debug, Default)]
pub struct Overlaps {
    /// How many pairs of leases.
    pub count: u64,
    /// Some of the pairs of requests.
    pub examples: Vec<(usize, usize)>,
    /// The requests that hold a lease now, under each key that the other policy gives them.
    held: HashMap<Key, Vec<usize>>,
}

impl Overlaps {
    /// The same, with the requests of the load in the examples.
    pub(super) fn between(self, of: impl Fn(usize) -> usize) -> Overlaps {
        Overlaps { examples: self.examples.iter().map(|(a, b)| (of(*a), of(*b))).collect(), ..self }
    }

    /// A request begins to use its lease. `plan`: the plan of the other policy for it. `excludes`: whether that policy keeps
    /// it and another request apart.
    pub(super) fn begin(&mut self, n: usize, plan: &Plan, excludes: impl Fn(&usize) -> bool) {
        let mut beside = BTreeSet::new();
        for key in &*plan.keys {
            let held = self.held.entry(key.clone()).or_default();
            beside.extend(held.iter().copied().filter(&excludes));
            held.push(n);
        }
        self.count += beside.len() as u64;
        let room = EXAMPLES.saturating_sub(self.examples.len());
        self.examples.extend(beside.into_iter().take(room).map(|m| (m, n)));
    }

    /// A request no longer uses its lease.
    pub(super) fn end(&mut self, n: usize, plan: &Plan) {
        for key in &*plan.keys {
            if let Some(held) = self.held.get_mut(key) {
                held.retain(|m| *m != n);
                if held.is_empty() {
                    self.held.remove(key);
                }
            }
        }
    }
}
