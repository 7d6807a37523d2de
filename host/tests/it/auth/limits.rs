//! Limits on what a principal has at a time.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::Empty;
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};

use super::*;
use crate::harness::{Raw, parsed};

/// Whether the answer refuses the client for this limit.
fn is_over(answer: &Response, limit: &str, bound: u64) {
    assert_eq!((answer.status, answer.slug()), (429, "too_many_requests"), "{}", answer.text);
    assert_eq!((&answer.json["limit"], answer.number("bound")), (&json!(limit), bound), "{}", answer.text);
}

async fn acquire(client: &Client, resource: &str) -> Response {
    client.acquire(json!({"resource": resource, "ttl_ms": 60_000})).await
}

/// An HTTP/2 client that gives the answers no room.
async fn reads_nothing(address: SocketAddr) -> http2::SendRequest<Empty<Bytes>> {
    let stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let mut client = http2::Builder::new(TokioExecutor::new());
    let client = client.initial_stream_window_size(0).handshake(TokioIo::new(stream)).await.unwrap();
    let (client, connection) = client;
    tokio::spawn(connection);
    client
}

on_both! {
    async fn a_principal_has_no_more_leases_than_its_limit(kind: Kind) {
        let secured = Secured::start(kind, "").await;
        let billing = secured.billing();
        let first = billing.lease("orders/1", 60_000).await;
        secured.limit("leases = 2").await;
        let repeated = json!({"resource": "orders/2", "request_id": "r", "ttl_ms": 60_000});
        let second = billing.acquire(repeated.clone()).await;
        let refused = acquire(&billing, "orders/3").await;
        is_over(&refused, "leases", 2);
        assert!(!refused.headers.contains_key("retry-after"), "nobody knows when the client ends a lease");
        let operator = secured.client(&secured.tokens.operator);
        assert_eq!(operator.get("/v1/locks/orders/3").await.status, 404, "nothing was granted");
        let metric = secured.proxy.admin().with_token(&secured.tokens.operator.token).get("/metrics").await;
        assert!(metric.text.contains("lockkeeper_limit_refusals_total{limit=\"leases\"} 1"), "{}", metric.text);
        // A client repeats a request if it did not receive the answer.
        let again = billing.acquire(repeated).await;
        assert_eq!((again.status, &again.json["lease_id"]), (200, &second.json["lease_id"]), "{}", again.text);
        assert_eq!(billing.renew(&first).await.status, 200);
        secured.shipping().lease("orders/4", 60_000).await;
        assert_eq!(billing.release(&first).await.status, 200);
        billing.lease("orders/3", 1_000).await;
        is_over(&acquire(&billing, "orders/5").await, "leases", 2);
        let free = async || acquire(&billing, "orders/5").await.status == 200;
        eventually("a lease that has ended does not count", free).await;
    }

    /// A re-entrant owner that asks in the same mode gets its lease again. In another mode, it needs another lease.
    async fn a_re_entrant_owner_has_no_more_leases_than_its_limit(kind: Kind) {
        let policy = "[policies.default]\npath = \"builtin:default\"\nsettings = { reentrant = true, permits = 100 }\n";
        let secured = Secured::start(kind, policy).await;
        secured.limit("leases = 1").await;
        let ask = async |permits: u32| {
            let body = json!({"resource": "orders/1", "owner": "w", "mode": {"permits": permits}, "ttl_ms": 60_000});
            secured.billing().acquire(body).await
        };
        let first = ask(1).await;
        assert_eq!(first.status, 200, "{}", first.text);
        is_over(&ask(2).await, "leases", 1);
        let again = ask(1).await;
        assert_eq!((again.status, &again.json["lease_id"]), (200, &first.json["lease_id"]), "{}", again.text);
    }

    /// Its acquires wait, or are at the store, or are answered when the client leaves.
    async fn what_a_client_leaves_behind_counts_until_it_has_ended(kind: Kind) {
        let secured = Secured::start(kind, "").await;
        secured.limit("leases = 3, waiters = 3, in_progress = 3").await;
        let shipping = secured.shipping();
        shipping.lease("orders/held", 60_000).await;
        for n in 0..60 {
            let resource = if n % 3 == 0 { "orders/held".to_owned() } else { format!("orders/{n}") };
            let body = json!({"resource": resource, "ttl_ms": 500, "wait_ms": 60_000});
            let client = secured.billing();
            let _ = tokio::time::timeout(Duration::from_micros(150 * n), client.acquire(body)).await;
        }
        let billing = secured.billing();
        for n in 0..3 {
            let resource = format!("orders/again/{n}");
            let free = async || acquire(&billing, &resource).await.status == 200;
            eventually("nothing is left of them", free).await;
        }
        is_over(&acquire(&billing, "orders/one-too-many").await, "leases", 3);
    }

    async fn a_principal_has_no_more_waiters_than_its_limit(kind: Kind) {
        let secured = Secured::start(kind, "").await;
        let (billing, shipping) = (secured.billing(), secured.shipping());
        let held = shipping.lease("orders/1", 60_000).await;
        secured.limit("waiters = 2").await;
        let waits = || {
            let client = secured.billing();
            let body = json!({"resource": "orders/1", "wait_ms": 600_000});
            tokio::spawn(async move { client.acquire(body).await })
        };
        let [first, second] = [waits(), waits()];
        billing.until_queued("orders/1", 2).await;
        let refused = acquire(&billing, "orders/2").await;
        is_over(&refused, "waiters", 2);
        assert!(refused.number("retry_after_ms") > 0 && refused.headers.contains_key("retry-after"));
        first.abort();
        let free = async || acquire(&billing, "orders/2").await.status == 200;
        eventually("a waiter that has left does not count", free).await;
        assert_eq!(shipping.release(&held).await.status, 200);
        assert_eq!(second.await.unwrap().status, 200);
    }

    async fn a_principal_has_no_more_watchers_than_its_limit(kind: Kind) {
        let secured = Secured::start(kind, "").await;
        secured.limit("watchers = 2").await;
        let billing = secured.billing();
        let watch = async || billing.stream("GET", "/v1/watch", "").await;
        let streams = [watch().await, watch().await];
        assert_eq!(streams.each_ref().map(|stream| stream.status), [200, 200]);
        is_over(&billing.get("/v1/watch").await, "watchers", 2);
        assert_eq!(billing.get("/v1/locks").await.status, 200);
        drop(streams);
        eventually("a stream that has ended does not count", async || watch().await.status == 200).await;
    }

    /// A client that reads nothing leaves its answers in the memory of the proxy.
    async fn a_request_counts_until_its_client_has_read_the_answer(kind: Kind) {
        let secured = Secured::start(kind, "").await;
        secured.limit("in_progress = 2").await;
        let mut client = reads_nothing(secured.proxy.api_address()).await;
        let mut ask = async || {
            let request = hyper::Request::get("http://localhost/v1/locks")
                .header("authorization", format!("Bearer {}", secured.tokens.billing.token));
            client.send_request(request.body(Empty::new()).unwrap()).await.unwrap()
        };
        let unread = [ask().await, ask().await];
        assert_eq!(unread.each_ref().map(|answer| answer.status().as_u16()), [200, 200]);
        is_over(&secured.billing().get("/v1/locks").await, "in_progress", 2);
        drop(unread);
        let free = async || secured.billing().get("/v1/locks").await.status == 200;
        eventually("an answer that nobody waits for does not count", free).await;
    }

    /// The listener of health asks nobody for credentials.
    async fn the_answers_of_health_that_an_address_leaves_unread_are_limited(kind: Kind) {
        let secured = Secured::start(kind, "[health]\nlisten = \"127.0.0.1:0\"\n").await;
        let mut client = reads_nothing(secured.proxy.health_address()).await;
        let mut unread = Vec::new();
        for _ in 0..16 {
            let request = hyper::Request::get("http://localhost/metrics").body(Empty::new()).unwrap();
            unread.push(client.send_request(request).await.unwrap());
        }
        let health = secured.proxy.health();
        is_over(&health.get("/metrics").await, "health.unread", 16);
        assert_eq!(health.get("/live").await.status, 200, "probes are answered");
        drop(unread);
        let free = async || health.get("/metrics").await.status == 200;
        eventually("an answer that nobody waits for does not count", free).await;
    }

    /// All of 127.0.0.0/8 is this machine, so the test has several addresses.
    async fn an_address_has_no_more_connections_than_its_limit(kind: Kind) {
        let secured = Secured::start(kind, "[http]\nmax_connections_per_address = 3\n").await;
        let proxy = secured.proxy.api_address();
        let connect = async |from: &str| {
            let socket = tokio::net::TcpSocket::new_v4().unwrap();
            socket.bind(format!("{from}:0").parse().unwrap()).unwrap();
            Raw::from(socket.connect(proxy).await.unwrap())
        };
        let ask = async |connection: &mut Raw| {
            let token = &secured.tokens.billing.token;
            let head = format!("GET /v1/locks HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {token}\r\n\r\n");
            connection.send(head).await;
            connection.until("\r\n").await
        };
        let mut open = Vec::new();
        for _ in 0..3 {
            let mut connection = connect("127.0.0.2").await;
            assert!(ask(&mut connection).await.contains(" 200 "));
            open.push(connection);
        }
        let (status, problem) = parsed(&connect("127.0.0.2").await.rest().await);
        assert_eq!((status, &problem["type"]), (429, &json!("too_many_connections")), "{problem}");
        assert_eq!((&problem["limit"], &problem["bound"]), (&json!("http.max_connections_per_address"), &json!(3)));
        assert!(ask(&mut connect("127.0.0.3").await).await.contains(" 200 "), "other addresses are served");
        drop(open.pop());
        eventually("a connection that has ended does not count", async || {
            let mut connection = connect("127.0.0.2").await;
            !connection.hears_within(Duration::from_millis(200)).await && ask(&mut connection).await.contains(" 200 ")
        })
        .await;
    }

    /// A client that guesses tokens is slowed, and the clients with valid ones behind the same address are served, even if
    /// the proxy has not seen them before.
    async fn an_address_that_guesses_tokens_is_slowed(kind: Kind) {
        let auth = "max_refused_per_second = 3\n";
        let secured = Secured::start(kind, auth).await;
        let guess = async || {
            let client = secured.client(&new_token());
            client.get("/v1/locks").await
        };
        let valid = async || secured.billing().get("/v1/locks").await;
        // A machine that is busy may have no more guesses in a second than the limit allows: then they go on.
        let (began, mut guesses) = (Instant::now(), Vec::new());
        eventually("a guess is refused", async || {
            let more = futures_util::future::join_all((0..20).map(|_| guess()));
            let (more, valid) = tokio::join!(more, futures_util::future::join_all((0..5).map(|_| valid())));
            assert!(valid.iter().all(|answer| answer.status == 200), "{:?}", valid.iter().map(|a| a.status).collect::<Vec<_>>());
            guesses.extend(more);
            guesses.iter().any(|answer| answer.status != 401)
        })
        .await;
        let looked_at = guesses.iter().filter(|answer| answer.status == 401).count();
        // Some are looked at while the first ones are not counted yet.
        let at_most = 6 + (3.0 * began.elapsed().as_secs_f64()) as usize;
        assert!((3..=at_most).contains(&looked_at), "{looked_at} of {} were looked at", guesses.len());
        let refused = guesses.iter().find(|answer| answer.status != 401).unwrap();
        is_over(refused, "auth.max_refused_per_second", 3);
        assert!(refused.number("retry_after_ms") > 0);
    }

    async fn a_principal_replaces_policies_as_often_as_its_limit(kind: Kind) {
        let secured = Secured::start(kind, "").await;
        let name = "name = \"operator\"\n";
        let limited = format!("{name}limits = {{ pushes_per_minute = 2 }}\n");
        secured.replace(&secured.tokens.to_toml().replace(name, &limited)).await;
        let operator = secured.proxy.admin().with_token(&secured.tokens.operator.token);
        let push = async || operator.send("PUT", "/v1/policies/default", "no component").await;
        assert_eq!([push().await.status, push().await.status], [422, 422]);
        let refused = push().await;
        is_over(&refused, "pushes_per_minute", 2);
        assert!(refused.number("retry_after_ms") > 10_000, "{}", refused.text);
        assert_eq!(operator.get("/v1/policies").await.status, 200);
    }

    async fn a_proxy_has_no_more_readers_of_events_than_its_limit(kind: Kind) {
        let secured = Secured::start(kind, "[limits]\nmax_watchers = 2\n").await;
        let (billing, shipping) = (secured.billing(), secured.shipping());
        let streams = [billing.stream("GET", "/v1/watch", "").await, shipping.stream("GET", "/v1/watch", "").await];
        assert_eq!(streams.each_ref().map(|stream| stream.status), [200, 200]);
        let refused = billing.get("/v1/watch").await;
        assert_eq!((refused.status, refused.slug()), (429, "too_many_watchers"), "{}", refused.text);
        drop(streams);
        let watches = async || billing.stream("GET", "/v1/watch", "").await.status == 200;
        eventually("a stream that has ended does not count", watches).await;
    }

    /// The file has limits for all principals that name no others.
    async fn the_limits_of_the_file_are_those_of_each_principal_without_its_own(kind: Kind) {
        let secured = Secured::start(kind, "").await;
        let name = "name = \"shipping\"\n";
        let limited = secured.tokens.to_toml().replace(name, &format!("{name}limits = {{ leases = 2 }}\n"));
        secured.replace(&format!("{limited}[limits]\nleases = 1\n")).await;
        let (billing, shipping) = (secured.billing(), secured.shipping());
        billing.lease("orders/1", 60_000).await;
        is_over(&acquire(&billing, "orders/2").await, "leases", 1);
        shipping.lease("orders/3", 60_000).await;
        shipping.lease("orders/4", 60_000).await;
        is_over(&acquire(&shipping, "orders/5").await, "leases", 2);
    }
}
