//! A shutdown answers all clients, loses no lease and ends.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::json;

use super::proxy_with;
use crate::harness::{Proxy, Raw, Settings, database, eventually, fresh};

/// The number of held connections at the start of the shutdown.
const HOLDS: usize = 10;

on_both! {
    /// Waiters and held connections are told, all leases stay valid for other proxies, and the exit code is 0.
    async fn a_shutdown_answers_every_client_and_loses_no_lease(kind: Kind) {
        let url = database(kind).await;
        let (mut proxy, other) = (Proxy::start(&url).await, Proxy::start(&url).await);
        let (client, resource, held) = (proxy.client(), fresh("kept"), fresh("held"));
        let lease = client.lease(&resource, 30_000).await;
        let mut holds = Vec::new();
        for n in 0..HOLDS {
            let body = json!({"resource": format!("{held}/{n}"), "ttl_ms": 30_000});
            holds.push(client.hold(&body).await);
        }
        let mut watch = client.stream("GET", "/v1/watch", "").await;
        assert_eq!(watch.line().await.as_deref(), Some(": watching"));
        let waiting = tokio::spawn({
            let (client, resource) = (proxy.client(), resource.clone());
            async move { client.acquire(json!({"resource": resource, "wait_ms": 60_000})).await }
        });
        client.until_queued(&resource, 1).await;
        let began = Instant::now();
        proxy.signal(Signal::TERM);
        let told = waiting.await.unwrap();
        assert_eq!((told.status, told.slug()), (503, "shutting_down"), "{}", told.text);
        assert!(told.number("retry_after_ms") < 1_000, "another proxy may be asked at once: {}", told.text);
        for (lines, granted) in &mut holds {
            let told = lines.json().await.expect("a last line");
            assert_eq!((&told["event"], &told["lease_id"]), (&json!("draining"), &granted["lease_id"]));
            assert!(told["expires_in_ms"].as_u64() > Some(20_000) && told["since_ms"].is_u64(), "{told}");
        }
        assert_eq!(proxy.ended().await, Some(0), "{}", proxy.log());
        assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
        assert!(client.try_send("GET", "/v1/locks", "").await.is_none(), "it still listens");
        assert_eq!(other.client().renew(&lease).await.status, 200);
        assert_eq!(other.client().release(&lease).await.status, 200);
        for (n, (_, granted)) in holds.iter().enumerate() {
            let resource = format!("{held}/{n}");
            assert_eq!(other.client().acquire(json!({"resource": resource})).await.slug(), "contended");
            let (lines, first) = other.client().hold(&json!({"lease_id": granted["lease_id"]})).await;
            assert_eq!((&first["token"], &first["keys"]), (&granted["token"], &granted["keys"]));
            drop(lines);
            let next = other.client().acquire(json!({"resource": resource, "wait_ms": 10_000})).await;
            assert_eq!(next.status, 200, "{}", next.text);
        }
    }

    /// A lock on a session cannot move to another proxy. Its holders have the time that they were told, and no
    /// longer.
    async fn session_locks_are_kept_at_shutdown_while_their_holders_are_certain(kind: Kind) {
        for primitive in ["advisory", "row"] {
            let url = database(kind).await;
            let policy = format!("primitive = \"{primitive}\"");
            let quick = "[fleet]\nbeat_ms = 250\n";
            let mut proxy = proxy_with(&url, &policy, quick).await;
            let other = proxy_with(&url, &policy, quick).await;
            let (client, elsewhere) = (proxy.client(), other.client());
            let ask = async |resource: &str, wait_ms: u32| {
                elsewhere.acquire(json!({"resource": resource, "wait_ms": wait_ms})).await
            };
            let (mut closing, _) = client.hold(&json!({"resource": "closing", "ttl_ms": 60_000})).await;
            let asked = Instant::now();
            let quiet = client.lease("quiet", 60_000).await;
            let certain = asked + Duration::from_millis(quiet["expires_in_ms"].as_u64().unwrap());
            proxy.signal(Signal::TERM);
            let told = loop {
                let line = closing.json().await.expect("a last line");
                if line["event"] != "renewed" {
                    break line;
                }
            };
            assert_eq!(told["event"], "lost", "{told}");
            assert!(told["expires_in_ms"].as_u64() > Some(0), "{told}");
            for resource in ["closing", "quiet"] {
                assert_eq!(ask(resource, 0).await.slug(), "contended", "{primitive}/{resource}");
            }
            drop(closing);
            let next = ask("closing", 10_000).await;
            assert_eq!(next.status, 200, "{primitive}: {}", next.text);
            let next = ask("quiet", 10_000).await;
            assert_eq!(next.status, 200, "{primitive}: {}", next.text);
            assert!(Instant::now() >= certain, "{primitive}: {:?} too early", certain - Instant::now());
            assert_eq!(proxy.ended().await, Some(0), "{}", proxy.log());
        }
    }

    /// Load balancers get the grace period to notice. Until it is over, nothing else changes.
    async fn readiness_fails_before_any_request_is_refused(kind: Kind) {
        let mut proxy = proxy_with(&database(kind).await, "", "[shutdown]\ngrace_ms = 3000\n").await;
        proxy.until_ready().await;
        let began = Instant::now();
        proxy.signal(Signal::TERM);
        let admin = proxy.admin();
        eventually("it is not ready", async || admin.get("/ready").await.status == 503).await;
        assert!(began.elapsed() < Duration::from_millis(2_500), "{:?}", began.elapsed());
        proxy.client().lease(&fresh("late"), 1_000).await;
        assert_eq!(proxy.ended().await, Some(0), "{}", proxy.log());
        assert!(began.elapsed() >= Duration::from_millis(2_950), "{:?}", began.elapsed());
    }

    /// A connection that breaks does not release its lock, and one that the client closes does.
    async fn only_a_connection_closed_in_order_releases_its_lock(kind: Kind) {
        let proxy = Proxy::start(&database(kind).await).await;
        let client = proxy.client();
        for breaks in [true, false] {
            let (resource, ttl_ms) = (fresh("broken"), 4_000);
            let begun = Instant::now();
            let mut held = Raw::connect(proxy.api_address()).await;
            held.post("/v1/hold", &json!({"resource": resource, "ttl_ms": ttl_ms})).await;
            // Read to the end of the chunk: a client that closes with unread data resets its connection.
            held.until("}\n\r\n").await;
            if breaks {
                held.reset();
            } else {
                drop(held);
            }
            let next = client.acquire(json!({"resource": resource, "wait_ms": 20_000})).await;
            assert_eq!(next.status, 200, "{}", next.text);
            let waited = begun.elapsed() >= Duration::from_millis(ttl_ms - 50);
            assert_eq!(waited, breaks, "after {:?}", begun.elapsed());
        }
    }

    /// A lock that ends with its proxy is kept while its holder, who cannot be told, is certain of it.
    async fn a_stopping_proxy_frees_no_session_lock_that_a_holder_is_certain_of(kind: Kind) {
        let url = database(kind).await;
        for primitive in ["advisory", "row"] {
            let policy = format!(
                "[policies.default]\npath = \"builtin:default\"\nsettings = {{ primitive = \"{primitive}\" }}\n"
            );
            let settings = Settings { url: url.clone(), sections: policy, ..Settings::default() };
            let (mut proxy, other) = (Proxy::with(settings.clone()).await, Proxy::with(settings).await);
            let (asked, resource) = (Instant::now(), fresh(primitive));
            let lease = proxy.client().lease(&resource, 2_500).await;
            let certain = asked + Duration::from_millis(lease["expires_in_ms"].as_u64().expect("a time"));
            proxy.signal(Signal::TERM);
            let next = other.client().acquire(json!({"resource": resource, "wait_ms": 20_000})).await;
            let granted = Instant::now();
            assert_eq!(next.status, 200, "{}", next.text);
            assert!(granted >= certain, "{primitive}: granted {:?} too early", certain - granted);
            assert_eq!(proxy.ended().await, Some(0), "{}", proxy.log());
        }
    }

    /// Promise 7: a request that does not end keeps the proxy for at most `drain_ms`.
    async fn the_time_of_a_drain_is_bounded(kind: Kind) {
        let slow = "[shutdown]\ndrain_ms = 500\n[http]\nbody_timeout_ms = 30000\n";
        let mut proxy = proxy_with(&database(kind).await, "", slow).await;
        let mut half = Raw::connect(proxy.api_address()).await;
        half.send("POST /v1/acquire HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{").await;
        proxy.client().lease(&fresh("warm"), 1_000).await;
        let began = Instant::now();
        proxy.signal(Signal::TERM);
        assert_eq!(proxy.ended().await, Some(0), "{}", proxy.log());
        let took = began.elapsed();
        assert!((Duration::from_millis(450)..Duration::from_secs(5)).contains(&took), "{took:?}");
    }
}
