//! The meaning of modes, through the API.

use serde_json::{Value, json};

use super::{proxy_with, token};
use crate::harness::{Client, Proxy, database, fresh};

async fn ask(client: &Client, resource: &str, mode: Value, status: u16) -> Value {
    let body = json!({"resource": resource, "mode": mode, "ttl_ms": 60_000});
    let answer = client.acquire(body).await;
    assert_eq!(answer.status, status, "{mode}: {}", answer.text);
    answer.json
}

on_both! {
    /// Shared leases coexist on any proxies and keep an exclusive one out.
    async fn shared_locks_coexist_and_exclude_exclusive_locks(kind: Kind) {
        let url = database(kind).await;
        let (one, other) = (Proxy::start(&url).await, Proxy::start(&url).await);
        let (client, elsewhere, resource) = (one.client(), other.client(), fresh("shared"));
        let first = ask(&client, &resource, json!("shared"), 200).await;
        let second = ask(&elsewhere, &resource, json!("shared"), 200).await;
        assert!(token(&second) > token(&first));
        ask(&client, &resource, json!("exclusive"), 409).await;
        ask(&client, &resource, json!({"permits": 1}), 409).await;
        assert_eq!(client.release(&second).await.status, 200);
        ask(&elsewhere, &resource, json!("exclusive"), 409).await;
        assert_eq!(elsewhere.release(&first).await.status, 200);
        ask(&elsewhere, &resource, json!("exclusive"), 200).await;
        ask(&client, &resource, json!("shared"), 409).await;
    }

    /// So do row locks, although each proxy has its own session. The proxy that granted a lock frees it.
    async fn shared_row_locks_coexist_and_exclude_exclusive_locks(kind: Kind) {
        let url = database(kind).await;
        let row = "primitive = \"row\"";
        let (one, other) = (proxy_with(&url, row, "").await, proxy_with(&url, row, "").await);
        let (shared, exclusive) = (json!("shared"), json!("exclusive"));
        for (here, there) in [(&one, &other), (&other, &one)] {
            let (here, there, resource) = (here.client(), there.client(), fresh("row"));
            let first = ask(&here, &resource, shared.clone(), 200).await;
            assert_eq!(first["primitive"], "row");
            let second = ask(&there, &resource, shared.clone(), 200).await;
            assert!(token(&second) > token(&first));
            for client in [&here, &there] {
                ask(client, &resource, exclusive.clone(), 409).await;
            }
            let writer = tokio::spawn({
                let (client, resource) = (here.clone(), resource.clone());
                let body = json!({"resource": resource, "ttl_ms": 60_000, "wait_ms": 20_000});
                async move { client.acquire(body).await }
            });
            here.until_queued(&resource, 1).await;
            assert_eq!(here.release(&first).await.status, 200);
            for client in [&here, &there] {
                ask(client, &resource, exclusive.clone(), 409).await;
            }
            assert!(!writer.is_finished(), "the other proxy's reader keeps it out");
            assert_eq!(there.release(&second).await.status, 200);
            let writer = writer.await.unwrap();
            assert_eq!(writer.status, 200, "{}", writer.text);
            assert!(token(&writer.json) > token(&second));
            for client in [&here, &there] {
                ask(client, &resource, shared.clone(), 409).await;
                ask(client, &resource, exclusive.clone(), 409).await;
            }
            assert_eq!(here.release(&writer.json).await.status, 200);
            ask(&there, &resource, shared.clone(), 200).await;
            ask(&here, &resource, shared.clone(), 200).await;
        }
    }

    /// One release lets in all waiters that fit.
    async fn one_release_grants_all_waiting_readers(kind: Kind) {
        let proxy = Proxy::start(&database(kind).await).await;
        let (client, resource) = (proxy.client(), fresh("several"));
        let lease = client.lease(&resource, 60_000).await;
        let waiting: Vec<_> = (0..5)
            .map(|_| {
                let (client, resource) = (client.clone(), resource.clone());
                let body =
                    json!({"resource": resource, "mode": "shared", "ttl_ms": 60_000, "wait_ms": 20_000});
                tokio::spawn(async move { client.acquire(body).await })
            })
            .collect();
        client.until_queued(&resource, 5).await;
        assert_eq!(client.release(&lease).await.status, 200);
        for waiter in waiting {
            assert_eq!(waiter.await.unwrap().status, 200, "nobody releases, so all must be let in together");
        }
        assert_eq!(client.show(&resource).await["holders"].as_array().map(Vec::len), Some(5));
    }

    /// The permits of all holders add up to at most the policy's limit.
    async fn the_permits_of_all_holders_stay_within_the_limit(kind: Kind) {
        let url = database(kind).await;
        let one = proxy_with(&url, "permits = 5", "").await;
        let other = proxy_with(&url, "permits = 5", "").await;
        let (client, elsewhere, resource) = (one.client(), other.client(), fresh("permits"));
        let two = ask(&client, &resource, json!({"permits": 2}), 200).await;
        ask(&elsewhere, &resource, json!({"permits": 3}), 200).await;
        ask(&client, &resource, json!({"permits": 1}), 409).await;
        ask(&client, &resource, json!("exclusive"), 409).await;
        assert_eq!(elsewhere.release(&two).await.status, 200);
        ask(&elsewhere, &resource, json!({"permits": 3}), 409).await;
        ask(&client, &resource, json!({"permits": 2}), 200).await;
    }

    /// Under a re-entrant policy, an owner holds its lock as many times as it acquired it.
    async fn a_reentrant_lock_is_released_as_often_as_it_was_acquired(kind: Kind) {
        let proxy = proxy_with(&database(kind).await, "reentrant = true", "").await;
        let (client, resource) = (proxy.client(), fresh("again"));
        let body = json!({"resource": resource, "owner": "me", "ttl_ms": 60_000});
        let first = client.acquire(body.clone()).await.json;
        for levels in [2, 3] {
            let again = client.acquire(body.clone()).await.json;
            assert_eq!(again["levels"], levels, "{again}");
            assert_eq!((&again["lease_id"], &again["token"]), (&first["lease_id"], &first["token"]));
        }
        for _ in 0..2 {
            assert_eq!(client.release(&first).await.status, 200);
            ask(&client, &resource, json!("exclusive"), 409).await;
        }
        assert_eq!(client.release(&first).await.status, 200);
        assert_eq!(client.release(&first).await.status, 410);
        ask(&client, &resource, json!("exclusive"), 200).await;
    }

    /// Under any other policy, an owner is not let in twice.
    async fn an_owner_is_not_granted_twice_without_reentrance(kind: Kind) {
        let proxy = Proxy::start(&database(kind).await).await;
        let body = json!({"resource": fresh("twice"), "owner": "me", "ttl_ms": 60_000});
        assert_eq!(proxy.client().acquire(body.clone()).await.status, 200);
        assert_eq!(proxy.client().acquire(body).await.slug(), "contended");
    }
}
