//! One generation replaces another.

use serde_json::json;

use super::*;

#[test]
fn a_swap_keeps_the_old_generation_for_its_current_users() {
    let policies = policies(&ENGINE);
    let old = policies.get("default").unwrap();
    let prepared = policies.prepare("default", builtin("fair-groups").unwrap(), None).unwrap();
    assert_eq!(policies.get("default").unwrap().number(), 1, "preparing changes nothing");
    let new = policies.commit(prepared);
    assert_eq!((new.number(), policies.get("default").unwrap().number()), (2, 2));
    assert_ne!(old.id(), new.id());
    old.plan(&request("orders/42")).unwrap();
    let status = &policies.status()[0];
    assert_eq!(status.digest, new.digest().to_string());
    assert_eq!(status.hooks, ["plan", "choose", "configure", "reads"]);
}

#[test]
fn the_same_component_and_settings_are_no_change() {
    let policies = policies(&ENGINE);
    let default = builtin("default").unwrap();
    let same = policies.prepare("default", default, None).unwrap();
    assert!(matches!(same, Prepared::Unchanged(_)));
    assert_eq!(policies.commit(same).number(), 1);
    let settings = Some(table(json!({"ttl_ms": 500})));
    let generation = policies.commit(policies.prepare("default", default, settings).unwrap());
    assert_eq!(generation.plan(&request("a")).unwrap().ttl_ms, 500);
    assert!(matches!(policies.prepare("default", default, None).unwrap(), Prepared::Unchanged(_)));
}

#[test]
fn a_refused_load_keeps_the_old_generation_and_is_recorded() {
    let policies = policies(&ENGINE);
    let rejection = policies.prepare("default", b"junk", None).unwrap_err();
    policies.reject("default", &rejection);
    let status = &policies.status()[0];
    assert_eq!(status.generation, 1);
    assert!(status.last_error.as_deref().unwrap().contains("not WebAssembly"));
    policies.get("default").unwrap().plan(&request("a")).unwrap();
    policies.commit(policies.prepare("default", builtin("default").unwrap(), None).unwrap());
    assert_eq!(policies.status()[0].last_error, None);
    let unknown = policies.prepare("other", b"junk", None).unwrap_err();
    assert!(unknown.to_string().contains("[policies.other]"));
}

#[test]
fn every_policy_that_cannot_be_loaded_is_reported_at_once() {
    let (_dir, path) = temporary();
    let file = PolicyConfig { source: PolicySource::File(path), ..builtin_config("a", "") };
    let configs = [file, builtin_config("b", "nothing"), builtin_config("c", "default")];
    let Err(rejections) = Policies::load(&ENGINE, &configs, &Limits::default(), &Metrics::default()) else {
        panic!("loaded")
    };
    let slugs: Vec<_> =
        rejections.iter().map(|(name, rejection)| (name.as_str(), rejection.as_str())).collect();
    assert_eq!(slugs, [("a", "unreadable"), ("b", "no_builtin")]);
}

#[test]
fn swaps_under_load_lose_no_call() {
    let policies = policies(&ENGINE);
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let ask = || {
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                policies.get("default").unwrap().plan(&request("orders/42")).unwrap();
            }
        };
        scope.spawn(ask);
        scope.spawn(ask);
        let settings = |ttl_ms: u32| Some(table(json!({ "ttl_ms": ttl_ms })));
        for ttl_ms in 1_000..1_050 {
            let component = builtin("default").unwrap();
            policies.commit(policies.prepare("default", component, settings(ttl_ms)).unwrap());
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    assert_eq!(policies.status()[0].generation, 51);
}
