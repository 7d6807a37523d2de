//! Optimistic versions and idempotency.

use futures_util::future::join_all;

use super::*;
use crate::harness::{Deadlocks, lockkeeper};

async fn begin(client: &Client, resource: &str, wait_ms: u32) -> crate::harness::Response {
    client.post("/v1/once/begin", &json!({"resource": resource, "wait_ms": wait_ms})).await
}

async fn finish(client: &Client, lease: &Value, outcome: Value) -> crate::harness::Response {
    client.post("/v1/once/finish", &json!({"lease_id": lease["lease_id"], "outcome": outcome})).await
}

/// The stock and its version.
async fn read(client: &Client) -> Value {
    let read = client.post("/v1/versions/read", &json!({"resource": "stock/17"})).await;
    assert_eq!(read.status, 200, "{}", read.text);
    read.json
}

async fn commit(client: &Client, version: &Value, left: u64) -> crate::harness::Response {
    let commit = json!({"resource": "stock/17", "version": version, "value": {"left": left}});
    client.post("/v1/versions/commit", &commit).await
}

/// Sells one piece after another until none is left. Returns how many it sold.
async fn sell(client: Client) -> u64 {
    let mut sold = 0;
    loop {
        let seen = read(&client).await;
        let left = seen["value"]["left"].as_u64().expect("the stock");
        if left == 0 {
            return sold;
        }
        let answer = commit(&client, &seen["version"], left - 1).await;
        match answer.status {
            200 => sold += 1,
            _ => assert_eq!((answer.status, answer.slug()), (409, "conflict"), "{}", answer.text),
        }
    }
}

/// A proxy remembers a row as it left it, but a later commit through the other proxy still counts.
async fn leave_each_other_behind(one: &Client, other: &Client) {
    let mut seen = read(one).await["version"].clone();
    for n in 0..8 {
        let (first, late) = if n % 2 == 0 { (one, other) } else { (other, one) };
        let made = commit(first, &seen, 100).await;
        assert_eq!(made.status, 200, "{}", made.text);
        let late = commit(late, &seen, 100).await;
        assert_eq!((late.status, &late.json["version"]), (409, &made.json["version"]), "{}", late.text);
        seen = made.json["version"].clone();
    }
}

