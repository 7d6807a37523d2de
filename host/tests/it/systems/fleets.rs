//! Several proxies and several servers.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use lockkeeper::mysql::managed::ManagedServer;
use rustix::process::Signal;
use tokio::task::JoinHandle;

use super::*;
use crate::harness::{Response, signal};

/// How long a quorum waits for servers that do not answer.
const PATIENCE_MS: u64 = 3_000;
const PATIENCE: Duration = Duration::from_millis(PATIENCE_MS);
const ORDERED: &str = "global_order = true\nmax_waiters = 1000";

fn waits(proxy: &Proxy, resource: &str, owner: &str, wait_ms: u32) -> JoinHandle<Response> {
    let client = proxy.client();
    let body = json!({"resource": resource, "owner": owner, "wait_ms": wait_ms, "ttl_ms": 60_000});
    tokio::spawn(async move { client.acquire(body).await })
}

/// Waits until this many waiters are in the global queue.
async fn until_in_line(url: &str, key: &str, count: usize) {
    eventually(&format!("{count} stand in line"), async || {
        let rows = sql(url, &format!("SELECT state FROM lockkeeper_lease WHERE k='{key}'")).await;
        let state: Option<String> = rows.into_iter().next().map(mysql_async::from_row);
        let state: Value = serde_json::from_str(&state.unwrap_or_default()).unwrap_or_default();
        state["line"]["places"].as_array().map_or(0, Vec::len) == count
    })
    .await;
}

