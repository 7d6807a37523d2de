//! Loads that are refused: one sentence gives the reason, and the old policy stays.

use super::*;

/// A component that is refused, and what the reason must contain.
type Bad = (&'static str, Vec<u8>, &'static [&'static str]);

fn wat(text: &str) -> Vec<u8> {
    wat::parse_str(text).expect("well-formed")
}

fn importing(name: &str) -> Vec<u8> {
    wat(&format!(r#"(component (import "{name}" (instance (export "f" (func)))))"#))
}

/// The live policy accepts any settings; pushed components receive `configure = "panic"`.
fn bad_components() -> Vec<Bad> {
    vec![
        ("not wasm", b"<html>not here</html>".to_vec(), &["not WebAssembly", "lockkeeper policy build"]),
        ("core module", wat("(module)"), &["core module", "lockkeeper policy build"]),
        ("cut short", default_policy()[..5_000].to_vec(), &["cut short", "build it again"]),
        ("wrong world", wat("(component)"), &["does not export `naming.plan`", "lockkeeper_sdk::export!"]),
        ("WASI", importing("wasi:clocks/wall-clock@0.2.0"), &["WASI", "wasm32-unknown-unknown"]),
        ("other import", importing("acme:db/query@1.0.0"), &["acme:db/query", "remove the import"]),
        ("too large", vec![0; (2 << 20) + 1], &["2097152", "engine.max_component_bytes"]),
        ("memory", wat("(component (core module (memory 257)))"), &["memory", "`engine.memory_bytes`"]),
        ("trap in configure", BAD.clone(), &["`configure` failed", "panicked"]),
        ("settings", default_policy().to_vec(), &["configure: unknown key", "settings table"]),
    ]
}

fn one_sentence(why: &str, words: &[&str]) {
    assert!(!why.contains('\n') && why.len() < 600, "more than a sentence: {why}");
    for word in words {
        assert!(why.contains(word), "`{word}` is not in: {why}");
    }
}

async fn refusals(proxy: &Proxy) -> f64 {
    let labels = ["policy=\"default\"", "outcome=\"refused\""];
    proxy.metric("lockkeeper_policy_loads_total", &labels).await
}

/// Checks that requests are still planned by the first generation.
async fn old_policy_answers(deployment: &Deployment, name: &str) {
    let client = deployment.proxy.client();
    let lease = client.lease(&crate::harness::fresh("still"), 1_000).await;
    assert!(keys(&lease)[0].starts_with("x/"), "{name}: {lease}");
    assert_eq!(deployment.status().await["generation"], 1, "{name}");
}

const SETTINGS: &str = "[policies.default.settings]\nconfigure = \"panic\"";

/// Each push is answered with 422 (413 if it is not even read) and its reason, which is also in the status and the
/// metrics.
#[test]
fn a_refused_push_keeps_the_old_policy_and_gives_its_reason() {
    crate::harness::run(async {
        let deployment = Deployment::with(Kind::Mysql, &RENAMED, SETTINGS).await;
        for (count, (name, component, words)) in bad_components().into_iter().enumerate() {
            let answer = deployment.proxy.admin().send("PUT", "/v1/policies/default", component).await;
            let expected = if name == "too large" { (413, "too_large") } else { (422, "refused") };
            assert_eq!((answer.status, answer.slug()), expected, "{name}: {}", answer.text);
            let why = answer.json["detail"].as_str().unwrap();
            one_sentence(why, words);
            assert_eq!(deployment.status().await["last_error"], why, "{name}");
            assert_eq!(refusals(&deployment.proxy).await, count as f64 + 1.0, "{name}");
            old_policy_answers(&deployment, name).await;
        }
        let empty = deployment.proxy.admin().send("PUT", "/v1/policies/default", "").await;
        assert_eq!((empty.status, empty.slug()), (400, "invalid"), "{}", empty.text);
        let unknown = deployment.proxy.admin().send("PUT", "/v1/policies/nobody", "x").await;
        assert_eq!((unknown.status, unknown.slug()), (404, "not_found"), "{}", unknown.text);
        // A good component still goes live, and the last error is cleared.
        deployment.push(&variant(&RENAMED, 1)).await;
        assert_eq!(deployment.status().await["last_error"], Value::Null);
    });
}

/// The same for a replaced file: the reason is in the log, the status and the metrics.
#[test]
fn a_refused_file_keeps_the_old_policy_and_gives_its_reason() {
    crate::harness::run(async {
        let deployment = Deployment::with(Kind::Mariadb, &RENAMED, SETTINGS).await;
        for (count, (name, component, words)) in bad_components().into_iter().enumerate() {
            deployment.deploy(&component);
            eventually(name, async || refusals(&deployment.proxy).await == count as f64 + 1.0).await;
            let why = deployment.status().await["last_error"].as_str().unwrap().to_owned();
            one_sentence(&why, words);
            let log = deployment.proxy.log();
            let told = log.lines().rfind(|line| line.contains("policy not loaded")).unwrap();
            assert!(words.iter().all(|word| told.contains(word)), "{name}: {told}");
            old_policy_answers(&deployment, name).await;
        }
        deployment.deploy(&variant(&RENAMED, 1));
        eventually("a good one goes live", async || deployment.status().await["generation"] == 2).await;
        assert_eq!(deployment.status().await["last_error"], Value::Null);
    });
}
