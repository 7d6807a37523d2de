//! Tests of held connections: the lines that they carry, and the end of their leases.

use std::time::Instant;

use super::*;

/// A held connection.
struct Held {
    lines: BufReader<TcpStream>,
    begun: Instant,
}

/// A line of a held connection, and the time until which it lets the client be certain of its lock.
#[derive(Debug)]
struct Word {
    line: Value,
    until: Instant,
}

impl Proxy {
    async fn hold(&self, body: Value) -> Held {
        let begun = Instant::now();
        Held { lines: BufReader::new(self.send("POST", "/v1/hold", "", &body.to_string()).await), begun }
    }

    async fn acquire(&self, resource: &str, wait_ms: u32) -> Answer {
        self.post("/v1/acquire", json!({"resource": resource, "ttl_ms": 60_000, "wait_ms": wait_ms})).await
    }
}

impl Held {
    /// The next line; `None` at the end of the answer.
    async fn next(&mut self) -> Option<Word> {
        loop {
            let mut line = String::new();
            let read = tokio::time::timeout(Duration::from_secs(20), self.lines.read_line(&mut line)).await;
            if read.expect("a line, or the end").unwrap() == 0 {
                return None;
            }
            if line.starts_with('{') {
                let line: Value = serde_json::from_str(&line).unwrap();
                let ms = line["since_ms"].as_u64().unwrap() + line["expires_in_ms"].as_u64().unwrap();
                return Some(Word { until: self.begun + Duration::from_millis(ms), line });
            }
        }
    }

    async fn hears(&mut self, event: &str) -> Word {
        let word = self.next().await.expect("the stream goes on");
        assert_eq!(word.line["event"], event, "{}", word.line);
        word
    }

    /// The last line after the renewals.
    async fn hears_last(&mut self) -> Word {
        loop {
            let word = self.next().await.expect("a last word");
            if word.line["event"] != "renewed" {
                return word;
            }
        }
    }
}

/// A proxy that keeps no lease alive for longer than 300 ms.
fn short_holds() -> Proxy {
    start_on(&memory(), Limits { max_hold_ms: 300, ..Limits::default() })
}

#[tokio::test]
async fn a_hold_lasts_as_long_as_its_connection() {
    let proxy = start();
    let mut held = proxy.hold(json!({"resource": "held/é", "owner": "h", "ttl_ms": 600})).await;
    let granted = held.hears("granted").await.line;
    assert!(granted["lease_id"].is_string() && granted["token"].is_u64(), "{granted}");
    held.hears("renewed").await;
    let path = "/v1/locks/held%2F%C3%A9";
    assert_eq!(proxy.get(path).await.body["holders"][0]["owner"], "h");
    drop(held);
    proxy.until(path, |answer| answer.body["holders"].as_array().is_none_or(Vec::is_empty)).await;
}

/// The line is read late, as if a relay had delayed it. Its times count from the start of the request.
#[tokio::test]
async fn the_times_in_a_delayed_line_count_from_the_start_of_the_request() {
    let proxy = start();
    let first = proxy.post("/v1/acquire", json!({"resource": "r", "ttl_ms": 700})).await;
    assert_eq!(first.status, 200, "{}", first.body);
    let mut held = proxy.hold(json!({"resource": "r", "ttl_ms": 1_500, "wait_ms": 10_000})).await;
    let granted = held.hears("granted").await;
    assert!(granted.line["since_ms"].as_u64() >= Some(600), "it waited: {}", granted.line);
    // The first renewal is due after a third of the lease, and the second after another third.
    tokio::time::sleep(Duration::from_millis(900)).await;
    let renewed = held.hears("renewed").await;
    let (since, left) = (&renewed.line["since_ms"], &renewed.line["expires_in_ms"]);
    assert!(since.as_u64() >= Some(1_000) && left.as_u64() > Some(1_000), "{}", renewed.line);
    assert!(renewed.until < Instant::now() + Duration::from_millis(1_400), "it counts from when it is read");
}

