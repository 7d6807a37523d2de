//! TLS towards the servers of the store: each connection is encrypted, and each server is verified.

use std::time::Duration;

use super::authority::{Authority, localhost};
use super::*;
use crate::harness::Node;

/// An authority, and the files that it has signed.
pub(super) struct Certified {
    folder: tempfile::TempDir,
    pub(super) authority: Authority,
}

impl Certified {
    pub(super) fn new() -> Certified {
        let certified = Certified { folder: folder(), authority: Authority::new() };
        certified.put("ca.pem", &certified.authority.pem);
        certified
    }

    fn put(&self, name: &str, text: &str) {
        write(Path::new(&self.path(name)), text);
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }

    /// A server with a certificate, whose sessions can be looked at.
    pub(super) async fn server(&self, kind: Kind, id: u32) -> Node {
        let (cert, key) = self.authority.signs(localhost(), id.into());
        let (cert_file, key_file) = (format!("server-{id}.pem"), format!("server-{id}.key"));
        self.put(&cert_file, &cert);
        self.put(&key_file, &key);
        let options = vec![
            format!("--ssl-ca={}", self.path("ca.pem")),
            format!("--ssl-cert={}", self.path(&cert_file)),
            format!("--ssl-key={}", self.path(&key_file)),
            "--performance-schema=ON".to_owned(),
        ];
        Node::start_with(kind, self.folder.path(), id, options).await
    }

    /// A server that takes writes, with the accounts of proxies.
    async fn primary(&self, kind: Kind) -> Node {
        let node = self.server(kind, 1).await;
        node.set_read_only(false).await;
        node.make_accounts().await;
        node
    }

    /// The settings of a proxy of these servers; `more` has more keys of `[store.tls]`.
    fn settings(&self, nodes: &[&Node], more: &str) -> Settings {
        let url = nodes.iter().map(|node| node.url()).collect::<Vec<_>>().join(",");
        let ca = self.path("ca.pem");
        Settings { url, store: format!("tls = {{ ca = \"{ca}\"{more} }}"), ..Settings::default() }
    }
}

/// How each session of the proxy's account is encrypted: by the cipher, or not at all.
async fn ciphers(node: &Node) -> Vec<String> {
    let query = "SELECT CONCAT(t.connection_type,' ',s.variable_value) FROM performance_schema.threads t \
                 JOIN performance_schema.status_by_thread s ON s.thread_id=t.thread_id \
                 WHERE t.processlist_user='lk' AND s.variable_name='Ssl_cipher'";
    let rows = node.root(query).await;
    rows.into_iter().map(mysql_async::from_row).collect()
}

fn are_encrypted(sessions: &[String]) {
    for session in sessions {
        let cipher = session.strip_prefix("SSL/TLS ");
        assert!(
            cipher.is_some_and(|cipher| cipher.contains("AES") || cipher.contains("CHACHA")),
            "{sessions:?}"
        );
    }
}

/// Waits until the proxy says that it is not ready, for a reason that has all of these words.
async fn refuses(proxy: &Proxy, words: &[&str]) {
    let admin = proxy.admin();
    let mut said = String::new();
    eventually(&format!("the proxy reports {words:?}"), async || {
        let ready = admin.get("/ready").await;
        said = ready.json["reasons"].to_string();
        ready.status == 503 && words.iter().all(|word| said.contains(word))
    })
    .await;
    assert!(!said.contains("secret"), "{said}");
}

const PRIMITIVES: &str = r#"
[policies.default]
path = "builtin:default"
[policies.rows]
path = "builtin:default"
settings = { primitive = "row" }
[policies.names]
path = "builtin:default"
settings = { primitive = "advisory" }
[policies.majority]
path = "builtin:default"
settings = { primitive = "quorum" }
[[routes]]
resource = "rows/*"
policy = "rows"
[[routes]]
resource = "names/*"
policy = "names"
[[routes]]
resource = "majority/*"
policy = "majority"
"#;

