//! The membership of a fleet, and proxies that are no longer members.

use mysql_async::Conn;
use mysql_async::prelude::Queryable;

use super::*;
use crate::harness::{Deadlocks, lockkeeper, own_server};

/// Records besides that of the default policy, not in the order of their names.
const TWO_POLICIES: &str =
    "[policies.second]\npath = \"builtin:default\"\n[policies.another]\npath = \"builtin:default\"";

on_both! {
    /// Promise 9, with holders and waiters: leases of a killed proxy are renewed and released through other proxies,
    /// and its waiters queue at other proxies.
    async fn a_killed_proxy_is_replaced_by_the_others(kind: Kind) {
        let mut fleet = Fleet::start(kind, 2, default_policy()).await;
        let (killed, other) = (fleet.proxies[0].client(), fleet.proxies[1].client());
        let lease = killed.lease("r", 5_000).await;
        let body = json!({"resource": "r", "owner": "w", "request_id": "mine", "wait_ms": 60_000});
        let waiting = |client: &Client| {
            let (client, body) = (client.clone(), body.to_string());
            tokio::spawn(async move { client.try_send("POST", "/v1/acquire", body).await })
        };
        let waiter = waiting(&killed);
        killed.until_queued("r", 1).await;
        fleet.proxies[0].kill();
        assert!(waiter.await.unwrap().is_none(), "its connection has ended");
        let waiter = waiting(&other);
        other.until_queued("r", 1).await;
        for _ in 0..8 {
            assert_eq!(other.renew(&lease).await.status, 200);
            pause_ms(800).await;
        }
        assert!(!waiter.is_finished(), "the lease lasts longer than it was granted for");
        assert_eq!(other.release(&lease).await.status, 200);
        let next = waiter.await.unwrap().expect("an answer");
        assert_eq!(next.status, 200, "{}", next.text);
        assert!(next.number("token") > lease["token"].as_u64().unwrap());
        until_members(&fleet.proxies[1], 1).await;
    }

    /// A proxy that is paused between the two requests of a transaction has rows locked. The server ends its session
    /// before a call through another proxy times out.
    async fn a_proxy_paused_during_a_transaction_does_not_block_other_proxies(kind: Kind) {
        let fleet = Fleet::start(kind, 2, default_policy()).await;
        let (resource, claim) = pause_half_way(&fleet, 1).await;
        let lease = fleet.proxies[0].client().acquire(json!({"resource": resource, "ttl_ms": 60_000})).await;
        assert_eq!(lease.status, 200, "{}", lease.text);
        go_on(&fleet.proxies[1]);
        fleet.until_members(2).await;
        assert!(!claim.is_finished(), "it is held");
        assert_eq!(fleet.proxies[0].client().release(&lease.json).await.status, 200);
        let next = claim.await.unwrap();
        assert_eq!(next.status, 200, "{}", next.text);
        assert!(next.number("token") > lease.number("token"), "{} after {}", next.text, lease.text);
    }

    /// One of the proxies records its policies, and the others follow it.
    async fn proxies_that_start_at_the_same_moment_do_not_deadlock(kind: Kind) {
        let dir = folder();
        let server = own_server(kind, dir.path()).await;
        let deadlocks = Deadlocks::from_now(server.url()).await;
        for round in 0..8 {
            let url = server.url().replace("/lockkeeper?", &format!("/round{round}?"));
            let dirs = [folder(), folder(), folder()];
            let [one, two, three] = [0, 1, 2].map(|n| start(&url, dirs[n].path(), default_policy(), TWO_POLICIES));
            let proxies = tokio::join!(one, two, three);
            for proxy in [&proxies.0, &proxies.1, &proxies.2] {
                until_members(proxy, 3).await;
            }
        }
        deadlocks.expect(0).await;
        server.stop().await;
    }

    /// A proxy that shuts down in order is not waited for.
    async fn a_proxy_that_shuts_down_leaves_the_fleet_at_once(kind: Kind) {
        let fleet = Fleet::start(kind, 2, default_policy()).await;
        fleet.proxies[0].signal(Signal::TERM);
        let began = std::time::Instant::now();
        until_members(&fleet.proxies[1], 1).await;
        assert!(began.elapsed() < Duration::from_millis(15 * BEAT_MS), "{:?}", began.elapsed());
    }

    /// Operators see the proxies through the admin API and on the command line.
    async fn operators_see_the_fleet(kind: Kind) {
        let fleet = Fleet::start(kind, 2, default_policy()).await;
        let proxy = &fleet.proxies[0];
        let shown = proxy.admin().get("/v1/fleet").await.json;
        let this: Vec<&Value> =
            shown["members"].as_array().unwrap().iter().filter(|member| member["is_this"] == true).collect();
        assert_eq!((this.len(), &this[0]["id"]), (1, &shown["id"]), "{shown}");
        assert_eq!(shown["trouble"], Value::Null, "{shown}");
        assert!(this[0]["acknowledged"]["default"].as_u64() >= Some(1), "{shown}");
        assert_eq!(proxy.metric("lockkeeper_fleet_members", &[]).await, 2.0);
        let admin = format!("http://{}", proxy.admin_address());
        let listed = tokio::task::spawn_blocking(move || {
            lockkeeper().args(["--admin", &admin, "--json", "fleet"]).output().unwrap()
        });
        let listed: Value = serde_json::from_slice(&listed.await.unwrap().stdout).unwrap();
        assert_eq!(listed["members"].as_array().unwrap().len(), 2, "{listed}");
        assert_eq!(listed["policies"][0]["version"], env!("CARGO_PKG_VERSION"), "{listed}");
        let admin = format!("http://{}", proxy.admin_address());
        let table = tokio::task::spawn_blocking(move || lockkeeper().args(["--admin", &admin, "fleet"]).output().unwrap());
        let table = String::from_utf8(table.await.unwrap().stdout).unwrap();
        assert!(table.contains("\nPOLICY ") && table.contains(env!("CARGO_PKG_VERSION")), "{table}");
    }

    /// A proxy whose file has another policy than the fleet takes the fleet's policy, reports that, and does not push
    /// its own. After a restart of the whole fleet, the files apply.
    async fn a_joining_proxy_takes_the_policy_of_the_fleet(kind: Kind) {
        let mut fleet = Fleet::start(kind, 1, &RENAMED).await;
        let late = fleet.add(default_policy(), "").await;
        assert_eq!(named(&late.client(), "r").await, json!(["x/r"]));
        // Longer than the poll interval of the file.
        pause_ms(2_500).await;
        let shown = status(late, "default").await;
        assert!(shown["last_error"].as_str().unwrap().contains("lockkeeper policy push default"), "{shown}");
        assert_eq!(named(&fleet.proxies[0].client(), "r").await, json!(["x/r"]));
        let url = fleet.url.clone();
        drop(fleet);
        let dir = folder();
        let alone = start(&url, dir.path(), default_policy(), "").await;
        alone.until_ready().await;
        assert_eq!(named(&alone.client(), "r").await, json!(["r"]));
    }

    /// Proxies that send a resource to different policies would give it different keys.
    async fn proxies_with_different_routes_do_not_grant_together(kind: Kind) {
        let mut fleet = Fleet::start(kind, 1, default_policy()).await;
        let dir = folder();
        let routes = "[[routes]]\nresource = \"r/*\"\npolicy = \"default\"";
        let other = start(&fleet.url, dir.path(), default_policy(), routes).await;
        let admin = other.admin();
        eventually("it says why", async || {
            let ready = admin.get("/ready").await;
            ready.status == 503 && ready.text.contains("[[routes]]")
        })
        .await;
        let refused = other.client().acquire(json!({"resource": "r/1"})).await;
        assert_eq!((refused.status, refused.slug()), (503, "store_unavailable"), "{}", refused.text);
        assert!(refused.text.contains("its /ready says why"), "{}", refused.text);
        fleet.proxies[0].kill();
        other.until_ready().await;
        other.client().lease("r/1", 1_000).await;
    }
}

