//! Promise 7: everything has a limit with a clear error.

use serde_json::{Value, json};

use super::proxy_with;
use crate::harness::{Client, Proxy, Raw, database, eventually, fresh, parsed};

/// A waiter in its own task. It leaves when the handle is aborted.
fn waiter(client: &Client, resource: &str) -> tokio::task::JoinHandle<()> {
    let (client, body) = (client.clone(), json!({"resource": resource, "wait_ms": 60_000}));
    tokio::spawn(async move {
        client.acquire(body).await;
    })
}

async fn is_full(client: &Client, resource: &str, bound: u64) {
    let answer = client.acquire(json!({"resource": resource, "wait_ms": 1_000})).await;
    assert_eq!((answer.status, answer.slug()), (429, "too_many_waiters"), "{}", answer.text);
    assert_eq!(answer.number("bound"), bound, "{}", answer.text);
    assert!(answer.headers.contains_key("retry-after"));
}

on_both! {
    /// Promise 7: a key has no more waiters than its policy allows, and a place that becomes free can be used.
    async fn the_waiters_of_a_key_are_bounded(kind: Kind) {
        let proxy = proxy_with(&database(kind).await, "max_waiters = 2", "").await;
        let (client, resource) = (proxy.client(), fresh("queue"));
        client.lease(&resource, 60_000).await;
        let waiters: Vec<_> = (0..2).map(|_| waiter(&client, &resource)).collect();
        client.until_queued(&resource, 2).await;
        is_full(&client, &resource, 2).await;
        let impatient = client.acquire(json!({"resource": resource, "wait_ms": 0})).await;
        assert_eq!(impatient.slug(), "contended", "who does not wait needs no place: {}", impatient.text);
        assert_eq!(impatient.number("position"), 3, "{}", impatient.text);
        waiters[0].abort();
        client.until_queued(&resource, 1).await;
        let again = waiter(&client, &resource);
        client.until_queued(&resource, 2).await;
        again.abort();
        waiters[1].abort();
    }

    /// Promise 7: the proxy's own limits apply, whatever a policy says.
    async fn the_limits_of_the_proxy_override_policies(kind: Kind) {
        let limits = "[limits]\nmax_waiters = 1\nmax_waiters_total = 2\nmax_ttl_ms = 2000\nmax_permits = 3\n";
        let proxy = proxy_with(&database(kind).await, "ttl_ms = 60000\nwait_ms = 60000", limits).await;
        let (client, one, two) = (proxy.client(), fresh("one"), fresh("two"));
        let lease = client.acquire(json!({"resource": one})).await;
        assert_eq!(lease.number("ttl_ms"), 2_000, "{}", lease.text);
        client.lease(&two, 2_000).await;
        let waiting = [waiter(&client, &one), waiter(&client, &two)];
        client.until_queued(&one, 1).await;
        client.until_queued(&two, 1).await;
        is_full(&client, &one, 2).await;
        is_full(&client, &fresh("three"), 2).await;
        waiting[1].abort();
        client.until_queued(&two, 0).await;
        is_full(&client, &one, 1).await;
        let permits = client.acquire(json!({"resource": two, "mode": {"permits": 4}})).await;
        assert_eq!((permits.status, permits.json["field"].as_str()), (400, Some("mode.permits")));
        waiting[0].abort();
    }

    /// Promise 7: a connection over the limit is told so and closed, and other connections do not notice.
    async fn connections_are_bounded(kind: Kind) {
        let proxy = proxy_with(&database(kind).await, "", "[http]\nmax_connections = 4\n").await;
        let mut sockets = Vec::new();
        let busy = json!({"resource": fresh("busy"), "ttl_ms": 60_000});
        for _ in 0..4 {
            let mut socket = Raw::connect(proxy.api_address()).await;
            socket.post("/v1/acquire", &busy).await;
            sockets.push(socket);
        }
        eventually("the fifth is refused", async || {
            let mut fifth = Raw::connect(proxy.api_address()).await;
            fifth.send("GET /v1/locks HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").await;
            let (status, problem) = parsed(&fifth.rest().await);
            status == 503 && problem["type"] == "overloaded" && problem["bound"] == "http.max_connections"
        })
        .await;
        assert_eq!(proxy.admin().get("/live").await.status, 200, "each listener has its own connections");
        drop(sockets);
        let client = proxy.client();
        eventually("there is room again", async || {
            client.try_send("GET", "/v1/locks", "").await.is_some_and(|answer| answer.status == 200)
        })
        .await;
    }

    /// Promise 7: a request that a policy does not allow is refused with the policy's reason.
    async fn permits_are_bounded_by_the_policy(kind: Kind) {
        let proxy = proxy_with(&database(kind).await, "permits = 3", "").await;
        let ask = |count: u32| json!({"resource": fresh("permits"), "mode": {"permits": count}});
        assert_eq!(proxy.client().acquire(ask(3)).await.status, 200);
        let refused = proxy.client().acquire(ask(4)).await;
        assert_eq!((refused.status, refused.slug()), (403, "refused"), "{}", refused.text);
        assert!(refused.json["reason"].as_str().is_some_and(|reason| reason.contains('3')));
    }

    /// Promise 7: lists of locks have pages.
    async fn lists_have_pages(kind: Kind) {
        let proxy = Proxy::start(&database(kind).await).await;
        let (client, prefix) = (proxy.client(), fresh("listed"));
        for n in 0..5 {
            client.lease(&format!("{prefix}/{n}"), 60_000).await;
        }
        let mut seen = Vec::new();
        let mut after = String::new();
        loop {
            let page = client.get(&format!("/v1/locks?prefix={prefix}/&limit=2&after={after}")).await.json;
            let keys = page["locks"].as_array().expect("a list");
            assert!(keys.len() <= 2, "{page}");
            seen.extend(keys.iter().map(|lock| lock["key"].clone()));
            let Some(next) = page["next"].as_str() else { break };
            after = next.to_owned();
        }
        let all: Vec<Value> = (0..5).map(|n| json!(format!("{prefix}/{n}"))).collect();
        assert_eq!(seen, all);
        for query in ["limit=0", "limit=1001", "limit=x", "colour=red"] {
            assert_eq!(client.get(&format!("/v1/locks?{query}")).await.status, 400, "{query}");
        }
    }
}
