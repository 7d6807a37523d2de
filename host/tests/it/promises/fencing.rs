//! Promise 2: the tokens of a key increase, whatever happens in between.

use std::time::Duration;

use rustix::process::Signal;
use serde_json::{Value, json};

use super::token;
use crate::harness::{Client, Proxy, Settings, crash, database, eventually, folder, fresh, own_server, sql};

const FIRST_OF_SECOND_EPOCH: u64 = 1 << 40;

/// Takes the key repeatedly and checks the tokens.
struct Fence {
    resource: String,
    last: u64,
}

impl Fence {
    fn new() -> Fence {
        Fence { resource: fresh("fenced"), last: 0 }
    }

    /// Takes the key, waits for it if it is held, and does not release it.
    async fn take(&mut self, client: &Client, after: &str, ttl_ms: u32) -> Value {
        let body = json!({"resource": self.resource, "ttl_ms": ttl_ms, "wait_ms": 10_000});
        let mut lease = Value::Null;
        eventually(&format!("granted after {after}"), async || {
            let granted = client.acquire(body.clone()).await;
            lease = granted.json;
            granted.status == 200
        })
        .await;
        self.look(&lease, after);
        lease
    }

    async fn cycle(&mut self, client: &Client, after: &str) {
        let lease = self.take(client, after, 10_000).await;
        assert_eq!(client.release(&lease).await.status, 200);
    }

    fn look(&mut self, lease: &Value, after: &str) {
        let token = token(lease);
        assert!(token > self.last, "{token} follows {} after {after}", self.last);
        self.last = token;
    }
}

