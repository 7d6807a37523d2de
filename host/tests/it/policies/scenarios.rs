//! `lockkeeper policy test`, `diff` and `bench`: requests of scenario files, without a proxy.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::{Value, json};

use super::command_line::text;
use super::*;

/// A folder with scenario files and components.
struct Files(TempDir);

impl Files {
    fn new() -> Files {
        Files(folder())
    }

    fn with(self, name: &str, content: impl AsRef<[u8]>) -> Files {
        std::fs::write(self.0.path().join(name), content).unwrap();
        self
    }

    /// Runs a `policy` command. `args` are separated by `|`.
    fn run(&self, args: &str) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_lockkeeper"));
        command.current_dir(self.0.path()).arg("policy").args(args.split('|'));
        command.output().expect("the command starts")
    }

    fn json(&self, args: &str, code: i32) -> Value {
        let output = self.run(&format!("{args}|--json"));
        let (out, told) = (text(&output.stdout), text(&output.stderr));
        assert_eq!(output.status.code(), Some(code), "{args}: {out}{told}");
        serde_json::from_str(&out).unwrap_or_else(|error| panic!("{args}: {error}: {out}"))
    }

    fn fails(&self, args: &str, code: i32, why: &str) {
        let output = self.run(args);
        let told = text(&output.stderr);
        assert!(
            output.status.code() == Some(code) && told.contains(why),
            "{args}: {told}{}",
            text(&output.stdout)
        );
    }
}

/// Two clients of two tenants ask for one name.
const TENANTS: &str = r#"
about = "tenants"
[[requests]]
name = "acme"
ask = { resource = "reports", wait = "1s", labels = { tenant = "acme" } }
hold = "20ms"
[[requests]]
name = "globex"
ask = { resource = "reports", wait = "1s", labels = { tenant = "globex" } }
at = "5ms"
hold = "20ms"
[[expect]]
of = "globex"
wait_max = "<5ms"
[properties]
never_share = ["label:tenant"]
keys_ignore = ["owner"]
"#;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// What was found for the checks that are not met.
fn unmet(tested: &Value) -> Vec<(String, String)> {
    let checks =
        tested["scenarios"].as_array().unwrap().iter().flat_map(|one| one["checks"].as_array().unwrap());
    let unmet = checks.filter(|check| check["is_met"] == false);
    unmet
        .map(|check| (check["what"].as_str().unwrap().into(), check["found"].as_str().unwrap().into()))
        .collect()
}

#[test]
fn the_shipped_policies_and_the_examples_meet_their_scenarios() {
    let files = Files::new().with("orders-policy.wasm", &*ORDERS).with("tenant-policy.wasm", &*TENANT);
    let shipped = ["default", "fair-groups", "backoff"]
        .map(|name| (format!("builtin:{name}"), format!("policies/{name}")));
    let examples =
        ["orders-policy", "tenant-policy"].map(|name| (format!("{name}.wasm"), format!("examples/{name}")));
    for (policy, folder) in shipped.into_iter().chain(examples) {
        let scenarios = root().join(folder).join("scenarios");
        let tested = files.json(&format!("test|{policy}|{}", scenarios.display()), 0);
        assert!(tested["checks"].as_u64().unwrap() >= 6 && tested["failed"] == 0, "{policy}: {tested}");
        let costs = files.json(&format!("bench|{policy}|{}|--max-fuel|100000", scenarios.display()), 0);
        assert!(costs["hooks"][0]["fuel_max"].as_u64().unwrap() > 100, "{costs}");
    }
}

