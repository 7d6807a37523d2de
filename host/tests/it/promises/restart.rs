//! A rolling restart of a fleet under load loses no lock, grants none twice, and fails no call that may be repeated.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::harness::{
    Client, Ledger, Lines, Noted, Proxy, Response, Settings, Upstream, database, fresh, within,
};

/// The number of holders of each kind, and of waiters.
const CROWD: usize = 200;
/// The number of holders of locks that end with their proxy.
const SESSIONS: usize = 20;
const PROXIES: usize = 3;
const TTL_MS: u32 = 20_000;
/// The longest pause between two renewals.
const PAUSE_MS: u64 = 5_000;
/// How long a call is repeated: longer than the restart of a proxy.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long a waiter waits for its holder: longer than the test.
const LONGEST_WAIT_MS: u64 = 120_000;
/// The limit for every call.
const LONGEST_CALL: Duration = Duration::from_millis(LONGEST_WAIT_MS + 30_000);

/// The clients, with their shared state.
struct Crowd {
    /// For each proxy, clients of the API and of the guarded listener.
    proxies: Mutex<Vec<(Client, Client)>>,
    ledger: Ledger,
    /// The number of guarded requests that were answered.
    answered: AtomicUsize,
    /// The number of held connections that were resumed on another proxy.
    moved: AtomicUsize,
    /// The number of calls that were told to ask another proxy.
    turned_away: AtomicUsize,
    over: CancellationToken,
}

impl Crowd {
    fn any(&self) -> (Client, Client) {
        self.proxies.lock().unwrap()[rand::random_range(0..PROXIES)].clone()
    }

    fn set(&self, n: usize, proxy: &Proxy) {
        self.proxies.lock().unwrap()[n] = (proxy.client(), proxy.guarded());
    }

    /// Records a grant that was just answered. No proxy is killed here, so the ledger need not know the proxy.
    fn noted(&self, resource: &str, by: &str, asked: Instant, granted: &Response) -> Noted {
        self.ledger.granted(resource, by, asked, self.any().0.address(), granted)
    }

