//! Routes that name requests differently, while requests hold locks under their old names.

use std::fs;

use mysql_async::prelude::Queryable;
use rustix::process::Signal;

use super::*;
use crate::harness::sql;

/// The same lock for all paths.
fn one_lock(name: &str, more: &str) -> String {
    format!("[fleet]\nbeat_ms = 250\n{LISTEN}{}", route("/{*all}", &format!("resource = \"{name}\"\n{more}")))
}

/// A request that holds its lock for as long as its connection is open.
async fn tunnel(proxy: &Proxy) -> Raw {
    let mut raw = Raw::connect(proxy.guard_address()).await;
    raw.send("GET /socket HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: echo\r\n\r\n").await;
    let head = raw.until("\r\n\r\n").await;
    assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
    raw
}

/// Rewrites the proxy's file.
fn change(proxy: &Proxy, old: &str, new: &str) {
    let text = fs::read_to_string(proxy.config_file()).unwrap();
    assert!(text.contains(old), "{text}");
    fs::write(proxy.config_file(), text.replace(old, new)).unwrap();
}

async fn until_said(proxy: &Proxy, what: &str) {
    eventually(what, async || proxy.log().contains(what)).await;
}

fn is_replaced(proxy: &Proxy) -> bool {
    proxy.log().contains("routes were replaced")
}

/// The key that a guarded request locks now.
async fn key(proxy: &Proxy) -> Value {
    let answer = proxy.guarded().get("/echo").await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    answer.json["headers"]["lock-key"][0].clone()
}

async fn holders(proxy: &Proxy, prefix: &str) -> usize {
    let locks = proxy.client().get(&format!("/v1/locks?prefix={prefix}")).await;
    assert_eq!(locks.status, 200, "{}", locks.text);
    let locks = locks.json["locks"].as_array().cloned().unwrap_or_default();
    locks.iter().map(|lock| lock["holders"].as_array().map_or(0, Vec::len)).sum()
}

/// A proxy that may not grant yet, for a reason that its `/ready` gives.
async fn waiting(upstream: &Upstream, url: &str, config: &str, why: &str) -> Proxy {
    let proxy = Proxy::with(Settings {
        url: url.to_owned(),
        sections: named(upstream, config),
        ..Settings::default()
    });
    let proxy = proxy.await;
    let admin = proxy.admin();
    eventually(why, async || {
        let ready = admin.get("/ready").await;
        ready.status == 503 && ready.text.contains(why)
    })
    .await;
    proxy
}