#[test]
fn a_policy_that_does_not_keep_tenants_apart_is_named_with_its_requests() {
    let files = Files::new().with("tenants.toml", TENANTS);
    let tested = files.json("test|builtin:default|tenants.toml", 7);
    assert_eq!((&tested["checks"], &tested["failed"]), (&json!(3), &json!(2)), "{tested}");
    let unmet = unmet(&tested);
    assert_eq!(unmet[0].0, "globex: wait_max <5ms");
    let pair = "reports (tenant=acme) and reports (tenant=globex) have the key reports";
    assert_eq!(unmet[1], ("never_share label:tenant".to_owned(), pair.to_owned()));
    assert_eq!(tested["scenarios"][0]["requests"][1]["granted"], 1, "{tested}");
    // The same each time.
    assert_eq!(files.json("test|builtin:default|tenants.toml", 7), tested);
    files.fails("test|builtin:default|tenants.toml", 7, "2 of 3 checks failed");
}

#[test]
fn each_property_finds_a_policy_that_breaks_it() {
    let properties = r#"
[[plan]]
ask = { resource = "a", labels = { tenant = "x" }, owner = "me" }
is = { keys = ["x/a"] }
[[plan]]
ask = { resource = "a", labels = { tenant = "y" } }
is = { keys = ["y/a"] }
[properties]
never_share = ["label:tenant"]
always_exclude = ["resource"]
keys_ignore = ["label:tenant", "ttl", "seed"]
"#;
    let files = Files::new().with("p.toml", properties).with("tenant.wasm", &*TENANT);
    let unmet = unmet(&files.json("test|tenant.wasm|p.toml", 7));
    let [excluded, ignored] = &unmet[..] else { panic!("{unmet:?}") };
    assert_eq!(excluded.0, "always_exclude resource");
    assert!(excluded.1.ends_with("can be granted together"), "{excluded:?}");
    assert_eq!(ignored.0, "keys_ignore label:tenant");
    assert!(ignored.1.contains("[\"x/a\"] with \"x\""), "{ignored:?}");
}

/// A bound must not be met because there is nothing to measure.
#[test]
fn a_policy_that_grants_nothing_or_fails_meets_no_bound() {
    let held = r#"
[[requests]]
name = "first"
ask = { resource = "job", ttl = "60s" }
hold = "10s"
[[requests]]
name = "none"
ask = { resource = "job" }
at = "1s"
clients = 5
hold = "1ms"
[[expect]]
of = "none"
wait_p99 = "<1s"
jain = ">0.9"
[properties]
never_share = ["label:tenant"]
"#;
    let files = Files::new().with("none.toml", held).with("bad.wasm", &*BAD);
    let found = unmet(&files.json("test|builtin:default|none.toml", 7));
    let found: Vec<&str> = found.iter().map(|(_, found)| found.as_str()).collect();
    assert_eq!(found[..2], ["none was granted", "none was granted"]);
    assert!(
        found[2].contains("(tenant=another) and job") || found[2].contains("job and job (tenant="),
        "{found:?}"
    );
    let files = files.with("panic.toml", held.replace("job", "panic"));
    let found = unmet(&files.json("test|bad.wasm|panic.toml", 7));
    assert!(found.iter().any(|(what, _)| what == "the policy does not fail"), "{found:?}");
    assert!(found.iter().any(|(_, found)| found.contains("the policy fails for panic")), "{found:?}");
    files.fails("bench|bad.wasm|panic.toml|--max-fuel|1000", 1, "the policy has failed");
    let args = "diff|bad.wasm|builtin:default|panic.toml|--fail-on|lost-exclusion";
    files.fails(args, 7, "were not compared: 6");
    let args = "diff|builtin:default|builtin:backoff|panic.toml|--before-settings|x";
    files.fails(args, 2, "--before-settings is not a JSON object");
}

