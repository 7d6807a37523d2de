//! `lockkeeper policy try`: a component asked without a proxy.

use std::process::{Command, Output};
use std::sync::LazyLock;

use serde_json::{Value, json};

use super::command_line::text;
use super::*;

/// The example for guarded routes: examples/orders-policy.
static ORDERS: LazyLock<Vec<u8>> = LazyLock::new(|| built("../examples/orders-policy"));

/// A folder with components to try.
struct Bench(TempDir);

impl Bench {
    fn new() -> Bench {
        let dir = folder();
        std::fs::write(dir.path().join("orders.wasm"), &*ORDERS).unwrap();
        std::fs::write(dir.path().join("bad.wasm"), &*BAD).unwrap();
        std::fs::write(dir.path().join("page.wasm"), "<html>").unwrap();
        Bench(dir)
    }

    /// `args` are parted by `|`.
    fn run(&self, args: &str) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_lockkeeper"));
        command.current_dir(self.0.path()).args(["policy", "try"]).args(args.split('|'));
        command.output().expect("the command starts")
    }

    fn printed(&self, args: &str) -> String {
        let output = self.run(args);
        assert!(output.status.success(), "{args}: {}{}", text(&output.stdout), text(&output.stderr));
        text(&output.stdout)
    }

    fn json(&self, args: &str) -> Value {
        let out = self.printed(&format!("{args}|--json"));
        serde_json::from_str(&out).unwrap_or_else(|error| panic!("{args}: {error}: {out}"))
    }

    fn keys(&self, args: &str) -> Value {
        self.json(args)["plan"]["keys"].take()
    }
}

const ORDER: &str = "orders.wasm|--path|/orders/{id}/{*rest}|--header|X-Tenant: acme|--request";

#[test]
fn a_guarded_request_has_what_its_route_would_show() {
    let bench = Bench::new();
    let read = bench.json(&format!("{ORDER}|GET /orders/42"));
    assert_eq!(read["plan"]["keys"], json!(["acme/orders/42"]));
    assert_eq!((&read["plan"]["mode"], &read["plan"]["primitive"]), (&json!("shared"), &json!("lease")));
    assert!(read["policy"].as_str().is_some_and(|by| by.starts_with("orders@sha256:")), "{read}");
    assert_eq!(bench.keys(&format!("{ORDER}|PUT /orders/4%2F2//x/")), json!(["acme/orders/4%2F2"]));

    let pay = format!("{ORDER}|POST /orders/42/pay|--header|Idempotency-Key: 7f3a|--ttl|3s|--wait|2s");
    let plan = bench.json(&format!("{pay}|--settings|{{\"keep_ms\": 60000}}"))["plan"].take();
    assert_eq!((&plan["primitive"], &plan["keep_ms"]), (&json!("once"), &json!(60_000)));
    assert_eq!((&plan["ttl_ms"], &plan["wait_ms"]), (&json!(3_000), &json!(2_000)));
    let told = bench.printed(&pay);
    for row in [
        "keys          acme/orders/42/pay/7f3a",
        "primitive     once",
        "outcome kept  24h00m",
        "on loss       finish",
    ] {
        assert!(told.contains(row), "`{row}` is not in:\n{told}");
    }
}

#[test]
fn without_the_lock_the_policy_or_the_proxy_answers() {
    let bench = Bench::new();
    let answer = bench.json(&format!("{ORDER}|PUT /orders/42|--contended"))["contended"].take();
    assert_eq!((&answer["status"], &answer["retry_after_ms"]), (&json!(423), &json!(1_000)));
    assert!(
        answer["detail"].as_str().is_some_and(|detail| detail.contains("changing this order")),
        "{answer}"
    );
    let own = bench.printed("builtin:default|--request|PUT /a|--contended");
    assert!(own.contains("the proxy answers") && own.contains("423"), "{own}");
}

