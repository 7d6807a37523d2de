//! `[recording]` and `lockkeeper policy replay`: requests of a running proxy, under another policy.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Output};

use rustix::process::Signal;
use serde_json::{Value, json};

use super::command_line::text;
use super::*;

/// A proxy that records, with the folder of the recording.
struct Recorded {
    proxy: Proxy,
    dir: TempDir,
}

impl Recorded {
    async fn start(kind: Kind, recording: &str) -> Recorded {
        let (url, dir) = (database(kind).await, folder());
        let path = dir.path().join("recording");
        let sections = format!(
            "[recording]\ndir = \"{}\"\n{recording}\n[policies.default]\npath = \"builtin:default\"\n",
            path.display()
        );
        let proxy = Proxy::with(Settings { url, sections, ..Settings::default() }).await;
        proxy.until_ready().await;
        Recorded { proxy, dir }
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("recording")
    }

    /// The lines of all files.
    fn lines(&self) -> Vec<Value> {
        let mut files: Vec<PathBuf> =
            fs::read_dir(self.path()).unwrap().map(|file| file.unwrap().path()).collect();
        files.retain(|file| file.extension().is_some_and(|end| end == "jsonl"));
        files.sort();
        let texts = files.iter().map(|file| fs::read_to_string(file).unwrap());
        texts
            .flat_map(|text| text.lines().map(|line| serde_json::from_str(line).unwrap()).collect::<Vec<_>>())
            .collect()
    }

    fn count(&self, kind: &str) -> usize {
        self.lines().iter().filter(|line| !line[kind].is_null()).count()
    }

    /// Stops the proxy in order, so that its recording is complete.
    async fn stop(&mut self) {
        self.proxy.signal(Signal::TERM);
        assert_eq!(self.proxy.ended().await, Some(0), "{}", self.proxy.log());
    }

    fn replay(&self, args: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_lockkeeper"));
        command.args(["policy", "replay"]).args(args).arg("--recording").arg(self.path());
        command.output().expect("the command starts")
    }

