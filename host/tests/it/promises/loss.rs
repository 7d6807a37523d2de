//! Promise 3: no holder loses a lease without notice.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::harness::{Lines, Proxy, database, eventually, folder, fresh, own_server, signal};

on_both! {
    /// Promise 3: the time that a client is told ends before another client gets the lock.
    async fn expires_in_is_a_lower_bound(kind: Kind) {
        let url = database(kind).await;
        let (one, other) = (Proxy::start(&url).await, Proxy::start(&url).await);
        for _ in 0..5 {
            let resource = fresh("bound");
            let asked = Instant::now();
            let lease = one.client().lease(&resource, 300).await;
            let told = lease["expires_in_ms"].as_u64().unwrap();
            assert!((1..300).contains(&told), "{lease}");
            let renewed_at = Instant::now();
            let renewed = one.client().renew(&lease).await;
            let longer = renewed.number("expires_in_ms");
            assert!((1..300).contains(&longer), "{}", renewed.text);
            let certain = (asked + Duration::from_millis(told)).max(renewed_at + Duration::from_millis(longer));
            let next = other.client().acquire(json!({"resource": resource, "wait_ms": 5_000})).await;
            assert_eq!(next.status, 200, "{}", next.text);
            assert!(Instant::now() >= certain, "granted {:?} too early", certain - Instant::now());
        }
    }

    /// Promise 3: the time counts from before the store was asked, so a slow answer of the store makes it shorter.
    async fn a_slow_store_shortens_the_reported_time(kind: Kind) {
        let dir = folder();
        let server = own_server(kind, dir.path()).await;
        // Neither proxy remembers the row that it is asked for, so it asks the server and hangs with it.
        let (one, other) = (Proxy::start(server.url()).await, Proxy::start(server.url()).await);
        let (client, elsewhere) = (one.client(), other.client());
        let lease = client.lease(&fresh("slow"), 5_000).await;
        elsewhere.lease(&fresh("connected"), 5_000).await;
        let pid = server.pid().expect("the server runs");
        signal(pid, Signal::STOP);
        let renewal = tokio::spawn(async move { elsewhere.renew(&lease).await });
        let acquire = json!({"resource": fresh("slow"), "ttl_ms": 5_000});
        let acquire = tokio::spawn(async move { client.acquire(acquire).await });
        tokio::time::sleep(Duration::from_millis(900)).await;
        signal(pid, Signal::CONT);
        for answer in [acquire.await.unwrap(), renewal.await.unwrap()] {
            assert_eq!(answer.status, 200, "{}", answer.text);
            assert!(answer.number("expires_in_ms") <= 5_000 - 550, "{}", answer.text);
        }
        server.stop().await;
    }

    /// Promise 3: if the server hangs, a held connection is told `lost` while its lease still runs.
    async fn a_hold_is_reported_lost_before_its_lease_ends(kind: Kind) {
        let dir = folder();
        let server = own_server(kind, dir.path()).await;
        let proxy = Proxy::start(server.url()).await;
        let resource = fresh("held");
        let (mut lines, granted) = proxy.client().hold(&json!({"resource": resource, "ttl_ms": 1_500})).await;
        let mut certain = until(&granted);
        let renewed = lines.json().await.expect("a renewal");
        assert_eq!(renewed["event"], "renewed");
        certain = certain.max(until(&renewed));
        let pid = server.pid().expect("the server runs");
        signal(pid, Signal::STOP);
        let lost = until_lost(&mut lines, &mut certain).await;
        let now = Instant::now();
        assert!(now < certain, "told {:?} after its end: {lost}", now - certain);
        assert_eq!(lines.line().await, None, "nothing follows `lost`");
        signal(pid, Signal::CONT);
        eventually("the lock is free again", async || {
            proxy.client().acquire(json!({"resource": resource, "wait_ms": 500})).await.status == 200
        })
        .await;
        server.stop().await;
    }

    /// Promise 3, and the bad-input row for lease ids: a client that does not hold the lease gets 410, and the holder
    /// notices nothing.
    async fn only_the_holder_renews_and_releases(kind: Kind) {
        let proxy = Proxy::start(&database(kind).await).await;
        let (client, resource) = (proxy.client(), fresh("mine"));
        let first = client.lease(&resource, 10_000).await;
        assert_eq!(client.release(&first).await.status, 200);
        let lease = client.lease(&resource, 10_000).await;
        let other = client.lease(&fresh("other"), 10_000).await;
        let before = client.show(&resource).await["holders"].clone();
        for id in strangers(&lease, &other).into_iter().chain([first["lease_id"].clone()]) {
            for call in ["/v1/renew", "/v1/release"] {
                let answer = client.post(call, &json!({"lease_id": id})).await;
                assert_eq!((answer.status, answer.slug()), (410, "lost"), "{call} {id}: {}", answer.text);
            }
        }
        let mut after = client.show(&resource).await["holders"].clone();
        for passes in ["left_ms", "held_ms"] {
            after[0][passes] = before[0][passes].clone();
        }
        assert_eq!(after, before);
        assert_eq!(client.release(&lease).await.status, 200);
        assert_eq!(client.release(&other).await.status, 200);
    }

    /// Promise 3: an expired lease stays expired, whether or not another client has the lock by then.
    async fn an_expired_lease_is_lost(kind: Kind) {
        let proxy = Proxy::start(&database(kind).await).await;
        let (client, resource) = (proxy.client(), fresh("expired"));
        let lease = client.lease(&resource, 100).await;
        eventually("it expires", async || client.show(&resource).await["holders"] == json!([])).await;
        assert_eq!(client.renew(&lease).await.status, 410);
        assert_eq!(client.release(&lease).await.status, 410);
        // The key is kept back for as long as a step of the store's clock may go unnoticed.
        let next = client.acquire(json!({"resource": resource, "ttl_ms": 10_000, "wait_ms": 5_000})).await.json;
        assert_eq!(client.renew(&lease).await.status, 410);
        assert_eq!(client.release(&lease).await.status, 410);
        assert_eq!(client.renew(&next).await.status, 200);
    }
}

