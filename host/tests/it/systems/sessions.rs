//! Locks on database sessions: row locks and named locks.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use mysql_async::prelude::Queryable;
use tokio::sync::Mutex;

use super::*;
use crate::harness::{Deadlocks, Statements, Upstream, crash, within};
use crate::policies::BASKET;

/// "Within a second, or at the next call", on a busy machine.
const AT_ONCE: Duration = Duration::from_secs(4);

/// Kills the sessions that hold row locks. There must be exactly `expected` of them, because the proxy keeps a
/// session for each lock.
///
/// Other connections of a proxy are in a transaction only for moments, so they drop out of the sessions that are in
/// the same transaction in several consecutive looks.
async fn kill_row_sessions(url: &str, expected: usize) {
    let mut lasting = sessions_in_transaction(url).await;
    within(Duration::from_secs(30), "only the sessions of row locks stay in a transaction", async || {
        let now = sessions_in_transaction(url).await;
        lasting.retain(|session| now.contains(session));
        lasting.len() <= expected
    })
    .await;
    assert_eq!(lasting.len(), expected, "each row lock has a session");
    kill_sessions(url, lasting.into_iter().map(|(id, _)| id)).await;
}

/// The last look at a server's transactions. The server repeats its last result for 100 ms after each look, so tests
/// that look often would keep each other, and themselves, from seeing anything new.
static LAST_LOOK: Mutex<Option<Instant>> = Mutex::const_new(None);
const LOOK_PAUSE: Duration = Duration::from_millis(150);

/// The sessions of the URL's database that are in a transaction, each with an identification of that transaction.
async fn sessions_in_transaction(url: &str) -> Vec<(String, String)> {
    let query = "SELECT CAST(p.id AS CHAR),CONCAT(t.trx_id,' ',t.trx_started) FROM information_schema.processlist p \
         JOIN information_schema.innodb_trx t ON t.trx_mysql_thread_id=p.id WHERE p.db=DATABASE()";
    let mut conn = mysql_async::Conn::from_url(url).await.expect("the server answers");
    let mut last = LAST_LOOK.lock().await;
    let rows = loop {
        if let Some(at) = *last {
            tokio::time::sleep_until((at + LOOK_PAUSE).into()).await;
        }
        let rows = conn.query(query).await;
        *last = Some(Instant::now());
        match rows {
            // MySQL cannot show a statement that contains binary data (as another test's may) until that statement is
            // over.
            Err(mysql_async::Error::Server(error)) if error.code == 3854 => {}
            rows => break rows.expect("the server lists its transactions"),
        }
    };
    drop(last);
    conn.disconnect().await.expect("the server says goodbye");
    rows
}

/// Kills sessions. A session that has already ended is ignored.
async fn kill_sessions(url: &str, ids: impl IntoIterator<Item = String>) {
    let mut conn = mysql_async::Conn::from_url(url).await.expect("the server answers");
    for id in ids {
        match conn.query_drop(format!("KILL {id}")).await {
            Err(mysql_async::Error::Server(error)) if error.code == 1094 => {}
            killed => killed.expect("the session is killed"),
        }
    }
    conn.disconnect().await.expect("the server says goodbye");
}

async fn waits(proxy: &Proxy, body: Value) -> tokio::task::JoinHandle<crate::harness::Response> {
    let client = proxy.client();
    tokio::spawn(async move { client.acquire(body).await })
}