on_both! {
    /// While requests come and go, each request is excluded by the lock of the one before, whatever its name.
    async fn renamed_routes_make_no_second_holder(kind: Kind) {
        let guarded = Guarded::start(kind, &one_lock("old", "wait_ms = 20_000")).await;
        let busy = (0..4).map(|_| {
            let (client, log) = (guarded.client(), guarded.proxy.config_file().with_file_name("log"));
            tokio::spawn(async move {
                let mut left = 10;
                while left > 0 {
                    let answer = client.send("POST", "/task/1?ms=30", "").await;
                    assert_eq!(answer.status, 200, "{}", answer.text);
                    left -= u64::from(fs::read_to_string(&log).unwrap().contains("routes were replaced"));
                }
            })
        });
        let busy: Vec<_> = busy.collect();
        guarded.until_served("/task/1", 8).await;
        change(&guarded.proxy, "\"old\"", "\"new\"");
        for client in busy {
            client.await.unwrap();
        }
        assert_eq!(guarded.upstream.together("/task/1").await, 1);
        assert_eq!(key(&guarded.proxy).await, json!("new"));
    }

    /// A request that holds its lock for long keeps the old routes for all: waiting requests keep their place, and
    /// later requests and a proxy that joins use the old name.
    async fn new_names_wait_for_locks_under_the_old_names(kind: Kind) {
        let url = database(kind).await;
        let guarded = Guarded::on(&url, &one_lock("old", "wait_ms = 60_000")).await;
        let tunnel = tunnel(&guarded.proxy).await;
        let first = guarded.send("POST", "/task/1?ms=1", &[]);
        guarded.proxy.client().until_queued("old", 1).await;
        change(&guarded.proxy, "\"old\"", "\"new\"");
        until_said(&guarded.proxy, "holds the lock old, which the new routes would give another name").await;
        let ready = guarded.proxy.admin().get("/ready").await;
        assert!(ready.status == 200 && ready.json["warnings"].to_string().contains("the lock old"), "{}", ready.text);
        let later = guarded.send("POST", "/task/1?ms=1", &[]);
        guarded.proxy.client().until_queued("old", 2).await;
        let renamed = one_lock("new", "");
        drop(waiting(&guarded.upstream, &url, &renamed, "[[guard]] default").await);
        let joined = before(&guarded.upstream, &url, &one_lock("old", "")).await;
        assert_eq!(joined.guarded().send("POST", "/task/1?ms=1", "").await.status, 423);
        drop(joined);
        assert!(!first.is_finished() && !later.is_finished() && !is_replaced(&guarded.proxy));
        drop(tunnel);
        for request in [first, later] {
            assert_eq!(request.await.unwrap().status, 200);
        }
        until_said(&guarded.proxy, "routes were replaced").await;
        assert_eq!(key(&guarded.proxy).await, json!("new"));
        assert_eq!(guarded.upstream.together("/task/1").await, 1);
    }

    /// The application may still work on a request that was aborted, for as long as its lease lasts.
    async fn new_names_wait_for_requests_that_were_cut_off(kind: Kind) {
        let config = one_lock("old", "ttl_ms = 10_000")
            + "[policies.default]\npath = \"builtin:default\"\nsettings = { max_hold_ms = 500, on_loss = \"cut\" }\n";
        let guarded = Guarded::start(kind, &config).await;
        let cut = guarded.client().send("POST", "/task/1?ms=60000", "").await;
        assert_eq!((cut.status, cut.slug()), (503, "lost"), "{}", cut.text);
        assert_eq!(holders(&guarded.proxy, "old").await, 1);
        change(&guarded.proxy, "\"old\"", "\"new\"");
        until_said(&guarded.proxy, "was cut off, holds the lock old").await;
        until_said(&guarded.proxy, "routes were replaced").await;
        assert_eq!(holders(&guarded.proxy, "old").await, 0);
    }

    /// The same for requests of a proxy that was killed, if the next proxy has other names. A proxy with the same
    /// names does not wait.
    async fn new_names_wait_for_the_requests_of_a_dead_proxy(kind: Kind) {
        let url = database(kind).await;
        let mut guarded = Guarded::on(&url, &one_lock("old", "ttl_ms = 60_000")).await;
        let under_way = guarded.send("POST", "/task/1?ms=60000", &[]);
        guarded.until_served("/task/1", 1).await;
        guarded.proxy.kill();
        under_way.abort();
        let why = "1 leases of guarded requests have not ended, one of them on old";
        let other = waiting(&guarded.upstream, &url, &one_lock("new", ""), why).await;
        let same = before(&guarded.upstream, &url, &one_lock("old", "")).await;
        assert_eq!(holders(&same, "old").await, 1);
        assert_eq!(same.guarded().get("/echo").await.status, 423);
        let taken = same.admin().send("DELETE", "/v1/locks/old", "").await;
        assert_eq!((taken.status, taken.number("holders")), (200, 1), "{}", taken.text);
        drop(same);
        other.until_ready().await;
        assert_eq!(key(&other).await, json!("new"));
    }

    /// While the new name of a request is unknown, the old routes stay until it has ended.
    async fn routes_that_cannot_name_a_request_in_progress_wait_for_its_end(kind: Kind) {
        let guarded = Guarded::start(kind, &one_lock("old", "")).await;
        let tunnel = tunnel(&guarded.proxy).await;
        change(&guarded.proxy, "\"old\"", "\"new/{header.x-order}\"");
        until_said(&guarded.proxy, "holds the lock old").await;
        let client = guarded.client();
        assert_eq!(client.get("/echo").await.status, 423, "the old routes go on");
        drop(tunnel);
        until_said(&guarded.proxy, "routes were replaced").await;
        assert_eq!(client.send_with("POST", "/task/1?ms=1", &[("x-order", "7")], "").await.status, 200);
        assert_eq!(client.get("/echo").await.status, 400);
        assert_eq!(guarded.proxy.admin().get("/ready").await.json["warnings"], json!([]));
    }

    /// Routes that keep the names of requests go live during a request.
    async fn routes_that_keep_the_names_go_live_at_once(kind: Kind) {
        let guarded = Guarded::start(kind, &one_lock("old", "wait_ms = 60_000")).await;
        let tunnel = tunnel(&guarded.proxy).await;
        let first = guarded.send("POST", "/task/1?ms=1", &[]);
        guarded.proxy.client().until_queued("old", 1).await;
        change(&guarded.proxy, "wait_ms = 60_000", "wait_ms = 0");
        until_said(&guarded.proxy, "routes were replaced").await;
        assert_eq!(guarded.client().get("/echo").await.status, 423);
        // This does not hold for names of other requests.
        change(&guarded.proxy, "[[guard.routes]]", "[[guard.routes]]\nmatch = { path = \"/free\" }\nupstream = \"GOOD\"\npolicy = \"none\"\n[[guard.routes]]");
        change(&guarded.proxy, "\"GOOD\"", &format!("\"http://{}\"", guarded.upstream.good));
        eventually("the second change is live", async || guarded.proxy.log().matches("routes were replaced").count() == 2)
            .await;
        assert!(!first.is_finished(), "it keeps its place, and its time to wait");
        drop(tunnel);
        assert_eq!(first.await.unwrap().status, 200);
    }

    /// The time that the request has waited for the lock of the old name counts.
    async fn a_renamed_request_waits_no_longer_than_its_wait(kind: Kind) {
        let guarded = Guarded::start(kind, &one_lock("old", "wait_ms = 6_000")).await;
        let client = guarded.proxy.client();
        for name in ["old", "new"] {
            let held = client.acquire(json!({"resource": name, "owner": "me", "ttl_ms": 60_000})).await;
            assert_eq!(held.status, 200, "{}", held.text);
        }
        let began = Instant::now();
        let waiter = guarded.send("POST", "/task/1?ms=1", &[]);
        client.until_queued("old", 1).await;
        tokio::time::sleep(Duration::from_secs(4)).await;
        change(&guarded.proxy, "\"old\"", "\"new\"");
        client.until_queued("new", 1).await;
        assert_eq!(waiter.await.unwrap().status, 423);
        assert!(began.elapsed() < Duration::from_secs(9), "{:?}", began.elapsed());
    }

    /// Routes that are refused because there are other proxies do not disturb waiting requests.
    async fn refused_routes_do_not_disturb_waiters(kind: Kind) {
        let url = database(kind).await;
        let one = Guarded::on(&url, &one_lock("old", "wait_ms = 3_500")).await;
        let other = before(&one.upstream, &url, &one_lock("old", "wait_ms = 3_500")).await;
        let tunnel = tunnel(&one.proxy).await;
        change(&other, "\"old\"", "\"new\"");
        until_said(&other, "stop them all").await;
        let waiter = tokio::time::timeout(Duration::from_secs(20), other.guarded().get("/echo")).await;
        assert_eq!(waiter.expect("its wait has an end").status, 423);
        drop(tunnel);
    }

    /// A proxy that counted as gone while others changed the names joins when its file has the new names.
    async fn an_evicted_proxy_takes_the_names_of_the_fleet(kind: Kind) {
        let url = database(kind).await;
        let late = Guarded::on(&url, &one_lock("old", "")).await;
        late.proxy.signal(Signal::STOP);
        sql(&url, "DELETE FROM lockkeeper_proxy").await;
        let other = before(&late.upstream, &url, &one_lock("new", "")).await;
        late.proxy.signal(Signal::CONT);
        let admin = late.proxy.admin();
        eventually("it waits", async || admin.get("/ready").await.text.contains("[[guard]] default")).await;
        change(&late.proxy, "\"old\"", "\"new\"");
        late.proxy.until_ready().await;
        let held = tunnel(&other).await;
        assert_eq!(late.client().get("/echo").await.status, 423);
        drop(held);
        eventually("it is free", async || late.client().get("/echo").await.status == 200).await;
        assert_eq!(key(&late.proxy).await, json!("new"));
    }

    /// If the store does not answer whether the names were recorded, the proxy stays in its fleet with all locks on
    /// its sessions, and grants under neither name.
    async fn an_unanswered_record_of_new_names_costs_no_lock(kind: Kind) {
        let url = database(kind).await;
        let config = one_lock("old", "")
            + "[policies.default]\npath = \"builtin:default\"\nsettings = { primitive = \"advisory\" }\n";
        let guarded = Guarded::on(&url, &config).await;
        let (client, admin) = (guarded.proxy.client(), guarded.proxy.admin());
        let lease = client.lease("mine", 60_000).await;
        let id = admin.get("/v1/fleet").await.json["id"].clone();
        let mut blocking = mysql_async::Conn::from_url(&url).await.unwrap();
        blocking.query_drop("BEGIN;SELECT name FROM lockkeeper_policy FOR UPDATE").await.unwrap();
        change(&guarded.proxy, "\"old\"", "\"new\"");
        until_said(&guarded.proxy, "whether the new routes were recorded").await;
        assert_eq!(client.renew(&lease).await.status, 200);
        assert_eq!(holders(&guarded.proxy, "").await, 1);
        blocking.query_drop("ROLLBACK").await.unwrap();
        until_said(&guarded.proxy, "routes were replaced").await;
        assert_eq!(admin.get("/v1/fleet").await.json["id"], id);
        assert_eq!(client.renew(&lease).await.status, 200);
        assert_eq!(key(&guarded.proxy).await, json!("new"));
        blocking.disconnect().await.unwrap();
    }

    /// Routes cannot be renamed while other proxies run, neither by file nor by a restart. A single proxy can rename
    /// them.
    async fn proxies_that_name_requests_differently_do_not_grant_together(kind: Kind) {
        let url = database(kind).await;
        let config = |name: &str| {
            let named = route("/task/{id}", &format!("resource = \"{name}/{{id}}\"\nwait_ms = 20_000"));
            format!("[fleet]\nbeat_ms = 250\n{LISTEN}{named}")
        };
        let mut one = Guarded::on(&url, &config("old")).await;
        let other = before(&one.upstream, &url, &config("old")).await;
        let file = other.config_file();
        let text = fs::read_to_string(&file).unwrap();
        fs::write(&file, text.replace("old/{id}", "new/{id}")).unwrap();
        eventually("it is said why", async || other.log().contains("stop them all")).await;
        let both = [one.client(), other.guarded()].map(|client| {
            tokio::spawn(async move { client.send("POST", "/task/1?ms=300", "").await })
        });
        for request in both {
            assert_eq!(request.await.unwrap().status, 200);
        }
        assert_eq!((one.upstream.served("/task/1").await, one.upstream.together("/task/1").await), (2, 1));

        let sections = named(&one.upstream, &config("other"));
        let late = Proxy::with(Settings { url: url.clone(), sections, ..Settings::default() }).await;
        eventually("it waits", async || late.admin().get("/ready").await.text.contains("[[guard]] default")).await;
        assert_eq!(late.guarded().send("POST", "/task/1", "").await.status, 503);
        drop(late);
        one.proxy.signal(Signal::TERM);
        assert_eq!(one.proxy.ended().await, Some(0));
        eventually("alone, it goes by the new names", async || {
            other.guarded().send("POST", "/task/2?ms=1", "").await;
            other.log().contains("routes were replaced")
        })
        .await;
    }
}
