//! Replays of made-up recordings, under the shipped policies.

use serde_json::{Map, Value, json};

use super::*;
use crate::config::{EngineLimits, Limits};
use crate::lock::Mode;
use crate::policy::{Compiler, Engine, Generation, builtin, load_file};
use crate::recording::{Ask, End, Header, LeaseName, PlanLine, Recording};

const SECOND: u64 = 1_000_000;

/// A request for `resource` after `at_ms`, whose lease was held for `held_ms`.
fn ask(n: u64, at_ms: u64, resource: &str, group: &str) -> Ask<'static> {
    Ask {
        at_us: SECOND + at_ms * 1_000,
        call: "acquire".into(),
        by: "default@sha256:0".into(),
        resource: resource.to_owned().into(),
        owner: format!("{group}-{n}").into(),
        mode: Mode::Exclusive,
        ttl_ms: Some(5_000),
        wait_ms: Some(60_000),
        labels: vec![("group".into(), group.to_owned().into())],
        http: None,
        seed: n as u32,
        plan: Some(PlanLine {
            keys: vec![resource.to_owned().into()],
            primitive: "lease".into(),
            mode: Mode::Exclusive,
            ttl_ms: 5_000,
            wait_ms: 60_000,
            group: "".into(),
        }),
        outcome: "granted".into(),
        reason: None,
        waited_us: 1_000,
        lease: Some(LeaseName { key: resource.to_owned().into(), token: n }),
    }
}

fn recording(asks: Vec<Ask<'static>>, held_ms: u64) -> Recording {
    let end = |ask: &Ask<'static>| {
        let lease = ask.lease.clone().unwrap();
        let at_us = ask.at_us + ask.waited_us + held_ms * 1_000;
        (lease.clone(), End { at_us, lease, how: "released".into(), held_us: held_ms * 1_000 })
    };
    Recording {
        policy: "default".to_owned(),
        generations: Vec::new(),
        ends: asks.iter().map(end).collect(),
        asks,
        header: Header { version: 1, at_us: 0, share: 1.0, limits: Limits::default(), masked: Vec::new() },
        starts: 1,
        dropped: 0,
        store: Vec::new(),
    }
}

fn policy(name: &str, settings: Value) -> Generation {
    let engine = Engine::new(&EngineLimits::default(), Compiler::InProcess).unwrap();
    let settings: Map<String, Value> = serde_json::from_value(settings).unwrap();
    load_file(name, builtin(name).unwrap(), &settings, &engine, &Limits::default()).unwrap()
}

fn compare(recording: &Recording, before: &Generation, after: &Generation) -> Report {
    let load = Load::of(recording, Arrivals::Open, None);
    let (planned, next) = (Plans::of(before, &load), Plans::of(after, &load));
    let ran = run(&load, before, &planned, None);
    let other = run(&load, after, &next, Some(&planned));
    let of = |id: &str, plans, run| Replayed { id: id.to_owned(), plans, run };
    let group = |n: usize| recording.asks[n].labels[0].1.to_string();
    Report::new(&load, &of("a", &planned, &ran), &of("b", &next, &other), group, Vec::new())
}

/// Forty requests of a large group at once, and one of a small group every 50 ms.
fn crowd() -> Recording {
    let large = (0..40).map(|n| ask(n, 0, "orders", "large"));
    let small = (0..10).map(|n| ask(100 + n, 20 + n * 50, "orders", "small"));
    let mut asks: Vec<Ask<'static>> = large.chain(small).collect();
    asks.sort_by_key(|ask| ask.at_us);
    recording(asks, 20)
}

#[test]
fn the_same_policy_changes_nothing_and_gives_the_same_outcome_each_time() {
    let (recording, policy) = (crowd(), policy("default", json!({})));
    let report = compare(&recording, &policy, &policy);
    assert_eq!((report.plans.lost_exclusion, report.plans.new_exclusion, report.overlaps), (0, 0, 0));
    assert_eq!((report.plans.changed_plans, report.plans.newly_refused), (0, 0));
    assert_eq!(report.after.outcomes, [("granted", 50)].into());
    assert_eq!(report.before.outcomes, report.after.outcomes);
    let again = compare(&recording, &policy, &policy);
    assert_eq!(serde_json::to_string(&again).unwrap(), serde_json::to_string(&report).unwrap());
    // Forty leases of 20 ms, one after the other, each after an answer of the store.
    let longest = report.groups[0].after.max_ms;
    assert!((800.0..900.0).contains(&longest), "{longest}");
}

#[test]
fn a_fair_policy_lets_the_small_group_wait_less() {
    let report = compare(&crowd(), &policy("default", json!({})), &policy("fair-groups", json!({})));
    let [_, large, small] = &report.groups[..] else { panic!("{:?}", report.groups) };
    assert_eq!((&*large.name, &*small.name, small.requests), ("large", "small", 10));
    assert!(small.before.p99_ms > 400.0, "{small:?}");
    assert!(small.after.p99_ms < 100.0, "{small:?}");
    assert_eq!((report.plans.lost_exclusion, report.overlaps), (0, 0));
    assert!(report.after.faults.is_empty());
}

