//! Promise 8: nothing leaks.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::proxy_with;
use crate::harness::{Client, Proxy, Raw, database, eventually, fresh, parsed};

/// Much longer than a test: a lock that is free earlier is free for another reason.
const LONG_MS: u32 = 60_000;
/// The longest time that "at once" may take on a busy machine.
const AT_ONCE: Duration = Duration::from_secs(2);

/// Acquires a lease, which must succeed at once.
async fn at_once(client: &Client, resource: &str, when: &str) -> Value {
    let began = Instant::now();
    let granted = client.acquire(json!({"resource": resource, "ttl_ms": LONG_MS, "wait_ms": 10_000})).await;
    assert_eq!(granted.status, 200, "{when}: {}", granted.text);
    assert!(began.elapsed() < AT_ONCE, "{when}: {:?}", began.elapsed());
    granted.json
}

async fn waits(proxy: &Proxy, resource: &str) -> Raw {
    let mut socket = Raw::connect(proxy.api_address()).await;
    let body = json!({"resource": resource, "ttl_ms": LONG_MS, "wait_ms": 30_000});
    socket.post("/v1/acquire", &body).await;
    socket
}

/// Waits for a time that is shorter than the resolution of the runtime's timer.
async fn let_pass(time: Duration) {
    let began = Instant::now();
    while began.elapsed() < time {
        tokio::task::yield_now().await;
    }
}

