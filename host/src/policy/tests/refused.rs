//! Refusals at load, and their messages.

use serde_json::json;

use super::*;

fn check(component: &[u8], settings: Value) -> Result<Report, Rejection> {
    check_file(component, &table(settings), &ENGINE, &Limits::default())
}

/// The rejection, whose message must contain all of `words`.
fn rejected(component: &[u8], settings: Value, words: &[&str]) -> Rejection {
    let rejection = check(component, settings).unwrap_err();
    let sentence = rejection.to_string();
    for word in words {
        assert!(sentence.contains(word), "`{word}` is not in: {sentence}");
    }
    rejection
}

fn wat(text: &str) -> Vec<u8> {
    wat::parse_str(text).unwrap()
}

#[test]
fn the_shipped_policies_pass_without_notes() {
    for (name, hook) in [("default", None), ("fair-groups", Some("choose")), ("backoff", Some("backoff"))] {
        let report = check(builtin(name).unwrap(), json!({})).unwrap();
        assert_eq!(report.notes, Vec::<String>::new(), "{name}");
        let hooks: Vec<&str> = ["plan"].into_iter().chain(hook).chain(["configure", "reads"]).collect();
        assert_eq!(report.hooks, hooks, "{name}");
    }
    assert_eq!(builtin("other"), None);
}

#[test]
fn files_that_are_no_component_are_refused_with_their_kind() {
    rejected(b"<html>", json!({}), &["not WebAssembly", "\"<htm\"", "lockkeeper policy build"]);
    rejected(b"", json!({}), &["not WebAssembly"]);
    rejected(&wat("(module)"), json!({}), &["core module", "lockkeeper policy build"]);
    rejected(&builtin("default").unwrap()[..5_000], json!({}), &["cannot be loaded", "cut short"]);
}

#[test]
fn a_component_of_another_world_is_refused_with_the_missing_export() {
    rejected(&wat("(component)"), json!({}), &["naming.plan", "nothing", "lockkeeper_sdk::export!"]);
    let wrong = wat(r#"(component
        (core module $m (func (export "plan")))
        (core instance $i (instantiate $m))
        (func $plan (canon lift (core func $i "plan")))
        (instance $naming (export "plan" (func $plan)))
        (export "lockkeeper:policy/naming@0.1.0" (instance $naming)))"#);
    assert!(matches!(
        rejected(&wrong, json!({}), &["`naming`", "0.1.0", "SDK"]),
        Rejection::WrongTypes { .. }
    ));
}

#[test]
fn imports_are_refused_by_name() {
    let import = |name| wat(&format!(r#"(component (import "{name}" (instance (export "f" (func)))))"#));
    rejected(
        &import("wasi:clocks/wall-clock@0.2.0"),
        json!({}),
        &["wall-clock", "WASI", "wasm32-unknown-unknown"],
    );
    rejected(&import("acme:db/query@1.0.0"), json!({}), &["acme:db/query", "remove the import"]);
    rejected(&wat(r#"(component (import "log" (func)))"#), json!({}), &["log"]);
}

#[test]
fn a_plan_that_depends_on_an_unlisted_part_is_refused_with_the_part() {
    let unlisted = |reads: Value, part: &str| {
        let rejection = rejected(&BAD, json!({"reads": reads}), &["plan-reads", part]);
        assert_eq!(rejection.as_str(), "reads");
    };
    unlisted(json!(["mode", "ttl", "wait"]), "needs name");
    unlisted(json!(["name", "mode", "wait"]), "needs ttl");
    unlisted(json!(["name", "ttl", "wait"]), "needs mode");
    check(&BAD, json!({"reads": ["name", "mode", "ttl", "wait"]})).unwrap();
    rejected(&BAD, json!({"reads": ["panic"]}), &["`plan-reads` failed", "trap"]);
}

#[test]
fn size_and_memory_have_limits() {
    rejected(&vec![0; (2 << 20) + 1], json!({}), &["2097152 bytes", "engine.max_component_bytes"]);
    let memory = wat("(component (core module (memory 257)))");
    rejected(&memory, json!({}), &["16842752 bytes", "16777216", "engine.memory_bytes"]);
    let sum = wat("(component (core module (memory 200)) (core module (memory 57)))");
    rejected(&sum, json!({}), &["16842752 bytes", "16777216", "engine.memory_bytes"]);
    let component = |part: &str, count: usize| wat(&format!("(component {})", part.repeat(count)));
    let memory = "(core module (memory 1))";
    rejected(&component(memory, 5), json!({}), &["5 memories", "at most 4"]);
    rejected(&component(memory, 4), json!({}), &["naming.plan"]);
    let table = "(core module (table 1 funcref))";
    rejected(&component(table, 17), json!({}), &["17 tables", "at most 16"]);
    rejected(&component(table, 16), json!({}), &["naming.plan"]);
    let instance = |count: usize| {
        wat(&format!("(component (core module $m) {})", "(core instance (instantiate $m))".repeat(count)))
    };
    rejected(&instance(17), json!({}), &["17 core instances", "at most 16"]);
    rejected(&instance(16), json!({}), &["naming.plan"]);
}

#[test]
fn invalid_settings_are_refused_with_the_message_of_the_policy() {
    let default = builtin("default").unwrap();
    rejected(default, json!({"pool": 2, "stripes": 2}), &["`pool` and `stripes` do not go together"]);
    rejected(&BAD, json!({"configure": "reject"}), &["must not be \"reject\""]);
    for (how, kind) in [("panic", FaultKind::Trap), ("loop", FaultKind::Time), ("memory", FaultKind::Memory)]
    {
        let rejection = rejected(&BAD, json!({"configure": how}), &["`configure` failed"]);
        assert!(matches!(rejection, Rejection::Configure(fault) if fault.kind == kind), "{how}");
    }
}

#[test]
fn a_policy_that_fails_a_trial_request_is_refused() {
    let rejection = rejected(&BAD, json!({"always": "panic"}), &["trial request", "panicked"]);
    assert!(matches!(rejection, Rejection::SelfTest { .. }));
}
