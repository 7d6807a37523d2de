//! The command line as README describes it: a policy from its creation to its rollback, and locks.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use lockkeeper::policy::attach;

use super::*;
use crate::harness::minisign::Signer;

/// The command, as a client of a proxy.
pub(crate) fn lockkeeper(proxy: &Proxy, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lockkeeper"));
    command.args(args).stdin(Stdio::null());
    command.env("LOCKKEEPER_SERVER", format!("http://{}", proxy.api_address()));
    command.env("LOCKKEEPER_ADMIN", format!("http://{}", proxy.admin_address()));
    command
}

/// Runs a command to its end, outside the test's own thread.
pub(crate) async fn ended(mut command: Command) -> Output {
    let run = tokio::task::spawn_blocking(move || command.output());
    run.await.expect("no panic").expect("the command starts")
}

/// The output of a command that must succeed.
async fn printed(command: Command) -> String {
    let output = ended(command).await;
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{:?}: {out}{err}", output.status);
    out
}

/// Output as text.
pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

async fn json_of(proxy: &Proxy, args: &[&str]) -> Value {
    let out = printed(lockkeeper(proxy, &[args, &["--json"]].concat())).await;
    serde_json::from_str(&out).unwrap_or_else(|error| panic!("{args:?}: {error}: {out}"))
}

/// A crate from `policy new`. It is built in the folder where other tests build theirs.
struct Author {
    dir: TempDir,
    root: PathBuf,
}

impl Author {
    async fn new(proxy: &Proxy) -> Author {
        let dir = folder();
        let mut new = lockkeeper(proxy, &["policy", "new", "quiet-orders"]);
        new.current_dir(dir.path());
        let told = printed(new).await;
        assert!(
            told.contains("wrote quiet-orders")
                && told.contains("cd quiet-orders")
                && told.contains("lockkeeper policy build"),
            "{told}"
        );
        let root = dir.path().join("quiet-orders");
        let host = Path::new(env!("CARGO_MANIFEST_DIR"));
        // Use the versions of the example, so that nothing has to be looked up.
        let lock = std::fs::read_to_string(host.join("../examples/tenant-policy/Cargo.lock")).unwrap();
        std::fs::write(root.join("Cargo.lock"), lock.replace("tenant-policy", "quiet-orders")).unwrap();
        let target = host.join("../target").canonicalize().unwrap();
        std::os::unix::fs::symlink(target, root.join("target")).unwrap();
        Author { dir, root }
    }

    /// Runs a `policy` command in the crate.
    async fn policy(&self, proxy: &Proxy, args: &[&str]) -> String {
        let mut command = lockkeeper(proxy, &[&["policy"], args].concat());
        command.current_dir(&self.root);
        printed(command).await
    }

    async fn cargo_test(&self) {
        let mut test = Command::new(env!("CARGO"));
        test.current_dir(&self.root).args([
            "test",
            "--quiet",
            "--offline",
            "--target-dir",
            "target/policies",
        ]);
        assert!(printed(test).await.contains("2 passed"));
    }

    /// Changes the policy: upper and lower case no longer matter.
    fn change(&self) {
        let file = self.root.join("src/lib.rs");
        let code = std::fs::read_to_string(&file).unwrap();
        let change = "request.name.to_lowercase()";
        let changed = code.replace("request.name", change);
        assert_ne!(code, changed);
        std::fs::write(file, changed).unwrap();
    }
}

/// Takes and releases one lock until it is told to stop, and publishes the key of the last lease.
fn running_client(
    client: Client,
    stop: Arc<AtomicBool>,
) -> (JoinHandle<()>, tokio::sync::watch::Receiver<String>) {
    let (tell, last) = tokio::sync::watch::channel(String::new());
    let work = tokio::spawn(async move {
        while !stop.load(Relaxed) {
            let body = json!({"resource": "Orders/42", "wait_ms": 30_000, "ttl_ms": 20_000, "labels": {"tenant": "acme"}});
            let lease = granted(waiting(&client, body)).await;
            tell.send_replace(keys(&lease).join(" "));
            released(&client, &lease).await;
        }
    });
    (work, last)
}

async fn until_key(last: &mut tokio::sync::watch::Receiver<String>, key: &str) {
    let limit = Duration::from_secs(30);
    let seen = tokio::time::timeout(limit, last.wait_for(|last| last == key)).await;
    seen.unwrap_or_else(|_| panic!("never held {key}")).expect("the client goes on");
}

