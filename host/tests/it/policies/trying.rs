//! `lockkeeper policy try`: calls a component without a proxy.

use std::process::{Command, Output};

use serde_json::{Value, json};

use super::command_line::text;
use super::*;

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

    /// Runs the command. `args` are separated by `|`.
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
fn a_tried_guarded_request_has_what_its_route_would_show() {
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
fn a_contended_trial_shows_the_answer_of_the_policy_or_the_proxy() {
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
    // A guarded request is locked by its path, or by the given name.
    assert_eq!(bench.keys("builtin:default|--request|GET //caf%C3%A9/?x=1"), json!(["/café"]));
    assert_eq!(bench.keys("builtin:default|--request|GET /a|--resource|b"), json!(["b"]));
}

#[test]
fn settings_and_bodies_can_be_read_from_files() {
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

/// A refusal, a fault and a mistake of the caller have different exit codes, and messages that name the cause.
#[test]
fn a_failed_trial_names_its_cause() {
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
        ("orders.wasm|--request|PUT /a|--path|/b/{id}", 2, "/b/{id} is not the pattern of the path /a"),
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

/// Routes of every kind, on two listeners.
const CONFIG: &str = r#"
[policies.orders]
path = "orders.wasm"
settings = { keep_ms = 60_000 }
[policies.bad]
path = "bad.wasm"
[limits]
max_ttl_ms = 9_000

[[guard]]
listen = "127.0.0.1:7080"
[[guard.routes]]
match = { method = ["GET", "PUT"], path = "/reports/{*name}", headers = { x-mode = "batch" } }
upstream = ["http://127.0.0.1:9000", "http://127.0.0.1:9001"]
policy = "default"
resource = "reports/{name}/{query.day}"
labels = { tenant = "{header.x-tenant}" }
mode = "shared"
ttl_ms = 8_500
wait_ms = 0
[[guard.routes]]
match = { path = "/orders/{id}/{*rest}" }
ambiguous_paths = "allow"
upstream = "http://127.0.0.1:9000"
policy = "orders"
see = { headers = ["x-tenant", "idempotency-key"] }
[[guard.routes]]
match = { method = "POST", path = "/carts" }
upstream = "http://127.0.0.1:9000"
policy = "default"
resource = "cart/{json.cart.id}"
see = { body_bytes = 40 }
[[guard.routes]]
match = { path = "/blind/{id}" }
upstream = "http://127.0.0.1:9000"
policy = "orders"
[[guard.routes]]
match = { path = "/trap" }
upstream = "http://127.0.0.1:9000"
policy = "bad"
resource = "panic"
[[guard.routes]]
match = { path = "/static/{*all}" }
upstream = "http://127.0.0.1:9000"

[[guard]]
listen = "127.0.0.1:7081"
[[guard.routes]]
match = { path = "/{*all}", extension = "exact" }
ambiguous_paths = "allow"
upstream = "http://127.0.0.1:9002"
policy = "default"
resource = "everything"
"#;

/// A folder with components and a configuration.
fn with_routes() -> Bench {
    let bench = Bench::new();
    std::fs::write(bench.0.path().join("config.toml"), CONFIG).unwrap();
    bench
}

const ROUTED: &str = "--config|config.toml|--request";

#[test]
fn a_configuration_says_which_route_and_policy_a_request_takes() {
    let bench = with_routes();
    let report = "PUT /reports//2%36/x/?day=mo|--header|X-Mode: batch|--header|X-Tenant: acme";
    let told = bench.json(&format!("{ROUTED}|{report}"));
    assert_eq!((&told["route"], &told["path"]), (&json!("guard[0].routes[0]"), &json!("/reports/{*name}")));
    assert_eq!(told["upstreams"], json!(["127.0.0.1:9000", "127.0.0.1:9001"]));
    assert_eq!((&told["resource"], &told["listen"]), (&json!("reports/26/x/mo"), &json!("127.0.0.1:7080")));
    assert_eq!(told["other_routes"], json!(["guard[1].routes[0]"]));
    assert!(told["policy"].as_str().is_some_and(|by| by.starts_with("default@sha256:")), "{told}");
    let plan = &told["plan"];
    assert_eq!((&plan["keys"], &plan["mode"]), (&json!(["reports/26/x/mo"]), &json!("shared")));
    assert_eq!((&plan["ttl_ms"], &plan["wait_ms"]), (&json!(8_500), &json!(0)));
    assert_eq!(told["labels"], json!({"tenant": "acme"}));

    let pay = "POST /orders/4%2F2/pay|--header|X-Tenant: acme|--header|Idempotency-Key: k|--contended";
    let told = bench.json(&format!("{ROUTED}|{pay}"));
    assert_eq!((&told["route"], &told["plan"]["keep_ms"]), (&json!("guard[0].routes[1]"), &json!(60_000)));
    assert_eq!(told["plan"]["keys"], json!(["acme/orders/4%2F2/pay/k"]));
    assert_eq!(told["contended"]["status"], 409);
    assert!(
        told["plan"]["ttl_ms"].as_u64().is_some_and(|ttl| ttl <= 9_000),
        "within the file's limits: {told}"
    );
    let text = bench.printed(&format!("{ROUTED}|{pay}"));
    for row in [
        "route         guard[0].routes[1], /orders/{id}/{*rest}, on 127.0.0.1:7080; others by --listen: guard[1].routes[0]",
        "upstreams     127.0.0.1:9000",
        "resource      /orders/4/2/pay",
        "outcome kept  1m00s",
    ] {
        assert!(text.contains(row), "`{row}` is not in:\n{text}");
    }
    let other = bench.json(&format!("--listen|127.0.0.1:7081|{ROUTED}|{pay}"));
    assert_eq!((&other["route"], &other["resource"]), (&json!("guard[1].routes[0]"), &json!("everything")));
}

#[test]
fn a_policy_is_tried_with_what_its_route_shows() {
    let bench = with_routes();
    // The tenant's header is present, but the route does not show it.
    let blind = bench.run(&format!("{ROUTED}|PUT /blind/42|--header|X-Tenant: acme"));
    let told = text(&blind.stderr);
    assert_eq!(blind.status.code(), Some(6), "{told}");
    assert!(
        told.contains("guard[0].routes[3]: the policy refuses: the request needs one header `x-tenant`"),
        "{told}"
    );

    let cart = |body: &str| format!("{ROUTED}|POST /carts|--body|{body}");
    assert_eq!(bench.json(&cart(r#"{"cart": {"id": 7}, "more": "and"}"#))["resource"], "cart/7");
    let far = bench.run(&cart(r#"{"more": "and more, and more, and more", "cart": {"id": 7}}"#));
    assert_eq!(far.status.code(), Some(6), "{}", text(&far.stdout));
    assert!(
        text(&far.stderr).contains("the proxy answers 413: the body is over 40 bytes"),
        "{}",
        text(&far.stderr)
    );

    // Another component instead of the route's, with the same settings.
    let told = bench.json("builtin:default|--config|config.toml|--request|PUT /orders/42");
    assert_eq!(
        (&told["route"], &told["plan"]["keys"]),
        (&json!("guard[0].routes[1]"), &json!(["/orders/42"]))
    );
    assert!(told["policy"].as_str().is_some_and(|by| by.starts_with("orders@sha256:")), "{told}");
}

#[test]
fn a_route_without_a_policy_passes_and_a_request_without_a_route_is_refused() {
    let bench = with_routes();
    let open = bench.json(&format!("{ROUTED}|GET /static/logo.png"));
    assert_eq!((&open["route"], &open["resource"]), (&json!("guard[0].routes[5]"), &Value::Null));
    assert_eq!((&open["policy"], &open["plan"]), (&Value::Null, &Value::Null));
    let told = bench.printed(&format!("{ROUTED}|GET /static/logo.png"));
    assert!(told.contains("policy     none; the request passes without a lock"), "{told}");

    let first = "--listen|127.0.0.1:7080|--config|config.toml|--request";
    let plain = CONFIG.split("[[guard]]").next().unwrap();
    std::fs::write(bench.0.path().join("plain.toml"), plain).unwrap();
    std::fs::write(
        bench.0.path().join("faulty.toml"),
        format!("[stor]\n{}", CONFIG.replace("see =", "sea =")),
    )
    .unwrap();
    for (args, code, words) in [
        (&*format!("{first}|GET /absent"), 6, "the proxy answers 404: no such path: /absent"),
        (&format!("{first}|DELETE /carts"), 6, "the proxy answers 404"),
        (&format!("{first}|PUT /reports/1?day=mo|--header|X-Mode: other"), 6, "the proxy answers 404"),
        (
            &format!("{ROUTED}|PUT /reports/1|--header|X-Mode: batch"),
            6,
            "guard[0].routes[0]: the proxy answers 400: query.day: is missing",
        ),
        (
            &format!("{ROUTED}|GET /orders/../admin"),
            6,
            "the proxy answers 400: path: a part of the path is `.`",
        ),
        (&format!("{ROUTED}|GET /trap"), 1, "guard[0].routes[4]: policy hook plan: trap"),
        ("--config|plain.toml|--request|GET /a", 2, "has no [[guard]]"),
        ("--config|absent.toml|--request|GET /a", 2, "absent.toml: cannot be read"),
        ("--config|faulty.toml|--request|GET /a", 2, "did you mean `see`?"),
        ("--config|faulty.toml|--request|GET /a", 2, "did you mean `store`?"),
        (
            &format!("--listen|127.0.0.1:1|{ROUTED}|GET /a"),
            2,
            "listens on 127.0.0.1:1; there are 127.0.0.1:7080, 127.0.0.1:7081",
        ),
        ("--config|config.toml", 2, "--request <LINE>"),
        ("--request|GET /a", 2, "<FILE>"),
        ("builtin:default|--listen|127.0.0.1:7080|--request|GET /a", 2, "--config <FILE>"),
        (&format!("{ROUTED}|GET /static/a|--ttl|1s"), 2, "cannot be used with"),
    ] {
        let output = bench.run(args);
        let told = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{args}: {told}");
        assert!(told.contains(words), "{args}: `{words}` is not in: {told}");
    }
    let none: Value =
        serde_json::from_slice(&bench.run(&format!("{first}|GET /absent|--json")).stdout).unwrap();
    assert_eq!(none["type"], "refused");
}
