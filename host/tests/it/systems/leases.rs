//! Rows with an owner and an expiry, by all the names that they go by.

use std::time::{Duration, Instant};

use futures_util::future::join_all;

use super::*;
use crate::harness::Response;

/// Tries at once, `n` clients at the same moment: those who got it.
async fn race(proxy: &Proxy, n: usize, body: &Value) -> Vec<Response> {
    let tries = (0..n).map(|_| {
        let client = proxy.client();
        async move { client.acquire(body.clone()).await }
    });
    let answers = join_all(tries).await;
    let (won, lost): (Vec<_>, Vec<_>) = answers.into_iter().partition(|answer| answer.status == 200);
    assert!(lost.iter().all(|answer| answer.slug() == "contended"), "{lost:?}");
    won
}

async fn lost(client: &Client, lease: &Value) {
    for answer in [client.renew(lease).await, client.release(lease).await] {
        assert_eq!((answer.status, answer.slug()), (410, "lost"), "{}", answer.text);
    }
}

async fn pause_ms(ms: u64) {
    tokio::time::sleep(Duration::from_millis(ms)).await;
}

on_both! {
    /// Lock name and resource are the key; a clean-up job is not needed, and one that puts a slow
    /// holder out leaves it with a token that is refused.
    async fn S1_one_inserts_and_the_others_fail_at_once(kind: Kind) {
        let proxy = proxy(&database(kind).await, "default", "").await;
        let client = proxy.client();
        let body = json!({"resource": "import/a", "ttl_ms": 60_000});
        let begun = Instant::now();
        let won = race(&proxy, 8, &body).await;
        assert_eq!(won.len(), 1);
        assert!(begun.elapsed() < Duration::from_secs(5), "nobody waits for a lease to end");
        client.lease("import/b", 60_000).await;

        let crashed = client.lease("import/c", 300).await;
        assert_eq!(client.acquire(json!({"resource": "import/c"})).await.status, 409);
        eventually("a crashed holder's lock is free", async || {
            client.acquire(json!({"resource": "import/c", "ttl_ms": 60_000})).await.status == 200
        })
        .await;
        lost(&client, &crashed).await;

        let slow = &won[0].json;
        assert_eq!(proxy.admin().send("DELETE", "/v1/locks/import%2Fa", "").await.status, 200);
        let next = client.lease("import/a", 60_000).await;
        assert!(next["token"].as_u64() > slow["token"].as_u64(), "a write with the old token can be refused");
        lost(&client, slow).await;
    }

    async fn S4_retries_end_at_a_deadline_and_only_the_holder_frees(kind: Kind) {
        let settings = "sleep = \"fixed\"\nmin_ms = 50\nmax_ms = 50";
        let proxy = proxy(&database(kind).await, "backoff", settings).await;
        let client = proxy.client();
        let held = client.lease("a", 60_000).await;
        let begun = Instant::now();
        let late = client.acquire(json!({"resource": "a", "wait_ms": 400})).await;
        assert_eq!((late.status, late.slug()), (409, "contended"));
        assert!(begun.elapsed() >= Duration::from_millis(400), "it retries as long as it may");
        let mut stranger = held.clone();
        let other = client.lease("b", 60_000).await;
        let id = held["lease_id"].as_str().unwrap();
        let (head, key) = id.rsplit_once('-').unwrap();
        let mine = other["lease_id"].as_str().unwrap().rsplit_once('-').unwrap().0;
        assert_ne!(head, mine);
        stranger["lease_id"] = format!("{mine}-{key}").into();
        lost(&client, &stranger).await;
        let waiting = tokio::spawn({
            let client = proxy.client();
            async move { client.acquire(json!({"resource": "a", "wait_ms": 20_000})).await.status }
        });
        client.until_queued("a", 1).await;
        assert_eq!(client.release(&held).await.status, 200);
        assert_eq!(waiting.await.unwrap(), 200);
    }

    async fn S5_an_expired_lock_is_taken_over_by_one(kind: Kind) {
        let proxy = proxy(&database(kind).await, "default", "").await;
        let client = proxy.client();
        let old = client.lease("a", 200).await;
        pause_ms(400).await;
        let won = race(&proxy, 16, &json!({"resource": "a", "ttl_ms": 60_000})).await;
        assert_eq!(won.len(), 1);
        lost(&client, &old).await;
        let shown = client.show("a").await;
        assert_eq!(shown["holders"][0]["token"], won[0].json["token"], "the late release did nothing");
    }

    /// Some drivers and poolers have the server count the rows that were found.
    async fn S7_success_does_not_hang_on_how_rows_are_counted(kind: Kind) {
        let url = format!("{}&client_found_rows=true", database(kind).await);
        let proxy = proxy(&url, "default", "").await;
        let client = proxy.client();
        for round in 0..20 {
            let body = json!({"resource": "a", "ttl_ms": 60_000});
            let won = race(&proxy, 8, &body).await;
            assert_eq!(won.len(), 1, "round {round}");
            assert_eq!(client.release(&won[0].json).await.status, 200);
            lost(&client, &won[0].json).await;
        }
    }

    async fn S12_random_sleeps_and_a_way_out_by_force(kind: Kind) {
        let settings = "sleep = \"random\"\nmin_ms = 20\nmax_ms = 60\nattempts = 5";
        let proxy = proxy(&database(kind).await, "backoff", settings).await;
        let client = proxy.client();
        let held = client.lease("a", 60_000).await;
        let begun = Instant::now();
        let gave_up = client.acquire(json!({"resource": "a", "wait_ms": 10_000})).await;
        assert_eq!((gave_up.status, gave_up.slug()), (409, "contended"), "{}", gave_up.text);
        assert!(gave_up.text.contains("5 attempts"), "{}", gave_up.text);
        assert!(begun.elapsed() >= Duration::from_millis(80), "four sleeps of 20 ms at least");
        assert_eq!(client.renew(&held).await.status, 200, "a lock is renewed by its id");
        // An operator need not wait for the lease's end; whoever is put out is told.
        assert_eq!(proxy.admin().send("DELETE", "/v1/locks/a", "").await.status, 200);
        lost(&client, &held).await;
        client.lease("a", 60_000).await;
        client.lease("b", 200).await;
        pause_ms(300).await;
        client.lease("b", 60_000).await;
    }

    async fn S13_S14_one_statement_takes_an_expired_lock_over_and_the_version_rises(kind: Kind) {
        let proxy = proxy(&database(kind).await, "default", "").await;
        let client = proxy.client();
        let mut last = 0;
        for _ in 0..5 {
            let lease = client.lease("a", 700).await;
            let token = lease["token"].as_u64().unwrap();
            assert!(token > last);
            last = token;
            let denied = client.acquire(json!({"resource": "a"})).await;
            assert_eq!(denied.json["holder"]["token"], lease["token"], "the answer says who won");
            pause_ms(800).await;
        }
    }

    async fn S15_S26_the_watchdog_renews_while_the_client_lives(kind: Kind) {
        let proxy = proxy(&database(kind).await, "default", "ttl_ms = 900").await;
        let client = proxy.client();
        let (mut lines, granted) = client.hold(&json!({"resource": "a"})).await;
        assert_eq!(granted["ttl_ms"], 900);
        let begun = Instant::now();
        for _ in 0..6 {
            assert_eq!(lines.json().await.unwrap()["event"], "renewed");
        }
        assert!(begun.elapsed() > Duration::from_millis(1_200), "it outlives its ttl");
        assert_eq!(client.acquire(json!({"resource": "a"})).await.status, 409);
        // Taken away: renewal stops, and the client is told.
        assert_eq!(proxy.admin().send("DELETE", "/v1/locks/a", "").await.status, 200);
        let told = loop {
            let line = lines.json().await.expect("a last line");
            if line["event"] != "renewed" {
                break line;
            }
        };
        assert_eq!(told["event"], "lost");
        assert_eq!(lines.line().await, None);

        let (lines, _) = client.hold(&json!({"resource": "b"})).await;
        drop(lines);
        eventually("the lock of a client that has gone is free", async || {
            client.acquire(json!({"resource": "b", "ttl_ms": 60_000})).await.status == 200
        })
        .await;
    }

    async fn S18_S21_the_lock_is_released_whatever_the_work_does_and_shows_who_has_it(kind: Kind) {
        let proxy = proxy(&database(kind).await, "default", "").await;
        let client = proxy.client();
        let api = format!("http://{}", proxy.api_address());
        let run = |script: &'static str| {
            let mut command = crate::harness::lockkeeper();
            command.args(["--server", &api, "run", "--owner", "nightly import", "task", "--", "sh", "-c", script]);
            tokio::task::spawn_blocking(move || command.status().expect("the command runs").code())
        };
        let working = run("sleep 1; exit 3");
        eventually("the holder can be read by others", async || {
            client.show("task").await["holders"][0]["owner"] == "nightly import"
        })
        .await;
        let holder = client.show("task").await["holders"][0].clone();
        assert!(holder["since"].as_str().unwrap() < holder["until"].as_str().unwrap(), "{holder}");
        assert_eq!(working.await.unwrap(), Some(3));
        assert_eq!(run("kill -9 $$").await.unwrap(), Some(137));
        client.lease("task", 60_000).await;
    }

    async fn S22_polls_of_100_ms_for_10_s_and_leases_of_60_s(kind: Kind) {
        let settings = "sleep = \"fixed\"\nmin_ms = 100\nmax_ms = 100\nwait_ms = 10000\nttl_ms = 60000";
        let proxy = proxy(&database(kind).await, "backoff", settings).await;
        let client = proxy.client();
        let first = client.acquire(json!({"resource": "a"})).await;
        assert_eq!(first.number("ttl_ms"), 60_000);
        let waiting = tokio::spawn({
            let client = proxy.client();
            async move { client.acquire(json!({"resource": "a"})).await }
        });
        client.until_queued("a", 1).await;
        pause_ms(450).await;
        let decisions = client.show("a").await["decisions"].clone();
        let polls = decisions.as_array().unwrap().iter().filter(|decision| decision["hook"] == "backoff");
        assert!(polls.clone().count() >= 3, "{decisions}");
        assert!(polls.clone().all(|poll| poll["what"].as_str().unwrap().contains("100 ms")), "{decisions}");
        // GETSET would have overwritten the holder's value with each of these polls.
        assert_eq!(client.show("a").await["holders"][0]["token"], first.json["token"]);
        assert_eq!(client.release(&first.json).await.status, 200);
        assert_eq!(waiting.await.unwrap().status, 200);
    }

    async fn S23_only_the_right_value_frees_and_the_expiry_is_set_with_the_lock(kind: Kind) {
        let url = database(kind).await;
        let mut proxy = proxy(&url, "default", "").await;
        let lease = proxy.client().lease("a", 1_000).await;
        // There is no moment between taking the lock and giving it its expiry.
        proxy.kill();
        let proxy = super::proxy(&url, "default", "").await;
        let client = proxy.client();
        let mut guess = lease.clone();
        guess["lease_id"] = "1-0000000000000001-YQ".into();
        lost(&client, &guess).await;
        eventually("the lock of a proxy that was killed ends by itself", async || {
            client.acquire(json!({"resource": "a", "ttl_ms": 60_000})).await.status == 200
        })
        .await;
        lost(&client, &lease).await;
    }

    async fn S27_first_come_first_served_with_one_wake_up_a_release(kind: Kind) {
        let proxy = proxy(&database(kind).await, "default", "reentrant = true\nwait_ms = 20000").await;
        let client = proxy.client();
        let (lines, _) = client.hold(&json!({"resource": "a", "owner": "first"})).await;
        let again = client.acquire(json!({"resource": "a", "owner": "first"})).await;
        assert_eq!((again.status, again.number("levels")), (200, 2), "{}", again.text);
        assert_eq!(client.release(&again.json).await.status, 200);
        let mut waiting = Vec::new();
        for n in 0..5 {
            let waiter = proxy.client();
            let body = json!({"resource": "a", "owner": format!("w{n}")});
            waiting.push(tokio::spawn(async move { waiter.acquire(body).await }));
            client.until_queued("a", n + 1).await;
        }
        // A waiter whose session ends is gone, and holds up nobody.
        waiting.remove(1).abort();
        client.until_queued("a", 4).await;
        let before = proxy.metric("lockkeeper_store_batch_operations_sum", &[]).await;
        drop(lines);
        let mut last = 0;
        for waiter in waiting {
            let lease = waiter.await.unwrap().json;
            assert!(lease["token"].as_u64().unwrap() > last, "{lease}");
            last = lease["token"].as_u64().unwrap();
            assert_eq!(client.release(&lease).await.status, 200);
        }
        let operations = proxy.metric("lockkeeper_store_batch_operations_sum", &[]).await - before;
        assert!(operations <= 30.0, "{operations} operations for five releases and four grants: no herd");
    }

    async fn S28_the_revision_is_the_place_and_the_fencing_token(kind: Kind) {
        let proxy = proxy(&database(kind).await, "default", "").await;
        let client = proxy.client();
        let body = json!({"resource": "a", "ttl_ms": 800, "request_id": "session-7"});
        let lease = client.acquire(body.clone()).await;
        let again = client.acquire(body.clone()).await;
        assert_eq!(again.json["lease_id"], lease.json["lease_id"], "the own entry is found");
        assert_eq!(again.json["token"], lease.json["token"]);
        let next = client.acquire(json!({"resource": "a", "wait_ms": 10_000, "ttl_ms": 60_000})).await;
        assert_eq!(next.status, 200, "the lease ended, and with it the place");
        assert!(next.number("token") > lease.number("token"));
        let late = client.acquire(body).await;
        assert_eq!((late.status, late.slug()), (409, "request_id_reused"));
    }

    /// The resource is a table that refuses what carries a lower token than it has seen.
    async fn S30_a_stalled_holders_write_is_refused(kind: Kind) {
        let url = database(kind).await;
        let proxy = proxy(&url, "default", "").await;
        let client = proxy.client();
        let stalled = client.lease("file", 300).await;
        sql(&url, "CREATE TABLE file (id INT PRIMARY KEY, content TEXT, token BIGINT)").await;
        sql(&url, "INSERT INTO file VALUES (1, '', 0)").await;
        let write = async |lease: &Value, content: &str| {
            let token = &lease["token"];
            sql(&url, &format!("UPDATE file SET content='{content}',token={token} WHERE id=1 AND token<={token}")).await;
        };
        pause_ms(500).await;
        let next = client.lease("file", 60_000).await;
        write(&next, "new").await;
        write(&stalled, "stale").await;
        let content: String = sql(&url, "SELECT content FROM file").await[0].get(0).unwrap();
        assert_eq!(content, "new");
    }
}
