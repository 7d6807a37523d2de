//! Asks a component what the live version was asked, and compares the answers.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt::Debug;
use std::hash::{BuildHasher, RandomState};

use serde::Serialize;

use crate::policy::{Fault, Generation, Hook, Observed, Plan, PlanError, PlanRequest};
use crate::replay::{Arrival, Load, PlanDiff, Planned, Plans, in_words};

/// How many different requests are kept, to say which of them exclude each other, and how many bytes they and their plans may
/// have.
const KEPT: usize = 10_000;
const KEPT_BYTES: usize = 32 << 20;
/// The longest text of an example, in characters.
const SHOWN: usize = 200;

/// The calls of a hook.
#[derive(Clone, Debug, Default, Serialize)]
pub struct HookDiff {
    /// The name of the hook.
    pub hook: &'static str,
    /// How many calls were compared.
    pub calls: u64,
    /// How many of these the candidate answers differently.
    pub different: u64,
    /// How many of these calls of the candidate fail.
    pub failed: u64,
    /// How many more calls of the live version failed, so that there was nothing to compare with.
    pub live_failed: u64,
    /// The first different answer: what was asked, the answer of the live version, and that of the candidate.
    pub example: Option<[String; 3]>,
}

/// How an answer compares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Compared {
    Same,
    Different,
    /// The candidate failed.
    Failed,
    /// The live version failed.
    LiveFailed,
    /// The candidate lacks the hook.
    Lacking,
}

impl Compared {
    /// The name in metrics; `None` if nothing was compared.
    pub fn as_str(self) -> Option<&'static str> {
        match self {
            Compared::Same => Some("same"),
            Compared::Different => Some("different"),
            Compared::Failed => Some("failed"),
            Compared::LiveFailed => Some("live_failed"),
            Compared::Lacking => None,
        }
    }
}

/// The answers of the two versions so far.
#[derive(Default)]
pub(super) struct Comparison {
    hooks: BTreeMap<Hook, HookDiff>,
    fault: Option<String>,
    /// Hashes of the requests that are kept.
    known: HashSet<u64>,
    hashes: RandomState,
    kept: Kept,
    bytes: usize,
    is_full: bool,
}

/// Different requests, and the answers of the two versions to them.
#[derive(Clone, Default)]
pub(super) struct Kept {
    requests: Vec<PlanRequest>,
    before: Vec<Planned>,
    after: Vec<Planned>,
}

impl Kept {
    /// How the plans differ. Takes a moment, because they are compared in pairs.
    pub fn diff(self) -> PlanDiff {
        let plans = |all| Plans { all, faults: HashMap::new(), fault: None };
        let requests = self.requests.into_iter().map(Arrival::planned).collect();
        PlanDiff::new(&Load::made(requests, 0, 0), &plans(self.before), &plans(self.after))
    }
}

impl Comparison {
    /// Asks the candidate what the live version was asked, and compares the answers.
    pub fn compare(&mut self, live: &Generation, candidate: &Generation, call: Observed) -> (Hook, Compared) {
        match call {
            Observed::Plan { request, answer } => self.plan([live, candidate], request, answer),
            Observed::Choose { queue, answer } => {
                let asked = || format!("{} waiters for {}", queue.waiters.len(), queue.key.as_str());
                self.other(Hook::Choose, answer, candidate.choose(&queue), asked)
            }
            Observed::Backoff { contention, answer } => {
                let asked = || format!("attempt {} for {}", contention.attempt, contention.key.as_str());
                self.other(Hook::Backoff, answer, candidate.backoff(&contention), asked)
            }
            Observed::Renewal { expiring, answer } => {
                let asked = || format!("{}, held for {} ms", expiring.key.as_str(), expiring.held_ms);
                self.other(Hook::Renewal, answer, candidate.renewal(&expiring), asked)
            }
            Observed::Response { request, contention, answer } => {
                let next = candidate.response(&request, &contention);
                self.other(Hook::Response, answer, next, || in_words(&request))
            }
        }
    }

    fn plan(
        &mut self,
        versions: [&Generation; 2],
        request: PlanRequest,
        answer: Result<Plan, PlanError>,
    ) -> (Hook, Compared) {
        let before = Planned::of(answer, |_| ());
        let mut fault = None;
        let after = Planned::of(versions[1].plan(&request), |failed| fault = Some(failed.to_string()));
        let compared = match (&before, &after) {
            (Planned::Fault, _) => Compared::LiveFailed,
            (_, Planned::Fault) => Compared::Failed,
            (before, after) if before == after => Compared::Same,
            _ => Compared::Different,
        };
        if let Some(fault) = fault {
            self.fault.get_or_insert_with(|| format!("{}: {fault}", in_words(&request)));
        }
        self.counts(Hook::Plan).count(compared);
        self.keep(versions, request, before, after);
        (Hook::Plan, compared)
    }