#[test]
fn a_lease_that_is_neither_renewed_nor_released_ends_in_use() {
    let scenario = r#"
[[requests]]
name = "crash"
ask = { resource = "job", ttl = "1s" }
hold = "10s"
renew = false
release = false
[[requests]]
name = "next"
ask = { resource = "job", wait = "60s" }
at = "10ms"
hold = "0"
[[requests]]
name = "guarded"
ask = { request = "PUT /a", path = "/a", resource = "a", ttl = "1s" }
hold = "10s"
[[expect]]
of = ["crash", "guarded"]
outlived = 2
[[expect]]
of = "next"
wait_max = "<1.1s"
"#;
    let files = Files::new().with("ends.toml", scenario);
    files.json(r#"test|builtin:default|ends.toml|--settings|{"max_hold_ms": 2000}"#, 0);
}

#[test]
fn a_difference_of_two_policies_names_what_they_no_longer_exclude() {
    let files = Files::new().with("tenants.toml", TENANTS).with("tenant.wasm", &*TENANT);
    let diff = files.json("diff|builtin:default|tenant.wasm|tenants.toml|--fail-on|lost-exclusion", 7);
    assert_eq!(
        (&diff["plans"]["lost_exclusion"], &diff["plans"]["changed_plans"]),
        (&json!(1), &json!(2)),
        "{diff}"
    );
    let pair = &diff["plans"]["lost_examples"][0];
    assert_eq!(pair["requests"], json!(["reports (tenant=acme)", "reports (tenant=globex)"]));
    assert_eq!(pair["after"], json!(["acme/reports by lease", "globex/reports by lease"]));
    files.json("diff|tenant.wasm|builtin:default|tenants.toml|--fail-on|lost-exclusion,refused,fault", 0);
    files.fails("diff|tenant.wasm|tenant.wasm|tenants.toml|--fail-on|p99:2x", 2, "policy replay");
    files.fails("bench|builtin:default|tenants.toml|--max-fuel|10", 7, "over --max-fuel");
}

#[test]
fn a_scenario_that_is_wrong_says_where() {
    let requests = "[[requests]]\nname = \"a\"\nhold = \"1ms\"\nask = { resource = \"a\" }\n";
    let bound = |bound: &str| format!("{requests}[[expect]]\n{bound}\n");
    for (content, why) in [
        (requests.to_owned(), "checks nothing"),
        (bound("of = \"b\"\ngranted = 1"), "`b`; there are a"),
        (bound("of = \"a\""), "no bound"),
        (bound("wait_p99 = \"<3%\""), "line 6"),
        (bound("outcomes = { lost = 1 }"), "`lost` is no outcome; there are granted"),
        (requests.replace("1ms", "3 parsecs"), "line 3"),
        (requests.replace("resource", "ressource"), "unknown field `ressource`"),
        (format!("{requests}{requests}"), "the name is given twice"),
        (requests.replace("hold", "repeat = 2\nuntil = \"1s\"\nhold"), "exclude each other"),
        (requests.replace("hold", "clients = 4000000000\nhold"), "`clients` must be 1 to 1000000"),
        (requests.replace("hold", "clients = 0\nhold"), "`clients` must be 1 to 1000000"),
        (
            requests.replace("hold", "every = \"1ms\"\nuntil = \"4294967.295s\"\nhold"),
            "at most 1000000 requests",
        ),
        (requests.replace("hold", "every = \"1ms\"\nhold"), "`every` needs"),
        (requests.replace("hold", "until = \"1s\"\nhold").replace("\"a\" }", "\"r/{n}\" }"), "`{n}` needs"),
        (
            bound("granted = 1").replace("hold = \"1ms\"", "hold = \"0\"\nuntil = \"1000h\""),
            "at most 1000000 requests",
        ),
        ("[[plan]]\nask = { resource = \"a\" }\nis = { keyz = [] }\n".to_owned(), "no plan has `keyz`"),
        (
            "[[plan]]\nask = { request = \"GET /a\", path = \"/b/{id}\" }\nrefused = \"\"\n".to_owned(),
            "/b/{id}",
        ),
        ("[properties]\nnever_share = [\"tenant\"]\n".to_owned(), "label:NAME"),
    ] {
        let files = Files::new().with("s.toml", &content);
        files.fails("test|builtin:default|s.toml", 2, why);
    }
    let files = Files::new();
    files.fails("test|builtin:default", 2, "builtin:default has no scenarios");
    files.fails("test|builtin:default|.", 2, "no file *.toml");
    files.fails("test|builtin:default|none.toml", 1, "none.toml");
}
