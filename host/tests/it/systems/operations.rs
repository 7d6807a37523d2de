//! Stripes, re-entrance, and what is watched in operation.

use std::time::{Duration, Instant};

use super::*;

/// The rules that `examples/monitoring` gives to users.
const ALERTS: &str = include_str!("../../../../examples/monitoring/alerts.yml");

on_both! {
    async fn S8_reentrant_by_owner_with_a_count_and_blocking_with_an_expiry(kind: Kind) {
        let proxy = proxy(&database(kind).await, "default", "reentrant = true").await;
        let client = proxy.client();
        let mine = json!({"resource": "a", "owner": "me", "ttl_ms": 60_000});
        let first = client.acquire(mine.clone()).await;
        let second = client.acquire(mine).await;
        assert_eq!((first.number("token"), second.number("levels")), (second.number("token"), 2));
        assert_eq!(client.release(&second.json).await.status, 200);
        let yours = json!({"resource": "a", "owner": "you"});
        assert_eq!(client.acquire(yours.clone()).await.status, 409, "one level is left");
        let blocking = tokio::spawn({
            let client = proxy.client();
            async move { client.acquire(json!({"resource": "a", "owner": "you", "wait_ms": 20_000})).await }
        });
        client.until_queued("a", 1).await;
        assert_eq!(client.release(&first.json).await.status, 200);
        assert_eq!(blocking.await.unwrap().status, 200);
        client.acquire(json!({"resource": "b", "owner": "me", "ttl_ms": 200})).await;
        eventually("an owner that is gone loses its lock", async || {
            client.acquire(json!({"resource": "b", "owner": "you", "ttl_ms": 60_000})).await.status == 200
        })
        .await;
    }

    async fn S9_resources_share_a_hundred_stripes_or_one_lock(kind: Kind) {
        let url = database(kind).await;
        let mut striped = proxy(&url, "default", "stripes = 100\nreentrant = true").await;
        let client = striped.client();
        let body = json!({"resource": "123456789", "owner": "me", "ttl_ms": 60_000, "request_id": "r1"});
        let lease = client.acquire(body.clone()).await;
        // CRC-32 of these digits is 0xCBF43926.
        assert_eq!(lease.json["keys"], json!(["stripe-62-of-100"]));
        assert_eq!(client.show("123456789").await["holders"][0]["owner"], "me", "the stripe can be seen");
        let again = client.acquire(body).await;
        assert_eq!((again.number("token"), &again.json["levels"]), (lease.number("token"), &Value::Null));
        let other = json!({"resource": "123456789", "owner": "me", "ttl_ms": 60_000, "request_id": "r2"});
        assert_eq!(client.acquire(other).await.number("levels"), 2, "another request is another level");
        let held = client.acquire(json!({"resource": "123456789", "owner": "you"})).await;
        assert_eq!(held.status, 409);
        let mut free = 0;
        for n in 0..20 {
            let body = json!({"resource": format!("orders/{n}"), "owner": "you", "ttl_ms": 300});
            free += u32::from(client.acquire(body).await.status == 200);
        }
        assert!(free >= 10, "{free} of 20 resources have a free stripe");
        // With other stripes on the same store, what is held stays held.
        striped.kill();
        let central = proxy(&url, "default", "stripes = 1").await;
        let held = central.client().acquire(json!({"resource": "123456789", "owner": "you"})).await;
        assert_eq!((held.status, &held.json["holder"]["owner"]), (409, &json!("me")), "{}", held.text);

        let central = proxy(&database(kind).await, "default", "stripes = 1").await;
        let client = central.client();
        let lease = client.lease("orders/1", 400).await;
        assert_eq!(lease["keys"], json!(["stripe-0-of-1"]));
        assert_eq!(client.acquire(json!({"resource": "orders/2"})).await.status, 409, "one lock for all");
        let begun = Instant::now();
        let next = client.acquire(json!({"resource": "orders/3", "wait_ms": 10_000})).await;
        assert_eq!(next.status, 200, "an expired lock is taken over");
        assert!(begun.elapsed() < Duration::from_secs(8));
    }

    async fn S19_waits_failures_and_hold_times_are_measured_and_have_alerts(kind: Kind) {
        let proxy = proxy(&database(kind).await, "default", "").await;
        let client = proxy.client();
        let lease = client.lease("a", 60_000).await;
        assert_eq!(client.acquire(json!({"resource": "a"})).await.status, 409);
        let waiting = tokio::spawn({
            let client = proxy.client();
            async move { client.acquire(json!({"resource": "a", "wait_ms": 20_000})).await.status }
        });
        client.until_queued("a", 1).await;
        tokio::time::sleep(Duration::from_millis(700)).await;
        client.release(&lease).await;
        assert_eq!(waiting.await.unwrap(), 200);

        let all = proxy.metric("lockkeeper_wait_seconds_count", &["policy=\"default\""]).await;
        let quick = proxy.metric("lockkeeper_wait_seconds_bucket", &["le=\"0.5\""]).await;
        assert_eq!(all - quick, 1.0, "one waited longer than 500 ms");
        let failed = proxy.metric("lockkeeper_acquire_total", &["outcome=\"contended\""]).await;
        assert_eq!((failed, proxy.metric("lockkeeper_acquire_total", &[]).await), (1.0, 3.0));
        assert_eq!(proxy.metric("lockkeeper_hold_seconds_bucket", &["le=\"30.0\""]).await, 1.0);

        // What the rules ask for is there, label by label.
        let metrics = proxy.admin().get("/metrics").await.text;
        let asked = ALERTS.split("lockkeeper_").skip(1).map(|rest| {
            let end = rest.find(|c: char| !c.is_ascii_lowercase() && c != '_').unwrap_or(rest.len());
            format!("lockkeeper_{}", &rest[..end])
        });
        // Errors of the store have no series before the first.
        for name in asked.filter(|name| !name.contains("store_errors")) {
            let family = name.trim_end_matches("_total").trim_end_matches("_bucket").trim_end_matches("_count");
            assert!(metrics.contains(family), "{name} is not measured");
        }
        for bound in ["le=\"0.5\"", "le=\"30.0\""] {
            assert!(ALERTS.contains(bound) && metrics.contains(bound), "{bound}");
        }
    }
}
