//! Several servers: the primary is killed, another server takes over, and back. The test acts as an operator: the
//! servers start read-only, and the test promotes them.

use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::harness::{Kind, Node, Proxy, Response, Settings, World, eventually, folder, fresh};

mod primitives;

/// Short leases, so that those of a lost server end soon.
const MAX_TTL_MS: u64 = 2_000;

async fn proxy_of(nodes: [&Node; 2], max_ttl_ms: u64) -> Proxy {
    proxy_with(nodes, max_ttl_ms, "").await
}

/// `more` has sections of config.toml.
async fn proxy_with(nodes: [&Node; 2], max_ttl_ms: u64, more: &str) -> Proxy {
    let url = nodes.map(Node::url).join(",");
    let sections = format!("[limits]\nmax_ttl_ms = {max_ttl_ms}\n{more}");
    Proxy::with(Settings { url, sections, ..Settings::default() }).await
}

/// A primary and its replica.
async fn pair(kind: Kind, dir: &Path) -> (Node, Node) {
    let (a, b) = tokio::join!(Node::start(kind, dir, 1), Node::start(kind, dir, 2));
    a.set_read_only(false).await;
    a.make_accounts().await;
    b.follow(&a).await;
    (a, b)
}

/// Waits for a lease, even if the store is not available yet.
async fn waited(proxy: &Proxy, resource: &str, ttl_ms: u64) -> Response {
    let client = proxy.client();
    let body = json!({"resource": resource, "ttl_ms": ttl_ms, "wait_ms": 20_000});
    let began = Instant::now();
    loop {
        let answer = client.acquire(body.clone()).await;
        if answer.status == 200 {
            return answer;
        }
        assert!(began.elapsed() < Duration::from_secs(40), "{}\n{}", answer.text, proxy.log());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

async fn until_used(proxy: &Proxy, node: &Node) {
    let (admin, address) = (proxy.admin(), node.address());
    eventually(&format!("{address} is used"), async || {
        let ready = admin.get("/ready").await;
        ready.status == 200 && ready.json["store"].to_string().contains(&address)
    })
    .await;
}

/// Prints how long the recovery took.
fn report(world: &World, killed: Instant, what: &str) {
    let (after, token) = world.ledger().first_grant_since(killed).expect("leases were granted");
    eprintln!("{what}: first grant {} ms after the kill, token {token}", after.as_millis());
    assert!(after >= Duration::from_millis(MAX_TTL_MS), "a lease of the lost server may still run");
}

on_both! {
    /// The primary is killed under load, in both directions, with one proxy that runs all the time and another one
    /// that is restarted in between.
    async fn S17_locks_are_granted_after_the_primary_is_lost(kind: Kind) {
        let dir = folder();
        let (mut a, b) = pair(kind, dir.path()).await;
        let (mut one, other) = tokio::join!(proxy_of([&a, &b], MAX_TTL_MS), proxy_of([&a, &b], MAX_TTL_MS));
        let world = World::start(&[one.api_address(), other.api_address()]);
        world.may_forget();
        world.another_round().await;
        b.catch_up(&a).await;

        let killed = Instant::now();
        a.kill();
        b.promote().await;
        world.another_round().await;
        report(&world, killed, "A to B");

        a.rebuild(&b).await;
        one.kill();
        one = proxy_of([&a, &b], MAX_TTL_MS).await;
        world.set_address(0, one.api_address());
        world.another_round().await;

        let killed = Instant::now();
        b.kill();
        a.promote().await;
        world.another_round().await;
        report(&world, killed, "B to A");
        world.finish().await;
        until_used(&other, &a).await;
    }

    /// The replica lacks the last grants when it is promoted. No lease overlaps a grant that the replica does not
    /// know, and no token is issued twice.
    async fn S17_a_lease_that_the_replica_missed_is_not_granted_twice(kind: Kind) {
        let dir = folder();
        let (a, b) = pair(kind, dir.path()).await;
        let (one, other) = tokio::join!(proxy_of([&a, &b], MAX_TTL_MS), proxy_of([&a, &b], MAX_TTL_MS));
        let world = World::start(&[one.api_address(), other.api_address()]);
        world.may_forget();
        world.another_round().await;
        b.catch_up(&a).await;
        b.stop_following().await;
        world.another_round().await;
        let killed = Instant::now();
        a.kill();
        b.promote().await;
        world.another_round().await;
        report(&world, killed, "A to a B that is behind");
        world.finish().await;
    }

    /// The primary waits for its replica at each commit, so nothing is granted while the replica is cut off. If the
    /// primary is killed then, the replica has everything that was confirmed.
    async fn S17_semi_synchronous_replication_keeps_every_confirmed_write(kind: Kind) {
        let dir = folder();
        let (a, b) = pair(kind, dir.path()).await;
        let once = "[policies.once]\npath = \"builtin:default\"\nsettings = { primitive = \"once\" }\n\
                    [[routes]]\nresource = \"once/*\"\npolicy = \"once\"\n";
        let proxy = || proxy_with([&a, &b], MAX_TTL_MS, once);
        let (one, other) = tokio::join!(proxy(), proxy());
        a.wait_for_replica(&b).await;
        let world = World::start(&[one.api_address(), other.api_address()]);
        world.another_round().await;
        let (client, asked) = (one.client(), json!({"resource": format!("once/{}", fresh("kept"))}));
        let begun = client.post("/v1/once/begin", &asked).await;
        let finish = json!({"lease_id": begun.json["lease_id"], "outcome": "sent"});
        assert_eq!(client.post("/v1/once/finish", &finish).await.status, 200);

        b.stop_receiving().await;
        // Answers for data that the replica has already received are still coming.
        eventually("nothing is granted that the replica does not have", async || {
            let confirmed = world.ledger().grants();
            tokio::time::sleep(Duration::from_secs(1)).await;
            world.ledger().grants() == confirmed
        })
        .await;
        let killed = Instant::now();
        a.kill();
        b.apply_all().await;
        b.promote().await;
        world.another_round().await;
        report(&world, killed, "A to a B that has all that was confirmed");
        // The other proxy may find B later than the proxy that has granted since.
        until_used(&other, &b).await;
        let again = other.client().post("/v1/once/begin", &asked).await;
        assert_eq!((&again.json["state"], &again.json["outcome"]), (&json!("done"), &json!("sent")), "{}", again.text);
        world.finish().await;
    }

    /// A server that does not know the epoch after its own is promoted again, and the only proxy has no knowledge of
    /// it. The proxy grants no lease before the leases of that epoch have ended, and issues none of its tokens again.
    async fn S17_a_server_that_missed_an_epoch_issues_tokens_above_that_epoch(kind: Kind) {
        let dir = folder();
        let (a, mut b) = pair(kind, dir.path()).await;
        let mut proxy = proxy_of([&a, &b], MAX_TTL_MS).await;
        let resource = fresh("missed");
        let before = waited(&proxy, &resource, 100).await.number("token");
        b.catch_up(&a).await;
        a.kill();
        b.promote().await;
        waited(&proxy, &resource, 100).await;
        let asked = Instant::now();
        let lost = waited(&proxy, &resource, MAX_TTL_MS).await;
        assert!(lost.number("token") > before, "{}", lost.text);
        proxy.kill();
        b.kill_for_good().await;
        a.promote().await;
        let proxy = proxy_of([&a, &b], MAX_TTL_MS).await;
        let again = waited(&proxy, &resource, 100).await;
        assert!(again.number("token") > lost.number("token"), "{} after {}", again.text, lost.text);
        assert!(asked.elapsed() >= Duration::from_millis(lost.number("expires_in_ms")));
        assert!(proxy.log().contains(&b.address()), "the log says which server is out of sight");
        assert!(!proxy.log().contains("secret"), "and no password");
    }

    /// A lease that was replicated is renewed and released while no new lease is granted. Everybody is told for how
    /// long.
    async fn S17_replicated_leases_are_renewed_while_grants_wait(kind: Kind) {
        let max_ttl_ms = 6_000;
        let dir = folder();
        let (a, b) = pair(kind, dir.path()).await;
        let proxy = proxy_of([&a, &b], max_ttl_ms).await;
        let (client, resource) = (proxy.client(), fresh("lives-on"));
        let lease = waited(&proxy, &resource, max_ttl_ms).await.json;
        b.catch_up(&a).await;
        eventually("the lease is replicated", async || {
            let row = format!("SELECT token FROM lockkeeper.lockkeeper_lease WHERE k='{resource}'");
            !b.root(&row).await.is_empty()
        })
        .await;
        let killed = Instant::now();
        a.kill();
        b.promote().await;
        eventually("the lease is renewed", async || client.renew(&lease).await.status == 200).await;
        eprintln!("renewed {} ms after the kill", killed.elapsed().as_millis());
        let early = client.acquire(json!({"resource": fresh("new")})).await;
        assert_eq!((early.status, early.slug()), (409, "contended"), "{}", early.text);
        assert!(early.number("retry_after_ms") > 1_000, "{}", early.text);
        assert!(early.headers.contains_key("retry-after"));
        until_used(&proxy, &b).await;
        let ready = proxy.admin().get("/ready").await;
        assert!(ready.json["warnings"].to_string().contains("limits.max_ttl_ms"), "{}", ready.text);
        assert_eq!(client.release(&lease).await.status, 200);
        waited(&proxy, &resource, 100).await;
        let ready = proxy.admin().get("/ready").await;
        assert!(!ready.json["warnings"].to_string().contains("limits.max_ttl_ms"), "{}", ready.text);
    }

    /// Two writable servers: a proxy leaves the server that another proxy has left before.
    async fn S17_a_proxy_leaves_a_server_that_another_proxy_has_left(kind: Kind) {
        let dir = folder();
        let (a, b) = pair(kind, dir.path()).await;
        let proxy = proxy_of([&a, &b], MAX_TTL_MS).await;
        let before = waited(&proxy, &fresh("left"), 100).await;
        // A lease that has run out may be renewed while the clock is in doubt.
        assert_eq!(proxy.client().release(&before.json).await.status, 200);
        b.catch_up(&a).await;
        b.promote().await;
        tokio::time::sleep(Duration::from_secs(2)).await;
        until_used(&proxy, &a).await;
        let elsewhere = Proxy::start(&b.url()).await;
        elsewhere.until_ready().await;
        until_used(&proxy, &b).await;
        assert_eq!(proxy.client().renew(&before.json).await.status, 410);
    }

    /// Two writable servers that do not know each other. Locks are on one of them at a time, even for a proxy that
    /// starts while the other one is back or hangs.
    async fn S8_proxies_fail_over_to_a_second_database_without_two_holders(kind: Kind) {
        let dir = folder();
        let (mut a, mut b) = tokio::join!(Node::start(kind, dir.path(), 1), Node::start(kind, dir.path(), 2));
        for node in [&a, &b] {
            node.set_read_only(false).await;
            node.make_accounts().await;
        }
        let (mut one, other) = tokio::join!(proxy_of([&a, &b], MAX_TTL_MS), proxy_of([&a, &b], MAX_TTL_MS));
        let world = World::start(&[one.api_address(), other.api_address()]);
        world.may_forget();
        world.another_round().await;
        until_used(&one, &a).await;

        let killed = Instant::now();
        a.kill_for_good().await;
        world.another_round().await;
        report(&world, killed, "A to an empty B");

        a.revive().await;
        a.set_read_only(false).await;
        for hangs in [false, true] {
            if hangs {
                a.signal(Signal::STOP);
            }
            one.kill();
            let began = Instant::now();
            one = proxy_of([&a, &b], MAX_TTL_MS).await;
            until_used(&one, &b).await;
            assert!(began.elapsed() < Duration::from_secs(10), "it took {:?}", began.elapsed());
            world.set_address(0, one.api_address());
            world.another_round().await;
        }
        a.signal(Signal::CONT);

        let killed = Instant::now();
        b.kill_for_good().await;
        world.another_round().await;
        report(&world, killed, "B to an A that was left behind");
        world.finish().await;
        until_used(&one, &a).await;
    }
}
