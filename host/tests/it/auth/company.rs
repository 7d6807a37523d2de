//! The page of README that sets up proxies for a company, with the addresses and files of this machine.

use std::fs;
use std::process::{Child, Stdio};

use rustix::process::{Signal, getuid};

use super::authority::localhost;
use super::store::Certified;
use super::*;
use crate::harness::{free_ports, signal};

const README: &str = include_str!("../../../../README.md");

/// The block of the page that begins with this line, or with this statement.
fn block(first: &str) -> String {
    let page = README.split("## Run it for a company").nth(1).expect("README has the page");
    let page = page.split("\n## ").next().expect("the page ends");
    let found = page.split("```").skip(1).step_by(2).filter_map(|block| block.split_once('\n'));
    let found = found.map(|(_, text)| text).find(|text| text.starts_with(first));
    found.unwrap_or_else(|| panic!("the page has no block that begins with `{first}`")).to_owned()
}

/// A text in which each of these parts is there and becomes another.
fn with(mut text: String, changes: &[(&str, &str)]) -> String {
    for (part, other) in changes {
        assert!(text.contains(part), "`{part}` is not in:\n{text}");
        text = text.replace(part, other);
    }
    text
}

struct Served(Child);

impl Drop for Served {
    fn drop(&mut self) {
        signal(self.0.id(), Signal::TERM);
        let _ = self.0.wait();
    }
}

on_both! {
    async fn the_page_for_companies_leads_to_a_proxy_that_serves(kind: Kind) {
        let certified = Certified::new();
        let node = certified.server(kind, 1).await;
        node.set_read_only(false).await;
        node.root(&block("CREATE DATABASE").replace("CREATE DATABASE", "CREATE DATABASE IF NOT EXISTS")).await;

        // The path of a socket must be short.
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let put = |name: &str, text: &str| write(&path(name), text);
        let (cert, key) = certified.authority.signs(localhost(), 9);
        put("cert.pem", &cert);
        put("key.pem", &key);
        put("db-ca.pem", &certified.authority.pem);
        let ports = free_ports(3);
        let [api, fleet, health] = [0, 1, 2].map(|n: usize| format!("127.0.0.1:{}", ports[n]));
        let (socket, audit) = (path("admin.sock"), path("audit.log"));
        let config = with(
            block("# /etc/lockkeeper/config.toml"),
            &[
                ("db.example.com:3306", &node.address()),
                ("10.0.0.7:7070", &api),
                ("10.0.0.7:7072", &fleet),
                ("10.0.0.7:7073", &health),
                ("/run/lockkeeper/admin.sock", &socket.display().to_string()),
                ("/var/log/lockkeeper/audit.log", &audit.display().to_string()),
            ],
        );
        put("config.toml", &config);

        let token = output({
            let mut command = lockkeeper();
            command.args(["token", "new", "--json"]);
            command
        });
        let (code, said) = token.await;
        assert_eq!(code, Some(0), "{said}");
        let token: Value = serde_json::from_str(&said).unwrap();
        put("billing.token", token["token"].as_str().unwrap());
        let rules = with(
            block("# /etc/lockkeeper/auth.toml"),
            &[
                ("ID", token["id"].as_str().unwrap()),
                ("SHA256", token["sha256"].as_str().unwrap()),
                ("uids = [0]", &format!("uids = [{}]", getuid().as_raw())),
            ],
        );
        put("auth.toml", &rules);

        let serve = |more: &[&str]| {
            let mut command = lockkeeper();
            command.arg("serve").args(more).arg("--config").arg(path("config.toml"));
            command
        };
        let (code, said) = output(serve(&["--check"])).await;
        assert_eq!(code, Some(0), "{said}");
        let log = fs::File::create(path("log")).unwrap();
        let mut command = serve(&[]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let _served = Served(command.spawn().unwrap());
        let ready = Client::new(health.parse().unwrap());
        let is_ready =
            async || ready.try_send("GET", "/ready", "").await.is_some_and(|answer| answer.status == 200);
        eventually("the proxy is ready", is_ready).await;

        let mut command = lockkeeper();
        command.args(["fleet", "--admin", &format!("unix:{}", socket.display())]);
        let (code, said) = output(command).await;
        assert!(code == Some(0) && said.contains("member"), "{said}");
        let client = |args: &[&str]| {
            let mut command = lockkeeper();
            command.args(args).arg("--ca-file").arg(path("db-ca.pem"));
            command.env("LOCKKEEPER_SERVER", format!("https://{api}"));
            command.env("LOCKKEEPER_CREDENTIALS_FILE", path("billing.token"));
            command
        };
        let mut command = client(&["run", "orders/report", "--ttl", "30s"]);
        command.args(["--", "echo", "done"]);
        let (code, said) = output(command).await;
        assert!(code == Some(0) && said.contains("done"), "{said}");
        let (code, said) = output(client(&["acquire", "salaries/1"])).await;
        assert_eq!(code, Some(6), "{said}");
    }
}

/// What systemd would do cannot be tried here, but the command can.
#[test]
fn the_service_of_the_page_starts_the_program_with_the_configuration() {
    let unit = block("# /etc/systemd/system/lockkeeper.service");
    assert!(
        unit.contains("\nExecStart=/usr/local/bin/lockkeeper serve --config /etc/lockkeeper/config.toml\n"),
        "{unit}"
    );
    // It outlives `shutdown.grace_ms` and `shutdown.drain_ms`.
    let seconds = unit.lines().find_map(|line| line.strip_prefix("TimeoutStopSec=")).expect("a limit");
    assert!(seconds.parse::<u32>().unwrap() > 60, "{seconds}");
}