on_both! {
    /// Others wait for the lock and get it when it is freed. A wait over its limit is a separate error. A missing row
    /// is created, and only that row is locked.
    async fn S2_a_row_lock_is_waited_for_and_ends_with_its_session(kind: Kind) {
        let url = database(kind).await;
        let proxy = proxy(&url, "default", "primitive = \"row\"").await;
        let client = proxy.client();
        let held = client.lease("jobs/1", 60_000).await;
        assert_eq!(held["primitive"], "row");
        client.lease("jobs/2", 60_000).await;
        let begun = Instant::now();
        let late = client.acquire(json!({"resource": "jobs/1", "wait_ms": 300})).await;
        assert_eq!((late.status, late.slug()), (409, "contended"));
        assert!(begun.elapsed() >= Duration::from_millis(300));
        let other = super::proxy(&url, "default", "primitive = \"row\"").await;
        let elsewhere = other.client().acquire(json!({"resource": "jobs/1"})).await;
        assert_eq!((elsewhere.status, elsewhere.slug()), (409, "contended"), "{}", elsewhere.text);
        let waiting = waits(&other, json!({"resource": "jobs/1", "wait_ms": 20_000, "ttl_ms": 60_000})).await;
        other.client().until_queued("jobs/1", 1).await;
        assert_eq!(client.release(&held).await.status, 200);
        let next = waiting.await.unwrap();
        assert_eq!(next.status, 200, "{}", next.text);
        assert!(next.number("token") > held["token"].as_u64().unwrap());
    }

    async fn S2_the_death_of_a_session_frees_its_row_at_once_and_notifies_its_holder(kind: Kind) {
        let url = database(kind).await;
        let settings = "primitive = \"row\"";
        let (proxy, other) = (proxy(&url, "default", settings).await, proxy(&url, "default", settings).await);
        let (mut lines, first) =
            proxy.client().hold(&json!({"resource": "a", "ttl_ms": 60_000})).await;
        let client = proxy.client();
        let quiet = client.lease("b", 60_000).await;
        let body = json!({"resource": "b", "ttl_ms": 60_000});
        assert_eq!(other.client().acquire(body.clone()).await.status, 409);
        kill_row_sessions(&url, 2).await;
        // The server has freed the rows, whatever their holders know. Nobody is waited for.
        let elsewhere = async || other.client().acquire(body.clone()).await;
        let mut next = elsewhere().await;
        within(AT_ONCE, "another proxy has the row", async || {
            if next.status != 200 {
                next = elsewhere().await;
            }
            next.status == 200
        })
        .await;
        assert!(next.number("token") > quiet["token"].as_u64().unwrap());
        // Each session is probed separately, once a second.
        let told = async {
            loop {
                let line = lines.json().await.expect("the holder is told");
                if line["event"] != "renewed" {
                    break line;
                }
            }
        };
        let told = tokio::time::timeout(AT_ONCE, told).await.expect("long before its lease would have ended");
        assert_eq!(told["event"], "lost", "{told}");
        within(AT_ONCE, "the quiet lease is lost", async || client.renew(&quiet).await.slug() == "lost").await;
        let next = client.lease("a", 60_000).await;
        assert!(next["token"].as_u64() > first["token"].as_u64());
    }

    /// NOWAIT, SKIP LOCKED, re-entrance, and one wake-up per release, in order of arrival, which the server's own
    /// queue does not keep.
    async fn S6_claims_skip_locked_rows_and_waiters_keep_their_order(kind: Kind) {
        let url = database(kind).await;
        let settings = "primitive = \"row\"\npool = 5";
        let (one, other) = (proxy(&url, "default", settings).await, proxy(&url, "default", settings).await);
        let claimers = (0..5).map(|n| {
            let client = if n % 2 == 0 { one.client() } else { other.client() };
            async move { client.acquire(json!({"resource": "queue", "ttl_ms": 60_000, "wait_ms": 5_000})).await }
        });
        let answers = join_all(claimers).await;
        assert!(answers.iter().all(|answer| answer.status == 200), "{answers:?}");
        let mut rows: Vec<String> = answers.iter().map(|answer| answer.json["keys"].to_string()).collect();
        rows.sort();
        rows.dedup();
        assert_eq!(rows.len(), 5, "each has a row of its own: {rows:?}");
        let none = one.client().acquire(json!({"resource": "queue"})).await;
        assert_eq!((none.status, none.slug()), (409, "contended"), "{}", none.text);
        // The proxy that granted the lock frees it.
        for answer in &answers {
            let freed = one.client().release(&answer.json).await.status;
            assert!(freed == 200 || other.client().release(&answer.json).await.status == 200);
        }

        let url = database(kind).await;
        let ordered = proxy(&url, "default", "primitive = \"row\"\nreentrant = true").await;
        let client = ordered.client();
        let mine = json!({"resource": "a", "owner": "me", "ttl_ms": 60_000});
        let first = client.acquire(mine.clone()).await;
        assert_eq!(first.status, 200, "{}", first.text);
        let again = client.acquire(mine).await;
        assert_eq!(again.number("levels"), 2, "{}", again.text);
        assert_eq!(client.acquire(json!({"resource": "a", "owner": "you"})).await.status, 409);
        assert_eq!(client.release(&first.json).await.status, 200);
        let mut waiters = Vec::new();
        for n in 0..CROWD {
            let body = json!({"resource": "a", "owner": format!("{n}"), "wait_ms": 60_000, "ttl_ms": 60_000});
            waiters.push(waits(&ordered, body).await);
            client.until_queued("a", n + 1).await;
        }
        let mut lease = first.json;
        let (before, begun) = (operations(&ordered).await, Instant::now());
        for (n, waiter) in waiters.into_iter().enumerate() {
            assert_eq!(client.release(&lease).await.status, 200);
            lease = waiter.await.unwrap().json;
            assert_eq!(lease["owner"], format!("{n}"), "first come, first served");
        }
        assert_no_herd(operations(&ordered).await - before, begun.elapsed());
    }

    /// As with a registry in the process: no statement for an owner that already holds the lock.
    async fn S10_a_reentrant_acquire_costs_no_statement(kind: Kind) {
        let dir = folder();
        let server = own_server(kind, dir.path()).await;
        let proxy = proxy(server.url(), "default", "primitive = \"advisory\"\nreentrant = true").await;
        let client = proxy.client();
        let body = |owner: &str, ttl_ms: u32| json!({"resource": "a", "owner": owner, "ttl_ms": ttl_ms});
        let mut statements = Statements::of(server.url(), dir.path()).await;
        let first = client.acquire(body("me", 60_000)).await;
        assert_eq!((first.status, &first.json["primitive"]), (200, &json!("advisory")), "{}", first.text);
        let entering = statements.next();
        assert!(entering.iter().any(|sql| sql.contains("GET_LOCK")), "the first time costs: {entering:?}");
        // Statements that the proxy sends on its own: heartbeats, and probes of its session.
        tokio::time::sleep(Duration::from_secs(3)).await;
        let unasked_a_second = statements.next().len() as f64 / 3.0;

        let begun = Instant::now();
        for _ in 0..10 {
            for n in 2..=40 {
                assert_eq!(client.acquire(body("me", 60_000)).await.number("levels"), n);
            }
            for _ in 2..=40 {
                assert_eq!(client.release(&first.json).await.status, 200);
            }
        }
        let refused = client.acquire(body("you", 60_000)).await;
        assert_eq!((refused.status, &refused.json["holder"]["owner"]), (409, &json!("me")));
        let (said, took) = (statements.next(), begun.elapsed());
        let of_locks = |sql: &String| ["GET_LOCK", "RELEASE_LOCK", "UUID_SHORT"].iter().any(|word| sql.contains(word));
        assert!(!said.iter().any(of_locks), "{said:?}");
        let unasked = 20.0 + 2.0 * unasked_a_second * took.as_secs_f64();
        assert!((said.len() as f64) < unasked, "{} statements in {took:?}, not {unasked}: {said:?}", said.len());
        assert_eq!(client.release(&first.json).await.status, 200);
        assert!(statements.next().iter().any(|sql| sql.contains("RELEASE_LOCK")), "the last time costs, too");

        let short = client.acquire(body("me", 200)).await;
        assert_eq!(short.status, 200);
        tokio::time::sleep(Duration::from_millis(400)).await;
        let racers = (0..8).map(|n| {
            let client = proxy.client();
            async move { client.acquire(body(&format!("racer-{n}"), 60_000)).await.status }
        });
        let won = join_all(racers).await.into_iter().filter(|status| *status == 200).count();
        assert_eq!(won, 1, "one of those that race for an expired lock");
        server.stop().await;
    }

    /// SQL that blocks on an uncommitted insert can deadlock; the primitive cannot.
    async fn S11_a_blocking_insert_can_deadlock_and_a_row_lock_of_the_proxy_cannot(kind: Kind) {
        let dir = folder();
        let server = own_server(kind, dir.path()).await;
        let url = server.url();
        sql(url, "CREATE TABLE theirs (k VARCHAR(64) PRIMARY KEY, n INT) ENGINE=InnoDB").await;
        let mut first = mysql_async::Conn::from_url(url).await.expect("a connection");
        let mut second = mysql_async::Conn::from_url(url).await.expect("a connection");
        let insert = |key: &str| format!("INSERT INTO theirs VALUES ('{key}',1) ON DUPLICATE KEY UPDATE n=n+1");
        let theirs = Deadlocks::from_now(url).await;
        first.query_drop("BEGIN").await.unwrap();
        second.query_drop("BEGIN").await.unwrap();
        first.query_drop(insert("a")).await.unwrap();
        second.query_drop(insert("b")).await.unwrap();
        let results = tokio::join!(first.query_drop(insert("b")), second.query_drop(insert("a")));
        let deadlock = |result: &Result<(), mysql_async::Error>| {
            matches!(result, Err(mysql_async::Error::Server(error)) if error.code == 1213)
        };
        assert!(deadlock(&results.0) || deadlock(&results.1), "{results:?}");
        drop((first, second));
        theirs.expect(1).await;

        // Rows in opposite order: both proxies ask for the same rows at the same moment, in opposite orders.
        let policy = dir.path().join("basket.wasm");
        std::fs::write(&policy, &*BASKET).expect("a file of our own");
        let policy = format!("path = \"{}\"\nsettings = {{ rows = true }}", policy.display());
        let upstream = Upstream::start().await;
        let sections = guarded(&policy, &[("/task/{*all}", upstream.good)], "wait_ms = 60_000");
        let settings = Settings { url: url.to_owned(), sections, ..Settings::default() };
        let ours = Deadlocks::from_now(url).await;
        let (one, other) = (Proxy::with(settings.clone()).await, Proxy::with(settings).await);
        let ask = async |proxy: &Proxy, race: &str, items: &[String]| {
            let answer = proxy.guarded().send("PUT", &format!("/task/{race}?ms=2&items={}", items.join(",")), "").await;
            assert_eq!((answer.status, &*answer.text), (200, "done"));
        };
        let races = (0..8).map(async |lane| {
            for round in 0..16 {
                let race = format!("{lane}-{round}");
                let there: Vec<String> = (0..12).map(|n| format!("{race}-{n}")).collect();
                let back: Vec<String> = there.iter().rev().cloned().collect();
                tokio::join!(ask(&one, &race, &there), ask(&other, &race, &back));
                assert_eq!(upstream.together(&format!("/task/{race}")).await, 1, "one after the other");
            }
        });
        join_all(races).await;
        for proxy in [&one, &other] {
            assert_eq!(proxy.metric("lockkeeper_grants_total", &["primitive=\"row\""]).await, 128.0);
        }
        ours.expect(0).await;
        server.stop().await;
    }

    async fn S11_a_second_client_waits_until_the_first_releases_or_dies(kind: Kind) {
        let url = database(kind).await;
        let settings = "primitive = \"row\"";
        let (one, other) = (proxy(&url, "default", settings).await, proxy(&url, "default", settings).await);
        let wait = json!({"resource": "fresh", "wait_ms": 50_000, "ttl_ms": 60_000});
        let blocked = one.client().lease("fresh", 60_000).await;
        let second = waits(&other, wait.clone()).await;
        other.client().until_queued("fresh", 1).await;
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert!(!second.is_finished(), "nothing else lets it in");
        assert_eq!(one.client().release(&blocked).await.status, 200);
        let second = second.await.unwrap();
        assert_eq!(second.status, 200, "{}", second.text);

        let third = waits(&one, wait).await;
        one.client().until_queued("fresh", 1).await;
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert!(!third.is_finished(), "nothing else lets it in");
        let begun = Instant::now();
        kill_row_sessions(&url, 1).await;
        let third = third.await.unwrap();
        assert_eq!(third.status, 200, "{}", third.text);
        assert!(third.number("token") > second.number("token"));
        assert!(begun.elapsed() < Duration::from_secs(15), "long before the lease of the dead would have ended");
    }

    /// Waiters are told how much time is left, and when the lock is free. Then they race for it.
    async fn S24_waiters_are_notified_of_a_release_and_one_of_them_wins(kind: Kind) {
        let proxy = proxy(&database(kind).await, "default", "primitive = \"advisory\"").await;
        let client = proxy.client();
        let held = client.lease("a", 5_000).await;
        let refused = client.acquire(json!({"resource": "a"})).await;
        let left = refused.number("retry_after_ms");
        assert!(refused.status == 409 && (1..=5_100).contains(&left), "{}", refused.text);
        let mut subscriptions = Vec::new();
        for _ in 0..4 {
            subscriptions.push(proxy.client().stream("GET", "/v1/watch?prefix=a", "").await);
        }
        // For a lease that is not the caller's, the answer says so. Anybody may ask how much time is left.
        let stranger = json!({"lease_id": "1-00000000000000ab-a~YQ"});
        let told = client.release(&stranger).await;
        assert_eq!((told.status, told.slug(), &told.json["retry_after_ms"]), (410, "lost", &Value::Null));
        let remaining = client.show("a").await["holders"][0]["left_ms"].as_u64().expect("what is left");
        assert!((1..=5_000).contains(&remaining), "{remaining}");
        assert_eq!(client.release(&held).await.status, 200, "the stranger's release did nothing");
        let racers = subscriptions.into_iter().map(|mut events| {
            let client = proxy.client();
            async move {
                while !events.line().await.expect("events go on").contains("released") {}
                client.acquire(json!({"resource": "a", "ttl_ms": 60_000})).await.status
            }
        });
        let won = join_all(racers).await.into_iter().filter(|status| *status == 200).count();
        assert_eq!(won, 1, "all are told, one wins");
    }

    async fn S24_an_owner_reenters_only_if_the_settings_allow_it(kind: Kind) {
        let url = database(kind).await;
        for primitive in ["advisory", "lease"] {
            let resource = format!("by {primitive}");
            let body = |owner: &str| json!({"resource": resource, "owner": owner, "ttl_ms": 60_000});
            let settings = format!("primitive = \"{primitive}\"");
            let strict = proxy(&url, "default", &settings).await;
            let first = strict.client().acquire(body("me")).await;
            assert_eq!(first.status, 200, "{}", first.text);
            let again = strict.client().acquire(body("me")).await;
            assert_eq!((again.status, again.slug()), (409, "contended"), "off: {}", again.text);
            assert_eq!(strict.client().release(&first.json).await.status, 200);
            drop(strict);

            let reentrant = proxy(&url, "default", &format!("{settings}\nreentrant = true")).await;
            let client = reentrant.client();
            let mut first = client.acquire(body("me")).await;
            eventually("the proxy before it is gone", async || {
                if first.status != 200 {
                    first = client.acquire(body("me")).await;
                }
                first.status == 200
            })
            .await;
            let again = client.acquire(body("me")).await;
            assert_eq!((again.status, again.number("levels")), (200, 2), "on: {}", again.text);
            for _ in 0..2 {
                assert_eq!(client.acquire(body("you")).await.status, 409, "a level is left");
                assert_eq!(client.release(&again.json).await.status, 200);
            }
            assert_eq!(client.acquire(body("you")).await.status, 200);
        }
    }

    async fn a_second_primitive_is_used_when_the_first_is_not_available(kind: Kind) {
        let url = database(kind).await;
        let settings = "primitive = \"quorum\"\nsecond_primitive = \"advisory\"";
        let lease = proxy(&url, "default", settings).await.client().lease("a", 60_000).await;
        assert_eq!(lease["primitive"], "advisory");
        let refused = proxy(&url, "default", "primitive = \"quorum\"").await;
        let refused = refused.client().acquire(json!({"resource": "a"})).await;
        assert_eq!((refused.status, refused.slug()), (500, "policy_fault"));
        assert!(refused.text.contains("no_primitive") && refused.text.contains("[stores."), "{}", refused.text);
    }

    /// If the server ends a session, all locks on it are lost, and their holders are told.
    async fn the_loss_of_the_advisory_session_is_reported_to_every_holder(kind: Kind) {
        let url = database(kind).await;
        let proxy = proxy(&url, "default", "primitive = \"advisory\"").await;
        let client = proxy.client();
        let mut holds = Vec::new();
        for n in 0..20 {
            holds.push(client.hold(&json!({"resource": format!("r{n}"), "ttl_ms": 60_000})).await);
        }
        let lease = client.lease("quiet", 60_000).await;
        let mut events = client.stream("GET", "/v1/watch?prefix=quiet", "").await;
        let sessions =
            "SELECT CAST(id AS CHAR) FROM information_schema.processlist WHERE db=DATABASE() AND id<>CONNECTION_ID()";
        let sessions = sql(&url, sessions).await.into_iter().map(mysql_async::from_row::<String>);
        kill_sessions(&url, sessions).await;
        for (lines, _) in &mut holds {
            let told = loop {
                let line = lines.json().await.expect("every holder is told");
                if line["event"] != "renewed" {
                    break line;
                }
            };
            assert_eq!(told["event"], "lost", "{told}");
        }
        while !events.line().await.expect("watchers hear of it").contains("event: lost") {}
        let lost = client.renew(&lease).await;
        assert_eq!((lost.status, lost.slug()), (410, "lost"), "{}", lost.text);
        let again = client.acquire(json!({"resource": "quiet", "ttl_ms": 60_000, "wait_ms": 10_000})).await;
        assert_eq!(again.status, 200, "{}", again.text);
        assert!(again.number("token") > lease["token"].as_u64().unwrap());
    }

    /// Nobody reads from the connection of a row lock, so the end of its session is noticed at the next statement.
    async fn a_row_lock_is_not_granted_on_a_session_that_has_ended(kind: Kind) {
        let url = database(kind).await;
        let settings = "primitive = \"row\"";
        let (one, other) = (proxy(&url, "default", settings).await, proxy(&url, "default", settings).await);
        let client = one.client();
        let body = json!({"resource": "a", "mode": "shared", "ttl_ms": 60_000, "wait_ms": 10_000});
        let first = client.acquire(body.clone()).await;
        assert_eq!(first.status, 200, "{}", first.text);
        // Within the second after which each session is probed anyway.
        kill_row_sessions(&url, 1).await;
        let second = client.acquire(body).await;
        assert_eq!(second.status, 200, "{}", second.text);
        let lost = client.renew(&first.json).await;
        assert_eq!((lost.status, lost.slug()), (410, "lost"), "the second one has another session: {}", lost.text);
        let beside = other.client().acquire(json!({"resource": "a", "ttl_ms": 60_000})).await;
        assert_eq!((beside.status, beside.slug()), (409, "contended"), "{}", beside.text);
        assert_eq!(client.release(&second.json).await.status, 200);
    }

    /// Two proxies and thousands of names: no name has two holders, and few connections are used.
    async fn thousands_of_advisory_locks_share_one_session(kind: Kind) {
        let url = database(kind).await;
        let settings = "primitive = \"advisory\"\nwait_ms = 30000";
        let (one, other) = (proxy(&url, "default", settings).await, proxy(&url, "default", settings).await);
        let clients = (0..32).map(|n| {
            let client = one.client();
            async move {
                for m in 0..64 {
                    client.lease(&format!("{n}/{m}"), 600_000).await;
                }
            }
        });
        join_all(clients).await;
        let connections = sql(&url, "SELECT id FROM information_schema.processlist WHERE db=DATABASE()").await;
        assert!(connections.len() <= 16, "{} connections of two proxies", connections.len());
        let page = one.client().get("/v1/locks?limit=1000").await;
        assert_eq!((page.json["locks"].as_array().map(Vec::len), &page.json["more"]), (Some(1000), &json!(true)));
        assert_eq!(page.json["locks"][0]["primitive"], "advisory");
        assert_eq!(one.metric("lockkeeper_grants_total", &["advisory"]).await, 2048.0);
        let taken = other.client().acquire(json!({"resource": "3/4", "wait_ms": 0})).await;
        assert_eq!((taken.status, taken.slug()), (409, "contended"), "{}", taken.text);
    }

    /// One lock too many is refused with the reason, and the rest of the proxy works.
    async fn row_locks_have_a_limit_of_their_own(kind: Kind) {
        let sections = "[policies.default]\npath = \"builtin:default\"\n[policies.row]\npath = \"builtin:default\"\n\
            settings = { primitive = \"row\" }\n[[routes]]\nresource = \"row/*\"\npolicy = \"row\"";
        let settings = Settings { api: String::new(),
            url: database(kind).await,
            store: "row_connections = 2".to_owned(),
            sections: sections.to_owned(),
        };
        let proxy = Proxy::with(settings).await;
        let client = proxy.client();
        let first = client.lease("row/1", 60_000).await;
        client.lease("row/2", 60_000).await;
        let third = client.acquire(json!({"resource": "row/3"})).await;
        assert_eq!((third.status, third.slug()), (503, "store_unavailable"), "{}", third.text);
        assert!(third.text.contains("store.row_connections"), "{}", third.text);
        client.lease("others/go on", 60_000).await;
        assert_eq!(client.release(&first).await.status, 200);
        client.lease("row/3", 60_000).await;
    }

    /// The server keeps its counters in memory; the database has the range that they belong to.
    async fn tokens_of_sessions_rise_over_a_crash_of_the_server(kind: Kind) {
        let dir = folder();
        let server = own_server(kind, dir.path()).await;
        let proxy = proxy(server.url(), "default", "primitive = \"advisory\"").await;
        let client = proxy.client();
        let mut last = 0;
        for round in 0..4 {
            if round > 0 {
                crash(&server).await;
            }
            for _ in 0..3 {
                let mut lease = Value::Null;
                eventually("locks are granted", async || {
                    let answer = client.acquire(json!({"resource": "k", "ttl_ms": 60_000})).await;
                    lease = answer.json;
                    answer.status == 200
                })
                .await;
                let token = lease["token"].as_u64().unwrap();
                assert!(token > last, "{token} comes after {last} in round {round}");
                last = token;
                assert_eq!(client.release(&lease).await.status, 200);
            }
        }
        server.stop().await;
    }

    /// A change from one primitive to another that lacks the mode of a lease: the resource is not free before the
    /// lease ends.
    async fn a_lease_in_a_mode_that_the_next_primitive_lacks_still_excludes_others(kind: Kind) {
        for primitive in ["advisory", "row"] {
            let url = database(kind).await;
            let before = proxy(&url, "default", "primitive = \"lease\"").await;
            let wanted = json!({"resource": "k", "ttl_ms": 60_000, "mode": {"permits": 1}});
            let lease = before.client().acquire(wanted).await;
            assert_eq!(lease.status, 200, "{}", lease.text);
            drop(before);
            let next = proxy(&url, "default", &format!("primitive = \"{primitive}\"")).await;
            next.until_ready().await;
            let client = next.client();
            let taken = client.acquire(json!({"resource": "k"})).await;
            assert_eq!((taken.status, taken.slug()), (409, "contended"), "{primitive}: {}", taken.text);
            assert_eq!(client.release(&lease.json).await.status, 200, "{primitive}");
            assert_eq!(client.acquire(json!({"resource": "k"})).await.status, 200, "{primitive}");
        }
    }

    /// A change from one primitive to another: the tokens of a key still increase.
    async fn tokens_rise_over_a_change_of_primitive(kind: Kind) {
        let url = database(kind).await;
        let mut last = 0;
        for primitive in ["lease", "advisory", "lease", "row", "advisory", "row", "lease"] {
            let proxy = proxy(&url, "default", &format!("primitive = \"{primitive}\"")).await;
            for _ in 0..3 {
                let lease = proxy.client().lease("k", 60_000).await;
                let token = lease["token"].as_u64().unwrap();
                assert!(token > last, "{primitive}: {token} comes after {last}");
                last = token;
                assert_eq!(proxy.client().release(&lease).await.status, 200);
            }
        }
    }
}
