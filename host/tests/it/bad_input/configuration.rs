//! Faults of config.toml, and running without one.

use std::path::Path;
use std::process::Output;

use rustix::process::Signal;
use serde_json::json;

use crate::harness::{Proxy, eventually, folder, fresh, is_running, lockkeeper};

/// Runs `lockkeeper serve` in a folder until it ends.
fn serve(dir: &Path, args: &[&str], env: &[(&str, &str)]) -> Output {
    let mut command = lockkeeper();
    command.arg("serve").args(args).current_dir(dir).envs(env.iter().copied());
    command.output().expect("the binary runs")
}

/// The faults of a config.toml: one per line, with their number at the end, and exit code 2.
fn faults(text: &str, env: &[(&str, &str)]) -> Vec<String> {
    let dir = folder();
    std::fs::write(dir.path().join("config.toml"), text).expect("a configuration");
    let output = serve(dir.path(), &[], env);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{text}: {said}");
    let mut lines: Vec<String> = said.lines().map(str::to_owned).collect();
    let summary = lines.pop().unwrap_or_default();
    assert!(summary.starts_with(&format!("lockkeeper: {} fault", lines.len())), "{said}");
    lines
}

/// `--check` does all checks of a start without ports and servers: every policy checks its settings, and certificates
/// are read.
#[test]
fn check_finds_the_faults_that_a_start_would_find() {
    let dir = folder();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let api = format!("[api]\nlisten = \"{}\"\n", taken.local_addr().expect("an address"));
    let check = |text: &str| {
        std::fs::write(dir.path().join("config.toml"), format!("{api}{text}")).expect("a configuration");
        serve(dir.path(), &["--check"], &[])
    };
    let policy = |name: &str, settings: &str| {
        let source = "path = \"builtin:default\"";
        format!("[policies.{name}]\n{source}\n[policies.{name}.settings]\n{settings}\n")
    };
    let fine = check(&policy("default", "ttl_ms = 5000"));
    assert_eq!(fine.status.code(), Some(0), "{fine:?}");
    assert_eq!(String::from_utf8_lossy(&fine.stdout), "the configuration is fine\n");

    for file in ["cert.pem", "key.pem"] {
        std::fs::write(dir.path().join(file), "no PEM").expect("a file");
    }
    let guard = "[[guard]]\nlisten = \"127.0.0.1:0\"\ntls = { cert = \"cert.pem\", key = \"key.pem\" }\n\
                 [[guard.routes]]\nmatch = { path = \"/\" }\nupstream = \"http://127.0.0.1:9\"\n";
    let (default, other) = ("pool = 2\nstripes = 2", "tll_ms = 500\n\non_loss = \"drop\"");
    let refused = check(&format!("{}{}{guard}", policy("default", default), policy("other", other)));
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(2), "{said}");
    for part in [
        "cert.pem",
        "policy `default`: the settings were refused: `pool` and `stripes` do not go together",
        "config.toml:11: policies.other.settings.tll_ms: unknown key; did you mean `ttl_ms`?",
        "config.toml:13: policies.other.settings.on_loss: is \"drop\"; must be one of `finish`, `mark`, `cut`",
        ": 4 faults",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
}

/// Each fault is reported with its line.
#[test]
fn faults_are_reported_with_their_lines() {
    let cases = [
        ("\n[store]\nlaness = 4\n", "config.toml:3: unknown key `store.laness`", "`lanes`"),
        ("[policies.default]\npath = \"gone.wasm\"\n", "config.toml:2: policies.default.path", "gone.wasm"),
        ("[api]\n\nlisten = \"localhost\"\n", "config.toml:3: api.listen", "127.0.0.1:7070"),
        ("[store]\nlanes = 0\n", "config.toml:2: store.lanes", "1 to 64"),
        ("[store]\nlanes = \"4\"\n", "config.toml:2: store.lanes", "number"),
        ("[store]\nurl = \"postgres://x/y\"\n", "config.toml:2: store.url", "mysql://"),
        ("[[routes]]\nresource = \"*\"\npolicy = \"gone\"\n", "config.toml:3: routes", "gone"),
    ];
    for (text, begins, says) in cases {
        let faults = faults(text, &[]);
        assert_eq!(faults.len(), 1, "{text}: {faults:?}");
        assert!(faults[0].starts_with(begins) && faults[0].contains(says), "{text}: {faults:?}");
    }
}

