//! Rows with an owner and an expiry, under all the names of this system.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use mysql_async::prelude::Queryable;

use super::*;
use crate::harness::{Response, Statements, within};

/// `n` clients try at the same moment, without waiting. Returns the clients that got the lock.
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

/// The id of the first lease with the nonce of the second.
fn other_id(of: &Value, with: &Value) -> Value {
    let parts = |lease: &Value| {
        let id = lease["lease_id"].as_str().expect("an id");
        let (secret, key) = id.rsplit_once('-').expect("it has parts");
        (secret.to_owned(), key.to_owned())
    };
    let ((mine, key), (theirs, _)) = (parts(of), parts(with));
    assert_ne!(mine, theirs);
    format!("{theirs}-{key}").into()
}

/// Whether the server received exactly one statement about leases, which writes and is outside a transaction. Adds
/// the statements to `said`.
fn is_one_write(statements: &mut Statements, said: &mut Vec<String>) -> bool {
    let mut told = statements.next();
    told.retain(|sql| sql.contains("lockkeeper_lease"));
    let is_one =
        told.len() == 1 && told[0].starts_with("INSERT INTO lockkeeper_lease") && !told[0].contains(';');
    said.append(&mut told);
    is_one
}

async fn pause_ms(ms: u64) {
    tokio::time::sleep(Duration::from_millis(ms)).await;
}