/// Pauses a proxy while its claim has locked the row and has not written it. Returns the resource and the claim.
async fn pause_half_way(fleet: &Fleet, paused: usize) -> (String, JoinHandle<Response>) {
    let proxy = &fleet.proxies[paused];
    let mut conn = Conn::from_url(&fleet.url).await.unwrap();
    for n in 0..20 {
        let resource = format!("half-way-{n}");
        let lease = fleet.proxies[0].client().lease(&resource, 60_000).await;
        assert_eq!(fleet.proxies[0].client().release(&lease).await.status, 200);
        let lock = format!("BEGIN;SELECT k FROM lockkeeper_lease WHERE k='{resource}' FOR UPDATE");
        conn.query_drop(&lock).await.unwrap();
        let claim = waiting(&proxy.client(), json!({"resource": resource, "wait_ms": 60_000}));
        proxy.client().until_queued(&resource, 1).await;
        // Less than the claim waits for a row.
        pause_ms(100).await;
        stop(proxy);
        conn.query_drop("ROLLBACK").await.unwrap();
        if conn.query_drop(lock + " NOWAIT").await.is_err() {
            conn.disconnect().await.unwrap();
            return (resource, claim);
        }
        // The claim was not waiting at that moment.
        conn.query_drop("ROLLBACK").await.unwrap();
        go_on(proxy);
    }
    panic!("no claim was caught half-way");
}
