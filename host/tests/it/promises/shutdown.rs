//! A shutdown answers everybody, loses no lease and comes to an end.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::json;

use super::proxy_with;
use crate::harness::{Proxy, Raw, Settings, database, fresh};

/// Connections that hold a lock when the shutdown begins.
const HOLDS: usize = 10;

on_both! {
    /// Waiters are told, held connections are told and let go, leases stay for other proxies, exit code 0.
    async fn a_shutdown_answers_everybody(kind: Kind) {
        let url = database(kind).await;
        let (mut proxy, other) = (Proxy::start(&url).await, Proxy::start(&url).await);
        let (client, resource, held) = (proxy.client(), fresh("kept"), fresh("held"));
        let lease = client.lease(&resource, 30_000).await;
        let mut holds = Vec::new();
        for n in 0..HOLDS {
            let body = json!({"resource": format!("{held}/{n}"), "ttl_ms": 30_000});
            holds.push(client.hold(&body).await.0);
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
        for lines in &mut holds {
            assert_eq!(lines.json().await.expect("a last line")["event"], "lost");
        }
        assert_eq!(proxy.ended().await, Some(0), "{}", proxy.log());
        assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
        assert!(client.try_send("GET", "/v1/locks", "").await.is_none(), "it still listens");
        assert_eq!(other.client().renew(&lease).await.status, 200);
        assert_eq!(other.client().release(&lease).await.status, 200);
        for n in 0..HOLDS {
            other.client().lease(&format!("{held}/{n}"), 1_000).await;
        }
    }

    /// A lock that ends with its proxy is kept while its holder, who cannot be told, is certain of it.
    async fn a_proxy_that_stops_frees_no_lock_that_a_holder_is_certain_of(kind: Kind) {
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

    /// Promise 7: a request that does not come to its end does not keep the proxy for longer than
    /// `drain_ms`.
    async fn a_drain_has_a_longest_time(kind: Kind) {
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