    /// Compares an answer of another hook. `asked`: what was asked, in words.
    fn other<R: PartialEq + Debug>(
        &mut self,
        hook: Hook,
        live: Option<R>,
        next: Option<Result<R, Fault>>,
        asked: impl Fn() -> String,
    ) -> (Hook, Compared) {
        let Some(next) = next else { return (hook, Compared::Lacking) };
        let (compared, example) = match (live, next) {
            (None, _) => (Compared::LiveFailed, None),
            (Some(_), Err(fault)) => {
                self.fault.get_or_insert_with(|| format!("{}: {fault}", asked()));
                (Compared::Failed, None)
            }
            (Some(live), Ok(next)) if live == next => (Compared::Same, None),
            (Some(live), Ok(next)) => (Compared::Different, Some((live, next))),
        };
        let counts = self.counts(hook);
        counts.count(compared);
        if let Some((live, next)) = example {
            let texts = || [asked(), format!("{live:?}"), format!("{next:?}")].map(|text| shortened(&text));
            counts.example.get_or_insert_with(texts);
        }
        (hook, compared)
    }

    fn counts(&mut self, hook: Hook) -> &mut HookDiff {
        let new = || HookDiff { hook: hook.as_str(), ..HookDiff::default() };
        self.hooks.entry(hook).or_insert_with(new)
    }

    /// Keeps the answers for a request, once for all requests that are alike in what the versions read.
    fn keep(&mut self, versions: [&Generation; 2], request: PlanRequest, before: Planned, after: Planned) {
        let request = PlanRequest { seed: 0, ..request };
        let hash = self.hashes.hash_one(versions.map(|version| version.as_read(&request)));
        if self.known.contains(&hash) {
            return;
        }
        let bytes = size(&request)
            + [&before, &after]
                .map(|planned| planned.plan().map_or(0, |plan| size_of_plan(plan)))
                .iter()
                .sum::<usize>();
        if self.kept.requests.len() >= KEPT || self.bytes + bytes > KEPT_BYTES {
            self.is_full = true;
            return;
        }
        self.bytes += bytes;
        self.known.insert(hash);
        // The comparison reads the name, the labels and the mode. A body may be long.
        self.kept.requests.push(PlanRequest { http: None, ..request });
        self.kept.before.push(before);
        self.kept.after.push(after);
    }

    /// The calls, by hook.
    pub fn hooks(&self) -> Vec<HookDiff> {
        self.hooks.values().cloned().collect()
    }

    /// What the comparison of the plans is made from.
    pub fn kept(&self) -> Kept {
        self.kept.clone()
    }

    /// Whether there were more different requests than are kept.
    pub fn is_full(&self) -> bool {
        self.is_full
    }

    /// The first failed call of the candidate, in words.
    pub fn fault(&self) -> Option<String> {
        self.fault.clone()
    }
}

impl HookDiff {
    fn count(&mut self, compared: Compared) {
        match compared {
            Compared::LiveFailed => self.live_failed += 1,
            compared => {
                self.calls += 1;
                self.different += u64::from(compared == Compared::Different);
                self.failed += u64::from(compared == Compared::Failed);
            }
        }
    }
}

/// About how many bytes a request takes.
fn size(request: &PlanRequest) -> usize {
    let labels: usize = request.labels.iter().map(|(name, value)| name.len() + value.len() + 48).sum();
    request.resource.len() + request.owner.len() + labels + size_of::<PlanRequest>()
}

/// About how many bytes a plan takes.
fn size_of_plan(plan: &Plan) -> usize {
    let keys: usize = plan.keys.iter().map(|key| key.as_str().len() + 32).sum();
    let labels: usize = plan.labels.iter().map(|(name, value)| name.len() + value.len() + 32).sum();
    keys + labels + plan.group.len() + size_of::<Plan>()
}

