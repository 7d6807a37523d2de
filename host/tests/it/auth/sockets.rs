//! Unix sockets: the proxy knows the user at the other end.

use std::fs;
use std::io::Read as _;
use std::os::unix::net::UnixStream;
use std::process::{Child, Stdio};
use std::time::Duration;

use rustix::process::Signal;

use super::*;
use crate::harness::signal;

/// A proxy whose listeners are Unix sockets in a folder.
struct OnSockets {
    proxy: Child,
    folder: tempfile::TempDir,
}

fn own_uid() -> u32 {
    rustix::process::getuid().as_raw()
}

/// Rules for two users and an operator with a token.
fn rules(billing: u32, other: u32, operator: &NewToken) -> String {
    format!(
        "[[principal]]\nname = \"billing\"\nroles = [\"orders\"]\nuids = [{billing}]\n\
         [[principal]]\nname = \"other\"\nroles = [\"other\"]\nuids = [{other}]\n\
         [[principal]]\nname = \"operator\"\nroles = [\"operator\"]\n\
         tokens = [{{ id = \"{}\", sha256 = \"{}\" }}]\n{ROLES}",
        operator.id, operator.sha256
    )
}

impl OnSockets {
    async fn start(kind: Kind, auth: &str, more: &str) -> OnSockets {
        // In the folder for temporary files: the path of a socket must be short.
        let folder = tempfile::tempdir().unwrap();
        let url = database(kind).await;
        let mut config = format!(
            "[store]\nurl = \"{url}\"\n[api]\nlisten = \"unix:api.sock\"\n[health]\nlisten = \"unix:health.sock\"\n\
             [admin]\nlisten = \"unix:admin.sock\"\nsocket_mode = \"0600\"\n[log]\nformat = \"json\"\n{more}"
        );
        if !auth.is_empty() {
            write(&folder.path().join("auth.toml"), auth);
            config += "[auth]\nfile = \"auth.toml\"\n[audit]\nfile = \"audit.log\"\n";
        }
        fs::write(folder.path().join("config.toml"), config).unwrap();
        let proxy = OnSockets::spawn(folder.path());
        let proxy = OnSockets { proxy, folder };
        proxy.until_ready().await;
        proxy
    }

    fn spawn(folder: &Path) -> Child {
        let mut command = lockkeeper();
        command.args(["serve", "--config"]).arg(folder.join("config.toml"));
        let log = fs::File::options().append(true).create(true).open(folder.join("log")).unwrap();
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        command.spawn().unwrap()
    }

    fn socket(&self, name: &str) -> PathBuf {
        self.folder.path().join(format!("{name}.sock"))
    }

    /// A client with connections of its own.
    fn client(&self, listener: &str) -> Client {
        Client::unix(&self.socket(listener))
    }

    async fn until_ready(&self) {
        let admin = self.client("admin");
        let is_ready =
            async || admin.try_send("GET", "/ready", "").await.is_some_and(|answer| answer.status == 200);
        eventually(&format!("the proxy is ready: {}", self.log()), is_ready).await;
    }

    fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = lockkeeper();
        command.args(args);
        command.env("LOCKKEEPER_ADMIN", format!("unix:{}", self.socket("admin").display()));
        command.env("LOCKKEEPER_SERVER", format!("unix://{}", self.socket("api").display()));
        command
    }
}

impl Drop for OnSockets {
    fn drop(&mut self) {
        let _ = self.proxy.kill();
        let _ = self.proxy.wait();
        if std::thread::panicking() {
            eprintln!("{}", self.log());
        }
    }
}

