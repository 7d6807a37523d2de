//! The promises that ARCHITECTURE.md states, each under faults, on both servers.

use std::time::Duration;

use serde_json::json;

use crate::harness::{Kind, Proxy, database, fresh};
use crate::on_both;

on_both! {
    /// Promise 9: any proxy renews and releases what another one granted.
    async fn proxies_are_stateless_to_their_clients(kind: Kind) {
        let url = database(kind).await;
        let (one, other) = (Proxy::start(&url).await, Proxy::start(&url).await);
        let resource = fresh("stateless");
        let lease = one.client().lease(&resource, 30_000).await;
        drop(one);
        assert_eq!(other.client().renew(&lease).await.status, 200);
        let held = other.client().acquire(json!({"resource": resource})).await;
        assert_eq!((held.status, held.slug()), (409, "contended"));
        assert_eq!(other.client().release(&lease).await.status, 200);
        let next = other.client().lease(&resource, 1_000).await;
        assert!(next["token"].as_u64() > lease["token"].as_u64());
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}