on_both! {
    /// Promise 8: a waiter whose client leaves is removed from the queue, however the client leaves.
    async fn a_waiter_whose_client_leaves_is_removed_from_the_queue(kind: Kind) {
        let proxy = Proxy::start(&database(kind).await).await;
        let (client, resource) = (proxy.client(), fresh("left"));
        let lease = client.lease(&resource, LONG_MS).await;
        let dropped = waits(&proxy, &resource).await;
        let mut half_closed = waits(&proxy, &resource).await;
        let _stays = waits(&proxy, &resource).await;
        let held = json!({"resource": resource, "ttl_ms": LONG_MS, "wait_ms": 30_000});
        let mut hold = Raw::connect(proxy.api_address()).await;
        hold.post("/v1/hold", &held).await;
        client.until_queued(&resource, 4).await;
        drop(dropped);
        client.until_queued(&resource, 3).await;
        half_closed.leave().await;
        client.until_queued(&resource, 2).await;
        drop(hold);
        client.until_queued(&resource, 1).await;
        assert_eq!(proxy.metric("lockkeeper_waiters", &[]).await, 1.0);
        assert_eq!(client.release(&lease).await.status, 200);
        client.until_queued(&resource, 0).await;
    }

    /// Promise 8: if a client leaves at the moment of its grant, the client either sees the grant or the grant is
    /// undone.
    async fn a_client_that_leaves_at_the_grant_leaves_no_lock_behind(kind: Kind) {
        let proxy = Proxy::start(&database(kind).await).await;
        let (client, resource) = (proxy.client(), fresh("race"));
        let (mut told, mut undone) = (0, 0);
        let mut lease = client.lease(&resource, LONG_MS).await;
        for round in 0..200_u32 {
            let mut leaver = waits(&proxy, &resource).await;
            client.until_queued(&resource, 1).await;
            let release = || {
                let (client, lease) = (client.clone(), lease.clone());
                tokio::spawn(async move { client.release(&lease).await.status })
            };
            // From 2.5 ms before the release to 7.4 ms after it.
            let step = Duration::from_micros(100);
            let release = match (round % 100).checked_sub(25) {
                Some(steps) => {
                    let release = release();
                    let_pass(step * steps).await;
                    leaver.leave().await;
                    release
                }
                None => {
                    leaver.leave().await;
                    let_pass(step * (25 - round % 100)).await;
                    release()
                }
            };
            let (status, granted) = parsed(&leaver.rest().await);
            assert_eq!(release.await.unwrap(), 200);
            if status == 200 {
                told += 1;
                assert_eq!(client.release(&granted).await.status, 200, "round {round}");
            } else {
                undone += 1;
            }
            lease = at_once(&client, &resource, &format!("round {round}")).await;
        }
        assert!(told > 0 && undone > 0, "{told} were told, {undone} were not: nothing was tried");
    }

    /// Promise 8: the same without a queue, if the client leaves while the store is asked.
    async fn a_client_that_leaves_during_its_claim_leaves_no_lock_behind(kind: Kind) {
        let proxy = Proxy::start(&database(kind).await).await;
        let (client, resource) = (proxy.client(), fresh("race"));
        for round in 0..60_u64 {
            let mut leaver = waits(&proxy, &resource).await;
            tokio::time::sleep(Duration::from_micros(round * 100)).await;
            leaver.leave().await;
            let (status, granted) = parsed(&leaver.rest().await);
            if status == 200 {
                assert_eq!(client.release(&granted).await.status, 200, "round {round}");
            }
            let lease = at_once(&client, &resource, &format!("round {round}")).await;
            assert_eq!(client.release(&lease).await.status, 200);
        }
    }

    /// Promise 8: the lock of a dead holder is free after its lease and not before, also for a waiter.
    async fn a_dead_holders_lock_is_free_after_its_ttl(kind: Kind) {
        let proxy = Proxy::start(&database(kind).await).await;
        let (client, resource) = (proxy.client(), fresh("dead"));
        let began = Instant::now();
        client.lease(&resource, 500).await;
        let granted_at = Instant::now();
        at_once(&client, &resource, "after the time of a dead holder").await;
        assert!(began.elapsed() >= Duration::from_millis(490), "{:?}", began.elapsed());
        assert!(granted_at.elapsed() < Duration::from_millis(500) + AT_ONCE, "{:?}", began.elapsed());
    }

    /// Promise 8: a held lock is renewed until its connection ends, and is then free at once.
    async fn a_held_lock_ends_with_its_connection(kind: Kind) {
        let proxy = Proxy::start(&database(kind).await).await;
        let (client, resource) = (proxy.client(), fresh("held"));
        let (mut lines, granted) = proxy.client().hold(&json!({"resource": resource, "ttl_ms": 1_000})).await;
        for _ in 0..4 {
            assert_eq!(lines.json().await.expect("a renewal")["event"], "renewed");
        }
        let contended = client.acquire(json!({"resource": resource})).await;
        assert_eq!(contended.json["holder"]["token"], granted["token"], "{}", contended.text);
        drop(lines);
        at_once(&client, &resource, "after the connection's end").await;
        let (lines, _) = proxy.client().hold(&json!({"resource": fresh("long"), "ttl_ms": LONG_MS})).await;
        drop(lines);
    }

    /// A lock is kept for a least time after its grant, and for a delay after the death of its holder.
    async fn locks_can_outlast_their_leases(kind: Kind) {
        let url = database(kind).await;
        let (at_least, delay) = ("lock_at_least_ms = 900", "lock_delay_ms = 900");
        let proxy = proxy_with(&url, at_least, "").await;
        let (client, resource) = (proxy.client(), fresh("kept"));
        let began = Instant::now();
        let lease = client.lease(&resource, LONG_MS).await;
        assert_eq!(client.release(&lease).await.status, 200);
        at_once(&client, &resource, "after the least time").await;
        assert!(began.elapsed() >= Duration::from_millis(890), "{:?}", began.elapsed());

        // The proxy needs another database, because proxies that share a database use the same settings.
        let proxy = proxy_with(&database(kind).await, delay, "").await;
        let (client, resource) = (proxy.client(), fresh("delayed"));
        let lease = client.lease(&resource, LONG_MS).await;
        assert_eq!(client.release(&lease).await.status, 200);
        let released = Instant::now();
        let began = Instant::now();
        let body = json!({"resource": resource, "ttl_ms": 200, "wait_ms": 5_000});
        assert_eq!(client.acquire(body).await.status, 200);
        assert!(released.elapsed() < Duration::from_millis(850), "a release is not followed by the delay");
        at_once(&client, &resource, "after the delay").await;
        assert!(began.elapsed() >= Duration::from_millis(1_090), "{:?}", began.elapsed());
    }
}

on_both! {
    /// Promise 8: what many clients leave behind at once is removed at once.
    async fn a_crowd_of_waiters_that_leaves_is_removed_at_once(kind: Kind) {
        let proxy = Proxy::start(&database(kind).await).await;
        let (client, resource) = (proxy.client(), fresh("crowd"));
        let lease = client.lease(&resource, LONG_MS).await;
        let mut crowd = Vec::new();
        for _ in 0..300 {
            crowd.push(waits(&proxy, &resource).await);
        }
        client.until_queued(&resource, 300).await;
        drop(crowd);
        assert_eq!(client.release(&lease).await.status, 200);
        client.until_queued(&resource, 0).await;
        eventually("nobody waits", async || proxy.metric("lockkeeper_waiters", &[]).await == 0.0).await;
    }
}
