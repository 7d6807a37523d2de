//! A policy is replaced while locks depend on the sessions of one proxy, which other proxies cannot see.

use mysql_async::prelude::Queryable;

use super::*;

/// Proxies whose default policy has this primitive.
async fn fleet_of(kind: Kind, primitive: &str, count: usize) -> Fleet {
    let mut fleet = Fleet { url: database(kind).await, proxies: Vec::new(), dirs: Vec::new() };
    for _ in 0..count {
        add(&mut fleet, primitive).await;
    }
    fleet.until_members(count).await;
    fleet
}

async fn add<'a>(fleet: &'a mut Fleet, primitive: &str) -> &'a Proxy {
    fleet.add(default_policy(), &format!("[policies.default.settings]\nprimitive = \"{primitive}\"")).await
}

/// Checks that nobody else is granted the resource while its holder has it, and that the change still waits.
async fn stays_with_its_holder(fleet: &Fleet, holder: &Client, lease: &Value) {
    for _ in 0..10 {
        for proxy in &fleet.proxies {
            let refused = proxy.client().acquire(json!({"resource": "r"})).await;
            assert_eq!((refused.status, refused.slug()), (409, "contended"), "{}", refused.text);
        }
        pause_ms(BEAT_MS).await;
    }
    assert_eq!(holder.renew(lease).await.status, 200);
    assert_eq!(phase(&fleet.proxies[0]).await, "both");
}

/// Checks that the change is complete when the lease is over.
async fn ends_with_its_lease(
    fleet: &Fleet,
    holder: &Client,
    lease: &Value,
    push: JoinHandle<Option<Response>>,
) {
    assert_eq!(holder.release(lease).await.status, 200);
    let answer = push.await.unwrap().expect("an answer");
    assert_eq!(answer.status, 200, "{}", answer.text);
    for proxy in &fleet.proxies {
        eventually("the new key stands alone", async || named(&proxy.client(), "r").await == json!(["x/r"]))
            .await;
    }
}

/// The claim is at the store when the change begins, and is granted before the change settles.
async fn a_claim_under_way_is_counted(kind: Kind, primitive: &str) {
    let fleet = fleet_of(kind, primitive, 2).await;
    let holder = fleet.proxies[0].client();
    // The server's first tokens are reserved in this row.
    let mut blocking = mysql_async::Conn::from_url(&fleet.url).await.unwrap();
    blocking.query_drop("BEGIN;SELECT token FROM lockkeeper_token WHERE id=1 FOR UPDATE").await.unwrap();
    let claim = waiting(&holder, json!({"resource": "r", "ttl_ms": 60_000, "wait_ms": 20_000}));
    holder.until_queued("r", 1).await;
    let push = pushing(&fleet.proxies[1], &RENAMED);
    eventually("the change is under way", async || phase(&fleet.proxies[0]).await == "both").await;
    pause_ms(2 * BEAT_MS).await;
    blocking.query_drop("ROLLBACK").await.unwrap();
    let lease = claim.await.unwrap();
    assert_eq!((lease.status, keys(&lease.json)), (200, vec!["r"]), "{}", lease.text);
    stays_with_its_holder(&fleet, &holder, &lease.json).await;
    assert!(!push.is_finished());
    ends_with_its_lease(&fleet, &holder, &lease.json, push).await;
    blocking.disconnect().await.unwrap();
}

/// The proxy is alone when the change begins. Another proxy joins before its lease has ended.
async fn a_joining_proxy_keeps_the_old_key_locked(kind: Kind, primitive: &str) {
    let mut fleet = fleet_of(kind, primitive, 1).await;
    let holder = fleet.proxies[0].client();
    let lease = holder.lease("r", 60_000).await;
    let push = pushing(&fleet.proxies[0], &RENAMED);
    eventually("the change is under way", async || phase(&fleet.proxies[0]).await == "both").await;
    eventually("claims take both keys", async || named(&holder, "free").await == json!(["free", "x/free"]))
        .await;
    let late = add(&mut fleet, primitive).await.client();
    assert_eq!(named(&late, "q").await, json!(["q", "x/q"]));
    stays_with_its_holder(&fleet, &holder, &lease).await;
    let shown = fleet.proxies[0].admin().get("/v1/fleet").await.json["policies"][0].clone();
    assert!(shown["held_up"].as_str().is_some_and(|why| why.contains("that of r")), "{shown}");
    ends_with_its_lease(&fleet, &holder, &lease, push).await;
}

on_both! {
    /// A lease that is granted while the change settles has the old key, and the change waits for the lease.
    async fn a_change_waits_for_named_locks_granted_meanwhile(kind: Kind) {
        a_claim_under_way_is_counted(kind, "advisory").await;
    }

    /// The same for rows.
    async fn a_change_waits_for_row_locks_granted_meanwhile(kind: Kind) {
        a_claim_under_way_is_counted(kind, "row").await;
    }

    /// A change on a single proxy also waits, because a second proxy may join while the lease lasts.
    async fn a_change_on_a_single_proxy_waits_for_its_named_locks(kind: Kind) {
        a_joining_proxy_keeps_the_old_key_locked(kind, "advisory").await;
    }

    /// The same for rows.
    async fn a_change_on_a_single_proxy_waits_for_its_row_locks(kind: Kind) {
        a_joining_proxy_keeps_the_old_key_locked(kind, "row").await;
    }
}