on_both! {
    /// Lanes, the reader, the registry, the watch of the clock, session locks, and the stores of a quorum.
    async fn every_session_of_a_proxy_is_encrypted(kind: Kind) {
        let certified = Certified::new();
        let node = certified.primary(kind).await;
        let mut settings = certified.settings(&[&node], "");
        settings.sections = PRIMITIVES.to_owned();
        for name in ["a", "b", "c"] {
            node.root(&format!("CREATE DATABASE member_{name}; GRANT ALL ON member_{name}.* TO 'lk'@'%'")).await;
            let url = node.url().replace("/lockkeeper", &format!("/member_{name}"));
            settings.sections += &format!("[stores.{name}]\nurl = \"{url}\"\n");
        }
        let proxy = Proxy::with(settings).await;
        proxy.until_ready().await;
        let client = proxy.client();
        for resource in ["leases/1", "rows/1", "rows/2", "names/1", "majority/1"] {
            client.lease(resource, 60_000).await;
        }
        assert_eq!(client.get("/v1/locks").await.status, 200);
        let sessions = ciphers(&node).await;
        assert!(sessions.len() >= 12, "all parts are connected: {sessions:?}");
        are_encrypted(&sessions);
        assert_eq!(proxy.admin().get("/ready").await.json["warnings"].to_string().matches("encrypted").count(), 0);
    }

    async fn a_server_that_cannot_be_verified_is_not_used(kind: Kind) {
        let certified = Certified::new();
        let node = certified.primary(kind).await;
        certified.put("stranger.pem", &Authority::new().pem);
        let settings = |ca: &str, more: &str| {
            let store = format!("tls = {{ ca = \"{}\"{more} }}", certified.path(ca));
            Settings { url: node.url(), store, ..Settings::default() }
        };
        let stranger = Proxy::with(settings("stranger.pem", "")).await;
        refuses(&stranger, &["certificate", "store.tls", "UnknownIssuer"]).await;
        let other = Proxy::with(settings("ca.pem", ", server_name = \"db.example\"")).await;
        refuses(&other, &["certificate", "store.tls", "db.example", "127.0.0.1"]).await;
        assert_eq!(ciphers(&node).await, [""; 0], "nobody has logged in");
        let right = Proxy::with(settings("ca.pem", ", server_name = \"127.0.0.1\"")).await;
        right.until_ready().await;
    }

    /// A man in the middle can take the offer of TLS out of the server's greeting.
    async fn a_server_without_encryption_is_not_used(kind: Kind) {
        let certified = Certified::new();
        let off = if kind == Kind::Mysql { "--tls-version=" } else { "--skip-ssl" };
        let node = Node::start_with(kind, certified.folder.path(), 1, vec![off.to_owned()]).await;
        node.set_read_only(false).await;
        node.make_accounts().await;
        let plain = Proxy::start(&node.url()).await;
        plain.until_ready().await;
        let proxy = Proxy::with(certified.settings(&[&node], "")).await;
        refuses(&proxy, &["offers no TLS", "store.tls"]).await;
    }

    async fn an_account_that_needs_a_certificate_gets_it(kind: Kind) {
        let certified = Certified::new();
        let node = certified.primary(kind).await;
        node.root("ALTER USER 'lk'@'%' REQUIRE X509").await;
        let (cert, key) = certified.authority.signs(Vec::new(), 7);
        certified.put("proxy.pem", &cert);
        certified.put("proxy.key", &key);
        certified.put("both.pem", &(cert + &key));
        let without = Proxy::with(certified.settings(&[&node], "")).await;
        refuses(&without, &["store.tls.cert"]).await;
        let files = format!(", cert = \"{}\", key = \"{}\"", certified.path("proxy.pem"), certified.path("proxy.key"));
        for more in [files, format!(", cert = \"{}\"", certified.path("both.pem"))] {
            let proxy = Proxy::with(certified.settings(&[&node], &more)).await;
            proxy.until_ready().await;
        }
    }

    async fn the_next_server_is_verified_and_used_after_a_fail_over(kind: Kind) {
        let certified = Certified::new();
        let mut first = certified.primary(kind).await;
        let second = certified.server(kind, 2).await;
        second.follow(&first).await;
        let mut settings = certified.settings(&[&first, &second], "");
        settings.sections = "[limits]\nmax_ttl_ms = 2000\n".to_owned();
        let proxy = Proxy::with(settings).await;
        proxy.until_ready().await;
        proxy.client().lease("orders/1", 2_000).await;
        second.catch_up(&first).await;
        are_encrypted(&ciphers(&second).await);
        assert!(!ciphers(&second).await.is_empty(), "the probes are connected");
        first.kill_for_good().await;
        second.promote().await;
        let (admin, address) = (proxy.admin(), second.address());
        crate::harness::within(Duration::from_secs(60), "the second server is used", async || {
            let ready = admin.get("/ready").await;
            ready.status == 200 && ready.json["store"].to_string().contains(&address)
        })
        .await;
        let body = json!({"resource": "orders/1", "ttl_ms": 2_000, "wait_ms": 20_000});
        eventually("locks are granted", async || proxy.client().acquire(body.clone()).await.status == 200).await;
        are_encrypted(&ciphers(&second).await);
    }

    async fn new_connections_use_the_changed_files(kind: Kind) {
        let certified = Certified::new();
        let node = certified.primary(kind).await;
        let proxy = Proxy::with(certified.settings(&[&node], "")).await;
        proxy.until_ready().await;
        certified.put("ca.pem", &Authority::new().pem);
        let admin = proxy.admin();
        eventually("the server is not trusted", async || {
            node.end_sessions().await;
            let ready = admin.get("/ready").await;
            ready.status == 503 && ready.text.contains("UnknownIssuer")
        })
        .await;
        certified.put("ca.pem", &certified.authority.pem);
        proxy.until_ready().await;
        // A file that is no certificate changes nothing.
        certified.put("ca.pem", "nonsense");
        eventually("the fault is logged", async || proxy.log().contains("there is no certificate in it")).await;
        node.end_sessions().await;
        eventually("the proxy connects again", async || !ciphers(&node).await.is_empty()).await;
        proxy.until_ready().await;
    }

    /// The server is this one, under an address that other machines have as well.
    async fn a_password_that_travels_unencrypted_causes_a_warning(kind: Kind) {
        let certified = Certified::new();
        let node = certified.primary(kind).await;
        let url = node.url().replace("127.0.0.1", "0.0.0.0");
        let warned = async |store: &str| {
            let settings = Settings { url: url.clone(), store: store.to_owned(), ..Settings::default() };
            let proxy = Proxy::with(settings).await;
            proxy.until_ready().await;
            let ready = proxy.admin().get("/ready").await.json["warnings"].to_string();
            let says = |text: &str| text.contains("are not encrypted") && text.contains("store.tls.ca");
            assert_eq!(says(&ready), says(&proxy.log()), "{ready}");
            assert!(!ready.contains("secret") && !proxy.log().contains("secret"));
            says(&ready)
        };
        assert!(warned("").await);
        assert!(!warned("allow_plaintext = true").await);
        let ca = certified.path("ca.pem");
        assert!(!warned(&format!("tls = {{ ca = \"{ca}\", server_name = \"127.0.0.1\" }}")).await);
        assert!(!Proxy::start(&node.url()).await.log().contains("are not encrypted"), "this machine is no other");
    }
}

