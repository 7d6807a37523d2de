//! Tests of the API from its socket to an in-memory store, with the built-in policy.

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

use super::*;
use crate::audit::Audit;
use crate::auth::{Auth, Guesses};
use crate::config::{Config, EngineLimits};
use crate::fronts::Access;
use crate::http;
use crate::net;
use crate::policy::{Compiler, Engine, Policies};
use crate::recording::Recorder;
use crate::service::{NoPeers, Parts};
use crate::store::memory::Memory;
use crate::telemetry::Metrics;

mod holds;

struct Proxy {
    address: SocketAddr,
    stop: CancellationToken,
}

fn start() -> Proxy {
    start_on(&memory(), Limits::default())
}

fn memory() -> Memory {
    Memory::new(Duration::from_secs(60))
}

/// Starts one of several proxies that share a store.
fn start_on(memory: &Memory, limits: Limits) -> Proxy {
    let config = Config::default();
    let metrics = Metrics::default();
    let engine = Engine::new(&EngineLimits::default(), Compiler::InProcess).unwrap();
    let policies = Policies::load(&engine, &config.policies, &limits, &metrics).unwrap();
    let service = Service::start(Parts {
        peers: Arc::new(NoPeers),
        store: Arc::new(memory.store()),
        policies,
        routes: Vec::new(),
        limits: limits.clone(),
        store_timeout_ms: 2_000,
        metrics: metrics.clone(),
        recorder: Recorder::off(),
    });
    let stop = CancellationToken::new();
    let access = Access {
        http: config.http.clone(),
        auth: Auth::off(),
        guesses: Guesses::new(None),
        audit: Audit::off(),
        metrics: metrics.clone(),
    };
    let api = Api::new(service, limits, access, stop.clone());
    let listener = net::Listener::bind(&"127.0.0.1:0".parse().unwrap()).unwrap();
    let address = listener.address().unwrap().to_string().parse().unwrap();
    tokio::spawn(http::serve(listener, api, config.http, metrics, stop.clone()));
    Proxy { address, stop }
}

struct Answer {
    status: u16,
    head: String,
    body: Value,
}

impl Proxy {
    async fn send(&self, method: &str, path: &str, headers: &str, body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{headers}content-length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(request.as_bytes()).await.unwrap();
        stream
    }

    async fn call(&self, method: &str, path: &str, headers: &str, body: &str) -> Answer {
        let mut text = String::new();
        self.send(method, path, headers, body).await.read_to_string(&mut text).await.unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        Answer { status, head: head.to_owned(), body: serde_json::from_str(body).unwrap() }
    }

    async fn post(&self, path: &str, body: Value) -> Answer {
        self.call("POST", path, "content-type: application/json\r\n", &body.to_string()).await
    }

    async fn get(&self, path: &str) -> Answer {
        self.call("GET", path, "", "").await
    }