/// Text that is not TOML.
#[test]
fn broken_syntax_is_reported_with_its_line() {
    let faults = faults("[api]\n[store\n", &[]);
    assert!(faults[0].starts_with("config.toml:2: "), "{faults:?}");
}

/// Two faults, and one of the environment, are reported together.
#[test]
fn all_faults_are_reported_at_once() {
    let text = "[store]\nlanes = 100\n[http]\nmax_body = 1\n[api]\nlisten = \"nowhere\"\n";
    let faults = faults(text, &[("LOCKKEEPER_SHUTDOWN_DRAIN_MS", "soon")]);
    assert_eq!(faults.len(), 4, "{faults:?}");
    for begins in ["config.toml:2: ", "config.toml:4: ", "config.toml:6: ", "LOCKKEEPER_SHUTDOWN_DRAIN_MS: "]
    {
        assert!(faults.iter().any(|fault| fault.starts_with(begins)), "{begins}: {faults:?}");
    }
}

/// A named file that does not exist; settings that the policy rejects; an address in use.
#[test]
fn a_start_that_fails_gives_its_reason() {
    let dir = folder();
    let missing = serve(dir.path(), &["--config", "gone.toml"], &[]);
    let said = String::from_utf8_lossy(&missing.stderr).into_owned();
    assert!(missing.status.code() == Some(2) && said.contains("gone.toml"), "{said}");
    let text = "[api]\nlisten = \"127.0.0.1:0\"\n[admin]\nlisten = \"127.0.0.1:0\"\n[policies.default]\n\
                path = \"builtin:default\"\n[policies.default.settings]\nttl_ms = 5\n";
    std::fs::write(dir.path().join("config.toml"), text).expect("a configuration");
    let rejected = serve(dir.path(), &[], &[]);
    let said = String::from_utf8_lossy(&rejected.stderr).into_owned();
    let expected =
        "config.toml:8: policies.default.settings.ttl_ms: is 5; must be a whole number from 100 to 3600000";
    assert!(rejected.status.code() == Some(2) && said.contains(expected), "{said}");
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("an address").to_string();
    let refused = serve(folder().path(), &[], &[("LOCKKEEPER_API_LISTEN", &address)]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains(&address) && said.contains("api.listen"), "{said}");
    assert_eq!(said.matches("in use").count(), 1, "{said}");
}

on_both! {
    /// Without a file, `lockkeeper serve` runs its own server. The server ends with the proxy, even if the proxy is
    /// killed. Started again in the same folder, the proxy finds its leases.
    async fn serve_needs_no_configuration(kind: Kind) {
        let dir = folder();
        let name = format!("{kind:?}").to_lowercase();
        let env = [("LOCKKEEPER_STORE_MANAGED_SERVER", name.as_str())];
        let mut proxy = Proxy::bare(dir.path(), &env).await;
        proxy.until_ready().await;
        let resource = fresh("kept");
        let lease = proxy.client().lease(&resource, 120_000).await;
        let server = server_of(dir.path());
        assert!(is_running(server));
        proxy.kill();
        eventually("the server has ended", async || !is_running(server)).await;

        let mut again = Proxy::bare(dir.path(), &env).await;
        again.until_ready().await;
        let client = again.client();
        let held = client.acquire(json!({"resource": resource})).await;
        assert_eq!((held.slug(), &held.json["holder"]["token"]), ("contended", &lease["token"]));
        assert_eq!(client.renew(&lease).await.status, 200);
        assert_eq!(client.release(&lease).await.status, 200);
        let server = server_of(dir.path());
        again.signal(Signal::TERM);
        assert_eq!(again.ended().await, Some(0), "{}", again.log());
        assert!(!is_running(server), "the server outlives a proxy that was stopped");
    }
}

fn server_of(dir: &Path) -> u32 {
    let file = dir.join(".lockkeeper/mysql/server.pid");
    let text = std::fs::read_to_string(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    text.trim().parse().expect("a process number")
}
