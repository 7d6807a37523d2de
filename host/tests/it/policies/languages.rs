//! Policies in other languages than Rust: what `lockkeeper policy new` writes builds, passes its tests, and stays within the
//! limits of a proxy.

use std::process::Command;

use lockkeeper::config::{EngineLimits, Limits};
use lockkeeper::policy::{Compiler, Engine, FaultKind, PlanError, PlanRequest, load_file};
use serde_json::Map;

use super::*;
use crate::harness::lockkeeper;

/// The folder of a new policy, which is built.
struct Built {
    dir: TempDir,
    name: String,
}

impl Built {
    /// Writes a policy, changes it, and builds it with the commands that `policy new` prints.
    fn of(language: &str, change: impl FnOnce(&Path)) -> Built {
        let (dir, name) = (folder(), format!("{language}-tenants"));
        let mut new = lockkeeper();
        new.args(["--json", "policy", "new", &name, "--lang", language]).current_dir(dir.path());
        let written: Value = serde_json::from_str(&succeeds(&mut new)).expect("JSON");
        let root = dir.path().join(&name);
        change(&root);
        let mut build = Command::new("sh");
        build.args(["-ec", written["build"].as_str().expect("a command")]).current_dir(&root);
        // The Makefile calls `lockkeeper`.
        let path = std::env::var("PATH").expect("a path");
        let program = Path::new(env!("CARGO_BIN_EXE_lockkeeper"));
        let beside = program.parent().expect("it is in a folder").display().to_string();
        succeeds(build.env("PATH", format!("{beside}:{path}")));
        Built { dir, name }
    }

    fn file(&self) -> std::path::PathBuf {
        self.dir.path().join(&self.name).join(&self.name).with_extension("wasm")
    }

    fn component(&self) -> Vec<u8> {
        std::fs::read(self.file()).expect("it was built")
    }

    /// The output of a command about the component.
    fn policy(&self, args: &[&str]) -> String {
        let mut command = lockkeeper();
        succeeds(command.arg("policy").arg(args[0]).arg(self.file()).args(&args[1..]))
    }
}

/// The output of a command that has to succeed.
fn succeeds(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{command:?}: {}\n{out}\n{err}", output.status);
    out
}

fn request(resource: &str) -> PlanRequest {
    let labels = vec![("tenant".into(), "acme".into())];
    PlanRequest { labels, seed: 7, ..PlanRequest::plain(resource, "worker-1") }
}

/// What `policy new` promises: the policy passes its tests, its checks and its scenario, and its plans are remembered.
fn passes(language: &str) {
    let built = Built::of(language, |_| {});
    let checked = built.policy(&["check"]);
    assert!(checked.contains("is fine") && checked.contains("decides plan, reads"), "{checked}");
    assert!(!checked.contains("note:"), "{checked}");
    assert!(
        checked.contains(&format!("manifest: {} 0.1.0; Each tenant has locks of its own", built.name)),
        "{checked}"
    );
    assert!(checked.contains("plan reads: name,") && checked.contains("label(tenant)"), "{checked}");
    let tested = built.policy(&["test"]);
    assert!(tested.contains("scenarios: 1") && tested.contains("failed: 0"), "{tested}");
    let tried = built.policy(&["try", "--resource", "orders/42", "--label", "tenant=acme"]);
    assert!(tried.contains("acme/orders/42"), "{tried}");
    let cost = built.policy(&["bench"]);
    assert!(cost.contains("plans of equal requests are remembered"), "{cost}");
}

#[test]
fn a_policy_in_javascript_builds_and_passes_its_tests() {
    passes("js");
}

#[test]
fn a_policy_in_typescript_builds_and_passes_its_tests() {
    passes("ts");
}

#[test]
fn a_policy_in_c_builds_and_passes_its_tests() {
    passes("c");
}

/// Loads a component under these limits, asks for plans of these resources, and returns the faults.
fn faults(component: &[u8], limits: EngineLimits, resources: &[&str]) -> Vec<FaultKind> {
    let limits = EngineLimits { instances: 1, ..limits };
    let engine = Engine::new(&limits, Compiler::InProcess).expect("an engine");
    let policy = load_file("it", component, &Map::new(), &engine, &Limits::default()).expect("it loads");
    let fault = |resource: &&str| match policy.plan(&request(resource)) {
        Err(PlanError::Fault(fault)) => fault.kind,
        other => panic!("{resource}: {other:?}"),
    };
    let faults = resources.iter().map(fault).collect();
    let plan = policy.plan(&request("orders/42")).expect("the other requests have plans");
    assert_eq!(plan.keys[0].as_str(), "acme/orders/42");
    faults
}