/// Until when the line that was just read lets its reader be certain.
fn until(line: &Value) -> Instant {
    Instant::now() + Duration::from_millis(line["expires_in_ms"].as_u64().unwrap_or_default())
}

async fn until_lost(lines: &mut Lines, certain: &mut Instant) -> Value {
    loop {
        let line = lines.json().await.expect("a line");
        match line["event"].as_str() {
            Some("renewed") => *certain = until(&line),
            _ => {
                assert_eq!(line["event"], "lost", "{line}");
                return line;
            }
        }
    }
}

/// Lease ids that are similar to an existing id, but different.
fn strangers(lease: &Value, other: &Value) -> Vec<Value> {
    let parts = |lease: &Value| -> Vec<String> {
        lease["lease_id"].as_str().expect("an id").splitn(3, '-').map(str::to_owned).collect()
    };
    let (mine, other) = (parts(lease), parts(other));
    let token: u64 = mine[0].parse().expect("a token");
    let (nonce, key) = (&mine[1], &mine[2]);
    let altered = if nonce.starts_with('0') { "1" } else { "0" };
    let ids = [
        format!("{}-{nonce}-{key}", token + 1),
        format!("{}-{nonce}-{key}", token - 1),
        format!("{token}-{altered}{}-{key}", &nonce[1..]),
        format!("{token}-{nonce}-{}", other[2]),
        format!("{token}-{nonce}-{key}.{}", other[2]),
        format!("{token}-{nonce}-{key}="),
        format!("{token}-{nonce}-"),
        format!("{token}-{nonce}"),
        format!("0{token}-{nonce}-{key}"),
        "nonsense".to_owned(),
        "\u{0}".to_owned(),
    ];
    ids.into_iter().map(Value::String).collect()
}
