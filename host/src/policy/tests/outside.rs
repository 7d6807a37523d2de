//! Crates outside the workspace, as users have them.

use std::process::Command;

use super::*;

fn checked(component: &[u8]) -> Report {
    let limits = EngineLimits { instances: 1, ..EngineLimits::default() };
    check_file(component, &Map::new(), &limits, &Limits::default()).unwrap()
}

#[test]
fn the_example_passes_and_is_live_at_once() {
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
fn a_new_policy_builds_and_passes_its_test_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let root = scaffold("orders-by-day", dir.path(), None).unwrap();
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