#[tokio::test]
async fn a_hold_ended_by_the_proxy_stays_locked_while_its_holder_is_certain() {
    let proxy = short_holds();
    let mut held = proxy.hold(json!({"resource": "r", "ttl_ms": 1_800})).await;
    held.hears("granted").await;
    let lost = held.hears_last().await;
    assert_eq!(lost.line["event"], "lost", "{}", lost.line);
    assert!(lost.line["expires_in_ms"].as_u64() > Some(500), "{}", lost.line);
    assert_eq!(proxy.acquire("r", 0).await.body["type"], "contended");
    let next = proxy.acquire("r", 10_000).await;
    assert_eq!(next.status, 200, "{}", next.body);
    assert!(Instant::now() >= lost.until, "granted {:?} too early", lost.until - Instant::now());
    assert!(held.next().await.is_none(), "nothing follows `lost`");
}

#[tokio::test]
async fn closing_the_connection_after_lost_releases_the_lock_at_once() {
    let proxy = short_holds();
    let mut held = proxy.hold(json!({"resource": "r", "ttl_ms": 3_000})).await;
    held.hears("granted").await;
    let lost = held.hears_last().await;
    drop(held);
    assert_eq!(proxy.acquire("r", 1_500).await.status, 200, "it runs until {:?}", lost.until);
    assert!(Instant::now() < lost.until, "it was not waited for its end");
}

#[tokio::test]
async fn a_hold_continues_through_another_proxy_after_a_shutdown() {
    let memory = memory();
    let (one, other) = (start_on(&memory, Limits::default()), start_on(&memory, Limits::default()));
    let mut held = one.hold(json!({"resource": "r", "owner": "h", "ttl_ms": 2_000})).await;
    let granted = held.hears("granted").await.line;
    one.stop.cancel();
    let draining = held.hears_last().await;
    assert_eq!(
        (&draining.line["event"], &draining.line["lease_id"]),
        (&json!("draining"), &granted["lease_id"])
    );
    assert!(draining.line["expires_in_ms"].as_u64() > Some(0), "{}", draining.line);
    assert!(held.next().await.is_none(), "nothing follows `draining`");
    assert_eq!(other.acquire("r", 0).await.body["type"], "contended", "it is not released");
    let mut again = other.hold(json!({"lease_id": granted["lease_id"]})).await;
    let first = again.hears("granted").await.line;
    for same in ["lease_id", "resource", "keys", "owner", "mode", "token", "ttl_ms", "policy", "primitive"] {
        assert_eq!(first[same], granted[same], "{same}: {first}");
    }
    again.hears("renewed").await;
    again.hears("renewed").await;
    assert_eq!(other.acquire("r", 0).await.body["type"], "contended");
    drop(again);
    assert_eq!(other.acquire("r", 1_500).await.status, 200);
}

#[tokio::test]
async fn the_longest_hold_counts_from_the_grant_on_every_proxy() {
    let memory = memory();
    let limits = Limits { max_hold_ms: 1_500, ..Limits::default() };
    let (one, other) = (start_on(&memory, limits.clone()), start_on(&memory, limits));
    let mut held = one.hold(json!({"resource": "r", "ttl_ms": 900})).await;
    let granted = held.hears("granted").await.line;
    let since = Instant::now();
    tokio::time::sleep(Duration::from_millis(700)).await;
    one.stop.cancel();
    assert_eq!(held.hears_last().await.line["event"], "draining");
    let mut again = other.hold(json!({"lease_id": granted["lease_id"]})).await;
    again.hears("granted").await;
    let lost = again.hears_last().await;
    assert_eq!(lost.line["event"], "lost", "{}", lost.line);
    assert!(lost.until < since + Duration::from_millis(1_700), "it was held for longer: {lost:?}");
}

#[tokio::test]
async fn only_a_running_lease_can_be_held_again() {
    let proxy = start();
    let lease = proxy.post("/v1/acquire", json!({"resource": "r", "ttl_ms": 60_000})).await.body;
    let id = json!({"lease_id": lease["lease_id"]});
    let more = json!({"lease_id": lease["lease_id"], "ttl_ms": 1_000});
    assert_eq!(proxy.post("/v1/hold", more).await.body["field"], "ttl_ms");
    assert_eq!(proxy.post("/v1/release", id.clone()).await.status, 200);
    for gone in [id, json!({"lease_id": "nonsense"})] {
        let answer = proxy.post("/v1/hold", gone).await;
        assert_eq!((answer.status, &answer.body["type"]), (410, &json!("lost")), "{}", answer.body);
    }
}
