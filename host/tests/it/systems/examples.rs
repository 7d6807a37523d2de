//! The programs of `examples/`, run as users run them: they show a fault without the proxy, and its absence with the
//! proxy.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::LazyLock;

use super::*;
use crate::harness::Kind;

const NAMES: [&str; 8] = [
    "cache",
    "configuration",
    "duplicate-submit",
    "paused-holder",
    "policy-rollout",
    "scheduled-task",
    "stock",
    "web-shop",
];

/// The folder of the built programs.
static BUILT: LazyLock<PathBuf> = LazyLock::new(|| {
    let folder = Path::new(env!("CARGO_BIN_EXE_lockkeeper")).parent().unwrap();
    let profile = match folder.file_name().unwrap().to_str() {
        Some("debug") => "dev",
        other => other.unwrap(),
    };
    // The proxy is among the packages, so that dependencies get the features that they have here and none is compiled
    // twice. Its own binary is not built, because other tests run it.
    let mut build = Command::new(env!("CARGO"));
    build.args([
        "build",
        "--locked",
        "--quiet",
        "--package",
        "lockkeeper",
        "--package",
        "lockkeeper-examples",
    ]);
    build.args(NAMES.iter().flat_map(|name| ["--bin".to_owned(), format!("example-{name}")]));
    build.args(["--profile", profile, "--target-dir"]).arg(folder.parent().unwrap());
    build.current_dir(env!("CARGO_MANIFEST_DIR")).stdin(Stdio::null());
    // Remove the variables that cargo has set for this test's package: they would make the build scripts of other
    // packages run again.
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy();
        if name == "OUT_DIR" || name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_") {
            build.env_remove(&*name);
        }
    }
    assert!(build.status().expect("cargo starts").success(), "the examples build");
    folder.to_owned()
});

/// What an example has printed, and the JSON in its last line.
async fn printed(name: &str, kind: Kind, args: [&str; 2]) -> (String, Value) {
    let (program, args) = (format!("example-{name}"), args.map(str::to_owned));
    let run = tokio::task::spawn_blocking(move || {
        let mut example = Command::new(BUILT.join(program));
        example.args(["--json", "--lockkeeper", env!("CARGO_BIN_EXE_lockkeeper")]).args(args);
        example.stdin(Stdio::null()).output().expect("the example starts")
    });
    let output = run.await.unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(0), "{out}{err}");
    let report: Value = serde_json::from_str(out.lines().last().unwrap()).expect(&out);
    let server = report["server"].as_str().unwrap().to_lowercase();
    assert!(server.starts_with(&format!("{kind:?} ").to_lowercase()), "{out}");
    (out.into_owned(), report)
}

/// The numbers of an example, which must show its fault without the proxy and be free of it with the proxy.
async fn played(name: &str, kind: Kind, args: [&str; 2]) -> (Value, Value) {
    let (out, mut report) = printed(name, kind, args).await;
    assert_eq!((&report["shown"], &report["cured"]), (&json!(true), &json!(true)), "{out}");
    for column in ["without", "with"] {
        let numbers = report[column].as_object().unwrap();
        assert!(numbers.keys().all(|row| out.contains(&format!("  {row} "))), "all are in the table: {out}");
    }
    (report["without"].take(), report["with"].take())
}

fn number(numbers: &Value, row: &str) -> u64 {
    numbers[row].as_u64().unwrap_or_else(|| panic!("no `{row}`: {numbers}"))
}

/// Runs an example on the server that the tests share.
async fn example(name: &str, kind: Kind) -> (Value, Value) {
    played(name, kind, ["--url", &database(kind).await]).await
}