on_both! {
    async fn a_user_of_a_socket_may_do_what_its_principal_may(kind: Kind) {
        let operator = new_token();
        let proxy = OnSockets::start(kind, &rules(own_uid(), own_uid() + 1, &operator), "").await;
        let (api, admin) = (proxy.client("api"), proxy.client("admin"));
        let lease = api.lease("orders/1", 60_000).await;
        assert_eq!(api.show("orders/1").await["holders"][0]["principal"], "billing");
        is_forbidden(&api.acquire(json!({"resource": "other/1"})).await);
        is_forbidden(&admin.get("/v1/policies").await);
        // A token counts more than the user.
        let with_token = admin.with_token(&operator.token);
        assert_eq!(with_token.get("/v1/policies").await.status, 200);
        assert_eq!(admin.with_token(&new_token().token).get("/v1/policies").await.status, 401);
        assert_eq!(with_token.send("DELETE", "/v1/locks/orders/1", "").await.status, 200);
        assert_eq!(api.renew(&lease).await.slug(), "lost");
        assert_eq!(proxy.client("health").get("/metrics").await.status, 200);
        let audit = fs::read_to_string(proxy.folder.path().join("audit.log.refusals")).unwrap();
        let first: Value = serde_json::from_str(audit.lines().next().unwrap()).unwrap();
        assert_eq!((&first["principal"], &first["credential"]), (&json!("billing"), &json!(format!("uid:{}", own_uid()))));
        assert_eq!(first["peer"], format!("unix:uid={},pid={}", own_uid(), std::process::id()), "{audit}");
    }

    async fn a_user_without_a_principal_is_refused_and_a_removed_one_loses_its_streams(kind: Kind) {
        let operator = new_token();
        let proxy = OnSockets::start(kind, &rules(own_uid() + 1, own_uid() + 2, &operator), "").await;
        let (api, admin) = (proxy.client("api"), proxy.client("admin"));
        for (client, path) in [(&api, "/v1/locks"), (&admin, "/v1/policies"), (&admin, "/v1/fleet"), (&admin, "/metrics")] {
            let answer = client.get(path).await;
            assert_eq!((answer.status, answer.slug()), (401, "unauthenticated"), "{path}: {}", answer.text);
            assert!(answer.text.contains(&format!("the user {}", own_uid())), "{}", answer.text);
        }
        let file = proxy.folder.path().join("auth.toml");
        write(&file, &rules(own_uid(), own_uid() + 2, &operator));
        eventually("the user is known", async || api.get("/v1/locks").await.status == 200).await;
        let (mut held, _) = api.hold(&json!({"resource": "orders/1", "ttl_ms": 60_000})).await;
        write(&file, &rules(own_uid() + 1, own_uid() + 2, &operator));
        let lost = held.json().await.expect("a last line");
        assert_eq!(lost["event"], "lost", "{lost}");
        assert_eq!(api.get("/v1/locks").await.status, 401);
    }

    async fn without_principals_a_socket_asks_nobody_and_hosts_count_as_elsewhere(kind: Kind) {
        let proxy = OnSockets::start(kind, "", "").await;
        let (api, admin) = (proxy.client("api"), proxy.client("admin"));
        api.lease("orders/1", 1_000).await;
        assert_eq!(admin.get("/v1/policies").await.status, 200);
        // A forwarded port (`ssh -L`) leads browsers to the socket, too.
        for (header, value, status) in [("origin", "https://evil.example", 403), ("sec-fetch-site", "cross-site", 403)] {
            assert_eq!(admin.send_with("GET", "/v1/policies", &[(header, value)], "").await.status, status, "{value}");
        }
        let rebound = admin.send_with("GET", "/v1/policies", &[("host", "evil.example")], "").await;
        assert_eq!(rebound.status, 421, "{}", rebound.text);
    }

    async fn the_processes_of_a_user_have_the_connections_of_one_address(kind: Kind) {
        let proxy = OnSockets::start(kind, "", "[http]\nmax_connections_per_address = 2\n").await;
        let connect = || UnixStream::connect(proxy.socket("api")).unwrap();
        let _open = [connect(), connect()];
        let mut third = connect();
        third.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let mut answer = String::new();
        third.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 429 ") && answer.contains("max_connections_per_address"), "{answer}");
    }

    async fn the_command_line_uses_sockets(kind: Kind) {
        let operator = new_token();
        let proxy = OnSockets::start(kind, &rules(own_uid(), own_uid() + 1, &operator), "").await;
        let (code, said) = output(proxy.command(&["run", "orders/1", "--", "true"])).await;
        assert_eq!(code, Some(0), "{said}");
        let (code, said) = output(proxy.command(&["acquire", "other/1"])).await;
        assert_eq!(code, Some(6), "{said}");
        let token = proxy.folder.path().join("token");
        write(&token, &operator.token);
        let (code, said) = output(proxy.command(&["fleet", "--credentials-file", token.to_str().unwrap()])).await;
        assert_eq!(code, Some(0), "{said}");
        let nowhere = ["ls", "--server", "unix:/nowhere/api.sock"];
        let mut command = lockkeeper();
        command.args(nowhere);
        let (code, said) = output(command).await;
        assert!(code == Some(5) && said.contains("unix:/nowhere/api.sock"), "{said}");
    }

    async fn a_socket_left_behind_is_replaced_and_one_in_use_is_not(kind: Kind) {
        let mut proxy = OnSockets::start(kind, "", "").await;
        let mode = |name| fs::metadata(proxy.socket(name)).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode("api"), mode("admin")), (0o660, 0o600));
        proxy.proxy.kill().unwrap();
        proxy.proxy.wait().unwrap();
        assert!(proxy.socket("admin").exists(), "a killed proxy removes nothing");
        proxy.proxy = OnSockets::spawn(proxy.folder.path());
        proxy.until_ready().await;
        let mut second = lockkeeper();
        second.args(["serve", "--config"]).arg(proxy.folder.path().join("config.toml"));
        let (code, said) = output(second).await;
        assert!(code.is_some_and(|code| code != 0), "{said}");
        let wanted = format!("unix:{} (api.listen): another process listens", proxy.socket("api").display());
        assert!(said.contains(&wanted), "{said}");
        assert_eq!(proxy.client("admin").get("/ready").await.status, 200, "the first one still serves");
        signal(proxy.proxy.id(), Signal::TERM);
        assert!(proxy.proxy.wait().unwrap().success());
        for name in ["api", "admin", "health"] {
            assert!(!proxy.socket(name).exists(), "{name}.sock is left");
        }
    }
}
