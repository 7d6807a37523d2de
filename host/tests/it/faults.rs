//! The store's row of the bad-input table: servers that are down, hang, are read-only, full, closed to us, or less
//! durable than required. Readiness gives the reason, calls are answered in bounded time, everything recovers without
//! help, and no lock is granted that should not be.

use std::time::{Duration, Instant};

use lockkeeper::config::StoreConfig;
use lockkeeper::lock::record::{Claim, Op, Outcome};
use lockkeeper::lock::{Instant as OwnInstant, Space};
use lockkeeper::mysql::managed::ManagedServer;
use lockkeeper::mysql::{Advisory, MysqlStore, Row};
use lockkeeper::store::{Member, Quorum, Router, Store, contract};
use lockkeeper::telemetry::Metrics;
use rustix::process::Signal;
use serde_json::json;

use crate::harness::{self, Client, Proxy, Settings, eventually, folder, fresh, own_server, sql};

mod clock;
mod conditions;
mod lost_answers;
mod sessions;

/// A proxy with a store time-out of half a second.
async fn impatient(url: &str, store: &str) -> Proxy {
    let store = format!("timeout_ms = 500\n{store}");
    Proxy::with(Settings { url: url.to_owned(), store, ..Settings::default() }).await
}

/// Checks an acquire that cannot reach the store: it is answered within seconds, with the right problem.
async fn unavailable(client: &Client) {
    let begun = Instant::now();
    let response = client.acquire(json!({"resource": fresh("down")})).await;
    assert_eq!((response.status, response.slug()), (503, "store_unavailable"), "{}", response.text);
    assert_eq!(response.text.matches("the store is unavailable").count(), 1, "{}", response.text);
    assert!(response.headers.contains_key("retry-after"));
    assert!(begun.elapsed() < Duration::from_secs(10), "it took {:?}", begun.elapsed());
}

