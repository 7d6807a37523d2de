//! Tests of the promises in ARCHITECTURE.md under faults, on both servers.

use std::time::Duration;

use serde_json::json;

use crate::harness::{Proxy, Settings, database, eventually, fresh, sql};

mod ambiguity;
mod bounds;
mod delegation;
mod exclusion;
mod fencing;
mod leaks;
mod loss;
mod order;
mod restart;
mod sharing;
mod shutdown;
mod waiting;
mod watching;

on_both! {
    /// Promise 9: any proxy renews and releases leases that another proxy granted.
    async fn any_proxy_renews_and_releases_a_lease(kind: Kind) {
        let url = database(kind).await;
        let (one, other) = (Proxy::start(&url).await, Proxy::start(&url).await);
        let resource = fresh("stateless");
        let lease = one.client().lease(&resource, 30_000).await;
        drop(one);
        assert_eq!(other.client().renew(&lease).await.status, 200);
        let held = other.client().acquire(json!({"resource": resource})).await;
        assert_eq!((held.status, held.slug()), (409, "contended"));
        assert_eq!(other.client().release(&lease).await.status, 200);
        let next = other.client().lease(&resource, 1_000).await;
        assert!(next["token"].as_u64() > lease["token"].as_u64());
    }

    /// Promise 9: the proxy that granted a lease learns of its release through another proxy before it tells anybody
    /// that the lock is held.
    async fn a_release_through_another_proxy_is_noticed(kind: Kind) {
        let url = database(kind).await;
        let (one, other) = (Proxy::start(&url).await, Proxy::start(&url).await);
        let (client, resource) = (one.client(), fresh("noticed"));
        let lease = client.lease(&resource, 600_000).await;
        assert_eq!(client.acquire(json!({"resource": resource})).await.slug(), "contended");
        assert_eq!(other.client().release(&lease).await.status, 200);
        let again = client.lease(&resource, 600_000).await;
        assert_eq!(other.client().release(&again).await.status, 200);
        let short = client.acquire(json!({"resource": resource, "wait_ms": 10, "ttl_ms": 600_000})).await;
        assert_eq!(short.status, 200, "{}", short.text);
        let waiting = tokio::spawn({
            let (client, body) = (client.clone(), json!({"resource": resource, "wait_ms": 60_000}));
            async move { client.acquire(body).await }
        });
        client.until_queued(&resource, 1).await;
        assert_eq!(other.client().release(&short.json).await.status, 200);
        assert_eq!(waiting.await.unwrap().status, 200);
    }

    /// Promise 9: a proxy that was killed and started again renews and releases its earlier leases.
    async fn a_restarted_proxy_knows_its_leases(kind: Kind) {
        let url = database(kind).await;
        let resource = fresh("restarted");
        let mut proxy = Proxy::start(&url).await;
        let lease = proxy.client().lease(&resource, 30_000).await;
        proxy.kill();
        let again = Proxy::start(&url).await;
        let client = again.client();
        let held = client.acquire(json!({"resource": resource})).await;
        assert_eq!((held.status, held.slug()), (409, "contended"));
        assert_eq!(held.json["holder"]["token"], lease["token"]);
        let renewed = client.renew(&lease).await;
        assert_eq!((renewed.status, &renewed.json["token"]), (200, &lease["token"]));
        assert_eq!(client.release(&lease).await.status, 200);
        assert_eq!(client.release(&lease).await.status, 410);
    }
}

/// A proxy with these settings of the default policy, and with more sections of config.toml.
async fn proxy_with(url: &str, policy: &str, sections: &str) -> Proxy {
    let sections = format!(
        "{sections}\n[policies.default]\npath = \"builtin:default\"\n[policies.default.settings]\n{policy}\n"
    );
    Proxy::with(Settings { api: String::new(), url: url.to_owned(), store: String::new(), sections }).await
}

/// Waits until the first proxies of a store notify each other: in their first heartbeats, they agree on a secret.
async fn until_proxies_notify(url: &str) {
    eventually("the proxies have a secret", async || {
        !sql(url, "SELECT 1 FROM lockkeeper_shared").await.is_empty()
    })
    .await;
    tokio::time::sleep(Duration::from_secs(4)).await;
}

fn token(lease: &serde_json::Value) -> u64 {
    lease["token"].as_u64().expect("a token")
}
