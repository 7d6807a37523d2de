//! Keys that a proxy decides about in its memory keep the promises.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::json;

use super::{proxy_with, token, until_proxies_notify};
use crate::harness::{Client, Proxy, World, crash, database, eventually, folder, fresh, own_server, sql};

/// A proxy that decides about keys in its memory whenever it can.
async fn proxy(url: &str) -> Proxy {
    proxy_with(url, "delegate = \"always\"", "").await
}

/// Leases a resource twice, so that the second lease is one of the proxy's memory.
async fn delegated(client: &Client, resource: &str, ttl_ms: u32) -> serde_json::Value {
    let first = client.lease(resource, ttl_ms).await;
    assert_eq!(client.release(&first).await.status, 200);
    let lease = client.lease(resource, ttl_ms).await;
    assert!(token(&lease) > token(&first));
    lease
}

/// The number of delegated keys, as the store has it.
async fn delegations(url: &str) -> usize {
    sql(url, "SELECT 1 FROM lockkeeper_lease WHERE state LIKE '%:delegated-to%'").await.len()
}

on_both! {
    /// Promises 1 and 2, while proxies and the server are killed and restarted.
    async fn holders_of_delegated_keys_never_overlap(kind: Kind) {
        let dir = folder();
        let server = own_server(kind, dir.path()).await;
        let (mut one, other) = (proxy(server.url()).await, proxy(server.url()).await);
        let world = World::start(&[one.api_address(), other.api_address()]);
        world.another_round().await;
        crash(&server).await;
        world.another_round().await;
        one.kill();
        world.another_round().await;
        one = proxy(server.url()).await;
        world.set_address(0, one.api_address());
        one.signal(Signal::STOP);
        tokio::time::sleep(Duration::from_secs(3)).await;
        one.signal(Signal::CONT);
        world.another_round().await;
        world.finish().await;
        server.stop().await;
    }

    /// Promise 9.
    async fn another_proxy_renews_shows_lists_and_releases_a_lease_of_a_delegated_key(kind: Kind) {
        let url = database(kind).await;
        let (one, other) = (proxy(&url).await, proxy(&url).await);
        until_proxies_notify(&url).await;
        let client = other.client();
        // Each call finds a key that is delegated.
        let another = async || {
            let resource = fresh("delegated");
            let lease = delegated(&one.client(), &resource, 30_000).await;
            assert_eq!(delegations(&url).await, 1, "{resource}");
            (resource, lease)
        };
        let (resource, lease) = another().await;
        let shown = client.show(&resource).await;
        assert_eq!(shown["holders"][0]["token"], lease["token"], "{shown}");
        let (resource, lease) = another().await;
        let listed = client.get(&format!("/v1/locks?prefix={resource}")).await;
        assert!(listed.text.contains(&format!("\"token\":{}", token(&lease))), "{}", listed.text);
        let (resource, _) = another().await;
        let held = client.acquire(json!({"resource": resource})).await;
        assert_eq!((held.status, held.slug()), (409, "contended"), "{}", held.text);
        let (_, lease) = another().await;
        assert_eq!(client.renew(&lease).await.status, 200);
        let (resource, lease) = another().await;
        assert_eq!(client.release(&lease).await.status, 200);
        let next = client.lease(&resource, 1_000).await;
        assert!(token(&next) > token(&lease));
    }

    /// Promise 9: a shutdown writes the leases down.
    async fn a_shutdown_gives_delegated_keys_back_with_their_leases(kind: Kind) {
        let url = database(kind).await;
        let (mut one, other) = (proxy(&url).await, proxy(&url).await);
        let mut leases = Vec::new();
        for n in 0..20 {
            leases.push(delegated(&one.client(), &format!("{}/{n}", fresh("drained")), 30_000).await);
        }
        // The other proxy may have read some of them while it started.
        assert_ne!(delegations(&url).await, 0);
        one.signal(Signal::TERM);
        assert_eq!(one.ended().await, Some(0), "{}", one.log());
        assert_eq!(delegations(&url).await, 0);
        for lease in &leases {
            assert_eq!(other.client().renew(lease).await.status, 200);
            assert_eq!(other.client().release(lease).await.status, 200);
        }
    }

    /// Promise 8: a key of a proxy that was killed is free after the lease and the rest of the delegation.
    async fn a_delegated_key_is_free_after_its_proxy_was_killed(kind: Kind) {
        let url = database(kind).await;
        let (mut one, other) = (proxy(&url).await, proxy(&url).await);
        let resource = fresh("orphaned");
        let lease = delegated(&one.client(), &resource, 1_000).await;
        let began = Instant::now();
        one.kill();
        let renewed = other.client().renew(&lease).await;
        assert!([410, 503].contains(&renewed.status), "{}", renewed.text);
        assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
        let next = other.client().acquire(json!({"resource": resource, "wait_ms": 30_000})).await;
        assert_eq!(next.status, 200, "{}", next.text);
        assert!(token(&next.json) > token(&lease));
        assert!(began.elapsed() > Duration::from_millis(900), "the lease may not be over: {:?}", began.elapsed());
        assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    }

    /// A key that nobody uses goes back to the store.
    async fn an_unused_key_goes_back_to_the_store(kind: Kind) {
        let url = database(kind).await;
        let one = proxy(&url).await;
        let lease = delegated(&one.client(), &fresh("unused"), 30_000).await;
        assert_eq!(one.client().release(&lease).await.status, 200);
        eventually("it is back", async || delegations(&url).await == 0).await;
    }
}