    fn report(&self, args: &[&str]) -> Value {
        let output = self.replay(&[args, &["--json"]].concat());
        assert!(output.status.success(), "{args:?}: {}{}", text(&output.stdout), text(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    }
}

/// Clients of a large group that queue for `orders`, and some of a small group.
async fn crowd(client: &Client) {
    let mut clients = Vec::new();
    for n in 0..20 {
        let (client, group) = (client.clone(), if n % 5 == 4 { "small" } else { "large" });
        clients.push(tokio::spawn(async move {
            let body = json!({
                "resource": "orders/42", "owner": format!("{group}-{n}"), "labels": {"group": group},
                "wait_ms": 60_000, "ttl_ms": 30_000,
            });
            let lease = granted(waiting(&client, body)).await;
            pause_ms(5).await;
            released(&client, &lease).await;
        }));
    }
    for client in clients {
        client.await.expect("the client ends");
    }
}

on_both! {
    async fn recorded_requests_have_the_same_outcome_under_the_same_policy(kind: Kind) {
        let mut recorded = Recorded::start(kind, "").await;
        crowd(&recorded.proxy.client()).await;
        // Its client leaves, and the lease of another one ends by itself.
        recorded.proxy.client().lease("other", 300).await;
        recorded.stop().await;
        assert_eq!((recorded.count("ask"), recorded.count("policy")), (21, 1));
        assert!(recorded.count("end") >= 20, "{:?}", recorded.lines());
        let report = recorded.report(&["builtin:default", "--by", "label:group"]);
        assert_eq!(report["requests"], 21);
        assert_eq!(report["recorded"], json!({"granted": 21}));
        assert_eq!(report["before"]["outcomes"], json!({"granted": 21}));
        assert_eq!(report["after"]["outcomes"], report["before"]["outcomes"]);
        for nothing in ["lost_exclusion", "overlaps", "new_exclusion", "changed_plans"] {
            assert_eq!(report[nothing], 0, "{nothing}: {report}");
        }
        let groups: Vec<&str> = report["groups"].as_array().unwrap().iter().map(|g| g["name"].as_str().unwrap()).collect();
        assert_eq!(groups, ["", "", "large", "small"]);
        assert_eq!(recorded.report(&["builtin:default", "--by", "label:group"]), report, "it is the same each time");
    }
}

#[test]
fn a_candidate_that_lets_requests_run_together_is_refused_by_its_condition() {
    crate::harness::run(async {
        let mut recorded = Recorded::start(Kind::Mysql, "[policies.default.settings]\nstripes = 1\n").await;
        let client = recorded.proxy.client();
        for n in 0..4 {
            let lease = client.lease(&format!("orders/{n}"), 30_000).await;
            released(&client, &lease).await;
        }
        recorded.stop().await;
        let page = recorded.dir.path().join("report.html");
        let args = ["builtin:default", "--settings", "{}", "--fail-on", "fault,lost-exclusion", "--html"];
        let output = recorded.replay(&[&args[..], &[page.to_str().unwrap()]].concat());
        assert_eq!(output.status.code(), Some(7), "{}", text(&output.stderr));
        assert!(text(&output.stderr).contains("no longer exclude each other: 6"));
        let told = text(&output.stdout);
        assert!(told.contains("orders/0 and orders/1"), "{told}");
        assert!(fs::read_to_string(page).unwrap().contains("no longer exclude each other: 6"));
        let fair = recorded.replay(&["builtin:nothing"]);
        assert_eq!(fair.status.code(), Some(2), "{}", text(&fair.stderr));
    });
}

#[test]
fn names_are_masked_and_the_files_are_private() {
    crate::harness::run(async {
        let mut recorded = Recorded::start(Kind::Mysql, "names = \"segments\"\nlabels = [\"group\"]\n").await;
        crowd(&recorded.proxy.client()).await;
        recorded.stop().await;
        let all = recorded.lines().iter().map(Value::to_string).collect::<Vec<_>>().join("\n");
        assert!(!all.contains("orders") && !all.contains("large-"), "{all}");
        assert!(all.contains("\"small\""), "{all}");
        for file in fs::read_dir(recorded.path()).unwrap() {
            let mode = file.unwrap().metadata().unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600);
        }
        let report = recorded.report(&["builtin:fair-groups", "--settings", "{}", "--by", "label:group"]);
        assert_eq!(report["after"]["outcomes"], json!({"granted": 20}));
        assert!(report["notes"].to_string().contains("resource (by segment)"), "{report}");
    });
}

#[test]
fn a_killed_proxy_leaves_a_recording_that_can_be_read() {
    crate::harness::run(async {
        let mut recorded = Recorded::start(Kind::Mysql, "").await;
        crowd(&recorded.proxy.client()).await;
        eventually("the lines are written", async || recorded.count("ask") == 20).await;
        recorded.proxy.kill();
        let mut file = fs::read_dir(recorded.path()).unwrap().map(|file| file.unwrap().path());
        let file = file.find(|file| file.extension().is_some_and(|end| end == "jsonl")).unwrap();
        let mut lines = fs::read_to_string(&file).unwrap();
        lines.push_str("{\"ask\":{\"at_us\":1");
        fs::write(&file, &lines).unwrap();
        assert_eq!(recorded.report(&["builtin:default"])["requests"], 20);
        fs::write(&file, lines + "}}\n").unwrap();
        let broken = recorded.replay(&["builtin:default"]);
        assert_eq!(broken.status.code(), Some(2));
        let said = text(&broken.stderr);
        assert!(said.contains("is no line of a recording") && said.contains(".jsonl, line "), "{said}");
    });
}

#[test]
fn a_full_disk_drops_lines_and_locks_go_on() {
    crate::harness::run(async {
        let recorded = Recorded::start(Kind::Mysql, "file_bytes = 65536\n").await;
        // The next file cannot be made.
        fs::remove_dir_all(recorded.path()).unwrap();
        fs::write(recorded.path(), "a file").unwrap();
        let client = recorded.proxy.client();
        for n in 0..200 {
            let lease = client.lease(&format!("orders/{n}"), 30_000).await;
            released(&client, &lease).await;
        }
        eventually("lines are dropped", async || {
            recorded.proxy.metric("lockkeeper_recording_dropped_lines_total", &[]).await > 0.0
        })
        .await;
        let ready = recorded.proxy.admin().get("/ready").await;
        assert!(
            ready.status == 200 && ready.text.contains("the recording cannot be written"),
            "{}",
            ready.text
        );
    });
}