    /// Repeats `GET path` until `is` accepts the answer.
    async fn until(&self, path: &str, is: impl Fn(&Answer) -> bool) -> Answer {
        for _ in 0..200 {
            let answer = self.get(path).await;
            if is(&answer) {
                return answer;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("{path} did not become as expected: {}", self.get(path).await.body);
    }
}

#[tokio::test]
async fn a_lease_is_granted_renewed_and_released_once() {
    let proxy = start();
    let grant =
        proxy.post("/v1/acquire", json!({"resource": "orders/42", "owner": "w", "ttl_ms": 5000})).await;
    assert_eq!(grant.status, 200, "{}", grant.body);
    assert_eq!((&grant.body["resource"], &grant.body["owner"]), (&json!("orders/42"), &json!("w")));
    assert_eq!((&grant.body["mode"], &grant.body["ttl_ms"]), (&json!("exclusive"), &json!(5000)));
    assert!((4_000..5_000).contains(&grant.body["expires_in_ms"].as_u64().unwrap()), "{}", grant.body);
    let id = json!({"lease_id": grant.body["lease_id"]});

    let refused = proxy.post("/v1/acquire", json!({"resource": "orders/42", "wait_ms": 0})).await;
    assert_eq!((refused.status, &refused.body["type"]), (409, &json!("contended")), "{}", refused.body);
    assert_eq!(refused.body["holder"]["owner"], "w");
    assert!(refused.head.contains("retry-after: "), "{}", refused.head);

    let renewed = proxy.post("/v1/renew", id.clone()).await;
    assert_eq!(renewed.status, 200, "{}", renewed.body);
    assert!(renewed.body["expires_in_ms"].as_u64().unwrap() > 4_000, "{}", renewed.body);

    assert_eq!(proxy.post("/v1/release", id.clone()).await.status, 200);
    for path in ["/v1/release", "/v1/renew"] {
        let again = proxy.post(path, id.clone()).await;
        assert_eq!((again.status, &again.body["type"]), (410, &json!("lost")), "{}", again.body);
    }
}

#[tokio::test]
async fn an_unknown_lease_id_is_answered_as_lost() {
    let proxy = start();
    for (id, status) in
        [("nonsense".to_owned(), 410), ("17-00000000000000ab-aw".to_owned(), 410), ("x".repeat(33_000), 400)]
    {
        assert_eq!(proxy.post("/v1/release", json!({"lease_id": id})).await.status, status);
    }
    assert_eq!(proxy.post("/v1/release", json!({})).await.body["field"], "lease_id");
}

#[tokio::test]
async fn a_waiter_that_goes_away_leaves_the_queue() {
    let proxy = start();
    let grant = proxy.post("/v1/acquire", json!({"resource": "r", "ttl_ms": 60_000})).await;
    let wait = json!({"resource": "r", "owner": "waiter", "wait_ms": 60_000}).to_string();
    let waiter = proxy.send("POST", "/v1/acquire", "", &wait).await;
    let queued = |length: usize| {
        move |answer: &Answer| answer.body["queue"].as_array().is_some_and(|q| q.len() == length)
    };
    let shown = proxy.until("/v1/locks/r", queued(1)).await;
    assert_eq!(shown.body["queue"][0]["owner"], "waiter");
    assert_eq!(shown.body["queue"][0]["position"], 1);
    drop(waiter);
    proxy.until("/v1/locks/r", queued(0)).await;
    assert_eq!(proxy.post("/v1/release", json!({"lease_id": grant.body["lease_id"]})).await.status, 200);
}

#[tokio::test]
async fn watchers_see_the_grants_and_releases_under_their_prefix() {
    let proxy = start();
    let mut lines = BufReader::new(proxy.send("GET", "/v1/watch?prefix=a%2F", "", "").await).lines();
    while !lines.next_line().await.unwrap().unwrap().contains(": watching") {}
    for resource in ["b/1", "a/1"] {
        let grant = proxy.post("/v1/acquire", json!({"resource": resource, "owner": "w"})).await;
        proxy.post("/v1/release", json!({"lease_id": grant.body["lease_id"]})).await;
    }
    let mut events = Vec::new();
    while events.len() < 2 {
        let line =
            tokio::time::timeout(Duration::from_secs(5), lines.next_line()).await.unwrap().unwrap().unwrap();
        if let Some(data) = line.strip_prefix("data: ") {
            events.push(serde_json::from_str::<Value>(data).unwrap());
        }
    }
    let seen: Vec<_> = events.iter().map(|event| (&event["event"], &event["key"])).collect();
    assert_eq!(seen, [(&json!("granted"), &json!("a/1")), (&json!("released"), &json!("a/1"))]);
}

#[tokio::test]
async fn lists_have_pages() {
    let proxy = start();
    for n in 0..5 {
        assert_eq!(proxy.post("/v1/acquire", json!({"resource": format!("p/{n}")})).await.status, 200);
    }
    let first = proxy.get("/v1/locks?prefix=p/&limit=3").await.body;
    assert_eq!(
        (first["locks"].as_array().unwrap().len(), &first["more"], &first["next"]),
        (3, &json!(true), &json!("p/2"))
    );
    let second = proxy.get("/v1/locks?prefix=p/&limit=3&after=p/2").await.body;
    assert_eq!((second["locks"].as_array().unwrap().len(), &second["more"]), (2, &json!(false)));
    assert_eq!(second["locks"][1]["key"], "p/4");
    assert_eq!(proxy.get("/v1/locks?limit=0").await.body["field"], "limit");
    assert_eq!(proxy.get("/v1/locks/nothing").await.status, 404);
}

#[tokio::test]
async fn an_unsupported_request_gets_the_matching_problem() {
    let proxy = start();
    for (method, path, headers, status, slug) in [
        ("GET", "/", "", 404, "not_found"),
        ("POST", "/v1/twice/begin", "", 404, "not_found"),
        ("GET", "/v1/acquire", "", 405, "method_not_allowed"),
        ("POST", "/v1/locks", "", 405, "method_not_allowed"),
        ("POST", "/v1/acquire", "content-type: text/plain\r\n", 415, "unsupported_media_type"),
        ("POST", "/v1/acquire", "", 400, "invalid"),
        ("GET", "/v1/locks/%ff", "", 400, "invalid"),
    ] {
        let answer = proxy.call(method, path, headers, "").await;
        assert_eq!((answer.status, answer.body["type"].as_str()), (status, Some(slug)), "{method} {path}");
        assert_eq!(answer.head.contains("\r\nallow: "), status == 405, "{}", answer.head);
    }
}
