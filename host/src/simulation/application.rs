//! The application behind the guarded routes, and the connections to it through a proxy.
//!
//! The application works on each request for a while, on a connection that is a pair of buffers. Some connections
//! take seconds to open, and some are closed after an answer. If the proxy closes a connection, the work on it ends.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hyper::body::Incoming;
use hyper::server::conn::http1 as server;
use hyper::service::service_fn;
use hyper::{StatusCode, Uri, client::conn::http1 as client};
use hyper_util::rt::TokioIo;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tokio::io::{DuplexStream, duplex};

use super::check::Work;
use super::options::Options;
use super::world::Shared;
use crate::app::reload;
use crate::config::{GuardConfig, GuardLock, GuardRoute, TrustForwarded, naming};
use crate::fleet::Fleet;
use crate::guard::upstream::simulated::APPLICATION;
use crate::guard::{Front, Guard};
use crate::http::{self, Body, Handler, Peer};
use crate::latest;
use crate::lock::Token;
use crate::mutex::Mutex;
use crate::net;

/// The policy of the guarded routes, which is also the first part of their paths.
pub const GUARDED: &str = "guarded";
/// How long a request waits for its lock.
pub const WAIT_MS: u32 = 3_000;
/// The longest work of the application on a request.
pub const LONG_WORK_MS: u32 = 6_000;
/// The longest time to open a connection to the application: longer than a lease.
pub const SLOW_CONNECTION_MS: u32 = 4_000;
/// The pause before routes that cannot go live yet are tried again.
const RETRY: Duration = Duration::from_secs(1);
/// The size of a connection's buffer, in bytes.
const BUFFER: usize = 4_096;
/// The header with the name of the client.
const OWNER: &str = "from";
/// The header with the index of the proxy that the client asks, and the proxy's `life`.
const ASKS: &str = "asks";

struct Application {
    shared: Arc<Shared>,
    random: Mutex<StdRng>,
    work_ms: u32,
}

/// Starts the application for the simulation of this thread; see [`end`].
pub fn begin(shared: &Arc<Shared>, options: &Options) {
    let random = Mutex::new(StdRng::seed_from_u64(options.seed ^ 7_000));
    let (shared, work_ms) = (shared.clone(), options.work_ms);
    let application = Arc::new(Application { shared, random, work_ms });
    APPLICATION.set(Some(Arc::new(move || Box::pin(connect(application.clone())))));
}

/// Ends the application.
pub fn end() {
    APPLICATION.set(None);
}

/// Opens a connection from a proxy to the application.
async fn connect(application: Arc<Application>) -> DuplexStream {
    let (opens_ms, is_kept) = {
        let mut random = application.random.lock();
        let longest_ms = if random.random_bool(0.1) { SLOW_CONNECTION_MS } else { 1 };
        (random.random_range(0..longest_ms), random.random_bool(0.7))
    };
    tokio::time::sleep(Duration::from_millis(opens_ms.into())).await;
    let (near, far) = duplex(BUFFER);
    tokio::spawn(async move {
        let answer = service_fn(move |request| {
            let application = application.clone();
            async move { application.answer(Box::new(request)).await }
        });
        let mut server = server::Builder::new();
        let _ = server.keep_alive(is_kept).serve_connection(TokioIo::new(far), answer).await;
    });
    near
}

/// Routes with a lock for each of the paths `/guarded/…`. A lease lasts for `ttl_ms` unless it is renewed. `naming`
/// is a version of the names: another value gives the locks other names.
pub fn routes(naming: u32, ttl_ms: u32) -> Vec<GuardConfig> {
    let resource = match naming {
        0 => format!("{GUARDED}/{{n}}"),
        naming => format!("{GUARDED}/{naming}-{{n}}"),
    };
    let lock = GuardLock {
        policy: GUARDED.to_owned(),
        ttl_ms: Some(ttl_ms),
        wait_ms: Some(WAIT_MS),
        ..GuardLock::named(&resource)
    };
    let route = GuardRoute {
        exact_case: true,
        upstreams: vec!["application:80".to_owned()],
        lock: Some(lock),
        response_timeout: Duration::from_secs(30),
        idle_timeout: Duration::from_secs(30),
        ..GuardRoute::at(&format!("/{GUARDED}/{{n}}"))
    };
    vec![GuardConfig {
        listen: SocketAddr::from(([127, 0, 0, 1], 1)).into(),
        application: "application".to_owned(),
        tls: None,
        trust_forwarded: TrustForwarded::All(false),
        keep_headers: Vec::new(),
        routes: vec![route],
    }]
}

