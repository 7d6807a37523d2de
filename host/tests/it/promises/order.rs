//! The order of waiters under `default`, which is the order of arrival, and the order of proxies.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::task::JoinHandle;

use super::{proxy_with, token, until_proxies_notify};
use crate::harness::{Client, Proxy, Response, Settings, database, eventually, fresh, sql};

const WAITERS: usize = 64;

/// Waits for the key on its own connection, and releases it at once.
fn waiter(proxy: &Proxy, resource: &str, owner: usize, rank: &str) -> JoinHandle<(u64, usize)> {
    let client = proxy.client();
    let body = json!({"resource": resource, "owner": owner.to_string(), "ttl_ms": 30_000,
        "wait_ms": 60_000, "labels": {"rank": rank}});
    tokio::spawn(async move {
        let granted: Response = client.acquire(body).await;
        assert_eq!(granted.status, 200, "{}", granted.text);
        assert_eq!(client.release(&granted.json).await.status, 200);
        (token(&granted.json), owner)
    })
}

/// Takes the key and releases it, again and again.
fn passes_on(proxy: &Proxy, resource: &str, owner: usize) -> JoinHandle<()> {
    let client = proxy.client();
    let body = json!({"resource": resource, "owner": owner.to_string(), "ttl_ms": 30_000, "wait_ms": 60_000});
    tokio::spawn(async move {
        loop {
            let granted = client.acquire(body.clone()).await;
            assert_eq!(granted.status, 200, "{}", granted.text);
            client.release(&granted.json).await;
        }
    })
}

/// The owners in the order of their tokens.
async fn order(waiters: Vec<JoinHandle<(u64, usize)>>) -> Vec<usize> {
    let mut grants = Vec::new();
    for waiter in waiters {
        grants.push(waiter.await.expect("a waiter"));
    }
    grants.sort_unstable();
    grants.into_iter().map(|(_, owner)| owner).collect()
}

async fn positions(client: &Client, resource: &str) -> Vec<(u64, String)> {
    let lock = client.show(resource).await;
    let place = |entry: &Value| {
        (entry["position"].as_u64().unwrap_or(0), entry["owner"].as_str().unwrap_or("").to_owned())
    };
    lock["queue"].as_array().map(|queue| queue.iter().map(place).collect()).unwrap_or_default()
}

/// How many proxies wait for the key without a global queue.
async fn wanted(url: &str, key: &str) -> usize {
    let rows = sql(url, &format!("SELECT state FROM lockkeeper_lease WHERE k='{key}'")).await;
    let state: Option<String> = rows.into_iter().next().map(mysql_async::from_row);
    let state: Value = serde_json::from_str(&state.unwrap_or_default()).unwrap_or_default();
    state["wanted"].as_array().map_or(0, Vec::len)
}

on_both! {
    /// Waiters are granted the lock in order of arrival.
    async fn waiters_are_granted_in_order_of_arrival(kind: Kind) {
        let proxy = Proxy::start(&database(kind).await).await;
        let (client, resource) = (proxy.client(), fresh("fifo"));
        let lease = client.lease(&resource, 60_000).await;
        let mut waiters = Vec::new();
        for owner in 0..WAITERS {
            waiters.push(waiter(&proxy, &resource, owner, "0"));
            client.until_queued(&resource, owner + 1).await;
        }
        let expected: Vec<_> = (0..WAITERS).map(|n| (n as u64 + 1, n.to_string())).collect();
        assert_eq!(positions(&client, &resource).await, expected);
        assert_eq!(client.release(&lease).await.status, 200);
        assert_eq!(order(waiters).await, (0..WAITERS).collect::<Vec<_>>());
    }

    /// The rank in the label that the settings name takes precedence over arrival.
    async fn rank_goes_before_arrival(kind: Kind) {
        let proxy = proxy_with(&database(kind).await, "rank_label = \"rank\"", "").await;
        let (client, resource) = (proxy.client(), fresh("ranked"));
        let lease = client.lease(&resource, 60_000).await;
        let mut waiters = Vec::new();
        for (owner, rank) in ["5", "0", "5", "-1", "0"].into_iter().enumerate() {
            waiters.push(waiter(&proxy, &resource, owner, rank));
            client.until_queued(&resource, owner + 1).await;
        }
        assert_eq!(client.release(&lease).await.status, 200);
        assert_eq!(order(waiters).await, [3, 1, 4, 0, 2]);
    }

    /// Clients of one proxy pass a key on among themselves without a pause.
    async fn a_proxy_with_a_queue_gives_another_proxy_its_turn(kind: Kind) {
        let url = database(kind).await;
        let (busy, other) = (Proxy::start(&url).await, Proxy::start(&url).await);
        let resource = fresh("turns");
        let clients: Vec<_> = (0..4).map(|n| passes_on(&busy, &resource, n)).collect();
        busy.client().until_queued(&resource, 3).await;
        let body = json!({"resource": resource, "ttl_ms": 30_000, "wait_ms": 20_000});
        for _ in 0..2 {
            let granted = other.client().acquire(body.clone()).await;
            assert_eq!(granted.status, 200, "{}", granted.text);
            assert_eq!(other.client().release(&granted.json).await.status, 200);
        }
        clients.iter().for_each(JoinHandle::abort);
    }

    /// Without a notification, the waiter's proxy would ask again only after 30 s.
    async fn a_release_on_one_proxy_is_noticed_by_a_waiter_on_another(kind: Kind) {
        let config = "[policies.default]\npath = \"builtin:backoff\"\n\
            settings = { sleep = \"fixed\", min_ms = 30_000, max_ms = 30_000, wait_ms = 120_000 }\n";
        let url = database(kind).await;
        let settings =
            || Settings { url: url.clone(), sections: config.to_owned(), ..Settings::default() };
        let proxies = [Proxy::with(settings()).await, Proxy::with(settings()).await];
        until_proxies_notify(&url).await;
        let resource = fresh("elsewhere");
        let began = Instant::now();
        let mut lease = proxies[0].client().lease(&resource, 120_000).await;
        for n in 1..=4 {
            let (holder, waits) = (&proxies[(n + 1) % 2], &proxies[n % 2]);
            let client = waits.client();
            let body = json!({"resource": resource, "ttl_ms": 120_000, "wait_ms": 120_000});
            let granted = tokio::spawn(async move { client.acquire(body).await });
            eventually("the store knows that the other proxy waits", async || {
                wanted(&url, &resource).await == 1
            })
            .await;
            assert_eq!(holder.client().release(&lease).await.status, 200);
            lease = granted.await.unwrap().json;
            assert!(token(&lease) > 0);
        }
        assert!(began.elapsed() < Duration::from_secs(25), "{:?}", began.elapsed());
    }

    async fn a_request_that_does_not_wait_does_not_overtake_waiters(kind: Kind) {
        let proxy = Proxy::start(&database(kind).await).await;
        let (client, resource) = (proxy.client(), fresh("passed"));
        let lease = client.acquire(json!({"resource": resource, "mode": "shared", "ttl_ms": 60_000})).await;
        let waiting = waiter(&proxy, &resource, 0, "0");
        client.until_queued(&resource, 1).await;
        let shared = client.acquire(json!({"resource": resource, "mode": "shared"})).await;
        assert_eq!(shared.slug(), "contended", "a shared lock would go past one that waits: {}", shared.text);
        assert_eq!(client.release(&lease.json).await.status, 200);
        waiting.await.expect("the waiter");
    }
}
