//! Faults at run time are stopped and classified, and do not affect other requests.

use std::time::{Duration, Instant};

use super::*;
use crate::policy::module::Module;

fn fault(generation: &Generation, resource: &str) -> Fault {
    match generation.plan(&request(resource)) {
        Err(PlanError::Fault(fault)) => fault,
        other => panic!("{resource}: {other:?}"),
    }
}

#[test]
fn the_default_policy_plans_an_exclusive_lock() {
    let default = policies(&ENGINE).get("default").unwrap();
    let plan = default.plan(&request("orders/42")).unwrap();
    assert_eq!(plan.keys.iter().map(Key::as_str).collect::<Vec<_>>(), ["orders/42"]);
    assert_eq!((plan.mode, plan.ttl_ms, plan.wait_ms), (Mode::Exclusive, 10_000, 0));
    assert_eq!(default.hooks(), ["plan", "configure", "reads"]);
    let digits = default.id().strip_prefix("default@sha256:").unwrap();
    assert!(digits.len() == 12 && default.digest().to_string().starts_with(&format!("sha256:{digits}")));
    assert!(default.choose(&queue("a", 2)).is_none());
}

#[test]
fn a_policy_is_not_asked_again_about_what_it_reads_alike() {
    let metrics = Metrics::default();
    let configs = [builtin_config("default", "default")];
    let policies = Policies::load(&ENGINE, &configs, &Limits::default(), &metrics).unwrap();
    let cached = || {
        let text = metrics.encode();
        let line = text.lines().find(|line| line.starts_with("lockkeeper_policy_plans_cached_total{"));
        line.unwrap().rsplit(' ').next().unwrap().parse::<u32>().unwrap()
    };
    let default = policies.get("default").unwrap();
    let first = default.plan(&request("orders/42")).unwrap();
    assert_eq!((default.plan(&request("orders/42")).unwrap(), cached()), (first.clone(), 0));
    let labels = vec![("tenant".to_owned(), "acme".to_owned())];
    let again = PlanRequest { owner: "worker-2".into(), seed: 8, labels, ..request("orders/42") };
    assert_eq!((default.plan(&again).unwrap(), cached()), (first.clone(), 1));
    let longer = PlanRequest { ttl_ms: Some(20_000), ..request("orders/42") };
    assert_eq!(default.plan(&longer).unwrap(), Plan { ttl_ms: 20_000, ..first.clone() });
    let shared = PlanRequest { mode: Mode::Shared, ..request("orders/42") };
    assert_eq!(default.plan(&shared).unwrap(), Plan { mode: Mode::Shared, ..first });
    assert_eq!(default.plan(&request("orders/43")).unwrap().keys[0].as_str(), "orders/43");
    let permits = PlanRequest { mode: Mode::Permits { count: 11, limit: 0 }, ..request("orders/42") };
    for _ in 0..3 {
        let Err(PlanError::Refused { reason }) = default.plan(&permits) else { panic!("granted") };
        assert!(reason.contains("10"), "{reason}");
    }
    assert_eq!(cached(), 2);
    // Another rank label: another generation, and a label that matters.
    let table = table(serde_json::json!({"rank_label": "rank"}));
    let ranked = policies.prepare("default", builtin("default").unwrap(), Some(table)).unwrap();
    let ranked = policies.commit(ranked);
    for rank in [1, 2, 1, 1] {
        let labels = vec![("rank".to_owned(), rank.to_string())];
        assert_eq!(ranked.plan(&PlanRequest { labels, ..request("orders/42") }).unwrap().rank, rank);
    }
    assert_eq!(cached(), 3);
}

#[test]
fn faults_are_not_cached() {
    let policies = policies(&ENGINE);
    let table = table(serde_json::json!({"reads": ["name", "mode", "ttl", "wait"]}));
    let bad = policies.commit(policies.prepare("default", &BAD, Some(table)).unwrap());
    for faults in 1..=3 {
        assert_eq!(fault(&bad, "panic").kind, FaultKind::Trap);
        assert_eq!(bad.faults(), faults);
    }
}