fn shortened(text: &str) -> String {
    text.chars().take(SHOWN).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Map, Value, json};

    use super::*;
    use crate::config::{EngineLimits, Limits};
    use crate::lock::Mode;
    use crate::policy::{Compiler, Engine, QueueView, WaiterView, builtin, load_file};

    fn policies<const N: usize>(all: [(&str, Value); N]) -> [Generation; N] {
        let engine = Engine::new(&EngineLimits::default(), Compiler::InProcess).unwrap();
        all.map(|(name, settings)| {
            let settings: Map<String, Value> = settings.as_object().cloned().unwrap_or_default();
            load_file("default", builtin(name).unwrap(), &settings, &engine, &Limits::default()).unwrap()
        })
    }

    fn request(resource: &str, seed: u32) -> PlanRequest {
        PlanRequest { seed, ..PlanRequest::plain(resource, "client") }
    }

    fn asked(live: &Generation, request: PlanRequest) -> Observed {
        Observed::Plan { answer: live.plan(&request), request }
    }

    #[test]
    fn each_call_is_counted_and_each_different_request_is_kept_once() {
        let [live, same, splits] = policies([
            ("default", json!({})),
            ("default", json!({})),
            ("default", json!({"separator": "+"})),
        ]);
        let mut comparison = Comparison::default();
        for seed in 0..5 {
            assert_eq!(
                comparison.compare(&live, &same, asked(&live, request("a+b", seed))).1,
                Compared::Same
            );
        }
        assert_eq!(
            comparison.compare(&live, &splits, asked(&live, request("b+c", 0))).1,
            Compared::Different
        );
        assert_eq!(
            comparison.compare(&live, &splits, asked(&live, request("c+d", 0))).1,
            Compared::Different
        );
        let hooks = comparison.hooks();
        assert_eq!((hooks[0].hook, hooks[0].calls, hooks[0].different), ("plan", 7, 2));
        let plans = comparison.kept().diff();
        assert_eq!((plans.requests, plans.changed_plans), (3, 2));
        // `b+c` and `c+d` share a key under the candidate alone.
        assert_eq!((plans.lost_exclusion, plans.new_exclusion), (0, 1));
    }

    #[test]
    fn a_refusal_and_a_choice_that_differ_are_told() {
        let [live, fair] = policies([("fair-groups", json!({})), ("fair-groups", json!({}))]);
        let waiter = |group: &str| WaiterView {
            rank: 0,
            group: group.into(),
            weight: 1,
            owner: "client".into(),
            mode: Mode::Exclusive,
            waited_ms: 1,
            labels: [].into(),
        };
        let key = crate::lock::Key::new("k").unwrap();
        let queue = QueueView { key, waiters: vec![waiter("a"), waiter("b")], groups: Vec::new(), seed: 1 };
        let chosen = fair.choose(&queue).unwrap().unwrap();
        let mut comparison = Comparison::default();
        let call = |answer| Observed::Choose { queue: queue.clone(), answer };
        assert_eq!(comparison.compare(&fair, &fair, call(Some(chosen))), (Hook::Choose, Compared::Same));
        assert_eq!(
            comparison.compare(&fair, &fair, call(Some(1 - chosen))),
            (Hook::Choose, Compared::Different)
        );
        assert_eq!(comparison.compare(&fair, &fair, call(None)), (Hook::Choose, Compared::LiveFailed));
        let hooks = comparison.hooks();
        assert_eq!((hooks[0].calls, hooks[0].different, hooks[0].live_failed), (2, 1, 1));
        assert_eq!(hooks[0].example.clone().unwrap()[0], "2 waiters for k");
        let refused = Observed::Plan {
            request: request("a", 0),
            answer: Err(PlanError::Refused { reason: "no".to_owned() }),
        };
        assert_eq!(comparison.compare(&live, &live, refused), (Hook::Plan, Compared::Different));
        assert_eq!(comparison.kept().diff().no_longer_refused, 1);
    }

    #[test]
    fn what_is_kept_is_bounded_in_number_and_in_bytes() {
        let [live] = policies([("default", json!({}))]);
        let mut comparison = Comparison::default();
        for n in 0..=KEPT {
            comparison.compare(&live, &live, asked(&live, request(&format!("orders/{n}"), 0)));
        }
        assert!(comparison.is_full());
        assert_eq!(comparison.kept().diff().requests, KEPT);
        assert_eq!(comparison.hooks()[0].calls, KEPT as u64 + 1);
        let mut comparison = Comparison::default();
        for n in 0..100 {
            let labels = vec![("label".to_owned(), "x".repeat(1 << 20))];
            let request = PlanRequest { labels, ..request(&format!("orders/{n}"), 0) };
            comparison.compare(&live, &live, asked(&live, request));
        }
        assert!(comparison.is_full() && comparison.bytes <= KEPT_BYTES, "{}", comparison.bytes);
        assert!((20..33).contains(&comparison.kept().diff().requests));
    }
}