/// The walk-through of README: write a policy, test it, build it, check it, push it, see a running client's locks
/// change, and roll it back.
#[test]
fn a_policy_is_written_tested_pushed_and_rolled_back_from_the_command_line() {
    crate::harness::run(async {
        let proxy = Proxy::start(&database(Kind::Mysql).await).await;
        proxy.until_ready().await;
        let stop = Arc::new(AtomicBool::new(false));
        let (work, mut last) = running_client(proxy.client(), stop.clone());
        until_key(&mut last, "Orders/42").await;

        let author = Author::new(&proxy).await;
        author.change();
        author.cargo_test().await;
        let tested = author.policy(&proxy, &["test", "."]).await;
        assert!(tested.contains("scenarios: 1") && tested.contains("failed: 0"), "{tested}");
        let built = author.policy(&proxy, &["build"]).await;
        assert!(built.contains("quiet-orders.wasm"), "{built}");
        let checked = author.policy(&proxy, &["check", "quiet-orders.wasm"]).await;
        assert!(checked.contains("is fine") && checked.contains("plan"), "{checked}");
        let pushed = author.policy(&proxy, &["push", "default", "quiet-orders.wasm"]).await;
        assert!(pushed.contains("(generation 2)"), "{pushed}");
        until_key(&mut last, "acme/orders/42").await;
        let listed = author.policy(&proxy, &["list"]).await;
        assert!(
            listed.lines().nth(1).is_some_and(|row| row.contains("default") && row.contains('2')),
            "{listed}"
        );
        let policies = json_of(&proxy, &["policy", "list"]).await;
        let live = &policies["policies"][0];
        assert_eq!(
            (&live["manifest"]["name"], &live["manifest"]["version"]),
            (&json!("quiet-orders"), &json!("0.1.0"))
        );
        assert_eq!(live["reads"], json!(["name", "mode", "ttl", "wait", "label(tenant)"]));
        let back = author.policy(&proxy, &["rollback", "default"]).await;
        assert!(back.contains("back at") && back.contains("(generation 3)"), "{back}");
        until_key(&mut last, "Orders/42").await;

        stop.store(true, Relaxed);
        work.await.expect("no request of the client failed");
        drop(author.dir);
    });
}