#[test]
fn each_failure_of_a_policy_has_its_fault_kind() {
    let bad = bad(&ENGINE);
    for (resource, kind) in [
        ("loop", FaultKind::Time),
        ("recurse", FaultKind::Stack),
        ("memory", FaultKind::Memory),
        ("panic", FaultKind::Trap),
        ("huge", FaultKind::Answer),
        ("utf8", FaultKind::Answer),
        ("empty", FaultKind::Value),
        ("no-keys", FaultKind::Value),
        ("long", FaultKind::Value),
        ("primitive", FaultKind::Value),
        ("permits", FaultKind::Value),
    ] {
        let fault = fault(&bad, resource);
        assert_eq!(fault.kind, kind, "{resource}: {fault}");
        assert_eq!(fault.hook, Hook::Plan);
    }
    assert_eq!(bad.faults(), 11);
    bad.plan(&request("orders/42")).unwrap();
}

#[test]
fn plan_values_and_refusal_texts_are_clamped_to_the_limits() {
    let bad = bad(&ENGINE);
    assert_eq!(bad.plan(&request("ttl")).unwrap().ttl_ms, Limits::default().max_ttl_ms);
    let Err(PlanError::Refused { reason }) = bad.plan(&request("refuse")) else { panic!("granted") };
    assert_eq!(reason, "ä".repeat(512));
}

#[test]
fn a_call_that_uses_little_fuel_is_stopped_by_its_time_limit() {
    let engine =
        Engine::new(&EngineLimits { fuel: u64::MAX, instances: 2, ..engine_limits() }, Compiler::InProcess)
            .unwrap();
    let bad = bad(&engine);
    for resource in ["loop", "fill"] {
        // The clock of the policies rests by now.
        std::thread::sleep(Duration::from_millis(400));
        let start = Instant::now();
        let fault = fault(&bad, resource);
        assert_eq!((fault.kind, fault.detail.as_str()), (FaultKind::Time, "ran past its time"));
        assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
    }
}

#[test]
fn each_optional_hook_reports_its_own_faults() {
    let bad = bad(&ENGINE);
    let kind = |fault: Option<Result<usize, Fault>>| fault.unwrap().unwrap_err().kind;
    assert_eq!(bad.choose(&queue("a", 3)).unwrap(), Ok(0));
    assert_eq!(kind(bad.choose(&queue("range", 3))), FaultKind::Value);
    assert_eq!(kind(bad.choose(&queue("loop", 3))), FaultKind::Time);
    assert_eq!(bad.backoff(&contention("a")).unwrap(), Ok(Backoff::Poll { after_ms: 5 }));
    assert_eq!(bad.backoff(&contention("most")).unwrap(), Ok(Backoff::Poll { after_ms: 60_000 }));
    assert_eq!(bad.backoff(&contention("panic")).unwrap().unwrap_err().kind, FaultKind::Trap);
    assert_eq!(bad.renewal(&expiring("a")).unwrap(), Ok(Renewal::Extend { ttl_ms: 1_000 }));
    assert_eq!(bad.renewal(&expiring("most")).unwrap(), Ok(Renewal::Extend { ttl_ms: 4_000 }));
    assert_eq!(bad.renewal(&expiring("memory")).unwrap().unwrap_err().kind, FaultKind::Memory);
    let answer = bad.response(&request("a"), &refused("a")).unwrap().unwrap();
    assert_eq!((answer.status, answer.retry_after_ms, answer.detail.len()), (429, 3_600_000, 1024));
    assert_eq!(bad.response(&request("a"), &refused("range")).unwrap().unwrap_err().kind, FaultKind::Value);
}

#[test]
fn a_policy_that_fails_repeatedly_is_suspended_for_a_while() {
    let suspend = Duration::from_millis(300);
    let limits = EngineLimits { faults_to_suspend: 3, suspend, instances: 2, ..EngineLimits::default() };
    let bad = bad(&Engine::new(&limits, Compiler::InProcess).unwrap());
    for _ in 0..3 {
        assert_eq!(fault(&bad, "panic").kind, FaultKind::Trap);
    }
    assert_eq!(fault(&bad, "orders/42").kind, FaultKind::Suspended);
    assert!(bad.choose(&queue("a", 2)).unwrap().is_ok(), "each hook is suspended by itself");
    std::thread::sleep(suspend);
    bad.plan(&request("orders/42")).unwrap();
    for _ in 0..20 {
        assert_eq!(fault(&bad, "empty").kind, FaultKind::Value, "one request's nonsense suspends nobody");
    }
}

