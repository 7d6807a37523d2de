//! Promise 6: a repeated request is not granted twice.

use std::time::Duration;

use serde_json::{Value, json};

use crate::harness::{Client, Proxy, Raw, database, eventually, fresh};

fn request(resource: &str, id: &str) -> Value {
    json!({"resource": resource, "owner": "worker", "request_id": id, "ttl_ms": 30_000})
}

async fn asked(client: &Client, body: &Value) -> Value {
    let granted = client.acquire(body.clone()).await;
    assert_eq!(granted.status, 200, "{}", granted.text);
    granted.json
}

fn same(one: &Value, other: &Value) {
    assert_eq!((&one["lease_id"], &one["token"]), (&other["lease_id"], &other["token"]));
}

async fn is_reused(client: &Client, body: &Value) {
    let answer = client.acquire(body.clone()).await;
    assert_eq!((answer.status, answer.slug()), (409, "request_id_reused"), "{body}: {}", answer.text);
}

on_both! {
    /// Promise 6: the same request gets the same lease on any proxy, including a proxy that is started later.
    async fn a_repeated_request_gets_its_lease(kind: Kind) {
        let url = database(kind).await;
        let (mut one, other) = (Proxy::start(&url).await, Proxy::start(&url).await);
        let (resource, id) = (fresh("repeated"), fresh("id"));
        let body = request(&resource, &id);
        let lease = asked(&one.client(), &body).await;
        same(&asked(&one.client(), &body).await, &lease);
        same(&asked(&other.client(), &body).await, &lease);
        one.kill();
        let again = Proxy::start(&url).await;
        same(&asked(&again.client(), &body).await, &lease);
        assert_eq!(again.client().show(&resource).await["holders"].as_array().map(Vec::len), Some(1));
        assert_eq!(again.client().release(&lease).await.status, 200);
        is_reused(&other.client(), &body).await;
        is_reused(&again.client(), &body).await;
        let next = again.client().lease(&resource, 1_000).await;
        assert_eq!(next["token"].as_u64(), lease["token"].as_u64().map(|token| token + 1));
    }

    /// Promise 6: a request id that is used again with another body is refused, and so is one whose lease has
    /// expired.
    async fn a_request_id_serves_one_body_and_one_lease(kind: Kind) {
        let url = database(kind).await;
        let (one, other) = (Proxy::start(&url).await, Proxy::start(&url).await);
        let (resource, id) = (fresh("once"), fresh("id"));
        let body = request(&resource, &id);
        let lease = asked(&one.client(), &body).await;
        let changes = [("owner", json!("another")), ("ttl_ms", json!(20_000)), ("mode", json!("shared")),
            ("labels", json!({"a": "b"}))];
        for (field, value) in changes {
            let mut changed = body.clone();
            changed[field] = value;
            is_reused(&one.client(), &changed).await;
            is_reused(&other.client(), &changed).await;
        }
        is_reused(&one.client(), &request(&fresh("elsewhere"), &id)).await;
        assert_eq!(one.client().renew(&lease).await.status, 200);
        let (resource, mut short) = (fresh("short"), request("", &fresh("id")));
        (short["resource"], short["ttl_ms"]) = (json!(resource), json!(100));
        asked(&one.client(), &short).await;
        eventually("it expires", async || one.client().show(&resource).await["holders"] == json!([])).await;
        is_reused(&one.client(), &short).await;
        is_reused(&other.client(), &short).await;
    }

    /// Promise 6: a proxy that is killed while it handles a request leaves one lease or none, and repeating the
    /// request on another proxy gets it.
    async fn a_killed_proxy_grants_once(kind: Kind) {
        let url = database(kind).await;
        let survivor = Proxy::start(&url).await;
        let client = survivor.client();
        for round in 0..4_u64 {
            let mut victim = Proxy::start(&url).await;
            // Connections and policies are warm, so what follows takes a few milliseconds.
            victim.client().lease(&fresh("warm"), 1_000).await;
            let bodies: Vec<Value> = (0..20).map(|_| request(&fresh("killed"), &fresh("id"))).collect();
            let mut sockets = Vec::new();
            for body in &bodies {
                let mut socket = Raw::connect(victim.api_address()).await;
                socket.post("/v1/acquire", body).await;
                sockets.push(socket);
            }
            tokio::time::sleep(Duration::from_millis(round * 3)).await;
            victim.kill();
            for body in &bodies {
                let lease = asked(&client, body).await;
                same(&asked(&client, body).await, &lease);
                assert_eq!(lease["token"], 1, "a second grant: {lease}");
            }
        }
    }

    /// Promise 6: a request that waits on two proxies at once gets one lease.
    async fn two_waiting_calls_with_one_request_id_share_a_lease(kind: Kind) {
        let url = database(kind).await;
        let (one, other) = (Proxy::start(&url).await, Proxy::start(&url).await);
        let resource = fresh("both");
        let held = one.client().lease(&resource, 30_000).await;
        let mut body = request(&resource, &fresh("id"));
        body["wait_ms"] = json!(10_000);
        let waiting: Vec<_> = [&one, &other]
            .map(|proxy| {
                let (client, body) = (proxy.client(), body.clone());
                tokio::spawn(async move { asked(&client, &body).await })
            })
            .into_iter()
            .collect();
        one.client().until_queued(&resource, 1).await;
        other.client().until_queued(&resource, 1).await;
        assert_eq!(one.client().release(&held).await.status, 200);
        let mut leases = Vec::new();
        for waiter in waiting {
            leases.push(waiter.await.expect("a waiter"));
        }
        same(&leases[0], &leases[1]);
        assert_eq!(other.client().renew(&leases[0]).await.status, 200);
    }

    /// Promise 6: a client whose answer was lost asks again, and holds the lock once.
    async fn a_client_whose_answer_was_lost_gets_the_same_lease(kind: Kind) {
        let proxy = Proxy::start(&database(kind).await).await;
        let client = proxy.client();
        for round in 0..40_u64 {
            let (resource, body) = (fresh("lost"), fresh("id"));
            let body = request(&resource, &body);
            let mut socket = Raw::connect(proxy.api_address()).await;
            socket.post("/v1/acquire", &body).await;
            tokio::time::sleep(Duration::from_micros(round * 100)).await;
            drop(socket);
            let lease = asked(&client, &body).await;
            same(&asked(&client, &body).await, &lease);
            assert_eq!(client.renew(&lease).await.status, 200, "round {round}");
            assert_eq!(client.show(&resource).await["holders"].as_array().map(Vec::len), Some(1));
        }
    }
}