on_both! {
    /// On two proxies.
    async fn S3_one_of_several_readers_of_a_version_commits(kind: Kind) {
        let url = database(kind).await;
        let settings = "primitive = \"version\"";
        let (one, other) = (proxy(&url, "default", settings).await, proxy(&url, "default", settings).await);
        let either = |n: usize| if n.is_multiple_of(2) { one.client() } else { other.client() };
        // First without a row, then with one.
        for _ in 0..2 {
            let start = read(&one.client()).await;
            assert_eq!(read(&other.client()).await, start);
            let racers = join_all((0..8).map(|n| {
                let (client, version) = (either(n), start["version"].clone());
                async move { commit(&client, &version, 100).await.status }
            }));
            let won = racers.await.into_iter().filter(|status| *status == 200).count();
            assert_eq!(won, 1);
            for client in [one.client(), other.client()] {
                let late = commit(&client, &start["version"], 100).await;
                assert_eq!((late.status, late.slug()), (409, "conflict"));
                assert_eq!(late.json["value"], json!({"left": 100}), "a conflict says what is there by now");
            }
        }

        leave_each_other_behind(&one.client(), &other.client()).await;

        let sold = join_all((0..16).map(|n| sell(either(n)))).await;
        assert_eq!(sold.iter().sum::<u64>(), 100, "{sold:?}");
        let end = read(&one.client()).await;
        assert_eq!((&end["value"], &end), (&json!({"left": 0}), &read(&other.client()).await));

        // A request is repeated because its answer was lost, the second time through another proxy.
        let delivery = json!({
            "resource": "stock/17", "version": end["version"], "value": {"left": 50}, "request_id": "delivery",
        });
        let once = one.client().post("/v1/versions/commit", &delivery).await;
        let again = other.client().post("/v1/versions/commit", &delivery).await;
        assert_eq!((once.status, &once.json), (200, &again.json), "{}", again.text);
        assert_eq!(read(&other.client()).await["version"], once.json["version"], "it was made once");
        let refused = other.client().acquire(json!({"resource": "stock/17"})).await;
        assert_eq!((refused.status, refused.slug()), (400, "invalid"), "{}", refused.text);
        assert!(refused.text.contains("/v1/versions/read"), "{}", refused.text);
    }

    /// A version that was read before a proxy was killed can be committed through the restarted proxy, unless another
    /// client has committed meanwhile.
    async fn S3_versions_outlive_their_proxy(kind: Kind) {
        let url = database(kind).await;
        let settings = "primitive = \"version\"";
        let (mut one, other) = (proxy(&url, "default", settings).await, proxy(&url, "default", settings).await);
        let start = read(&one.client()).await;
        // As if rows of other keys had been cleaned up.
        sql(&url, "UPDATE lockkeeper_meta SET floor=floor+1 WHERE id=1").await;
        one.kill();
        one = proxy(&url, "default", settings).await;
        let first = commit(&one.client(), &start["version"], 1).await;
        assert_eq!(first.status, 200, "{}", first.text);
        let late = commit(&other.client(), &start["version"], 9).await;
        assert_eq!((late.status, &late.json["value"]), (409, &json!({"left": 1})), "{}", late.text);

        let seen = read(&one.client()).await;
        one.kill();
        let second = commit(&other.client(), &seen["version"], 2).await;
        assert_eq!(second.status, 200, "{}", second.text);
        one = proxy(&url, "default", settings).await;
        let late = commit(&one.client(), &seen["version"], 9).await;
        assert_eq!((late.status, &late.json["value"]), (409, &json!({"left": 2})), "{}", late.text);
        assert_eq!(late.json["version"], second.json["version"]);
        let third = commit(&one.client(), &second.json["version"], 3).await;
        assert!(third.number("version") > second.number("version"), "{}", third.text);
        assert_eq!(read(&other.client()).await["value"], json!({"left": 3}));
    }

    async fn S29_one_of_many_submissions_runs_and_the_others_get_its_outcome(kind: Kind) {
        let dir = folder();
        let server = own_server(kind, dir.path()).await;
        let settings = "primitive = \"once\"\nkeep_ms = 2000";
        let other = proxy(server.url(), "default", settings).await;
        let proxy = proxy(server.url(), "default", settings).await;
        proxy.until_ready().await;
        other.until_ready().await;
        let deadlocks = Deadlocks::from_now(server.url()).await;
        for order in 0..4 {
            let resource = format!("orders/{order}");
            let submits = join_all((0..64).map(|n| {
                let proxy = if n % 2 == 0 { &proxy } else { &other };
                let (client, resource) = (proxy.client(), resource.clone());
                async move {
                    let begun = begin(&client, &resource, 20_000).await;
                    assert_eq!(begun.status, 200, "{}", begun.text);
                    if begun.json["state"] == "done" {
                        return (false, begun.json["outcome"].clone());
                    }
                    let outcome = json!({"payment": format!("p-{}", begun.number("token"))});
                    assert_eq!(finish(&client, &begun.json, outcome.clone()).await.status, 200);
                    (true, outcome)
                }
            }));
            let answers = submits.await;
            assert_eq!(answers.iter().filter(|(ran, _)| *ran).count(), 1);
            assert!(answers.iter().all(|(_, outcome)| *outcome == answers[0].1), "{answers:?}");
        }
        deadlocks.expect(0).await;

        // Records are deleted after their time.
        let client = proxy.client();
        assert_eq!(begin(&client, "orders/0", 0).await.json["state"], "done");
        eventually("the outcome is forgotten", async || {
            let begun = begin(&client, "orders/0", 0).await;
            begun.json["state"] == "first"
        })
        .await;
    }

    async fn S29_a_runner_that_dies_lets_another_runner_start(kind: Kind) {
        let proxy = proxy(&database(kind).await, "default", "primitive = \"once\"\nttl_ms = 1000").await;
        let client = proxy.client();
        let first = begin(&client, "o", 0).await;
        assert_eq!(first.json["state"], "first");
        let busy = begin(&client, "o", 0).await;
        assert_eq!((busy.status, busy.slug(), &busy.json["state"]), (409, "contended", &json!("in_progress")));
        let second = begin(&client, "o", 5_000).await;
        assert_eq!((second.status, &second.json["state"]), (200, &json!("first")), "{}", second.text);
        assert!(second.number("token") > first.number("token"));
        let late = finish(&client, &first.json, json!(1)).await;
        assert_eq!((late.status, late.slug()), (410, "lost"));
        assert_eq!(finish(&client, &second.json, json!({"n": [1, "ü"]})).await.status, 200);
        assert_eq!(finish(&client, &second.json, json!(3)).await.status, 200, "it may be repeated");
        let done = begin(&client, "o", 0).await;
        assert_eq!(done.json["outcome"], json!({"n": [1, "ü"]}));
        let shared = client.post("/v1/once/begin", &json!({"resource": "o", "mode": "shared"})).await;
        assert_eq!((shared.status, &shared.json["field"]), (400, &json!("mode")), "{}", shared.text);
        let large = begin(&client, "large", 0).await;
        let refused = finish(&client, &large.json, "x".repeat(20_000).into()).await;
        assert_eq!((refused.status, &refused.json["field"]), (400, &json!("outcome")), "{}", refused.text);
        assert_eq!(client.release(&large.json).await.status, 200, "given up without an outcome");
        assert_eq!(begin(&client, "large", 0).await.json["state"], "first");
    }

    /// Every proxy knows who works, even after a crash, and also knows the outcome.
    async fn S29_the_state_of_a_once_outlives_its_proxy(kind: Kind) {
        let url = database(kind).await;
        let settings = "primitive = \"once\"\nttl_ms = 60000";
        let (mut one, other) = (proxy(&url, "default", settings).await, proxy(&url, "default", settings).await);
        let first = begin(&one.client(), "o", 0).await;
        assert_eq!(first.json["state"], "first", "{}", first.text);
        one.kill();
        let busy = begin(&other.client(), "o", 0).await;
        assert_eq!((busy.status, &busy.json["state"]), (409, &json!("in_progress")), "{}", busy.text);
        one = proxy(&url, "default", settings).await;
        let busy = begin(&one.client(), "o", 0).await;
        assert_eq!((busy.status, &busy.json["state"]), (409, &json!("in_progress")), "{}", busy.text);
        let waits = tokio::spawn({
            let client = one.client();
            async move { begin(&client, "o", 30_000).await }
        });
        one.client().until_queued("o", 1).await;
        assert_eq!(other.client().renew(&first.json).await.status, 200);
        assert_eq!(finish(&other.client(), &first.json, json!("sent")).await.status, 200);
        let told = waits.await.unwrap();
        assert_eq!((&told.json["state"], &told.json["outcome"]), (&json!("done"), &json!("sent")), "{}", told.text);
        one.kill();
        one = proxy(&url, "default", settings).await;
        for client in [one.client(), other.client()] {
            let done = begin(&client, "o", 0).await;
            assert_eq!((&done.json["state"], &done.json["outcome"]), (&json!("done"), &json!("sent")), "{}", done.text);
        }
        assert_eq!(finish(&one.client(), &first.json, json!("again")).await.status, 200, "it may be repeated");
        assert_eq!(begin(&other.client(), "o", 0).await.json["outcome"], "sent");
    }

    async fn S29_a_command_runs_once(kind: Kind) {
        let proxy = proxy(&database(kind).await, "default", "primitive = \"once\"\nwait_ms = 20000").await;
        proxy.until_ready().await;
        let dir = folder();
        let trace = dir.path().join("trace");
        let api = format!("http://{}", proxy.api_address());
        let once_of = |resource: &str, script: &str| {
            let mut command = lockkeeper();
            command.args(["--server", &api, "once", resource, "--", "sh", "-c", script]).env("TRACE", &trace);
            tokio::task::spawn_blocking(move || command.output().expect("the command runs"))
        };
        let once = |script: &str| once_of("invoices", script);
        let failed = once("echo x >> $TRACE; exit 7").await.unwrap();
        assert_eq!(failed.status.code(), Some(7));
        let runs = join_all((0..6).map(|_| once("echo x >> $TRACE; sleep 0.3; echo sent 12"))).await;
        for run in runs {
            let run = run.unwrap();
            assert_eq!((run.status.code(), &*run.stdout), (Some(0), &b"sent 12\n"[..]), "{run:?}");
        }
        let lines = || std::fs::read_to_string(&trace).unwrap().lines().count();
        assert_eq!(lines(), 2, "one that failed, and one that did not");

        // Binary output is longer as JSON than its number of bytes, which limits the outcome.
        for kept in ["everything", "the beginning"] {
            let run = once_of("binary", "echo x >> $TRACE; head -c 9000 /dev/zero").await.unwrap();
            let complains = String::from_utf8_lossy(&run.stderr).contains("only the beginning");
            assert_eq!((run.status.code(), complains), (Some(0), kept == "the beginning"), "{run:?}");
            assert_eq!(run.stdout.len() == 9_000, kept == "everything");
        }
        assert_eq!(lines(), 3, "the second call is answered with the first one's outcome");
    }
}
