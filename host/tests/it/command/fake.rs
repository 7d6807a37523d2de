//! A server that grants leases, and otherwise answers as the test says.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use bytes::Bytes;
use futures_util::StreamExt;
use http_body_util::BodyExt;
use lockkeeper::config::HttpLimits;
use lockkeeper::fronts::Code;
use lockkeeper::http::{self, Body, Handler, Peer, Problem, Request, Response};
use lockkeeper::net;
use lockkeeper::telemetry::Metrics;
use tokio_util::sync::CancellationToken;

use super::*;

/// How the server answers calls of a path.
#[derive(Clone, Copy, PartialEq)]
pub enum Answer {
    Works,
    /// 503: the store is unreachable.
    Unavailable,
    /// 503: the server is shutting down.
    ShuttingDown,
    Hangs,
    /// Works, and answers this much later.
    WorksAfter(Duration),
    Lost,
    /// A held connection receives the message that the server stops, and ends.
    Drains,
    /// A held connection ends without a message.
    Ends,
}

#[derive(Default)]
struct State {
    /// The answers by path. Calls of paths without an entry work.
    answers: HashMap<&'static str, Answer>,
    /// The calls so far, with their times.
    calls: Vec<(String, Value, SystemTime)>,
}

/// The server. Dropping this stops it.
pub struct Fake {
    pub url: String,
    state: Arc<Mutex<State>>,
    stop: CancellationToken,
}

struct Front {
    state: Arc<Mutex<State>>,
    primitive: &'static str,
    ttl_ms: u32,
    stop: CancellationToken,
}

impl Fake {
    /// Starts a server whose leases have this ttl.
    pub fn start(ttl_ms: u32) -> Fake {
        Fake::of("lease", ttl_ms)
    }

    /// Starts a server whose locks have this primitive.
    pub fn of(primitive: &'static str, ttl_ms: u32) -> Fake {
        let state = Arc::<Mutex<State>>::default();
        let listener = net::Listener::bind(&"127.0.0.1:0".parse().unwrap()).unwrap();
        let url = format!("http://{}", listener.address().unwrap());
        let stop = CancellationToken::new();
        let front = Front { state: state.clone(), primitive, ttl_ms, stop: stop.clone() };
        let (limits, metrics) = (HttpLimits::default(), Metrics::default());
        tokio::spawn(http::serve(listener, front, limits, metrics, stop.clone()));
        Fake { url, state, stop }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// From now on calls of this path are answered like this.
    pub fn answers(&self, path: &'static str, answer: Answer) {
        self.state().answers.insert(path, answer);
    }

    /// The bodies of the calls of a path.
    pub fn calls(&self, path: &str) -> Vec<Value> {
        let state = self.state();
        state.calls.iter().filter(|(of, ..)| of == path).map(|(_, body, _)| body.clone()).collect()
    }

    /// The number of calls of a path.
    pub fn count(&self, path: &str) -> usize {
        self.calls(path).len()
    }

    /// The time of the last call that granted or renewed a lease.
    pub fn last_grant(&self, path: &str) -> SystemTime {
        let state = self.state();
        state.calls.iter().rfind(|(of, ..)| of == path).expect("a call").2
    }

    /// Waits until a path was called this many times.
    pub async fn until_called(&self, path: &str, times: usize) {
        eventually(&format!("{path} is called {times} times"), async || self.count(path) >= times).await;
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl Handler for Front {
    const FRONT: &'static str = "fake";

    async fn handle(&self, request: Request, _peer: &Arc<Peer>) -> Response {
        let path = request.uri().path().to_owned();
        let came = SystemTime::now();
        let body = request.into_body().collect().await.map(|body| body.to_bytes()).unwrap_or_default();
        let body = serde_json::from_slice(&body).unwrap_or(Value::Null);
        let answer = {
            let mut state = self.state.lock().unwrap();
            state.calls.push((path.clone(), body, came));
            state.answers.get(path.as_str()).copied().unwrap_or(Answer::Works)
        };
        match answer {
            Answer::Works if path == "/v1/hold" => self.held(&[], false),
            Answer::Works if path == "/v1/watch" => self.silent(),
            Answer::Drains => self.held(&["draining"], true),
            Answer::Ends => self.held(&[], true),
            Answer::Works => self.works(&path),
            Answer::WorksAfter(time) => {
                tokio::time::sleep(time).await;
                self.works(&path)
            }
            Answer::Unavailable => Problem::new(Code::StoreUnavailable, "down").into_response(),
            Answer::ShuttingDown => Problem::new(Code::ShuttingDown, "stopping").into_response(),
            Answer::Lost => Problem::new(Code::Lost, "taken").into_response(),
            Answer::Hangs => std::future::pending().await,
        }
    }
}

impl Front {
    /// A held connection: its lines, and whether it ends after them.
    fn held(&self, more: &[&str], ends: bool) -> Response {
        let line = |event: &&str| {
            let event = json!({
                "event": event, "lease_id": "the-lease", "token": 7, "ttl_ms": self.ttl_ms, "since_ms": 0,
                "expires_in_ms": self.ttl_ms, "primitive": self.primitive,
            });
            Bytes::from(format!("{event}\n"))
        };
        let lines: Vec<Bytes> = [&["granted"], more].concat().iter().map(line).collect();
        let lines = futures_util::stream::iter(lines);
        if ends {
            return Response::new(Body::stream(lines));
        }
        Response::new(Body::stream(lines.chain(futures_util::stream::pending())))
    }

    /// A stream of events without events, until the server stops.
    fn silent(&self) -> Response {
        let stop = self.stop.clone();
        let end = async move {
            stop.cancelled().await;
            Bytes::new()
        };
        Response::new(Body::stream(futures_util::stream::once(end)))
    }

    fn works(&self, path: &str) -> Response {
        let ttl_ms = self.ttl_ms;
        match path {
            "/v1/acquire" | "/v1/once/begin" => http::json(&json!({
                "state": "first", "lease_id": "the-lease", "token": 7, "keys": ["k"], "ttl_ms": ttl_ms,
                "expires_in_ms": ttl_ms, "waited_ms": 0, "primitive": self.primitive,
            })),
            "/v1/renew" => http::json(&json!({"ttl_ms": ttl_ms, "expires_in_ms": ttl_ms})),
            "/v1/release" => http::json(&json!({"released": true})),
            "/v1/once/finish" => http::json(&json!({"finished": true})),
            path => Problem::not_found(path).into_response(),
        }
    }
}