#[test]
fn a_policy_in_javascript_that_misbehaves_is_stopped_by_the_default_limits() {
    let change = |root: &Path| {
        let file = root.join("policy.js");
        let code = std::fs::read_to_string(&file).unwrap();
        let misbehave = r#"plan(_settings, request) {
    if (request.name === "loop") for (;;) {}
    if (request.name === "recurse") (function again() { return again() + 1; })();
    if (request.name === "memory") for (let all = []; ; ) all.push(new Uint8Array(1 << 20));
    if (request.name === "throw") throw new Error("on purpose");
    if (request.name === "empty") return {};
    if (request.name === "clock") return { keys: [String(Date.now())] };"#;
        let changed = code.replace("plan(_settings, request) {", misbehave);
        assert_ne!(code, changed);
        std::fs::write(file, changed).unwrap();
    };
    let component = Built::of("js", change).component();
    let resources = ["loop", "recurse", "memory", "throw", "empty", "clock"];
    let kinds = faults(&component, EngineLimits::default(), &resources);
    // QuickJS writes to all memory that it allocates, which uses the fuel of a call before 16 MiB are full.
    let expected = [
        FaultKind::Time,
        FaultKind::Stack,
        FaultKind::Time,
        FaultKind::Trap,
        FaultKind::Trap,
        FaultKind::Trap,
    ];
    assert_eq!(kinds, expected);
    let time = Duration::from_secs(10);
    let patient = EngineLimits { fuel: 1_000_000_000, time, ..EngineLimits::default() };
    assert_eq!(faults(&component, patient, &["memory"]), [FaultKind::Memory]);
}

#[test]
fn a_policy_in_c_that_misbehaves_is_stopped_by_the_default_limits() {
    let change = |root: &Path| {
        let file = root.join("policy.c");
        let code = std::fs::read_to_string(&file).unwrap();
        let helpers = r#"static int deeper(volatile int *above) {
  volatile int here[64] = {*above};
  return deeper(here) + here[1];
}

// Returns true with a plan"#;
        let misbehave = r#"  policy_string_t tenant = label(request, "tenant");
  volatile int forever = 1;
  if (equals(request->name, "loop")) while (forever) {}
  if (equals(request->name, "recurse")) forever = deeper(&forever);
  if (equals(request->name, "memory")) while (forever) *(volatile char *)malloc(1 << 20) = 1;
  if (equals(request->name, "abort")) abort();"#;
        let changed = code
            .replace("// Returns true with a plan", helpers)
            .replace("  policy_string_t tenant = label(request, \"tenant\");", misbehave);
        assert_ne!(code, changed);
        std::fs::write(file, changed).unwrap();
    };
    let built = Built::of("c", change);
    let kinds = faults(&built.component(), EngineLimits::default(), &["loop", "recurse", "memory", "abort"]);
    assert_eq!(kinds, [FaultKind::Time, FaultKind::Stack, FaultKind::Memory, FaultKind::Trap]);
}

#[test]
fn a_policy_in_javascript_goes_live_and_decides_in_a_proxy() {
    crate::harness::run(async {
        let built = tokio::task::spawn_blocking(|| Built::of("js", |_| {})).await.unwrap();
        let deployment = Deployment::start(Kind::Mysql, default_policy()).await;
        deployment.push(&built.component()).await;
        let client = deployment.proxy.client();
        for _ in 0..2 {
            let body = json!({"resource": "orders/42", "labels": {"tenant": "acme"}, "ttl_ms": 5_000});
            let lease = granted(waiting(&client, body)).await;
            assert_eq!(keys(&lease), ["acme/orders/42"]);
            released(&client, &lease).await;
        }
        let refused = client.acquire(json!({"resource": "orders/42"})).await;
        assert_eq!((refused.status, refused.slug()), (403, "refused"), "{}", refused.text);
        assert!(refused.text.contains("the label `tenant` is missing"), "{}", refused.text);
        assert_eq!(deployment.status().await["faults"], 0);
    });
}