on_both! {
    async fn S20_stock_is_sold_once(kind: Kind) {
        let (without, with) = example("stock", kind).await;
        assert!(number(&without, "orders taken") > 100 && number(&without, "oversold") > 0, "{without}");
        let sold = ["orders taken", "pieces left in the table", "oversold"].map(|row| number(&with, row));
        assert_eq!(sold, [100, 0, 0]);
    }

    /// On a separate server, as `cargo xtask example` runs it.
    async fn S20_a_scheduled_task_runs_on_one_node(kind: Kind) {
        let server = if kind == Kind::Mysql { "mysql" } else { "mariadb" };
        let (without, with) = played("scheduled-task", kind, ["--server", server]).await;
        assert!(number(&without, "reports sent") > 5 && number(&without, "sent again") > 0, "{without}");
        assert_eq!((number(&with, "reports sent"), number(&with, "sent again")), (5, 0));
    }

    async fn S20_a_cache_is_filled_by_one_client_at_a_time(kind: Kind) {
        let (without, with) = example("cache", kind).await;
        assert!(number(&without, "at the same time, at most") > 1, "{without}");
        assert_eq!(number(&with, "at the same time, at most"), 1, "{with}");
        assert!((2..=13).contains(&number(&with, "slow queries")), "one each 200 ms at most: {with}");
    }

    async fn S20_no_change_of_a_configuration_is_lost(kind: Kind) {
        let (without, with) = example("configuration", kind).await;
        assert!(number(&without, "changes lost") > 0, "{without}");
        assert_eq!((number(&with, "settings in the document"), number(&with, "changes lost")), (60, 0));
    }

    async fn S20_an_order_that_is_submitted_again_is_paid_once(kind: Kind) {
        let (without, with) = example("duplicate-submit", kind).await;
        assert!(number(&without, "paid again") > 0, "{without}");
        let paid = ["submitted", "orders paid", "paid again", "buyers told several order numbers"];
        assert_eq!(paid.map(|row| number(&with, row)), [100, 25, 0, 0]);
    }

    async fn S30_a_holder_that_was_stopped_overwrites_nothing(kind: Kind) {
        let (without, with) = example("paused-holder", kind).await;
        let rows = ["their writes refused", "later writes overwritten"];
        assert_eq!(rows.map(|row| number(&without, row)), [0, 3]);
        assert_eq!(rows.map(|row| number(&with, row)), [3, 0]);
    }

    async fn a_policy_is_replaced_step_by_step_and_flawed_candidates_are_stopped(kind: Kind) {
        let (out, report) = printed("policy-rollout", kind, ["--url", &database(kind).await]).await;
        let number = |row: &str| number(&report["numbers"], row);
        // Each of the 100 printers was shared by two tenants.
        assert_eq!(number("pairs that would lose their exclusion"), 100, "{out}");
        assert_eq!(number("requests that got no lock"), 0, "{out}");
        assert!(number("requests that a shadow compared") > 100, "{out}");
        let [was, is] = ["replayed before", "replayed fair"].map(|side| number(&format!("p99 of small, {side}, ms")));
        assert!(is < was, "{out}");
        for step in ["stopped: 100 pairs", "the canary decides for 5.0 %", "rolled back by itself: proxy "] {
            assert!(out.contains(step), "{step} is not in {out}");
        }
    }

    async fn a_shop_without_locks_is_correct_behind_guarded_routes(kind: Kind) {
        let (without, with) = example("web-shop", kind).await;
        let mut faults = vec![
            "pieces oversold",
            "charged again",
            "buyers told several charges",
            "reports made again",
            "pages computed beside another",
            "later prices overwritten",
        ];
        if has_python() {
            faults.push("visits not counted (Python)");
        }
        for fault in faults {
            assert!(number(&without, fault) > 0, "{fault}: {without}");
            assert_eq!(number(&with, fault), 0, "{fault}: {with}");
        }
        let rows = ["orders taken", "orders paid", "answers replayed", "stale prices refused"];
        assert_eq!(rows.map(|row| number(&with, row)), [100, 25, 75, 1]);
        assert_eq!(number(&without, "stale prices refused"), 0, "there is no token without the proxy");
    }
}

/// Without Python, the example skips its counter and says so.
fn has_python() -> bool {
    let mut python = Command::new("python3");
    let version = python.arg("--version").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    version.status().is_ok_and(|status| status.success())
}