/// Makes the guarded routes of a proxy follow `named`, as the watch over the file does.
pub async fn follow(
    guard: Arc<Guard>,
    fleet: Fleet,
    (mut live, ttl_ms): (u32, u32),
    mut named: latest::Receiver<u32>,
) {
    loop {
        let wanted = *named.borrow_and_update();
        let guards = routes(wanted, ttl_ms);
        if wanted != live && reload::rename(&guard, &fleet, &guards, &naming(&guards)).await.is_ok() {
            live = wanted;
        }
        let retry = (wanted != live).then_some(RETRY);
        tokio::select! {
            biased;
            changed = named.changed() => if changed.is_err() {
                return;
            },
            () = tokio::time::sleep(retry.unwrap_or_default()), if retry.is_some() => {}
        }
    }
}

impl Application {
    async fn answer(&self, request: http::Request) -> Result<http::Response, Infallible> {
        let header = |name: &str| {
            let value = request.headers().get(name).and_then(|value| value.to_str().ok());
            value.unwrap_or_default().to_owned()
        };
        let resource = request.uri().path().trim_start_matches('/').to_owned();
        let asks: Vec<u64> = header(ASKS).split(' ').filter_map(|number| number.parse().ok()).collect();
        let proxy = self.shared.proxy(asks.first().map_or(0, |index| *index as usize));
        let work = Work {
            owner: header(OWNER),
            // If the request has several keys, their tokens are equal.
            token: Token(
                header("lock-token")
                    .split(',')
                    .next()
                    .and_then(|token| token.parse().ok())
                    .unwrap_or_default(),
            ),
            process: proxy.process,
            life: (asks.get(1).copied().unwrap_or_default(), proxy.life),
        };
        let owner = work.owner.clone();
        self.shared
            .note(format!("the application works on {resource} for {owner}, with token {}", work.token.0));
        self.shared.check(|checks| checks.begins_work(&resource, work));
        let mut working =
            Working { shared: &self.shared, resource: &resource, owner: &owner, is_done: false };
        let ms = {
            let mut random = self.random.lock();
            // Some work lasts longer than an interruption of the proxy that is longer than a lease.
            let longest_ms = if random.random_bool(0.02) { LONG_WORK_MS } else { self.work_ms };
            random.random_range(0..longest_ms)
        };
        tokio::time::sleep(Duration::from_millis(ms.into())).await;
        working.is_done = true;
        Ok(http::Response::new(Body::full(Bytes::from_static(b"done"))))
    }
}

/// Work in progress. It ends with its answer or with its connection.
struct Working<'a> {
    shared: &'a Shared,
    resource: &'a str,
    owner: &'a str,
    is_done: bool,
}

impl Drop for Working<'_> {
    fn drop(&mut self) {
        self.shared.check(|checks| checks.ends_work(self.resource, self.owner, self.is_done));
        self.shared.note(format!("the application works on {} for {} no more", self.resource, self.owner));
    }
}

/// A request to the application.
pub struct Asked {
    pub resource: String,
    pub owner: String,
    /// The index of the proxy, and its `life`.
    pub proxy: (usize, u64),
}

/// The two ends of a new connection to a proxy.
pub fn connection() -> (DuplexStream, DuplexStream) {
    duplex(BUFFER)
}

/// The proxy's side of a client connection.
pub async fn serve(front: Arc<Front>, stream: DuplexStream) {
    let peer = Arc::new(Peer::new(net::Peer::new(SocketAddr::from(([10, 0, 0, 1], 1)), false)));
    let answer = service_fn(move |request| {
        let (front, peer) = (front.clone(), peer.clone());
        async move { Ok::<_, Infallible>(front.handle(Box::new(request), &peer).await) }
    });
    let _ = server::Builder::new().serve_connection(TokioIo::new(stream), answer).await;
}

/// Sends a request and waits for the whole answer. Returns its status, or `None` if there is no answer.
pub async fn send(asked: &Asked, stream: DuplexStream) -> Option<StatusCode> {
    let (mut sender, connection) = client::handshake::<_, Body>(TokioIo::new(stream)).await.ok()?;
    let (index, life) = asked.proxy;
    let request = hyper::Request::builder()
        .uri(format!("/{}", asked.resource).parse::<Uri>().ok()?)
        .header("host", "application")
        .header(OWNER, &asked.owner)
        .header(ASKS, format!("{index} {life}"))
        .body(Body::full(Bytes::new()))
        .ok()?;
    let answer = async {
        let (head, mut body) = sender.send_request(request).await.ok()?.into_parts();
        while let Some(frame) = next_frame(&mut body).await {
            frame.ok()?;
        }
        Some(head.status)
    };
    tokio::select! {
        biased;
        answer = answer => answer,
        _ = connection => None,
    }
}

async fn next_frame(body: &mut Incoming) -> Option<Result<hyper::body::Frame<Bytes>, hyper::Error>> {
    std::future::poll_fn(|cx| hyper::body::Body::poll_frame(std::pin::Pin::new(body), cx)).await
}