#[test]
fn resources_that_no_longer_exclude_each_other_are_named() {
    let asks = (0..20).map(|n| ask(n, n * 10, if n % 2 == 0 { "a" } else { "b" }, "x")).collect();
    let recording = recording(asks, 30);
    let one = policy("default", json!({"stripes": 1}));
    let each = policy("default", json!({}));
    let report = compare(&recording, &one, &each);
    assert_eq!((report.plans.lost_exclusion, report.plans.new_exclusion), (1, 0));
    let pair = &report.plans.lost_examples[0];
    assert_eq!(pair.requests, ["a (group=x)", "b (group=x)"]);
    assert_eq!(pair.after, ["a by lease", "b by lease"]);
    assert!(report.overlaps > 0 && report.overlap_examples.contains(&["a".to_owned(), "b".to_owned()]));
    let lost = Failing::parse("lost-exclusion").unwrap();
    assert_eq!(lost.of(&report).unwrap(), "pairs of resources that no longer exclude each other: 1");
    let back = compare(&recording, &each, &one);
    assert_eq!((back.plans.lost_exclusion, back.plans.new_exclusion, back.overlaps), (0, 1, 0));
    assert_eq!(lost.of(&back), None);
}

#[test]
fn requests_that_the_candidate_refuses_are_counted() {
    let required = policy("fair-groups", json!({"label": "tenant", "required": true}));
    let report = compare(&crowd(), &policy("default", json!({})), &required);
    assert_eq!((report.plans.newly_refused, report.plans.no_longer_refused), (50, 0));
    assert_eq!(report.after.outcomes, [("refused", 50)].into());
    assert!(Failing::parse("refused").unwrap().of(&report).unwrap().ends_with(": 50"));
}

#[test]
fn a_shorter_lease_ends_in_use() {
    let asks = vec![Ask { ttl_ms: None, ..ask(1, 0, "a", "x") }, ask(2, 500, "a", "x")];
    let recording = recording(asks, 2_000);
    let report = compare(
        &recording,
        &policy("default", json!({"ttl_ms": 5_000})),
        &policy("default", json!({"ttl_ms": 1_000})),
    );
    assert_eq!((report.before.outlived, report.after.outlived), (0, 1));
    assert_eq!(report.overlaps, 0, "the holder was told that its lease has ended");
}

#[test]
fn an_owner_sends_its_next_request_after_the_end_of_the_one_before() {
    let owner = |n, at_ms| Ask { owner: "one".into(), ..ask(n, at_ms, "a", "x") };
    let blocker = ask(9, 0, "a", "y");
    let recording = recording(vec![blocker, owner(1, 10), owner(2, 500)], 100);
    let load = Load::of(&recording, Arrivals::Closed, None);
    assert_eq!([1, 2].map(|n| load.requests[n].next.map(|(next, _)| next)), [Some(2), Some(1)]);
    let policy = policy("default", json!({}));
    let ran = run(&load, &policy, &Plans::of(&policy, &load), None);
    assert!(ran.done.iter().all(|done| done.outcome == "granted"), "{:?}", ran.done);
}

#[test]
fn requests_of_an_owner_at_the_same_time_are_as_many_again() {
    let owner = |n, at_ms| Ask { owner: "one".into(), ..ask(n, at_ms, &format!("r{n}"), "x") };
    let asks = (0..20).flat_map(|n| [owner(2 * n, n * 100), owner(2 * n + 1, n * 100 + 10)]).collect();
    let load = Load::of(&recording(asks, 50), Arrivals::Closed, None);
    assert_eq!(load.requests.iter().filter(|asked| asked.is_first).count(), 2);
    let policy = policy("default", json!({}));
    let sent = run(&load, &policy, &Plans::of(&policy, &load), None).done.len();
    assert!((38..=42).contains(&sent), "{sent}");
}

#[test]
fn a_lease_that_ends_by_itself_lasts_as_long_again() {
    let asks = (0..10).map(|n| Ask { owner: "one".into(), ..ask(n, n * 6_000, "a", "x") }).collect();
    let mut recording = recording(asks, 5_000);
    recording.ends.values_mut().for_each(|end| end.how = "expired".into());
    let load = Load::of(&recording, Arrivals::Closed, None);
    let policy = policy("default", json!({}));
    let sent = run(&load, &policy, &Plans::of(&policy, &load), None).done.len();
    assert!((9..=11).contains(&sent), "{sent}");
}

#[test]
fn a_candidate_for_other_calls_is_granted_nothing() {
    let report =
        compare(&crowd(), &policy("default", json!({})), &policy("default", json!({"primitive": "once"})));
    assert_eq!(report.after.outcomes, [("wrong_call", 50)].into());
    let slower = Failing::parse("p99:1.2x").unwrap().of(&report);
    assert!(slower.as_deref().is_some_and(|why| why.contains("0.0 % are granted")), "{slower:?}");
}

#[test]
fn a_hold_that_is_not_known_is_that_of_another_lease_of_the_resource() {
    let mut recording = recording(vec![ask(1, 0, "a", "x"), ask(2, 10, "a", "x")], 30);
    recording.ends.remove(&LeaseName { key: "a".into(), token: 2 });
    let load = Load::of(&recording, Arrivals::Open, None);
    let ((known, guess), (other, is_guess)) = (load.hold(0), load.hold(1));
    assert_eq!((known, guess, is_guess), (other, false, true));
    assert_eq!(known.us, 30_000);
}

#[test]
fn the_page_has_the_waits_of_each_group_and_no_markup_of_clients() {
    let mut recording = crowd();
    recording.asks.iter_mut().for_each(|ask| ask.labels[0].1 = format!("<b>{}", ask.labels[0].1).into());
    let policy = policy("default", json!({}));
    let page = page(&compare(&recording, &policy, &policy));
    assert!(page.contains("&lt;b&gt;small") && !page.contains("<b>"), "{page}");
    assert_eq!(page.matches("<svg").count(), 3);
}
