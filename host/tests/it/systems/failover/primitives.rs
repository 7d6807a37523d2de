//! What happens to the primitives other than leases when the primary is lost.

use super::*;
use crate::harness::{Client, Lines};

const PRIMITIVES: [&str; 4] = ["advisory", "row", "once", "version"];
/// A margin that is added if there are several servers, see ARCHITECTURE.md.
const MARGIN: Duration = Duration::from_secs(6);
const TTL_MS: u64 = 8_000;

/// A proxy that keeps each resource in the primitive that its name begins with.
async fn proxy_of_all(nodes: [&Node; 2]) -> Proxy {
    let url = nodes.map(Node::url).join(",");
    let builtin = "path = \"builtin:default\"";
    let mut sections = format!("[limits]\nmax_ttl_ms = {TTL_MS}\n[policies.default]\n{builtin}\n");
    for primitive in PRIMITIVES {
        sections.push_str(&format!(
            "[policies.{primitive}]\n{builtin}\nsettings = {{ primitive = \"{primitive}\" }}\n\
             [[routes]]\nresource = \"{primitive}/*\"\npolicy = \"{primitive}\"\n"
        ));
    }
    let proxy = Proxy::with(Settings { url, sections, ..Settings::default() }).await;
    proxy.until_ready().await;
    proxy
}

/// A lock on a session, and what its client hears.
struct Held {
    primitive: &'static str,
    lines: Lines,
    token: u64,
    /// A lock on another resource, whose client must ask, and what watchers hear of it.
    quiet: Value,
    events: Lines,
}

impl Held {
    async fn take(client: &Client, primitive: &'static str) -> Held {
        let body = json!({"resource": format!("{primitive}/held"), "ttl_ms": TTL_MS});
        let (lines, first) = client.hold(&body).await;
        assert_eq!(first["primitive"], primitive, "{first}");
        let quiet = client.lease(&format!("{primitive}/quiet"), TTL_MS as u32).await;
        let events = client.stream("GET", &format!("/v1/watch?prefix={primitive}/quiet"), "").await;
        Held { primitive, lines, token: first["token"].as_u64().expect("a token"), quiet, events }
    }

    async fn until_told(&mut self) {
        let told = loop {
            let line = self.lines.json().await.expect("the holder is told");
            if line["event"] != "renewed" {
                break line;
            }
        };
        assert_eq!(told["event"], "lost", "{told}");
        while !self.events.line().await.expect("watchers hear of it").contains("event: lost") {}
    }
}

/// Waits until the replica's row of a key is equal to its source's row.
async fn until_replicated(from: &Node, to: &Node, key: &str) {
    let row = format!("SELECT revision FROM lockkeeper.lockkeeper_lease WHERE k='{key}'");
    let there: u64 = from.root(&row).await[0].get(0).expect("a row");
    eventually(&format!("{key} is replicated"), async || {
        to.root(&row).await.first().and_then(|row| row.get::<u64, _>(0)) == Some(there)
    })
    .await;
}

async fn commit(client: &Client, version: &Value, n: u32) -> Response {
    let body = json!({"resource": "version/v", "version": version, "value": {"n": n}});
    client.post("/v1/versions/commit", &body).await
}

async fn read(client: &Client) -> Response {
    client.post("/v1/versions/read", &json!({"resource": "version/v"})).await
}

async fn begin(client: &Client, name: &str) -> Response {
    client.post("/v1/once/begin", &json!({"resource": format!("once/{name}"), "ttl_ms": TTL_MS})).await
}

async fn finish(client: &Client, begun: &Response, outcome: &str) {
    assert_eq!((begun.status, &begun.json["state"]), (200, &json!("first")), "{}", begun.text);
    let body = json!({"lease_id": begun.json["lease_id"], "outcome": outcome});
    let answer = client.post("/v1/once/finish", &body).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
}

/// The answer of every proxy while leases of the lost server may run.
fn assert_waits(answer: &Response) {
    assert_eq!((answer.status, answer.slug()), (409, "contended"), "{}", answer.text);
    assert!(answer.number("retry_after_ms") > 1_000, "{}", answer.text);
}

