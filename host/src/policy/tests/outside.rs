//! Crates outside the workspace, like those of users.

use std::process::Command;

use super::*;

fn checked(component: &[u8]) -> Report {
    check_file(component, &Map::new(), &ENGINE, &Limits::default()).unwrap()
}

#[test]
fn the_tenant_example_passes_its_checks_and_goes_live() {
    let component = built("../examples/tenant-policy");
    assert_eq!(checked(&component).notes, Vec::<String>::new());
    let policies = policies(&ENGINE);
    let tenant = policies.commit(policies.prepare("default", &component, None).unwrap());
    let labels = vec![("tenant".to_owned(), "acme".to_owned())];
    let plan = tenant.plan(&PlanRequest { labels, ..request("orders/42") }).unwrap();
    assert_eq!(plan.keys[0].as_str(), "acme/orders/42");
    let refusal = tenant.plan(&request("orders/42"));
    assert!(matches!(refusal, Err(PlanError::Refused { reason }) if reason.contains("tenant")));
}

#[test]
fn the_orders_example_passes_its_checks_and_sees_the_guarded_request() {
    let component = built("../examples/orders-policy");
    assert_eq!(checked(&component).notes, Vec::<String>::new());
    let orders = load_file("orders", &component, &Map::new(), &ENGINE, &Limits::default()).unwrap();
    let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    let http = HttpView {
        method: "POST".into(),
        path: "/orders/42/pay".into(),
        captures: vec![pair("id", "42")],
        headers: vec![pair("x-tenant", "acme"), pair("idempotency-key", "7f3a")],
        ..HttpView::default()
    };
    let request = PlanRequest { http: Some(Arc::new(http)), ..request("/orders/42/pay") };
    let plan = orders.plan(&request).unwrap();
    assert_eq!((plan.keys[0].as_str(), plan.primitive), ("acme/orders/42/pay/7f3a", Primitive::Once));
    let contention = ResponseContention {
        key: plan.keys[0].clone(),
        holder: "another".into(),
        position: 1,
        waited_ms: 0,
        retry_after_ms: 0,
    };
    assert_eq!(orders.response(&request, &contention).unwrap().unwrap().status, 409);
}

#[test]
fn a_scaffolded_policy_builds_and_passes_its_test() {
    let dir = tempfile::tempdir().unwrap();
    let root = scaffold("orders-by-day", Language::Rust, dir.path()).unwrap();
    // The versions of the example, so that nothing has to be looked up.
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/tenant-policy/Cargo.lock");
    let lock = std::fs::read_to_string(example).unwrap().replace("tenant-policy", "orders-by-day");
    std::fs::write(root.join("Cargo.lock"), lock).unwrap();
    let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/policies");
    checked(&lockkeeper_builder::build(&root, Some(&target)).unwrap());
    let mut test = Command::new(env!("CARGO"));
    test.current_dir(&root).args(["test", "--quiet", "--target-dir"]).arg(&target);
    let output = test.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
