//! Stripes, re-entrance, and monitoring.

use std::time::{Duration, Instant};

use super::*;
use crate::harness::{Upstream, lockkeeper};

/// The alert rules that `examples/monitoring` gives to users.
const ALERTS: &str = include_str!("../../../../examples/monitoring/alerts.yml");

/// The expression of an alert, in one line.
fn rule(name: &str) -> String {
    let (_, rest) = ALERTS.split_once(&format!("alert: {name}\n")).expect(name);
    let (_, rest) = rest.split_once("expr: >\n").expect("an expression");
    let (expression, _) = rest.split_once("for: ").expect("and for how long");
    expression.split_whitespace().collect::<Vec<_>>().join(" ")
}

on_both! {
    async fn S8_an_owner_reenters_with_a_count_and_a_waiter_blocks_until_the_lock_is_free(kind: Kind) {
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
        // With a different number of stripes on the same store, held locks stay held.
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
        // Longer than anything else takes on a busy machine.
        tokio::time::sleep(Duration::from_millis(2_700)).await;
        client.release(&lease).await;
        assert_eq!(waiting.await.unwrap(), 200);

        let all = proxy.metric("lockkeeper_wait_seconds_count", &["policy=\"default\""]).await;
        let quick = proxy.metric("lockkeeper_wait_seconds_bucket", &["le=\"2.5\""]).await;
        assert_eq!(all - quick, 1.0, "one waited longer than 2.5 s");
        let failed = proxy.metric("lockkeeper_acquire_total", &["outcome=\"contended\""]).await;
        let granted = proxy.metric("lockkeeper_acquire_total", &["outcome=\"granted\""]).await;
        assert_eq!((failed, granted), (1.0, 2.0));
        assert_eq!(proxy.metric("lockkeeper_acquire_total", &[]).await, 3.0, "one in three failed");
        assert_eq!(proxy.metric("lockkeeper_hold_seconds_bucket", &["le=\"30.0\""]).await, 1.0);

        // The metrics have every name and label that the rules use.
        let metrics = proxy.admin().get("/metrics").await.text;
        let asked = ALERTS.split("lockkeeper_").skip(1).map(|rest| {
            let end = rest.find(|c: char| !c.is_ascii_lowercase() && c != '_').unwrap_or(rest.len());
            format!("lockkeeper_{}", &rest[..end])
        });
        // Store errors have no series before the first error.
        for name in asked.filter(|name| !name.contains("store_errors")) {
            let family = name.trim_end_matches("_total").trim_end_matches("_bucket").trim_end_matches("_count");
            assert!(metrics.contains(family), "{name} is not measured");
        }
        for bound in ["le=\"0.5\"", "le=\"30.0\""] {
            assert!(ALERTS.contains(bound) && metrics.contains(bound), "{bound}");
        }
        // More than 5 % failures: outcomes that the rule does not list as good.
        let rule = rule("LockAcquiresFail");
        let good = "lockkeeper_acquire_total{outcome=~\"granted|done\"}[5m]";
        assert!(rule.contains(good) && rule.contains("/ sum by (policy) (rate(lockkeeper_acquire_total[5m]))"), "{rule}");
        assert!(rule.contains("1 - (sum by") && rule.ends_with(") > 0.05"), "{rule}");
        assert!(metrics.contains("outcome=\"granted\"") && 1.0 - granted / 3.0 > 0.05);
        for name in ["LockWaitsAreLong", "LocksAreHeldLong"] {
            assert!(self::rule(name).ends_with(") > 0.01"), "{name}");
        }
    }

    /// The proxy's part of the template: whatever happens to the work, the lock is free after it.
    async fn S18_holds_and_guarded_requests_that_fail_release_their_locks(kind: Kind) {
        let upstream = Upstream::start().await;
        let routes = [("/status/{code}", upstream.good), ("/bad/{name}", upstream.bad)];
        let more = "resource = \"job\"\nttl_ms = 60_000\nwait_ms = 20_000";
        let sections = guarded("path = \"builtin:default\"", &routes, more);
        let proxy = Proxy::with(Settings { url: database(kind).await, sections, ..Settings::default() }).await;
        proxy.until_ready().await;
        let client = proxy.client();
        // Long before the lease of a minute ends.
        let is_free = async |what: &str| {
            eventually(&format!("the lock is free after {what}"), async || {
                // This lease expires by itself if the release is not answered.
                let next = client.acquire(json!({"resource": "job", "ttl_ms": 2_000})).await;
                next.status == 200 && client.release(&next.json).await.status == 200
            })
            .await;
        };
        for (path, status) in [("/status/500", 500), ("/bad/reset", 502), ("/bad/garbage", 502)] {
            assert_eq!(proxy.guarded().send("POST", path, "").await.status, status, "{path}");
            is_free(path).await;
        }
        assert!(proxy.guarded().try_send("GET", "/bad/half", "").await.is_none(), "broken off in the midst");
        is_free("half of an answer").await;
        let locked = proxy.metric("lockkeeper_guard_requests_total", &["\"locked\""]).await;
        assert!(locked > 0.5, "they had it: {locked}");

        let (lines, _) = client.hold(&json!({"resource": "job", "ttl_ms": 60_000})).await;
        assert_eq!(client.acquire(json!({"resource": "job"})).await.status, 409);
        drop(lines);
        is_free("a connection that was dropped").await;
        let beside = folder();
        let said = beside.path().join("said");
        let mut command = lockkeeper();
        command.args(["--server", &format!("http://{}", proxy.api_address()), "hold", "--ttl", "60s", "job"]);
        command.stdout(std::fs::File::create(&said).expect("a file"));
        let mut holder = command.spawn().expect("the command runs");
        // If the command ends before it has read its grant, it resets the connection, and the lease runs out instead.
        eventually("the command says that it holds the lock", async || {
            std::fs::read_to_string(&said).expect("a file").ends_with('\n')
        })
        .await;
        holder.kill().expect("a process of our own");
        holder.wait().expect("a process of our own");
        is_free("a command that was killed").await;
    }
}