/// A component that another tool has built gets its manifest, and from then on its settings are checked by it.
#[test]
fn a_manifest_is_attached_once_and_before_the_signatures() {
    let dir = folder();
    let write = |name: &str, bytes: &[u8]| std::fs::write(dir.path().join(name), bytes).expect("a file");
    write("bare.wasm", &RENAMED);
    let settings = r#"{"type": "object", "properties": {"prefix": {"type": "string", "maxLength": 2}}}"#;
    write(
        "manifest.json",
        format!(r#"{{"name": "renamed", "version": "7", "settings": {settings}}}"#).as_bytes(),
    );
    write("wrong.json", br#"{"name": "renamed", "version": "7", "licence": "none"}"#);
    let signature = Signer::new(1).sign(&RENAMED, "policy=default");
    write("signed.wasm", &attach(&RENAMED, &signature).expect("a signature"));
    let run = |args: &[&str]| {
        let mut command = crate::harness::lockkeeper();
        let output = command.arg("policy").args(args).current_dir(dir.path()).output().expect("it runs");
        (output.status.code(), text(&output.stdout) + &text(&output.stderr))
    };
    for (args, expected, words) in [
        (&["annotate", "bare.wasm", "--manifest", "absent.json"][..], 2, "there is no absent.json"),
        (&["annotate", "bare.wasm", "--manifest", "wrong.json"], 2, "wrong.json: unknown key `licence`"),
        (&["annotate", "signed.wasm"], 6, "attach the manifest before it is signed"),
        (
            &["annotate", "bare.wasm", "--output", "full.wasm"],
            0,
            "full.wasm has the manifest of manifest.json now",
        ),
        (&["annotate", "full.wasm"], 6, "has a manifest already"),
        (&["annotate", "manifest.json"], 6, "this is not a component"),
        (&["check", "full.wasm", "--settings", r#"{"prefix": "x/"}"#], 0, "manifest: renamed 7"),
        (
            &["check", "full.wasm", "--settings", r#"{"prefix": "xyz"}"#],
            6,
            "prefix: is \"xyz\"; must be text of 2 or fewer",
        ),
        (&["check", "bare.wasm", "--settings", r#"{"prefix": "xyz"}"#], 0, "is fine"),
    ] {
        let (code, told) = run(args);
        assert_eq!(code, Some(expected), "{args:?}: {told}");
        assert!(told.contains(words), "{args:?}: {told}");
    }
}

/// The `policy` commands refuse what the proxy would refuse, with the proxy's words and the right exit code.
#[test]
fn policy_commands_name_the_fault_and_set_the_exit_code() {
    crate::harness::run(async {
        let proxy = Proxy::start(&database(Kind::Mariadb).await).await;
        // The component for a rollback is recorded with the fleet.
        proxy.until_ready().await;
        let dir = folder();
        std::fs::write(dir.path().join("page.wasm"), "<html>").unwrap();
        let failed = async |args: &[&str]| {
            let mut command = lockkeeper(&proxy, &[&["policy"], args].concat());
            command.current_dir(dir.path());
            let output = ended(command).await;
            (output.status.code(), text(&output.stderr))
        };
        for (args, expected, words) in [
            (&["new", "Not A Name"][..], 1, "cannot name a policy"),
            (&["build", "nowhere"], 1, "no Cargo.toml"),
            (&["check", "page.wasm"], 6, "not WebAssembly"),
            (&["check", "absent.wasm"], 1, "cannot read absent.wasm"),
            (&["check", "builtin:default", "--settings", "x"], 2, "--settings is not a JSON object"),
            (&["check", "builtin:default", "--settings", "@absent"], 1, "cannot read absent"),
            (&["check", "builtin:none"], 2, "there is no `builtin:none`"),
            (&["push", "default", "page.wasm"], 6, "not WebAssembly"),
            (&["rollback", "default"], 6, "no earlier generation"),
            (&["push", "nobody", "page.wasm"], 1, "no policy is named `nobody`"),
        ] {
            let (code, told) = failed(args).await;
            assert_eq!(code, Some(expected), "{args:?}: {told}");
            assert!(told.contains(words), "{args:?}: {told}");
        }
    });
}

/// Every lock command with `--json`, in success and failure.
#[test]
fn every_lock_command_works_with_json_output() {
    crate::harness::run(async {
        let proxy = Proxy::start(&database(Kind::Mysql).await).await;
        proxy.until_ready().await;
        let mut watch = Watch::start(&proxy);
        let lease = json_of(&proxy, &["acquire", "cli/1", "--ttl", "30s", "--owner", "me"]).await;
        let id = lease["lease_id"].as_str().unwrap();
        assert_eq!((&lease["owner"], &lease["ttl_ms"]), (&json!("me"), &json!(30_000)));

        let taken = ended(lockkeeper(&proxy, &["acquire", "cli/1", "--wait", "0", "--json"])).await;
        let problem: Value = serde_json::from_slice(&taken.stdout).unwrap();
        assert_eq!((taken.status.code(), problem["type"].as_str()), (Some(3), Some("contended")));
        assert_eq!(problem["holder"]["owner"], "me");

        let renewed = json_of(&proxy, &["renew", id, "--ttl", "1m"]).await;
        assert!(renewed["expires_in_ms"].as_u64() > Some(50_000), "{renewed}");
        let listed = json_of(&proxy, &["ls", "cli/"]).await;
        assert_eq!((&listed["locks"][0]["key"], &listed["more"]), (&json!("cli/1"), &json!(false)));
        let shown = json_of(&proxy, &["show", "cli/1"]).await;
        assert_eq!((owners(&shown["holders"]), &shown["token"]), (vec!["me".to_owned()], &lease["token"]));
        assert_eq!(shown["decisions"][0]["hook"], "plan");

        assert_eq!(json_of(&proxy, &["release", id]).await["released"], true);
        let lost = ended(lockkeeper(&proxy, &["renew", id])).await;
        assert_eq!(lost.status.code(), Some(4), "{}", text(&lost.stderr));
        let free = ended(lockkeeper(&proxy, &["acquire", "", "--json"])).await;
        assert_eq!(free.status.code(), Some(2), "{}", text(&free.stdout));
        let usage = ended(lockkeeper(&proxy, &["acquire", "cli/1", "--ttl", "5", "--json"])).await;
        let problem: Value = serde_json::from_slice(&usage.stdout).unwrap();
        assert_eq!((usage.status.code(), problem["type"].as_str()), (Some(2), Some("usage")));
        assert!(problem["detail"].to_string().contains("must be a time like 500ms"), "{problem}");
        let repeated = ["acquire", "once/1", "--request-id", "r1", "--ttl", "30s"];
        let first = json_of(&proxy, &repeated).await;
        let again = json_of(&proxy, &repeated).await;
        assert_eq!(first["lease_id"], again["lease_id"], "one call, from two processes: {first} {again}");
        for event in ["granted", "released"] {
            let seen = watch.next();
            assert_eq!((&seen["event"], &seen["key"]), (&json!(event), &json!("cli/1")));
        }
    });
}

#[test]
fn show_says_in_a_few_lines_who_has_the_lock_and_why_others_wait() {
    crate::harness::run(async {
        let proxy = Proxy::start(&database(Kind::Mysql).await).await;
        let client = proxy.client();
        let lease =
            client.acquire(json!({"resource": "cli/1", "owner": "worker-7", "ttl_ms": 60_000})).await.json;
        let _first = line_up(&client, "cli/1", "worker-", 1).await;
        let body = json!({"resource": "cli/1", "owner": "reader-3", "mode": "shared", "wait_ms": 60_000});
        let _second = waiting(&client, body);
        client.until_queued("cli/1", 2).await;
        let shown = printed(lockkeeper(&proxy, &["show", "cli/1"])).await;
        let lines: Vec<&str> = shown.lines().collect();
        assert!(lines[0].starts_with("cli/1  held by worker-7 (exclusive) for "), "{shown}");
        assert!(lines[0].ends_with(&format!(" left), token {}", lease["token"])), "{shown}");
        assert!(lines[1].starts_with("  1.  worker-0  waits "), "{shown}");
        assert!(
            lines[1].contains("next: first by rank, then arrival; the key is held by worker-7"),
            "{shown}"
        );
        assert!(lines[1].ends_with("no estimate: 0 holds have ended here so far"), "{shown}");
        assert!(lines[2].contains("behind worker-0, which wants the lock exclusively"), "{shown}");
        assert!(
            shown.contains("\nplans\nPLACE  OWNER") && shown.contains("name=cli/1 mode=shared ttl wait"),
            "{shown}"
        );
        let one = printed(lockkeeper(&proxy, &["show", "cli/1", "--owner", "reader-3"])).await;
        assert!(one.lines().nth(1).is_some_and(|line| line.starts_with("  2.  reader-3")), "{one}");
        let json = json_of(&proxy, &["show", "cli/1", "--owner", "reader-3"]).await;
        assert_eq!(json["queue"][0]["why"]["behind"]["owner"], "worker-0", "{json}");
        let free = client.lease("cli/2", 60_000).await;
        client.release(&free).await;
        let shown = printed(lockkeeper(&proxy, &["show", "cli/2"])).await;
        assert!(shown.starts_with(&format!("cli/2  free, last token {}\n", free["token"])), "{shown}");
    });
}

#[test]
fn versions_are_read_and_committed_from_the_command_line() {
    crate::harness::run(async {
        let url = database(Kind::Mysql).await;
        let sections = "[policies.default]\npath = \"builtin:default\"\n\
                        [policies.default.settings]\nprimitive = \"version\"\n";
        let proxy = Proxy::with(Settings { url, sections: sections.to_owned(), ..Settings::default() }).await;
        proxy.until_ready().await;
        let read = json_of(&proxy, &["version", "read", "stock/17", "--label", "shop=a"]).await;
        let version = read["version"].to_string();
        let commit = ["version", "commit", "stock/17", &version, r#"{"left": 9}"#, "--request-id", "r1"];
        let first = json_of(&proxy, &commit).await;
        assert_eq!(first, json_of(&proxy, &commit).await, "the same id commits once");
        let told = printed(lockkeeper(&proxy, &["version", "read", "stock/17"])).await;
        assert_eq!(told, format!("version {}\n{{\"left\":9}}\n", first["version"]));
        let long = format!("shop={}", "a".repeat(5_000));
        for (args, code, said) in [
            (&["commit", "stock/17", &version, "8"][..], 3, "is at version"),
            (&["commit", "stock/17", &version, "{left"], 2, "the value is not JSON"),
            (&["commit", "stock/17", "0", "8", "--label", &long], 2, "labels.shop"),
            (&["read", "stock/17", "--label", &long], 2, "labels.shop"),
        ] {
            let output = ended(lockkeeper(&proxy, &[&["version"], args].concat())).await;
            let told = text(&output.stderr);
            assert_eq!(output.status.code(), Some(code), "{args:?}: {told}");
            assert!(told.contains(said), "{args:?}: {told}");
        }
    });
}

/// `lockkeeper watch --json`, after it has started to watch.
struct Watch {
    child: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl Watch {
    fn start(proxy: &Proxy) -> Watch {
        let mut command = lockkeeper(proxy, &["watch", "cli/", "--json"]);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        // It prints nothing before the first event; an additional connection shows that it watches.
        std::thread::sleep(Duration::from_millis(500));
        Watch { child, lines }
    }

    fn next(&mut self) -> Value {
        serde_json::from_str(&self.lines.next().unwrap().unwrap()).unwrap()
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