#[test]
fn a_request_of_the_lock_api_has_a_resource_and_labels() {
    let bench = Bench::new();
    let plan = bench.json(
        "builtin:default|--resource|a|--mode|permits=2|--label|rank=-3|--settings|\
         {\"permits\": 5, \"rank_label\": \"rank\", \"on_loss\": \"cut\"}",
    )["plan"]
        .take();
    assert_eq!((&plan["keys"], &plan["rank"]), (&json!(["a"]), &json!(-3)));
    assert_eq!((&plan["mode"], &plan["on_loss"]), (&json!({"permits": 2, "limit": 5}), &json!("cut")));
    // A guarded request is locked by its path, or by what is named.
    assert_eq!(bench.keys("builtin:default|--request|GET //caf%C3%A9/?x=1"), json!(["/café"]));
    assert_eq!(bench.keys("builtin:default|--request|GET /a|--resource|b"), json!(["b"]));
}

#[test]
fn files_hold_long_settings_and_bodies() {
    let bench = Bench::new();
    std::fs::write(bench.0.path().join("settings.json"), r#"{"tenant_header": ""}"#).unwrap();
    let body = format!(r#"{{"id": 7, "note": "{}"}}"#, "x".repeat(100_000));
    std::fs::write(bench.0.path().join("body.json"), body).unwrap();
    let put = "orders.wasm|--path|/orders/{id}|--request|PUT /orders/42";
    assert_eq!(
        bench.keys(&format!("{put}|--settings|@settings.json|--body|@body.json")),
        json!(["orders/42"])
    );
}

/// A refusal, a fault and a mistake of who asks have exit codes of their own, and sentences that name the
/// cause.
#[test]
fn what_is_wrong_is_named() {
    let bench = Bench::new();
    for (args, code, words) in [
        ("orders.wasm|--request|PUT /orders/42", 6, "the policy refuses: the route's path has no {id}"),
        (&*format!("{ORDER}|POST /orders/42/pay"), 6, "`Idempotency-Key`"),
        ("page.wasm|--resource|a", 6, "not WebAssembly"),
        ("orders.wasm|--resource|a|--settings|{\"kep_ms\": 1}", 6, "unknown field `kep_ms`"),
        ("orders.wasm|--resource|a|--settings|{\"keep_ms\": 1}", 6, "`keep_ms` must be between"),
        ("bad.wasm|--resource|panic", 1, "policy hook plan: trap"),
        ("bad.wasm|--resource|empty", 1, "a key is empty"),
        ("bad.wasm|--request|GET /a|--resource|range|--contended", 1, "policy hook response: value"),
        ("absent.wasm|--resource|a", 1, "cannot read absent.wasm"),
        ("builtin:orders|--resource|a", 2, "there is no `builtin:orders`"),
        ("orders.wasm", 2, "--resource <NAME>"),
        ("orders.wasm|--request|/orders/42", 2, "does not begin with a method"),
        ("orders.wasm|--request|POST orders", 2, "no path behind its method"),
        ("orders.wasm|--request|PUT /a|--header|X-Tenant", 2, "must be NAME: VALUE"),
        ("orders.wasm|--request|PUT /a|--header|X Tenant: a", 2, "`X Tenant` is not the name of a header"),
        ("orders.wasm|--request|PUT /a|--path|a", 2, "must begin with `/`"),
        ("orders.wasm|--request|PUT /a|--path|/b/{id}", 2, "--path is not the pattern of the path /a"),
        ("orders.wasm|--request|PUT /a|--body|@absent", 1, "cannot read absent"),
        ("orders.wasm|--resource|a|--settings|x", 2, "--settings is not a JSON object"),
        ("orders.wasm|--resource|a|--settings|@absent", 1, "cannot read absent"),
        ("orders.wasm|--resource|a|--header|a: b", 2, "--request <LINE>"),
    ] {
        let output = bench.run(args);
        let told = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{args}: {told}");
        assert!(told.contains(words), "{args}: `{words}` is not in: {told}");
    }
    let refused: Value =
        serde_json::from_slice(&bench.run(&format!("{ORDER}|POST /orders/42/pay|--json")).stdout).unwrap();
    assert_eq!(refused["type"], "refused");
    let failed: Value =
        serde_json::from_slice(&bench.run("bad.wasm|--resource|panic|--json").stdout).unwrap();
    assert_eq!(failed["type"], "policy_fault");
}
