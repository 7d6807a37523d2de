//! Notifications between proxies: a proxy of the store wakes a waiter, and a stranger wakes nobody and keeps no proxy
//! out.

use std::net::SocketAddr;
use std::time::Instant;

use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

use super::*;

const ORDERED: &str =
    "[policies.default]\npath = \"builtin:default\"\n[policies.default.settings]\nglobal_order = true\n";

/// More silent connections than a proxy has places for.
const SILENT: usize = 300;

async fn ordered(url: &str) -> Proxy {
    let proxy =
        Proxy::with(Settings { url: url.to_owned(), sections: ORDERED.to_owned(), ..Settings::default() })
            .await;
    proxy.until_ready().await;
    proxy
}

/// Where other proxies notify this one.
async fn peer_address(proxy: &Proxy) -> SocketAddr {
    let fleet = proxy.admin().get("/v1/fleet").await.json;
    let members = fleet["members"].as_array().expect("members");
    let this = members.iter().find(|member| member["is_this"] == true).expect("the proxy itself");
    this["address"].as_str().and_then(|address| address.parse().ok()).expect("an address")
}

fn waits(proxy: &Proxy, owner: usize) -> JoinHandle<Response> {
    let body = json!({"resource": "a", "owner": owner.to_string(), "wait_ms": 60_000, "ttl_ms": 60_000});
    waiting(&proxy.client(), body)
}

/// The frame that a proxy of an earlier version sends for the key `a`.
const UNPROVEN: &[u8] = &[0, 2, 0, b'a'];

/// Calls as a proxy of an earlier version, which checks the name alone.
async fn stranger(address: SocketAddr) -> BufReader<TcpStream> {
    let mut stream = BufReader::new(TcpStream::connect(address).await.expect("it accepts"));
    let mut name = Vec::new();
    stream.read_until(b'\n', &mut name).await.expect("its name");
    assert!(name.starts_with(address.to_string().as_bytes()), "{name:?}");
    stream
}

on_both! {
    async fn a_stranger_wakes_nobody_and_keeps_no_proxy_out(kind: Kind) {
        let url = database(kind).await;
        let (one, other) = (ordered(&url).await, ordered(&url).await);
        let mut held = one.client().lease("a", 60_000).await;
        let mut waiter = waits(&other, 0);
        other.client().until_queued("a", 1).await;
        let address = peer_address(&other).await;

        let asked = || other.metric("lockkeeper_store_batch_operations_sum", &[]);
        let notified = async |outcome: &str| {
            let label = format!("outcome=\"{outcome}\"");
            other.metric("lockkeeper_fleet_notifications_total", &[&label]).await
        };
        let before = asked().await;
        for _ in 0..50 {
            let mut stranger = stranger(address).await;
            stranger.write_all(&UNPROVEN.repeat(50)).await.expect("it is sent");
        }
        eventually("all were refused", async || notified("refused").await >= 50.0).await;
        assert_eq!(notified("woken").await, 0.0);
        let polls = asked().await - before;
        assert!(polls < 20.0, "the waiter asked {polls} times");

        // They stay, and the proxies of the store go on.
        let mut silent = Vec::new();
        for _ in 0..SILENT {
            silent.push(TcpStream::connect(address).await.expect("it accepts"));
        }
        let mut took = Vec::new();
        for n in 1..=8 {
            // A waiter that has just come asks the store several times, and might not need a notification.
            pause_ms(400).await;
            let begun = Instant::now();
            assert_eq!(one.client().release(&held).await.status, 200);
            let granted = waiter.await.unwrap();
            took.push(begun.elapsed());
            assert_eq!(granted.status, 200, "{}", granted.text);
            assert_eq!(other.client().release(&granted.json).await.status, 200);
            held = one.client().lease("a", 60_000).await;
            waiter = waits(&other, n);
            other.client().until_queued("a", 1).await;
            silent.push(TcpStream::connect(address).await.expect("it accepts"));
        }
        took.sort();
        assert!(took[took.len() / 2] < Duration::from_millis(500), "waiters polled: {took:?}");
        assert!(notified("woken").await >= 4.0, "{}", other.log());
        waiter.abort();
    }
}