on_both! {
    async fn S16_waiters_of_all_proxies_are_served_in_order_of_arrival(kind: Kind) {
        let url = database(kind).await;
        let proxies = join_all((0..3).map(|_| proxy(&url, "default", ORDERED))).await;
        let mut lease = proxies[0].client().lease("a", 60_000).await;
        let mut waiters = Vec::new();
        for n in 0..12 {
            waiters.push(waits(&proxies[n % 3], "a", &n.to_string(), 60_000));
            until_in_line(&url, "a", n + 1).await;
        }
        let mut wake_ups = Vec::new();
        for (n, waiter) in waiters.into_iter().enumerate() {
            let begun = Instant::now();
            // Any proxy may release a lease that another proxy granted.
            assert_eq!(proxies[(n + 2) % 3].client().release(&lease).await.status, 200);
            lease = waiter.await.unwrap().json;
            wake_ups.push(begun.elapsed());
            assert_eq!(lease["owner"], n.to_string(), "first come, first served");
        }
        wake_ups.sort();
        println!("from release to grant: median {:?}", wake_ups[wake_ups.len() / 2]);
    }

    async fn S16_waiters_that_leave_or_time_out_are_passed_over(kind: Kind) {
        let url = database(kind).await;
        let (one, other) = (proxy(&url, "default", ORDERED).await, proxy(&url, "default", ORDERED).await);
        let held = one.client().lease("a", 60_000).await;
        let leaves = waits(&other, "a", "leaves", 60_000);
        until_in_line(&url, "a", 1).await;
        let late = waits(&one, "a", "late", 300);
        until_in_line(&url, "a", 2).await;
        let stays = waits(&one, "a", "stays", 60_000);
        until_in_line(&url, "a", 3).await;
        assert_eq!(late.await.unwrap().status, 409, "its time is up");
        leaves.abort();
        until_in_line(&url, "a", 1).await;
        assert_eq!(one.client().release(&held).await.status, 200);
        assert_eq!(stays.await.unwrap().json["owner"], "stays");
    }

    /// A proxy is killed with its waiters: the waiters behind them do not wait for it.
    async fn S16_waiters_of_a_dead_proxy_block_no_other_waiter(kind: Kind) {
        let url = database(kind).await;
        let (one, mut other) = (proxy(&url, "default", ORDERED).await, proxy(&url, "default", ORDERED).await);
        let held = one.client().lease("a", 60_000).await;
        let dead: Vec<_> = (0..3).map(|n| waits(&other, "a", &format!("dead-{n}"), 60_000)).collect();
        until_in_line(&url, "a", 3).await;
        let alive = waits(&one, "a", "alive", 60_000);
        until_in_line(&url, "a", 4).await;
        other.kill();
        drop(dead);
        let begun = Instant::now();
        assert_eq!(one.client().release(&held).await.status, 200);
        let next = alive.await.unwrap();
        assert_eq!((next.status, &next.json["owner"]), (200, &json!("alive")), "{}", next.text);
        assert!(begun.elapsed() < Duration::from_secs(4), "before their places end: {:?}", begun.elapsed());
    }

    /// The address that a proxy advertises is unreachable. Notifications for its waiters fail, and the waiters keep
    /// their places.
    async fn S16_a_waiter_whose_proxy_cannot_be_notified_keeps_its_place(kind: Kind) {
        let url = database(kind).await;
        let nowhere = format!("{ORDERED}\n[fleet]\nadvertise = \"192.0.2.1:7072\"");
        let (one, other) = (proxy(&url, "default", ORDERED).await, proxy(&url, "default", &nowhere).await);
        let mut lease = one.client().lease("a", 60_000).await;
        let mut waiters = Vec::new();
        for n in 0..4 {
            waiters.push(waits([&other, &one][n % 2], "a", &n.to_string(), 60_000));
            until_in_line(&url, "a", n + 1).await;
        }
        for (n, waiter) in waiters.into_iter().enumerate() {
            assert_eq!(one.client().release(&lease).await.status, 200);
            lease = waiter.await.unwrap().json;
            assert_eq!(lease["owner"], n.to_string(), "first come, first served");
        }
        assert!(one.log().contains("a proxy cannot be told that its waiter is next"), "{}", one.log());
    }

    /// A proxy that hangs does not react to notifications; its places in the global queue expire.
    async fn S16_a_proxy_that_hangs_is_passed_over(kind: Kind) {
        let url = database(kind).await;
        let (one, other) = (proxy(&url, "default", ORDERED).await, proxy(&url, "default", ORDERED).await);
        let held = one.client().lease("a", 60_000).await;
        let _hangs = waits(&other, "a", "hangs", 60_000);
        until_in_line(&url, "a", 1).await;
        let alive = waits(&one, "a", "alive", 60_000);
        until_in_line(&url, "a", 2).await;
        other.signal(Signal::STOP);
        assert_eq!(one.client().release(&held).await.status, 200);
        let next = alive.await.unwrap();
        assert_eq!((next.status, &next.json["owner"]), (200, &json!("alive")), "{}", next.text);
        other.signal(Signal::CONT);
    }

    /// A proxy is stopped, and another one is killed: a client with a request id finds its place again through
    /// another proxy.
    async fn S16_a_waiter_keeps_its_place_through_a_restart(kind: Kind) {
        let url = database(kind).await;
        for how in [Signal::TERM, Signal::KILL] {
            let (one, other) = (proxy(&url, "default", ORDERED).await, proxy(&url, "default", ORDERED).await);
            let held = one.client().lease("a", 60_000).await;
            let moves = |proxy: &Proxy| {
                let client = proxy.client();
                let body = json!({"resource": "a", "owner": "moves", "request_id": format!("{how:?}"),
                    "wait_ms": 60_000, "ttl_ms": 60_000});
                tokio::spawn(async move { client.try_send("POST", "/v1/acquire", body.to_string()).await })
            };
            let first = moves(&other);
            until_in_line(&url, "a", 1).await;
            let behind = waits(&one, "a", "behind", 60_000);
            until_in_line(&url, "a", 2).await;
            other.signal(how);
            let told = first.await.unwrap();
            if how == Signal::TERM {
                let told = told.expect("an answer");
                assert_eq!((told.status, told.slug()), (503, "shutting_down"), "{}", told.text);
                assert_eq!(told.json["retry_after_ms"], 0, "{}", told.text);
            }
            // This waiter is next and has not come back yet, but the waiter behind it does not overtake it.
            assert_eq!(one.client().release(&held).await.status, 200);
            let granted = moves(&one).await.unwrap().expect("an answer");
            assert_eq!((granted.status, &granted.json["owner"]), (200, &json!("moves")), "{}", granted.text);
            assert_eq!(one.client().release(&granted.json).await.status, 200);
            let next = behind.await.unwrap();
            assert_eq!(next.json["owner"], "behind", "{}", next.text);
            assert_eq!(one.client().release(&next.json).await.status, 200);
        }
    }

    /// On two proxies. A waiter that leaves, or that lets its lease end, loses its place.
    async fn S28_waiters_are_granted_in_order_with_rising_fencing_tokens(kind: Kind) {
        let url = database(kind).await;
        let (one, other) = (proxy(&url, "default", ORDERED).await, proxy(&url, "default", ORDERED).await);
        let body = |n: u32, ttl_ms: u32| {
            let owner = format!("session-{n}");
            json!({"resource": "a", "owner": owner, "request_id": owner, "wait_ms": 60_000, "ttl_ms": ttl_ms})
        };
        let waits = |proxy: &Proxy, n: u32, ttl_ms: u32| {
            let (client, body) = (proxy.client(), body(n, ttl_ms));
            tokio::spawn(async move { client.acquire(body).await })
        };
        let first = one.client().acquire(body(0, 60_000)).await;
        assert_eq!(first.status, 200, "{}", first.text);
        for proxy in [&one, &other] {
            let again = proxy.client().acquire(body(0, 60_000)).await;
            assert_eq!(again.json["lease_id"], first.json["lease_id"], "the own entry is found: {}", again.text);
            assert_eq!(again.json["token"], first.json["token"]);
        }
        let short = waits(&other, 1, 800);
        until_in_line(&url, "a", 1).await;
        let leaves = waits(&one, 2, 60_000);
        until_in_line(&url, "a", 2).await;
        let third = waits(&other, 3, 60_000);
        until_in_line(&url, "a", 3).await;
        let fourth = waits(&one, 4, 60_000);
        until_in_line(&url, "a", 4).await;
        leaves.abort();
        until_in_line(&url, "a", 3).await;
        let back = waits(&other, 2, 60_000);
        until_in_line(&url, "a", 4).await;

        assert_eq!(one.client().release(&first.json).await.status, 200);
        let mut granted = vec![first.json, short.await.unwrap().json];
        // The lease is not released: it expires, and the waiter that has waited longest is next.
        granted.push(third.await.unwrap().json);
        let late = other.client().acquire(body(1, 800)).await;
        assert_eq!((late.status, late.slug()), (409, "request_id_reused"), "{}", late.text);
        assert_eq!(other.client().renew(&granted[1]).await.slug(), "lost");
        for waiter in [fourth, back] {
            let last = granted.last().expect("granted before");
            assert_eq!(one.client().release(last).await.status, 200);
            granted.push(waiter.await.unwrap().json);
        }
        let owners: Vec<&str> = granted.iter().filter_map(|lease| lease["owner"].as_str()).collect();
        assert_eq!(owners, ["session-0", "session-1", "session-3", "session-4", "session-2"]);
        let tokens: Vec<u64> = granted.iter().filter_map(|lease| lease["token"].as_u64()).collect();
        assert!(tokens.len() == 5 && tokens.is_sorted_by(|a, b| a < b), "{tokens:?}");
    }

    /// Five servers: two may be gone or hang, but not three. Nothing is left behind.
    async fn S25_a_majority_of_five_servers_grants_leases(kind: Kind) {
        let dir = folder();
        let paths: Vec<_> = (0..5).map(|n| dir.path().join(n.to_string())).collect();
        let servers: Vec<ManagedServer> = join_all(paths.iter().map(|path| own_server(kind, path))).await;
        let stores: String = servers
            .iter()
            .enumerate()
            .map(|(n, server)| format!("[stores.s{n}]\nurl = \"{}\"\n", server.url()))
            .collect();
        let sections = format!(
            "{stores}[quorum]\npatience_ms = {PATIENCE_MS}\n[policies.default]\npath = \"builtin:default\"\n\
             settings = {{ primitive = \"quorum\" }}\n\
             [policies.plain]\npath = \"builtin:default\"\n[[routes]]\nresource = \"plain/*\"\npolicy = \"plain\"\n"
        );
        let main = database(kind).await;
        let settings = |url: &str| Settings { api: String::new(),
            url: url.to_owned(),
            store: format!("timeout_ms = {}", 2 * PATIENCE_MS),
            sections: sections.clone(),
        };
        let (one, other) = (Proxy::with(settings(&main)).await, Proxy::with(settings(&main)).await);
        let (client, elsewhere) = (one.client(), other.client());
        // A majority is enough to be ready. The others are prepared a little later if the disk is slow.
        every_server_is_there(&[&one, &other]).await;
        let wait = |resource: &str| json!({"resource": resource, "ttl_ms": 20_000, "wait_ms": 10_000});
        let first = client.acquire(wait("a")).await;
        assert_eq!((first.status, &first.json["primitive"]), (200, &json!("quorum")), "{}", first.text);
        assert!(first.number("expires_in_ms") <= 20_000);
        assert_eq!(elsewhere.acquire(json!({"resource": "a"})).await.status, 409);
        all(&servers, "it is granted everywhere", true).await;
        assert_eq!(elsewhere.renew(&first.json).await.status, 200, "any proxy renews it");
        assert_eq!(elsewhere.release(&first.json).await.status, 200);
        all(&servers, "it is released everywhere", false).await;

        let stop = |n: usize| signal(servers[n].pid().expect("it runs"), Signal::STOP);
        let go_on = |n: usize| signal(servers[n].pid().expect("it runs"), Signal::CONT);
        (0..2).for_each(stop);
        let begun = Instant::now();
        let second = client.acquire(wait("a")).await;
        assert_eq!(second.status, 200, "{}", second.text);
        assert!(begun.elapsed() < PATIENCE, "those that hang are not waited for");
        assert!(second.number("token") > first.number("token"));
        assert_eq!(elsewhere.acquire(json!({"resource": "a"})).await.status, 409);
        assert_eq!(client.release(&second.json).await.status, 200);

        // The time that the wait for the third server took is subtracted.
        stop(2);
        let late = {
            let (client, body) = (client.clone(), json!({"resource": "late", "ttl_ms": 20_000}));
            tokio::spawn(async move { client.acquire(body).await })
        };
        tokio::time::sleep(Duration::from_millis(200)).await;
        go_on(2);
        let late = late.await.unwrap();
        assert_eq!(late.status, 200, "{}", late.text);
        assert!((1..=19_900).contains(&late.number("expires_in_ms")), "{}", late.text);
        assert_eq!(client.release(&late.json).await.status, 200);

        stop(2);
        let third = client.acquire(json!({"resource": "a", "ttl_ms": 20_000})).await;
        assert_eq!((third.status, third.slug()), (503, "store_unavailable"), "{}", third.text);
        the_rest_goes_on(&one).await;
        (0..3).for_each(go_on);
        all(&servers, "nothing is left behind", false).await;
        // All five servers have the grants from here on, so two of them may go.
        every_server_is_there(&[&one, &other]).await;
        let after = elsewhere.acquire(wait("a")).await;
        assert_eq!(after.status, 200, "{}", after.text);
        assert!(after.number("token") > second.number("token"));
        all(&servers, "it is granted everywhere", true).await;

        // The servers are restarted automatically, which takes longer than this.
        for server in &servers[3..] {
            signal(server.pid().expect("it runs"), Signal::KILL);
        }
        let begun = Instant::now();
        let renewed = client.renew(&after.json).await;
        assert_eq!(renewed.status, 200, "two servers were killed: {}", renewed.text);
        assert_eq!(client.release(&after.json).await.status, 200);
        let last = elsewhere.acquire(wait("a")).await;
        assert_eq!(last.status, 200, "{}", last.text);
        assert!(begun.elapsed() < PATIENCE, "those that are gone are not waited for");
        assert!(last.number("token") > after.number("token"));
        for server in servers {
            server.stop().await;
        }
    }
}