on_both! {
    /// The key consists of lock name and resource. No clean-up job is necessary. If one removes a slow holder, the
    /// token of that holder is refused.
    async fn S1_one_client_acquires_and_the_other_clients_fail_at_once(kind: Kind) {
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

    async fn S4_retries_end_at_a_deadline_and_only_the_holder_releases(kind: Kind) {
        let settings = "sleep = \"fixed\"\nmin_ms = 50\nmax_ms = 50";
        let proxy = proxy(&database(kind).await, "backoff", settings).await;
        let client = proxy.client();
        let held = client.lease("a", 60_000).await;
        let begun = Instant::now();
        let late = client.acquire(json!({"resource": "a", "wait_ms": 400})).await;
        assert_eq!((late.status, late.slug()), (409, "contended"));
        assert!(begun.elapsed() >= Duration::from_millis(400), "it retries as long as it may");
        let mut stranger = held.clone();
        stranger["lease_id"] = other_id(&held, &client.lease("b", 60_000).await);
        lost(&client, &stranger).await;
        let waiting = tokio::spawn({
            let client = proxy.client();
            async move { client.acquire(json!({"resource": "a", "wait_ms": 20_000})).await.status }
        });
        client.until_queued("a", 1).await;
        assert_eq!(client.release(&held).await.status, 200);
        assert_eq!(waiting.await.unwrap(), 200);
    }

    /// The holder dies with its proxy, and nobody cleans up after it.
    async fn S4_the_lock_of_a_dead_holder_is_taken_over_without_a_clean_up_job(kind: Kind) {
        let url = database(kind).await;
        let settings = "sleep = \"fixed\"\nmin_ms = 50\nmax_ms = 50";
        let (mut dead, proxy) = (proxy(&url, "backoff", settings).await, proxy(&url, "backoff", settings).await);
        let begun = Instant::now();
        let left = dead.client().lease("a", 2_000).await;
        dead.kill();
        let client = proxy.client();
        assert_eq!(client.acquire(json!({"resource": "a", "wait_ms": 0})).await.status, 409, "it has not ended");
        let next = client.acquire(json!({"resource": "a", "wait_ms": 20_000, "ttl_ms": 60_000})).await;
        assert_eq!(next.status, 200, "{}", next.text);
        assert!(begun.elapsed() >= Duration::from_secs(2), "not before the lease has ended: {:?}", begun.elapsed());
        assert!(begun.elapsed() < Duration::from_secs(12), "by the next poll, not by a job: {:?}", begun.elapsed());
        assert!(next.number("token") > left["token"].as_u64().unwrap());
        lost(&client, &left).await;
        assert_eq!(client.show("a").await["holders"][0]["token"], next.json["token"]);
    }

    async fn S5_an_expired_lock_is_taken_over_by_one_client(kind: Kind) {
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

    /// Some drivers and poolers make the server count the rows that were found.
    async fn S7_success_does_not_depend_on_how_the_server_counts_rows(kind: Kind) {
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

    async fn S12_polls_sleep_at_random_and_an_operator_can_force_a_release(kind: Kind) {
        let settings = "sleep = \"random\"\nmin_ms = 20\nmax_ms = 60\nattempts = 7";
        let proxy = proxy(&database(kind).await, "backoff", settings).await;
        let client = proxy.client();
        let held = client.lease("a", 60_000).await;
        let begun = Instant::now();
        let gave_up = client.acquire(json!({"resource": "a", "wait_ms": 10_000})).await;
        assert_eq!((gave_up.status, gave_up.slug()), (409, "contended"), "{}", gave_up.text);
        assert!(gave_up.text.contains("7 attempts"), "{}", gave_up.text);
        assert!(begun.elapsed() >= Duration::from_millis(120), "six sleeps of 20 ms at least");
        let sleeps = sleeps_ms(&client, "a").await;
        assert_eq!(sleeps.len(), 6, "{sleeps:?}");
        assert!(sleeps.iter().all(|ms| (20..=60).contains(ms)), "each is inside its bounds: {sleeps:?}");
        assert!(sleeps.iter().any(|ms| *ms != sleeps[0]), "at random: {sleeps:?}");
        assert!(begun.elapsed() >= Duration::from_millis(sleeps.iter().sum()), "it slept: {sleeps:?}");
        assert_eq!(client.renew(&held).await.status, 200, "a lock is renewed by its id");
        // An operator need not wait for the end of the lease. The holder that loses it is told.
        assert_eq!(proxy.admin().send("DELETE", "/v1/locks/a", "").await.status, 200);
        lost(&client, &held).await;
        client.lease("a", 60_000).await;
        client.lease("b", 200).await;
        pause_ms(300).await;
        client.lease("b", 60_000).await;
    }

    /// A transaction of another client, or of a person at a console, has locked the row.
    async fn S12_a_statement_waits_for_a_row_lock_for_at_most_one_second(kind: Kind) {
        let url = database(kind).await;
        let proxy = proxy(&url, "backoff", "sleep = \"random\"").await;
        let client = proxy.client();
        let lease = client.lease("a", 60_000).await;
        assert_eq!(client.release(&lease).await.status, 200);
        let mut foreign = mysql_async::Conn::from_url(&url).await.expect("a connection");
        foreign.query_drop("BEGIN").await.unwrap();
        let locked: Option<String> =
            foreign.query_first("SELECT k FROM lockkeeper_lease WHERE k='a' FOR UPDATE").await.unwrap();
        assert_eq!(locked.as_deref(), Some("a"));
        // An attempt may end with the time limit of its transaction, which has two statements that wait if the row
        // was remembered.
        let given_up = async || {
            let conflicts = proxy.metric("lockkeeper_store_errors_total", &["\"conflict\""]).await;
            conflicts + proxy.metric("lockkeeper_store_errors_total", &["\"timeout\""]).await
        };
        let before = given_up().await;
        let begun = Instant::now();
        let waiting = tokio::spawn({
            let client = proxy.client();
            async move { client.acquire(json!({"resource": "a", "wait_ms": 60_000})).await }
        });
        // The server checks its time limit once a second.
        for attempts in 1..=2 {
            let limit = Duration::from_secs(8);
            within(limit, "a statement gives up", async || given_up().await >= before + f64::from(attempts)).await;
            let each = begun.elapsed() / attempts;
            assert!(each >= Duration::from_millis(900), "it waits for the row before: {each:?}");
        }
        assert!(!waiting.is_finished(), "and is tried again");
        foreign.query_drop("ROLLBACK").await.unwrap();
        let answer = waiting.await.unwrap();
        assert_eq!(answer.status, 200, "{}", answer.text);
    }

    async fn S13_S14_one_statement_takes_over_an_expired_lock_and_raises_the_version(kind: Kind) {
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
        // A release checks the client's id.
        let lease = client.lease("b", 60_000).await;
        let mut wrong = lease.clone();
        wrong["lease_id"] = other_id(&lease, &client.lease("c", 60_000).await);
        lost(&client, &wrong).await;
        assert_eq!(client.show("b").await["holders"][0]["token"], lease["token"], "that did nothing");
        assert_eq!(client.release(&lease).await.status, 200);
        lost(&client, &lease).await;
        assert!(client.lease("b", 60_000).await["token"].as_u64() > lease["token"].as_u64());
    }

    /// Statements are counted by the server. If the proxy's last reading of the server's clock is a second old, the
    /// proxy reads the clock first, so not every round is that short.
    async fn S13_one_statement_acquires_takes_over_or_releases(kind: Kind) {
        const ROUNDS: usize = 10;
        let dir = folder();
        let server = own_server(kind, dir.path()).await;
        let sections = "[policies.default]\npath = \"builtin:default\"".to_owned();
        let settings = Settings { api: String::new(), url: server.url().to_owned(), store: "lanes = 1".to_owned(), sections };
        let proxy = Proxy::with(settings).await;
        let client = proxy.client();
        let warm = client.lease("warm", 60_000).await;
        assert_eq!(client.release(&warm).await.status, 200);
        let mut statements = Statements::of(server.url(), dir.path()).await;
        let (mut acquired, mut released, mut taken_over) = (0, 0, 0);
        let mut said = Vec::new();
        for _ in 0..ROUNDS {
            // A row that exists and is free, and a row whose lease has ended.
            let crashed = client.lease("crashed", 100).await;
            pause_ms(300).await;
            client.release(&client.lease("warm", 60_000).await).await;
            statements.next();
            let next = client.lease("crashed", 60_000).await;
            taken_over += usize::from(is_one_write(&mut statements, &mut said));
            assert!(next["token"].as_u64() > crashed["token"].as_u64());
            assert_eq!(client.release(&next).await.status, 200);
            released += usize::from(is_one_write(&mut statements, &mut said));
            let lease = client.lease("crashed", 60_000).await;
            acquired += usize::from(is_one_write(&mut statements, &mut said));
            assert_eq!(client.release(&lease).await.status, 200);
        }
        let short = [acquired, taken_over, released];
        assert!(short.iter().all(|short| *short >= ROUNDS / 2), "{short:?} of {ROUNDS}: {said:#?}");
        server.stop().await;
    }

    async fn S15_S26_the_watchdog_renews_while_the_client_lives(kind: Kind) {
        let proxy = proxy(&database(kind).await, "default", "ttl_ms = 3000").await;
        let client = proxy.client();
        let (mut lines, granted) = client.hold(&json!({"resource": "a"})).await;
        assert_eq!(granted["ttl_ms"], 3000);
        let begun = Instant::now();
        for _ in 0..6 {
            assert_eq!(lines.json().await.unwrap()["event"], "renewed");
        }
        assert!(begun.elapsed() > Duration::from_millis(4_000), "it outlives its ttl");
        assert_eq!(client.acquire(json!({"resource": "a"})).await.status, 409);
        // After a forced release, renewal stops, and the client is told.
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

    /// One timer serves all leases, instead of one thread for each.
    async fn S15_a_thousand_leases_are_renewed_by_as_many_threads_as_one_lease(kind: Kind) {
        let proxy = proxy(&database(kind).await, "default", "").await;
        let clients: Vec<Client> = (0..10).map(|_| Client::http2(proxy.api_address())).collect();
        let hold = async |client: &Client, n: usize| {
            let (mut lines, _) = client.hold(&json!({"resource": format!("held/{n}"), "ttl_ms": 9_000})).await;
            assert_eq!(lines.json().await.expect("it goes on")["event"], "renewed");
            lines
        };
        let one = hold(&clients[0], 0).await;
        let before = proxy.threads();
        let holds = join_all((1..=1_000).map(|n| hold(&clients[n % 10], n))).await;
        assert_eq!(proxy.metric("lockkeeper_leases", &[]).await, 1_001.0);
        let now = proxy.threads();
        assert!(now <= before + 8, "{before} threads for one lease, {now} for {}", holds.len() + 1);
        drop((one, holds));
    }

    async fn S18_S21_the_lock_is_released_however_the_work_ends_and_shows_its_holder(kind: Kind) {
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

    async fn S22_a_waiter_polls_every_100_ms_and_a_lease_lasts_60_s(kind: Kind) {
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
        let polls = sleeps_ms(&client, "a").await;
        assert!(polls.len() >= 3 && polls.iter().all(|ms| *ms == 100), "{polls:?}");
        // With GETSET, each of these polls would have overwritten the holder's value.
        assert_eq!(client.show("a").await["holders"][0]["token"], first.json["token"]);
        assert_eq!(client.release(&first.json).await.status, 200);
        assert_eq!(waiting.await.unwrap().status, 200);
    }

    /// Polls at random moments, so that no client is always a little too late.
    async fn S22_random_polls_end_after_10_s(kind: Kind) {
        let settings = "sleep = \"random\"\nmin_ms = 50\nmax_ms = 150\nwait_ms = 10000\nttl_ms = 60000";
        let proxy = proxy(&database(kind).await, "backoff", settings).await;
        let client = proxy.client();
        let held = client.acquire(json!({"resource": "a"})).await;
        let begun = Instant::now();
        let waiting = tokio::spawn({
            let client = proxy.client();
            async move { client.acquire(json!({"resource": "a"})).await }
        });
        let mut polls = Vec::new();
        eventually("it polls", async || {
            polls = sleeps_ms(&client, "a").await;
            polls.len() >= 6
        })
        .await;
        assert!(polls.iter().all(|ms| (50..=150).contains(ms)), "{polls:?}");
        assert!(polls.iter().any(|ms| *ms != polls[0]), "{polls:?}");
        let late = waiting.await.unwrap();
        assert_eq!((late.status, late.slug()), (409, "contended"), "{}", late.text);
        let took = begun.elapsed();
        assert!((Duration::from_secs(10)..Duration::from_secs(20)).contains(&took), "{took:?}");
        assert_eq!(client.renew(&held.json).await.status, 200, "the holder knows nothing of it");
    }

    async fn S23_only_the_right_lease_id_releases_and_the_expiry_is_set_with_the_lock(kind: Kind) {
        let url = database(kind).await;
        let mut proxy = proxy(&url, "default", "").await;
        let lease = proxy.client().lease("a", 1_000).await;
        // There is no moment between taking the lock and setting its expiry.
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

    async fn S27_waiters_are_served_in_order_with_one_wake_up_per_release(kind: Kind) {
        let proxy = proxy(&database(kind).await, "default", "reentrant = true\nwait_ms = 20000").await;
        let client = proxy.client();
        let (lines, _) = client.hold(&json!({"resource": "a", "owner": "first"})).await;
        let again = client.acquire(json!({"resource": "a", "owner": "first"})).await;
        assert_eq!((again.status, again.number("levels")), (200, 2), "{}", again.text);
        assert_eq!(client.release(&again.json).await.status, 200);
        let mut waiting = Vec::new();
        for n in 0..=CROWD {
            let waiter = proxy.client();
            let body = json!({"resource": "a", "owner": format!("w{n}")});
            waiting.push(tokio::spawn(async move { waiter.acquire(body).await }));
            client.until_queued("a", n + 1).await;
        }
        // A waiter whose session ends is gone and delays nobody.
        waiting.remove(1).abort();
        client.until_queued("a", CROWD).await;
        let (before, begun) = (operations(&proxy).await, Instant::now());
        drop(lines);
        let mut last = 0;
        for waiter in waiting {
            let lease = waiter.await.unwrap().json;
            assert!(lease["token"].as_u64().unwrap() > last, "{lease}");
            last = lease["token"].as_u64().unwrap();
            assert_eq!(client.release(&lease).await.status, 200);
        }
        assert_no_herd(operations(&proxy).await - before, begun.elapsed());
    }

    /// The resource is a table that refuses writes with a lower token than it has seen.
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