/// Waits until `/ready` is 503 and its reasons contain one of the words.
async fn says(proxy: &Proxy, words: &[&str]) {
    let admin = proxy.admin();
    let mut last = String::new();
    for _ in 0..400 {
        let response = admin.get("/ready").await;
        last = response.text.to_lowercase();
        if response.status == 503 && words.iter().any(|word| last.contains(word)) {
            let log = proxy.log();
            assert!(!log.contains("front=\"admin\" status=503"), "a probe is no failure to warn of: {log}");
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("/ready never said any of {words:?}, but {last}\n{}", proxy.log());
}

async fn recovers(proxy: &Proxy) {
    proxy.until_ready().await;
    let client = proxy.client();
    eventually("locks are granted again", async || {
        client.acquire(json!({"resource": fresh("up")})).await.status == 200
    })
    .await;
}

fn signal(server: &ManagedServer, signal: Signal) {
    harness::signal(server.pid().expect("the server runs"), signal);
}

/// The URL of an account without administrative rights, with its own database.
pub(crate) async fn plain_account(server: &ManagedServer, password: &str) -> String {
    let root = server.url();
    sql(root, "CREATE DATABASE IF NOT EXISTS plain").await;
    sql(root, "CREATE USER IF NOT EXISTS 'lk'@'localhost' IDENTIFIED BY 'secret'").await;
    sql(root, "GRANT SELECT, INSERT, UPDATE, DELETE, CREATE ON plain.* TO 'lk'@'localhost'").await;
    root.replace("root@", &format!("lk:{password}@")).replace("/lockkeeper?", "/plain?")
}

on_both! {
    /// The server is down when the proxy starts.
    async fn a_proxy_recovers_when_its_server_starts_after_it(kind: Kind) {
        let dir = folder();
        let server = own_server(kind, dir.path()).await;
        let url = server.url().to_owned();
        server.stop().await;
        let proxy = impatient(&url, "").await;
        says(&proxy, &["cannot", "connect", "refused", "no such file"]).await;
        unavailable(&proxy.client()).await;
        let _server = own_server(kind, dir.path()).await;
        recovers(&proxy).await;
    }

    /// The server is killed under load: grants stay valid, and tokens increase.
    async fn a_lease_outlasts_a_kill_of_the_server(kind: Kind) {
        let dir = folder();
        let server = own_server(kind, dir.path()).await;
        let proxy = impatient(server.url(), "").await;
        let client = proxy.client();
        let lease = client.lease("kept", 60_000).await;
        signal(&server, Signal::KILL);
        unavailable_or_granted(&client).await;
        recovers(&proxy).await;
        assert_eq!(client.acquire(json!({"resource": "kept"})).await.status, 409);
        assert_eq!(client.renew(&lease).await.status, 200);
        assert_eq!(client.release(&lease).await.status, 200);
        let next = client.lease("kept", 1_000).await;
        assert!(next["token"].as_u64() > lease["token"].as_u64());
        server.stop().await;
    }

    /// The server is paused for longer than a call's time-out: the call is answered, and is not applied afterwards.
    async fn a_call_that_timed_out_on_a_paused_server_is_not_applied_later(kind: Kind) {
        let dir = folder();
        let server = own_server(kind, dir.path()).await;
        let proxy = impatient(server.url(), "").await;
        let client = proxy.client();
        let warm = client.lease("warm", 1_000).await;
        client.release(&warm).await;
        signal(&server, Signal::STOP);
        let response = client.acquire(json!({"resource": "warm", "ttl_ms": 3_000_000})).await;
        unavailable(&client).await;
        signal(&server, Signal::CONT);
        assert_eq!((response.status, response.slug()), (503, "store_unavailable"));
        recovers(&proxy).await;
        assert!(proxy.metric("lockkeeper_store_errors_total", &[]).await > 0.0);
        eventually("the refused call holds nothing", async || {
            client.acquire(json!({"resource": "warm", "ttl_ms": 1_000})).await.status == 200
        })
        .await;
        server.stop().await;
    }

    /// The server refuses the proxy: a wrong password, a full server, a read-only server, and a server that may lose
    /// commits.
    async fn the_refusal_of_a_server_is_reported_until_it_is_over(kind: Kind) {
        let dir = folder();
        let server = own_server(kind, dir.path()).await;
        access_denied(&server).await;
        too_many_connections(&server).await;
        read_only(&server).await;
        weaker_durability(&server).await;
        server.stop().await;
    }

    /// All properties of the store's contract, on the real server.
    async fn the_store_keeps_its_contract(kind: Kind) {
        let (lasting, forgetful) = (harness::database(kind).await, harness::database(kind).await);
        contract::run_all(|which| {
            let mut config = StoreConfig::default();
            let url = match which {
                contract::Kind::Lasting => lasting.clone(),
                contract::Kind::Forgetful => {
                    config.clean_after = contract::FORGETS_AFTER;
                    forgetful.clone()
                }
            };
            async move {
                let store = MysqlStore::open(&config, &url, 3_600_000, Metrics::default());
                let store = store.expect("the URL is good");
                store.ready(Duration::from_secs(30)).await;
                std::sync::Arc::new(store) as std::sync::Arc<dyn Store>
            }
        })
        .await;
    }

    /// The properties that apply to locks on sessions.
    async fn session_locks_keep_the_applicable_part_of_the_contract(kind: Kind) {
        let url = harness::database(kind).await;
        let (one, other) = (open(&url).await, open(&url).await);
        let advisory = |store| std::sync::Arc::new(Advisory::new(store, &StoreConfig::default()));
        contract::run_session_locks(advisory(&one), advisory(&other), Space::Advisory).await;
        let row = |store| std::sync::Arc::new(Row::new(store, &many_rows()));
        contract::run_session_locks(row(&one), row(&other), Space::Row).await;
        contract::run_any(row(&one), Space::Row).await;
        contract::run_shared(row(&one), row(&other), Space::Row).await;
    }

    /// The properties that apply to leases of which a part depends on a session.
    async fn leases_of_two_spaces_keep_the_applicable_part_of_the_contract(kind: Kind) {
        let url = harness::database(kind).await;
        let (one, other) = (std::sync::Arc::new(open(&url).await), open(&url).await);
        let beside = Advisory::new(&one, &StoreConfig::default());
        let both = Router::new(one.clone(), vec![(Space::Advisory, std::sync::Arc::new(beside))]);
        let advisory = std::sync::Arc::new(Advisory::new(&other, &StoreConfig::default()));
        contract::run_both(std::sync::Arc::new(both), advisory, Space::Advisory, one.clone()).await;
        let beside = Row::new(&one, &many_rows());
        let both = Router::new(one.clone(), vec![(Space::Row, std::sync::Arc::new(beside))]);
        let row = std::sync::Arc::new(Row::new(&other, &many_rows()));
        contract::run_both(std::sync::Arc::new(both), row, Space::Row, one).await;
    }

    /// The properties that apply to a majority of servers.
    async fn a_quorum_keeps_the_applicable_part_of_the_contract(kind: Kind) {
        let mut urls = Vec::new();
        for _ in 0..3 {
            urls.push(harness::database(kind).await);
        }
        let mut proxies = Vec::new();
        for _ in 0..2 {
            let mut members = Vec::new();
            for url in &urls {
                members.push(Member { name: url.clone(), store: std::sync::Arc::new(open(url).await) });
            }
            let always = std::sync::Arc::new(|| OwnInstant(u64::MAX));
            proxies.push(std::sync::Arc::new(Quorum::new(members, Duration::from_secs(5), always)));
        }
        let [one, other] = proxies.try_into().unwrap_or_else(|_| unreachable!("there are two"));
        contract::run_session_locks(one.clone(), other.clone(), Space::Quorum).await;
        contract::run_fleet(one, other, Space::Quorum).await;
    }

    /// Rows are created when they are needed, and deleted when nobody has them.
    async fn rows_without_a_lock_are_deleted(kind: Kind) {
        let url = harness::database(kind).await;
        let config = StoreConfig { clean_after: contract::FORGETS_AFTER, ..StoreConfig::default() };
        let store = open_with(&config, &url).await;
        let row = Row::new(&store, &StoreConfig::default());
        let claim = |name: &str| {
            let mut claim = contract::claim(&[name], "me");
            claim.keys = claim.keys.iter().map(|key| key.clone().within(Space::Row)).collect();
            claim
        };
        let (tell, mut told) = tokio::sync::mpsc::unbounded_channel();
        for (name, ttl_ms) in [("held", 600_000), ("short", 100)] {
            let tell = tell.clone();
            let op = Op::Acquire(Claim { ttl_ms, ..claim(name) });
            let deadline = lockkeeper::clock::now().plus_ms(5_000);
            row.submit(vec![op], deadline, Box::new(move |result| drop(tell.send(result))));
            let reply = told.recv().await.expect("an answer").expect("the server is there");
            assert!(matches!(reply.outcomes[..], [Outcome::Granted(_)]), "{reply:?}");
        }
        eventually("only the row that is locked stays", async || {
            let rows = sql(&url, "SELECT CAST(k AS CHAR) FROM lockkeeper_row").await;
            let rows: Vec<String> = rows.into_iter().map(mysql_async::from_row).collect();
            rows == ["held"]
        })
        .await;
    }
}

/// Enough connections for the contract's row locks.
fn many_rows() -> StoreConfig {
    StoreConfig { row_connections: 200, ..StoreConfig::default() }
}

async fn open(url: &str) -> MysqlStore {
    open_with(&StoreConfig::default(), url).await
}

async fn open_with(config: &StoreConfig, url: &str) -> MysqlStore {
    let store = MysqlStore::open(config, url, 3_600_000, Metrics::default());
    let store = store.expect("the URL is good");
    store.ready(Duration::from_secs(30)).await;
    store
}

/// While a server recovers, a call is either answered in time or granted.
async fn unavailable_or_granted(client: &Client) {
    let begun = Instant::now();
    let response = client.acquire(json!({"resource": fresh("maybe")})).await;
    assert!(matches!(response.status, 200 | 503), "{}", response.text);
    assert!(begun.elapsed() < Duration::from_secs(10));
}

async fn access_denied(server: &ManagedServer) {
    let proxy = impatient(&plain_account(server, "wrong").await, "").await;
    says(&proxy, &["refuses the account"]).await;
    unavailable(&proxy.client()).await;
    sql(server.url(), "ALTER USER 'lk'@'localhost' IDENTIFIED BY 'wrong'").await;
    recovers(&proxy).await;
    sql(server.url(), "ALTER USER 'lk'@'localhost' IDENTIFIED BY 'secret'").await;
}

async fn too_many_connections(server: &ManagedServer) {
    let url = plain_account(server, "secret").await;
    let mut crowd = Vec::new();
    sql(server.url(), "SET GLOBAL max_connections = 12").await;
    while let Ok(conn) = mysql_async::Conn::from_url(&url).await {
        crowd.push(conn);
    }
    let proxy = impatient(&url, "").await;
    says(&proxy, &["too many connections"]).await;
    unavailable(&proxy.client()).await;
    crowd.clear();
    recovers(&proxy).await;
    sql(server.url(), "SET GLOBAL max_connections = 200").await;
}

async fn read_only(server: &ManagedServer) {
    let proxy = impatient(&plain_account(server, "secret").await, "").await;
    recovers(&proxy).await;
    let held = proxy.client().lease("before", 60_000).await;
    sql(server.url(), "SET GLOBAL read_only = 1").await;
    unavailable(&proxy.client()).await;
    says(&proxy, &["read-only", "read_only", "read only"]).await;
    sql(server.url(), "SET GLOBAL read_only = 0").await;
    recovers(&proxy).await;
    assert_eq!(proxy.client().release(&held).await.status, 200);
}

async fn weaker_durability(server: &ManagedServer) {
    sql(server.url(), "SET GLOBAL innodb_flush_log_at_trx_commit = 2").await;
    let url = plain_account(server, "secret").await;
    let warned = impatient(&url, "").await;
    recovers(&warned).await;
    let ready = warned.admin().get("/ready").await;
    assert!(ready.json["warnings"].to_string().contains("innodb_flush_log_at_trx_commit"), "{}", ready.text);
    let strict = impatient(&url, "require_durable = true").await;
    says(&strict, &["innodb_flush_log_at_trx_commit"]).await;
    unavailable(&strict.client()).await;
    sql(server.url(), "SET GLOBAL innodb_flush_log_at_trx_commit = 1").await;
    recovers(&strict).await;
}