async fn every_server_is_there(proxies: &[&Proxy]) {
    for proxy in proxies {
        proxy.until_ready().await;
        eventually("every server is there", async || !warns(proxy, "stores.").await).await;
    }
}

/// Waits until each server of a quorum has a lease, or none has. The proxy answers for a majority, and the other
/// servers may be a moment behind: they must not be stopped then.
async fn all(servers: &[ManagedServer], what: &str, hold: bool) {
    for server in servers {
        eventually(what, async || holds_some(server.url()).await == hold).await;
    }
}

/// Whether one server of a quorum has a lease.
async fn holds_some(url: &str) -> bool {
    let states = sql(url, "SELECT state FROM lockkeeper_lease").await;
    states.into_iter().map(mysql_async::from_row).any(|state: String| {
        let state: Value = serde_json::from_str(&state).expect("it is JSON");
        state["holders"].as_array().is_some_and(|holders| !holders.is_empty())
    })
}

/// A quorum without a majority does not affect other primitives, and is reported.
async fn the_rest_goes_on(proxy: &Proxy) {
    let client = proxy.client();
    client.lease("plain/x", 20_000).await;
    let listed = client.get("/v1/locks").await;
    assert_eq!((listed.status, &listed.json["locks"][0]["key"]), (200, &json!("plain/x")), "{}", listed.text);
    assert!(
        listed.json["unheard"][0].as_str().is_some_and(|why| why.contains("no majority")),
        "{}",
        listed.text
    );
    let forced = proxy.admin().send("DELETE", "/v1/locks/plain%2Fx", "").await;
    assert_eq!((forced.status, forced.number("holders")), (200, 1), "{}", forced.text);
    eventually("the operator is told", async || warns(proxy, "the quorum has no majority").await).await;
}

/// Whether the proxy is ready with this warning.
async fn warns(proxy: &Proxy, what: &str) -> bool {
    let ready = proxy.admin().get("/ready").await;
    assert_eq!(ready.status, 200, "{}", ready.text);
    ready.json["warnings"].to_string().contains(what)
}
