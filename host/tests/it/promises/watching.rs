//! What can be observed from outside: events, decisions and metrics.

use serde_json::{Value, json};

use crate::harness::{Lines, Proxy, database, eventually, fresh};

/// The next event of a stream of server-sent events.
async fn event(lines: &mut Lines) -> Value {
    loop {
        let line = lines.line().await.expect("an event");
        if let Some(data) = line.strip_prefix("data: ") {
            return serde_json::from_str(data).expect("JSON");
        }
    }
}

on_both! {
    /// A watcher sees the events of a key in order, and no events of other keys.
    async fn events_come_in_order(kind: Kind) {
        let proxy = Proxy::start(&database(kind).await).await;
        let (client, resource) = (proxy.client(), fresh("watched"));
        let mut watch = client.stream("GET", &format!("/v1/watch?prefix={resource}"), "").await;
        assert_eq!(watch.line().await.as_deref(), Some(": watching"));
        client.lease(&fresh("other"), 1_000).await;
        let body = |owner: &str| {
            json!({"resource": resource, "owner": owner, "ttl_ms": 10_000, "wait_ms": 10_000})
        };
        let first = client.acquire(body("first")).await.json;
        let waiting = tokio::spawn({
            let (client, body) = (client.clone(), body("second"));
            async move { client.acquire(body).await.json }
        });
        client.until_queued(&resource, 1).await;
        assert_eq!(client.release(&first).await.status, 200);
        let second = waiting.await.unwrap();
        assert_eq!(client.release(&second).await.status, 200);
        let mut short = body("third");
        short["ttl_ms"] = json!(150);
        let third = client.acquire(short).await.json;
        let fourth = client.acquire(body("fourth")).await.json;
        proxy.admin().send("DELETE", &format!("/v1/locks/{resource}"), "").await;
        assert_eq!(event(&mut watch).await["owner"], "first");
        let mut next = event(&mut watch).await;
        if next["event"] == "released" {
            // The waiter was polling at that moment, so the handoff took two steps.
            assert_eq!((&next["owner"], &next["token"]), (&json!("first"), &first["token"]), "{next}");
            next = event(&mut watch).await;
            assert_eq!(next["event"], "granted", "{next}");
        } else {
            assert_eq!(next["event"], "handed_off", "{next}");
        }
        assert_eq!((&next["owner"], &next["token"]), (&json!("second"), &second["token"]), "{next}");
        let expected = [
            ("released", "second", &second),
            ("granted", "third", &third),
            ("expired", "third", &third),
            ("granted", "fourth", &fourth),
        ];
        for (name, owner, lease) in expected {
            let event = event(&mut watch).await;
            assert_eq!((&event["event"], &event["owner"]), (&json!(name), &json!(owner)), "{event}");
            assert_eq!((&event["key"], &event["token"]), (&json!(resource), &lease["token"]), "{event}");
        }
        assert_eq!(event(&mut watch).await["event"], "forced");
        assert_eq!(client.release(&fourth).await.status, 410, "an operator took it away");
    }

    /// Every answer is counted by policy and outcome, and no label contains a key.
    async fn every_answer_is_counted_in_the_metrics(kind: Kind) {
        let proxy = Proxy::start(&database(kind).await).await;
        let (client, resource) = (proxy.client(), fresh("counted"));
        let lease = client.lease(&resource, 10_000).await;
        client.acquire(json!({"resource": resource})).await;
        client.renew(&lease).await;
        client.release(&lease).await;
        client.release(&lease).await;
        client.acquire(json!({"resource": ""})).await;
        let counts = [
            ("lockkeeper_acquire_total", vec!["policy=\"default\"", "outcome=\"granted\""], 1.0),
            ("lockkeeper_acquire_total", vec!["outcome=\"contended\""], 1.0),
            ("lockkeeper_renewals_total", vec!["outcome=\"renewed\""], 1.0),
            ("lockkeeper_releases_total", vec!["outcome=\"released\""], 1.0),
            ("lockkeeper_releases_total", vec!["outcome=\"lost\""], 1.0),
            ("lockkeeper_hold_seconds_count", vec!["how=\"released\""], 1.0),
            ("lockkeeper_http_requests_total", vec!["front=\"api\"", "status=\"200\""], 3.0),
            ("lockkeeper_http_requests_total", vec!["front=\"api\"", "status=\"400\""], 1.0),
            ("lockkeeper_http_requests_total", vec!["front=\"api\"", "status=\"409\""], 1.0),
            ("lockkeeper_http_requests_total", vec!["front=\"api\"", "status=\"410\""], 1.0),
            ("lockkeeper_waiters", vec![], 0.0),
            ("lockkeeper_leases", vec![], 0.0),
        ];
        for (name, labels, count) in counts {
            assert_eq!(proxy.metric(name, &labels).await, count, "{name} {labels:?}");
        }
        let text = proxy.admin().get("/metrics").await.text;
        assert!(!text.contains(&resource), "a key became a label");
    }

    /// The ends of leases are counted, and so are the calls of the policy and the store.
    async fn the_ends_of_leases_are_counted_in_the_metrics(kind: Kind) {
        let proxy = Proxy::start(&database(kind).await).await;
        let (client, resource) = (proxy.client(), fresh("ended"));
        let lease = client.lease(&resource, 10_000).await;
        let waiting = tokio::spawn({
            let body = json!({"resource": resource, "ttl_ms": 200, "wait_ms": 10_000});
            let client = client.clone();
            async move { client.acquire(body).await.json }
        });
        client.until_queued(&resource, 1).await;
        assert_eq!(client.release(&lease).await.status, 200);
        let short = waiting.await.unwrap();
        let ends = "lockkeeper_hold_seconds_count";
        eventually("it expires", async || proxy.metric(ends, &["how=\"expired\""]).await == 1.0).await;
        assert_eq!(client.renew(&short).await.status, 410);
        // The waiter may have been polling when the lease was released.
        assert_eq!(proxy.metric(ends, &["how=\"released\""]).await + proxy.metric(ends, &["how=\"handed_off\""]).await, 1.0);
        assert_eq!(proxy.metric("lockkeeper_renewals_total", &["outcome=\"lost\""]).await, 1.0);
        assert!(proxy.metric("lockkeeper_policy_call_seconds_count", &["hook=\"plan\""]).await >= 2.0);
        assert!(proxy.metric("lockkeeper_store_batch_operations_sum", &[]).await >= 4.0);
    }

    /// The view of a lock shows who made each decision.
    async fn the_view_of_a_lock_shows_its_decisions(kind: Kind) {
        let proxy = Proxy::start(&database(kind).await).await;
        let (client, resource) = (proxy.client(), fresh("decided"));
        let lease = client.lease(&resource, 10_000).await;
        let shown = client.show(&resource).await;
        let holder = &shown["holders"][0];
        assert_eq!((&holder["token"], &holder["owner"]), (&lease["token"], &lease["owner"]), "{shown}");
        let decision = &shown["decisions"][0];
        assert_eq!((&decision["hook"], &decision["by"]), (&json!("plan"), &lease["policy"]), "{shown}");
        assert!(lease["policy"].as_str().is_some_and(|policy| policy.starts_with("default@sha256:")));
        assert_eq!(client.get(&format!("/v1/locks/{}", fresh("never-seen"))).await.status, 404);
    }
}