/// Runs again in its own process, because other tests use memory too.
#[test]
fn a_failing_policy_does_not_disturb_other_policies_or_leak_memory() {
    const ALONE: &str = "LOCKKEEPER_TEST_ALONE";
    if std::env::var_os(ALONE).is_none() {
        let mut again = std::process::Command::new(std::env::current_exe().unwrap());
        again.args([
            "--exact",
            "policy::tests::running::a_failing_policy_does_not_disturb_other_policies_or_leak_memory",
        ]);
        let done = again.env(ALONE, "1").output().unwrap();
        let said = String::from_utf8_lossy(&done.stdout);
        assert!(done.status.success() && said.contains("1 passed"), "{said}");
        return;
    }
    let limits = EngineLimits { instances: 2, fuel: 100_000, ..engine_limits() };
    let engine = Engine::new(&limits, Compiler::InProcess).unwrap();
    let (good, bad) = (policies(&engine).get("default").unwrap(), bad(&engine));
    let ways = ["loop", "recurse", "memory", "panic", "huge", "utf8", "empty", "orders/42"];
    let round = |calls: usize| {
        std::thread::scope(|scope| {
            for worker in 0..4 {
                let (good, bad) = (&good, &bad);
                scope.spawn(move || {
                    for call in 0..calls / 4 {
                        let _ = bad.plan(&request(ways[(call + worker) % ways.len()]));
                        good.plan(&request("orders/42")).unwrap();
                    }
                });
            }
        });
    };
    round(1_000);
    let before = resident_bytes();
    round(10_000);
    let grown = resident_bytes().saturating_sub(before);
    assert!(grown < 8 << 20, "{grown} bytes more after 10,000 calls");
    assert_eq!(good.faults(), 0);
}

fn resident_bytes() -> usize {
    let status = std::fs::read_to_string("/proc/self/statm").unwrap();
    status.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

fn queue(key: &str, waiters: usize) -> QueueView {
    let waiter = WaiterView {
        rank: 0,
        group: "a".into(),
        weight: 1,
        owner: "b".into(),
        mode: Mode::Exclusive,
        waited_ms: 1,
        labels: Arc::from([]),
    };
    QueueView { key: Key::new(key).unwrap(), waiters: vec![waiter; waiters], groups: Vec::new(), seed: 1 }
}

fn contention(key: &str) -> Contention {
    Contention {
        key: Key::new(key).unwrap(),
        attempt: 1,
        waited_ms: 0,
        wait_left_ms: 1_000,
        holder_left_ms: 0,
        holder: "b".into(),
        waiters: 1,
        last_sleep_ms: 0,
        labels: Arc::from([]),
        seed: 1,
    }
}

fn expiring(key: &str) -> Expiring {
    Expiring {
        key: Key::new(key).unwrap(),
        owner: "b".into(),
        ttl_ms: 1_000,
        renewals: 1,
        held_ms: 6_000,
        max_hold_ms: 10_000,
        waiters: 0,
        client_alive: true,
        labels: Arc::from([]),
    }
}

fn refused(key: &str) -> ResponseContention {
    ResponseContention {
        key: Key::new(key).unwrap(),
        holder: "b".into(),
        position: 1,
        waited_ms: 5,
        retry_after_ms: 100,
    }
}

#[test]
fn a_component_that_is_in_use_is_not_compiled_again() {
    let engine = Engine::new(&engine_limits(), Compiler::InProcess).unwrap();
    let component = builtin("default").unwrap();
    let compile = || Module::compile(&engine, component).ok().unwrap();
    let (one, other) = (compile(), compile());
    assert!(Arc::ptr_eq(&one, &other));
}