    /// Makes a call through any proxy. Goes to another proxy if that one stops, or has no answer from the store
    /// because the server is slow. Returns the start of the call that was answered, and its answer.
    async fn call(&self, path: &str, body: &Value) -> (Instant, Response) {
        let began = Instant::now();
        while began.elapsed() < PATIENCE {
            let asked = Instant::now();
            let answer = in_time(body, self.any().0.try_send("POST", path, body.to_string())).await;
            match answer.as_ref().map(Response::slug) {
                Some("shutting_down") => drop(self.turned_away.fetch_add(1, Ordering::Relaxed)),
                Some("store_unavailable") | None => {}
                Some(_) => return (asked, answer.expect("it has a slug")),
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        panic!("{path} {body}: not answered within {PATIENCE:?}");
    }

    /// Waits for a while. Returns false if the test is over.
    async fn goes_on(&self) -> bool {
        let pause = Duration::from_millis(rand::random_range(PAUSE_MS / 2..PAUSE_MS));
        tokio::time::timeout(pause, self.over.cancelled()).await.is_err()
    }

    async fn renews(&self, lease: &Value, noted: &Noted) {
        let (asked, renewed) = self.call("/v1/renew", &json!({"lease_id": lease["lease_id"]})).await;
        assert_eq!(renewed.status, 200, "{lease}: {}", renewed.text);
        assert!(Instant::now() < self.ledger.until(noted), "{lease} was renewed too late");
        self.ledger.renewed(noted, asked, &renewed);
    }

    /// A lease that is renewed through any proxy, and a waiter that gets it at the end.
    async fn leases(self: Arc<Crowd>, n: usize) {
        let body = json!({"resource": format!("lease/{n}"), "ttl_ms": TTL_MS, "request_id": fresh("lease")});
        let (asked, granted) = self.call("/v1/acquire", &body).await;
        assert_eq!(granted.status, 200, "{}", granted.text);
        let by = format!("holder {n}");
        let noted = self.noted(&format!("lease/{n}"), &by, asked, &granted);
        let waiter = tokio::spawn(self.clone().waits(n));
        while self.goes_on().await {
            self.renews(&granted.json, &noted).await;
        }
        self.ledger.ended(&noted);
        let (_, released) = self.call("/v1/release", &json!({"lease_id": granted.json["lease_id"]})).await;
        assert_eq!(released.status, 200, "{}", released.text);
        waiter.await.expect("a waiter");
    }

    async fn waits(self: Arc<Crowd>, n: usize) {
        let resource = format!("lease/{n}");
        let body = json!({"resource": resource, "ttl_ms": TTL_MS, "wait_ms": LONGEST_WAIT_MS, "request_id": fresh("waits")});
        let (asked, granted) = self.call("/v1/acquire", &body).await;
        assert_eq!(granted.status, 200, "{}", granted.text);
        assert!(self.over.is_cancelled(), "its holder has not released {resource}");
        let noted = self.noted(&resource, &format!("waiter {n}"), asked, &granted);
        self.ledger.ended(&noted);
        let (_, released) = self.call("/v1/release", &json!({"lease_id": granted.json["lease_id"]})).await;
        assert_eq!(released.status, 200, "{}", released.text);
    }

    /// Work that is done once and takes as long as the test.
    async fn once(self: Arc<Crowd>, n: usize) {
        let resource = format!("once/{n}");
        let body = json!({"resource": resource, "ttl_ms": TTL_MS, "request_id": fresh("once")});
        let (asked, begun) = self.call("/v1/once/begin", &body).await;
        assert_eq!(begun.json["state"], "first", "{}", begun.text);
        let noted = self.noted(&resource, &format!("first {n}"), asked, &begun);
        while self.goes_on().await {
            self.renews(&begun.json, &noted).await;
        }
        self.ledger.ended(&noted);
        let finish = json!({"lease_id": begun.json["lease_id"], "outcome": n});
        let (_, finished) = self.call("/v1/once/finish", &finish).await;
        assert_eq!(finished.status, 200, "{}", finished.text);
        let (_, again) = self.call("/v1/once/begin", &json!({"resource": resource})).await;
        assert_eq!(
            (&again.json["state"], &again.json["outcome"]),
            (&json!("done"), &json!(n)),
            "{}",
            again.text
        );
    }

    /// A held connection that is resumed on another proxy when its own proxy stops.
    async fn holds(self: Arc<Crowd>, n: usize) {
        let resource = format!("held/{n}");
        let body = json!({"resource": resource, "ttl_ms": TTL_MS, "request_id": fresh("holds")});
        let (mut held, granted) = self.hold(&body).await;
        let noted = self.noted(&resource, &format!("connection {n}"), held.began, &as_answer(&granted));
        loop {
            let line = tokio::select! {
                line = held.lines.json() => line.unwrap_or_else(|| panic!("{granted}: ended without a word")),
                () = self.over.cancelled() => break,
            };
            self.ledger.renewed(&noted, held.since(&line), &as_answer(&line));
            if line["event"] == "renewed" {
                continue;
            }
            assert_eq!(
                (&line["event"], &line["lease_id"]),
                (&json!("draining"), &granted["lease_id"]),
                "{line}"
            );
            let (next, again) = self.hold(&json!({"lease_id": line["lease_id"]})).await;
            assert_eq!((&again["lease_id"], &again["token"]), (&granted["lease_id"], &granted["token"]));
            assert!(Instant::now() < self.ledger.until(&noted), "{again} goes on too late");
            held = next;
            self.ledger.renewed(&noted, held.since(&again), &as_answer(&again));
            self.moved.fetch_add(1, Ordering::Relaxed);
        }
        self.ledger.ended(&noted);
    }

    async fn hold(&self, body: &Value) -> (Held, Value) {
        let first = Instant::now();
        while first.elapsed() < PATIENCE {
            let began = Instant::now();
            let stream = self.any().0;
            let stream = in_time(body, stream.try_stream("POST", "/v1/hold", body.to_string()));
            if let Some(mut lines) = stream.await
                && let Some(line) = in_time(body, lines.json()).await
                && line["type"] != "shutting_down"
                && line["type"] != "store_unavailable"
            {
                assert_eq!(line["event"], "granted", "{body}: {line}");
                return (Held { lines, began }, line);
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        panic!("{body}: not held within {PATIENCE:?}");
    }

    /// A lock that ends with its proxy. Its holder is told in time, and acquires it again.
    async fn rests(self: Arc<Crowd>, n: usize) {
        let resource = format!("advisory/{n}");
        while !self.over.is_cancelled() {
            let id = fresh("rests");
            let body = json!({"resource": resource, "ttl_ms": TTL_MS, "wait_ms": 30_000, "request_id": id});
            let (mut held, granted) = self.hold(&body).await;
            let by = format!("session {n}");
            let noted = self.noted(&resource, &by, held.began, &as_answer(&granted));
            loop {
                let line = tokio::select! {
                    line = held.lines.json() => line.unwrap_or_else(|| panic!("{granted}: ended without a word")),
                    () = self.over.cancelled() => break,
                };
                self.ledger.renewed(&noted, held.since(&line), &as_answer(&line));
                if line["event"] != "renewed" {
                    assert_eq!(line["event"], "lost", "{line}");
                    break;
                }
            }
            self.ledger.ended(&noted);
        }
    }

    /// Requests to an application that takes some time for each of them.
    async fn requests(self: Arc<Crowd>, n: usize) {
        while !self.over.is_cancelled() {
            // A request that was not let in may be sent again.
            let path = format!("/task/{n}?ms=700");
            if let Some(answer) = in_time(&path, self.any().1.try_send("GET", &path, "")).await
                && !["shutting_down", "store_unavailable"].contains(&answer.slug())
            {
                assert_eq!((answer.status, &*answer.text), (200, "done"));
                self.answered.fetch_add(1, Ordering::Relaxed);
            }
            tokio::time::sleep(Duration::from_millis(rand::random_range(500..2_000))).await;
        }
    }
}

/// The result of a call, which must end in time.
async fn in_time<T>(call: &impl std::fmt::Display, work: impl Future<Output = T>) -> T {
    let done = tokio::time::timeout(LONGEST_CALL, work).await;
    done.unwrap_or_else(|_| panic!("no answer within {LONGEST_CALL:?}: {call}"))
}

/// A held connection, with the start of its request.
struct Held {
    lines: Lines,
    began: Instant,
}

impl Held {
    fn since(&self, line: &Value) -> Instant {
        self.began + Duration::from_millis(line["since_ms"].as_u64().expect("since when"))
    }
}

/// A line of a held connection in the form in which the ledger reads answers: its wait counts from the request.
fn as_answer(line: &Value) -> Response {
    let mut json = line.clone();
    json["waited_ms"] = line["since_ms"].clone();
    Response { status: 200, headers: hyper::HeaderMap::new(), text: line.to_string(), json }
}

async fn start(url: &str, upstream: &Upstream) -> Proxy {
    let policy = |name: &str, settings: &str| {
        format!("[policies.{name}]\npath = \"builtin:default\"\nsettings = {{ {settings} }}\n")
    };
    let sections = format!(
        "[[guard]]\nlisten = \"127.0.0.1:0\"\n[[guard.routes]]\nmatch = {{ path = \"/{{*rest}}\" }}\n\
         upstream = \"http://{}\"\npolicy = \"default\"\nwait_ms = 30_000\n\
         [[routes]]\nresource = \"once/*\"\npolicy = \"once\"\n\
         [[routes]]\nresource = \"advisory/*\"\npolicy = \"advisory\"\n{}{}{}",
        upstream.good,
        policy("default", ""),
        policy("once", "primitive = \"once\""),
        policy("advisory", "primitive = \"advisory\""),
    );
    let proxy = Proxy::with(Settings { url: url.to_owned(), sections, ..Settings::default() }).await;
    proxy.until_ready().await;
    proxy
}

on_both! {
    async fn a_rolling_restart_loses_no_lock_and_no_request(kind: Kind) {
        lockkeeper::net::raise_file_limit();
        let (url, upstream) = (database(kind).await, Upstream::start().await);
        let mut proxies = join_all((0..PROXIES).map(|_| start(&url, &upstream))).await;
        let crowd = Arc::new(Crowd {
            proxies: Mutex::new(proxies.iter().map(|proxy| (proxy.client(), proxy.guarded())).collect()),
            ledger: Ledger::default(),
            answered: AtomicUsize::new(0),
            moved: AtomicUsize::new(0),
            turned_away: AtomicUsize::new(0),
            over: CancellationToken::new(),
        });
        let mut clients = JoinSet::new();
        for n in 0..CROWD {
            clients.spawn(crowd.clone().leases(n));
            clients.spawn(crowd.clone().holds(n));
            clients.spawn(crowd.clone().once(n));
            clients.spawn(crowd.clone().requests(n));
        }
        (0..SESSIONS).for_each(|n| drop(clients.spawn(crowd.clone().rests(n))));
        within(2 * PATIENCE, "all have their locks", async || {
            while let Some(ended) = clients.try_join_next() {
                ended.expect("a client");
            }
            crowd.ledger.grants() >= 3 * CROWD + SESSIONS
        })
        .await;
        for (n, proxy) in proxies.iter_mut().enumerate() {
            proxy.signal(Signal::TERM);
            assert_eq!(proxy.ended().await, Some(0), "{}", proxy.log());
            *proxy = start(&url, &upstream).await;
            crowd.set(n, proxy);
        }
        crowd.over.cancel();
        while let Some(ended) = clients.join_next().await {
            ended.expect("a client");
        }
        crowd.ledger.check();
        let count = |count: &AtomicUsize| count.load(Ordering::Relaxed);
        assert!(count(&crowd.moved) >= CROWD / 2, "{} connections went on elsewhere", count(&crowd.moved));
        assert!(count(&crowd.turned_away) > 0, "nobody waited while a proxy stopped");
        let served = upstream.stats().await["served"].as_object().map_or(0, |served| {
            served.values().filter_map(Value::as_u64).sum::<u64>()
        });
        assert_eq!(served as usize, count(&crowd.answered), "each request that was let in was answered");
    }
}