on_both! {
    /// Promise 2, across handoff, expiry, other proxies, policy swaps and forced releases.
    async fn tokens_rise_whichever_way_a_lock_is_granted(kind: Kind) {
        let url = database(kind).await;
        let (one, other) = (Proxy::start(&url).await, Proxy::start(&url).await);
        let (client, elsewhere) = (one.client(), other.client());
        let mut fence = Fence::new();
        for _ in 0..3 {
            fence.cycle(&client, "a release").await;
            fence.cycle(&elsewhere, "a release on another proxy").await;
        }
        let held = fence.take(&client, "a release", 10_000).await;
        let waiter = tokio::spawn({
            let (client, resource) = (client.clone(), fence.resource.clone());
            async move { client.acquire(json!({"resource": resource, "ttl_ms": 100, "wait_ms": 9_000})).await }
        });
        client.until_queued(&fence.resource, 1).await;
        assert_eq!(client.release(&held).await.status, 200);
        fence.look(&waiter.await.unwrap().json, "a handoff");
        fence.take(&elsewhere, "an expiry", 10_000).await;
        let forced = one.admin().send("DELETE", &format!("/v1/locks/{}", fence.resource), "").await;
        assert_eq!(forced.json["holders"], 1, "{}", forced.text);
        fence.cycle(&client, "a forced release").await;
        let module = lockkeeper::policy::builtin("backoff").expect("it is built in");
        let pushed = one.admin().send("PUT", "/v1/policies/default", module).await;
        assert_eq!((pushed.status, &pushed.json["outcome"]), (200, &json!("live")), "{}", pushed.text);
        fence.cycle(&client, "a policy swap").await;
        fence.cycle(&elsewhere, "a policy swap elsewhere").await;
    }

    /// Promise 2, across crashes of the proxy and of the server.
    async fn tokens_rise_across_crashes(kind: Kind) {
        let dir = folder();
        let server = own_server(kind, dir.path()).await;
        let mut fence = Fence::new();
        let mut proxy = Proxy::start(server.url()).await;
        fence.cycle(&proxy.client(), "nothing").await;
        fence.take(&proxy.client(), "a release", 300).await;
        proxy.kill();
        proxy = Proxy::start(server.url()).await;
        fence.cycle(&proxy.client(), "a killed proxy").await;
        fence.take(&proxy.client(), "a release", 300).await;
        crash(&server).await;
        fence.cycle(&proxy.client(), "a killed server").await;
        proxy.signal(Signal::TERM);
        assert_eq!(proxy.ended().await, Some(0));
        crash(&server).await;
        proxy = Proxy::start(server.url()).await;
        fence.cycle(&proxy.client(), "both were started again").await;
        server.stop().await;
    }

    /// Promise 2, across the deletion of idle rows, including on a proxy that remembers the row.
    async fn tokens_rise_across_clean_up(kind: Kind) {
        let url = database(kind).await;
        let proxy = cleaning(&url).await;
        let mut fence = Fence::new();
        for _ in 0..5 {
            fence.cycle(&proxy.client(), "a release").await;
        }
        // As if nobody had used the row for a day.
        let age = format!("UPDATE lockkeeper_lease SET until_us=1 WHERE k='{}'", fence.resource);
        sql(&url, &age).await;
        let cleaner = cleaning(&url).await;
        let count = format!("SELECT k FROM lockkeeper_lease WHERE k='{}'", fence.resource);
        eventually("the row is deleted", async || sql(&url, &count).await.is_empty()).await;
        fence.cycle(&proxy.client(), "clean-up").await;
        fence.cycle(&cleaner.client(), "clean-up").await;
        let fresh_key = cleaner.client().lease(&fresh("unseen"), 1_000).await;
        assert!(token(&fresh_key) > 0);
    }

    /// Promise 2: a clean-up raises the floor of tokens after a transaction has looked for its row, and before the
    /// transaction inserts the row.
    async fn tokens_rise_across_a_clean_up_during_a_claim(kind: Kind) {
        let url = database(kind).await;
        let store = "timeout_ms = 20000".to_owned();
        let proxy = Proxy::with(Settings { url: url.clone(), store, ..Settings::default() }).await;
        let client = proxy.client();
        client.lease(&fresh("warm"), 1_000).await;
        let slow = "CREATE TRIGGER slow BEFORE INSERT ON lockkeeper_lease FOR EACH ROW DO SLEEP(2)";
        sql(&url, slow).await;
        let asked = tokio::spawn(async move { client.lease(&fresh("deleted"), 60_000).await });
        tokio::time::sleep(Duration::from_millis(300)).await;
        sql(&url, "UPDATE lockkeeper_meta SET floor=1000 WHERE id=1").await;
        let lease = asked.await.unwrap();
        assert!(token(&lease) > 1_000, "{lease}");
    }

    /// Promises 1 and 2: on another server, nothing is granted while a lease of the previous server may run. After
    /// that, tokens are higher than all tokens that the previous server can have issued.
    async fn another_server_begins_another_epoch(kind: Kind) {
        let url = database(kind).await;
        let short = "[limits]\nmax_ttl_ms = 1000\n";
        let settings = || Settings { url: url.clone(), sections: short.into(), ..Settings::default() };
        let mut fence = Fence::new();
        let mut proxy = Proxy::with(settings()).await;
        let lease = proxy.client().lease(&fence.resource, 1_000).await;
        fence.look(&lease, "nothing");
        assert_eq!(proxy.client().release(&lease).await.status, 200);
        proxy.kill();
        sql(&url, "UPDATE lockkeeper_meta SET identity='another'").await;
        let proxy = Proxy::with(settings()).await;
        let began = std::time::Instant::now();
        let client = proxy.client();
        let early = client.acquire(json!({"resource": fence.resource, "ttl_ms": 500})).await;
        assert_eq!((early.status, early.slug()), (409, "contended"), "{}", early.text);
        assert!(early.number("retry_after_ms") > 0, "{}", early.text);
        let body = json!({"resource": fence.resource, "ttl_ms": 500, "wait_ms": 20_000});
        let late = client.acquire(body).await;
        assert_eq!(late.status, 200, "{}", late.text);
        // The longest lease and one second, less the part of the proxy's start-up after it had first seen the server.
        assert!(began.elapsed() > Duration::from_millis(1_000), "{:?}", began.elapsed());
        fence.look(&late.json, "a change of the server");
        assert!(fence.last > FIRST_OF_SECOND_EPOCH, "{}", fence.last);
        let epoch = sql(&url, "SELECT epoch FROM lockkeeper_meta").await;
        assert_eq!(epoch[0].get::<u64, _>(0), Some(1));
    }
}

/// A proxy that deletes rows after the shortest time, and looks for them at its start.
async fn cleaning(url: &str) -> Proxy {
    let store = "clean_after_s = 60".to_owned();
    Proxy::with(Settings { url: url.to_owned(), store, ..Settings::default() }).await
}