/// Faults of the configuration, which `serve --check` finds without a server.
#[test]
fn faults_of_the_files_and_of_the_url_are_named() {
    let certified = Certified::new();
    let (cert, _) = certified.authority.signs(localhost(), 1);
    let (_, other) = certified.authority.signs(localhost(), 2);
    certified.put("cert.pem", &cert);
    certified.put("other.key", &other);
    certified.put("empty.pem", "");
    let check = |store: &str| {
        let config = format!("[store]\n{store}\n");
        std::fs::write(certified.folder.path().join("config.toml"), config).unwrap();
        let mut command = lockkeeper();
        command.args(["serve", "--check"]).current_dir(certified.folder.path());
        let (code, said) = ending(command.output().unwrap());
        assert!(!said.contains("secret"), "{said}");
        (code, said)
    };
    let url = "url = \"mysql://lk:secret@db.example/lockkeeper\"\n";
    let (code, said) = check(&format!("{url}tls = {{ ca = \"ca.pem\" }}"));
    assert_eq!(code, Some(0), "{said}");
    assert!(!said.contains("not encrypted"), "{said}");
    for (store, expected) in [
        ("tls = { ca = \"none.pem\" }", "store.tls.ca: there is no file none.pem"),
        ("tls = { ca = \"empty.pem\" }", "store.tls: empty.pem: there is no certificate in it"),
        ("tls = { ca = \"ca.pem\", cert = \"cert.pem\" }", "cert.pem: there is no private key in it"),
        (
            "tls = { ca = \"ca.pem\", cert = \"cert.pem\", key = \"other.key\" }",
            "store.tls: other.key: the key is not that of the certificate in cert.pem",
        ),
        ("tls = { cert = \"cert.pem\" }", "store.tls.cert: needs ca"),
        ("tls = { server_name = \"db\" }", "store.tls.server_name: needs ca"),
        ("tls = { ca = \"ca.pem\", key = \"other.key\" }", "store.tls.key: needs cert"),
        ("tls = { ca = \"ca.pem\", server_name = \"a b\" }", "must be a DNS name or an IP address"),
        ("tls = { ca = \"ca.pem\", verify = false }", "unknown key `store.tls.verify`"),
    ] {
        let (code, said) = check(&format!("{url}{store}"));
        assert!(code == Some(2) && said.contains(expected), "{store}: {code:?} {said}");
    }
    for parameter in ["require_ssl=true", "verify_ca=false", "verify_identity=false", "built_in_roots=true"] {
        let (code, said) = check(&url.replace("/lockkeeper", &format!("/lockkeeper?{parameter}")));
        let (name, _) = parameter.split_once('=').unwrap();
        assert!(code == Some(2) && said.contains(&format!("store.url: has {name}")), "{said}");
    }
}