on_both! {
    /// Named locks and row locks end with their sessions. Their holders are told long before the end of their leases,
    /// and nobody gets the locks on the new server before a lease of the old server would have ended.
    async fn S17_session_locks_end_with_the_primary(kind: Kind) {
        let dir = folder();
        let (a, b) = pair(kind, dir.path()).await;
        let (one, other) = tokio::join!(proxy_of_all([&a, &b]), proxy_of_all([&a, &b]));
        let client = one.client();
        let mut held = [Held::take(&client, "advisory").await, Held::take(&client, "row").await];
        b.catch_up(&a).await;
        for held in &held {
            let body = json!({"resource": format!("{}/held", held.primitive)});
            assert_eq!(other.client().acquire(body).await.slug(), "contended");
        }

        let killed = Instant::now();
        a.kill();
        // The locks are renewed after a third of the lease; later than this limit they would expire by themselves.
        let limit = Duration::from_millis(TTL_MS / 3 * 2);
        for held in &mut held {
            let told = tokio::time::timeout_at((killed + limit).into(), held.until_told()).await;
            assert!(told.is_ok(), "nobody tells of {} within {limit:?}", held.primitive);
        }
        eprintln!("all are told {} ms after the kill", killed.elapsed().as_millis());

        let promoted = Instant::now();
        b.promote().await;
        until_used(&other, &b).await;
        for held in &held {
            let fresh = json!({"resource": format!("{}/fresh", held.primitive)});
            assert_waits(&other.client().acquire(fresh).await);
            let lost = client.renew(&held.quiet).await;
            assert_eq!((lost.status, lost.slug()), (410, "lost"), "{}", lost.text);
        }
        let next = held.iter().flat_map(|held| [(held, &one), (held, &other)]).map(|(held, proxy)| async move {
            let next = waited(proxy, &format!("{}/held", held.primitive), 100).await;
            assert_eq!(next.json["primitive"], held.primitive);
            assert!(next.number("token") > held.token, "{} after {}", next.text, held.token);
            promoted.elapsed()
        });
        for after in futures_util::future::join_all(next).await {
            eprintln!("granted {} ms after the promotion", after.as_millis());
            let wait = Duration::from_millis(TTL_MS) + MARGIN;
            assert!(after > wait - Duration::from_millis(50), "granted {after:?} after the promotion");
        }
    }

    /// Values that were replicated are still there, and a version that was lost is not issued again.
    async fn S17_replicated_values_survive_a_fail_over(kind: Kind) {
        let dir = folder();
        let (a, b) = pair(kind, dir.path()).await;
        let (one, other) = tokio::join!(proxy_of_all([&a, &b]), proxy_of_all([&a, &b]));
        let client = one.client();
        let first = commit(&client, &read(&client).await.json["version"], 1).await;
        assert_eq!(first.status, 200, "{}", first.text);
        finish(&client, &begin(&client, "kept").await, "paid").await;
        let running = begin(&client, "running").await;
        b.catch_up(&a).await;
        for key in ["version/v", "once/kept", "once/running"] {
            until_replicated(&a, &b, key).await;
        }
        b.stop_following().await;
        let second = commit(&client, &first.json["version"], 2).await;
        assert_eq!(second.status, 200, "{}", second.text);
        let gone = begin(&client, "gone").await;
        finish(&client, &gone, "paid").await;

        a.kill();
        b.promote().await;
        // Leases that run stay valid, through any proxy.
        let client = other.client();
        eventually("it is renewed", async || client.renew(&running.json).await.status == 200).await;
        finish(&client, &running, "late").await;
        for (name, outcome) in [("kept", "paid"), ("running", "late")] {
            let done = begin(&client, name).await;
            assert_eq!((&done.json["state"], &done.json["outcome"]), (&json!("done"), &json!(outcome)), "{}", done.text);
        }
        assert_waits(&begin(&client, "gone").await);

        let now = read(&client).await;
        assert_eq!((&now.json["value"], &now.json["version"]), (&json!({"n": 1}), &first.json["version"]));
        let stale = commit(&client, &second.json["version"], 3).await;
        assert_eq!((stale.status, stale.slug(), &stale.json["value"]), (409, "conflict", &json!({"n": 1})));
        let third = commit(&client, &now.json["version"], 3).await;
        assert_eq!(third.status, 200, "{}", third.text);
        assert!(third.number("version") > second.number("version"), "{} after {}", third.text, second.text);
        assert_eq!(read(&one.client()).await.json["value"], json!({"n": 3}));

        let mut again = begin(&client, "gone").await;
        let began = Instant::now();
        // A busy server may be unreachable for a moment, which is answered with 503.
        while again.status != 200 && began.elapsed() < Duration::from_secs(40) {
            tokio::time::sleep(Duration::from_millis(200)).await;
            again = begin(&client, "gone").await;
        }
        assert_eq!(again.status, 200, "{}", again.text);
        assert!(again.number("token") > gone.number("token"), "{} after {}", again.text, gone.text);
        finish(&client, &again, "paid").await;
    }
}
