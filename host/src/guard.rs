//! Guarded routes: an HTTP proxy in front of an application that holds a lock during each request.
//!
//! | step | file |
//! | --- | --- |
//! | finding the route, the view of the request for its policy, and the resource name | `crate::route` |
//! | the current routes and upstreams | `routes` |
//! | replacing routes while requests are in progress | `change`, `underway` |
//! | headers that the proxy removes and sets | `headers` |
//! | sending the request to the upstream, with time-outs | `exchange`, `upstream`, `upload`, `socket` |
//! | passing the answer to the client, and releasing the lock | `relay`, `locked` |
//! | storing answers for duplicate requests | `replay` |
//! | connections that change their protocol | `tunnel` |
//! | health checks of upstreams | `health` |
//!
//! A client that disconnects while its request is queued leaves the queue. Once the lock is granted, the exchange
//! continues without the client, because the upstream continues too. The proxy releases the lock when the answer has
//! ended.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use arc_swap::ArcSwap;
use hyper::Method;
use hyper::body::{Body as _, Incoming};
use hyper::header::{self, HeaderValue};
use hyper::http::request::Parts;
use tokio_util::task::TaskTracker;

use crate::clock;
use crate::config::{GuardConfig, GuardLock, HttpLimits, Limits, Matched, UpstreamLimits};
use crate::fronts::Code;
use crate::http::{Body, Handler, Kind, Peer, Problem, Request, Response};
use crate::lock::Instant;
use crate::random;
use crate::route::{self, Asked};
use crate::service::{
    AcquireError, Guarded, Principal, RefusalResponse, Request as Wanted, RoutedRequest, Service,
};
use crate::store::Health;
use crate::telemetry::Metrics;
use crate::vital;

mod change;
mod exchange;
pub(crate) mod headers;
mod health;
mod idle;
mod locked;
mod relay;
pub(crate) mod replay;
mod routes;
mod socket;
mod tunnel;
mod underway;
mod upload;
pub mod upstream;

pub use change::Change;
use exchange::Exchange;
use locked::Locked;
use replay::Once;
use routes::{Route, Routes, Targets};
#[cfg(any(test, feature = "simulation"))]
pub use underway::LONGEST_PAUSE;
use underway::{Entry, Named, UnderWay, Waited};
use upload::{Prefix, Upload};

/// The guarded listeners and the context that they share.
pub struct Guard {
    shared: Arc<GuardContext>,
    routes: Vec<Arc<ArcSwap<Routes>>>,
}

struct GuardContext {
    service: Service,
    targets: Targets,
    limits: Limits,
    http: HttpLimits,
    metrics: Metrics,
    /// Exchanges that continue without their clients.
    tasks: TaskTracker,
    under_way: Arc<UnderWay>,
    /// Set once the store has been reached or has failed a request. Until then, an unavailable store in the health
    /// status may only mean that the proxy has not asked the store yet.
    has_looked: AtomicBool,
}

/// The handler of one listener.
pub struct Front {
    shared: Arc<GuardContext>,
    /// The index of the listener.
    place: usize,
    routes: Arc<ArcSwap<Routes>>,
}

impl Guard {
    /// Creates the handlers of the listeners, and starts the health checks of the upstreams.
    pub fn new(
        configs: &[GuardConfig],
        upstreams: &UpstreamLimits,
        service: Service,
        limits: Limits,
        http: HttpLimits,
        metrics: Metrics,
    ) -> Guard {
        let targets = Targets::new(upstreams);
        let routes =
            configs.iter().map(|config| Arc::new(ArcSwap::from_pointee(Routes::new(config, &targets))));
        let routes: Vec<_> = routes.collect();
        let (tasks, has_looked) = (TaskTracker::new(), AtomicBool::new(false));
        let under_way = Arc::new(UnderWay::new());
        let shared = GuardContext { service, targets, limits, http, metrics, tasks, under_way, has_looked };
        let guard = Guard { shared: Arc::new(shared), routes };
        if !guard.routes.is_empty() {
            let watch = health::watch(guard.shared.clone(), guard.routes.clone(), upstreams.health_every);
            vital::spawn("the health checks of upstreams", watch);
        }
        guard
    }

    /// The handlers of the listeners, in the order of the configuration.
    pub fn fronts(&self) -> Vec<Front> {
        let front = |(place, routes): (usize, &Arc<ArcSwap<Routes>>)| Front {
            shared: self.shared.clone(),
            place,
            routes: routes.clone(),
        };
        self.routes.iter().enumerate().map(front).collect()
    }

    /// Waits for the exchanges that continue without their clients.
    pub async fn drain(&self) {
        self.shared.tasks.close();
        self.shared.tasks.wait().await;
    }
}

impl GuardContext {
    /// Whether the store is known to be unavailable, so that requests need not wait to find out.
    fn store_is_gone(&self) -> bool {
        let is_gone = matches!(self.service.store_health(), Health::Unavailable { .. });
        if !is_gone {
            self.has_looked.store(true, Relaxed);
        }
        is_gone && self.has_looked.load(Relaxed)
    }
}

impl Handler for Front {
    const FRONT: &'static str = "guard";
    const WATCHES_PEERS: bool = true;

    async fn handle(&self, request: Request, peer: &Arc<Peer>) -> Response {
        let (outcome, response) = match self.answer(request, peer).await {
            Ok(answered) => answered,
            Err(problem) => (problem.kind().slug, problem.into_response()),
        };
        self.shared.metrics.guard.answered(outcome);
        response
    }
}

type Answered = Result<(&'static str, Response), Problem>;

impl Front {
    async fn answer(&self, request: Request, peer: &Arc<Peer>) -> Answered {
        if request.method() == Method::CONNECT {
            return Err(Problem::method_not_allowed("any but CONNECT"));
        }
        let (mut parts, mut body) = request.into_parts();
        let mut routes = self.routes.load_full();
        headers::strip_misleading(&mut parts.headers, &routes.keep_headers);
        let (upgrade, takes_trailers) =
            rewrite(&mut parts, &body, peer, routes.trust_forwarded.includes(peer.address.ip()));
        let (mut prefix, mut waited) = (Prefix::default(), Waited::default());
        // The loop repeats each time that the routes are replaced while the request waits.
        let (route, grant) = loop {
            let (route, matched) = routes.find(&parts)?;
            let grant = match &route.config.lock {
                None => Some(Grant::NotNeeded),
                Some(lock) => {
                    let body = (&mut body, &mut prefix);
                    self.admit(&routes, (&route, lock, matched), &parts, body, peer, &mut waited).await?
                }
            };
            if let Some(grant) = grant {
                break (route, grant);
            }
            if !self.shared.under_way.resumed(&mut waited).await {
                let why = "the routes are being replaced".to_owned();
                return Err(AcquireError::NotYet { why }.into());
            }
            routes = self.routes.load_full();
        };
        let (outcome, lock) = match grant {
            Grant::NotNeeded => ("passed", None),
            Grant::Locked(locked) => {
                headers::fence(&mut parts.headers, locked.keys(), locked.tokens());
                ("locked", Some(locked))
            }
            Grant::Unlocked => {
                parts.headers.insert(headers::LOCK_STATUS, headers::UNLOCKED);
                ("unlocked", None)
            }
            Grant::Answered(outcome, response) => return Ok((outcome, response)),
        };
        let (upload, sending) = Upload::new(prefix, body, route.config.clone());
        let request = hyper::Request::from_parts(parts, upload);
        let tasks = self.shared.tasks.clone();
        let exchange = Exchange { route, sending, lock, upgrade, takes_trailers, peer: peer.clone(), tasks };
        let mut response = exchange.answer(request).await?;
        if outcome == "unlocked" {
            response.headers_mut().insert(headers::LOCK_STATUS, headers::UNLOCKED);
        }
        Ok((outcome, response))
    }

    /// Asks for the lock that the route requires for the request; the policy sees the part of the body that was read.
    /// `None` if the routes are being replaced or have been replaced since. The time that the request has already
    /// `waited` under earlier routes is subtracted from its wait limit.
    async fn admit(
        &self,
        routes: &Arc<Routes>,
        (route, lock, matched): (&Route, &GuardLock, Matched),
        parts: &Parts,
        (body, prefix): (&mut Incoming, &mut Prefix),
        peer: &Peer,
        waited: &mut Waited,
    ) -> Result<Option<Grant>, Problem> {
        prefix.read(body, lock.see_body_bytes, self.shared.http.body_timeout).await?;
        let seen = prefix.seen(lock.see_body_bytes, body);
        let asked = route::asked(lock, parts, matched, seen.clone(), &self.shared.limits)?;
        // The owner is unique, so a re-entrant policy never treats two requests as one owner.
        let client = peer.address.ip().map_or_else(|| peer.address.to_string(), |ip| ip.to_string());
        let owner = format!("{client}/{:016x}", random::number::<u64>());
        let now = clock::now();
        let begun = *waited.begun.get_or_insert(now);
        let mut wanted = wanted(route, lock, asked, owner);
        wanted.wait_ms = wanted.wait_ms.map(|wait_ms| wait_ms.saturating_sub(now.ms_since(begun)));
        let named = Named { listener: self.place, parts: parts.clone(), seen, wanted: wanted.clone() };
        let is_current = || Arc::ptr_eq(&self.routes.load(), routes);
        if lock.fail_open && self.shared.store_is_gone() {
            return Ok(Some(Grant::Unlocked));
        }
        let Some(entry) = self.shared.under_way.enter(named, is_current) else { return Ok(None) };
        let outdated = entry.watch();
        let waits_for_body = !body.is_end_stream();
        tokio::select! {
            biased;
            grant = self.lock(lock, (&wanted, begun), parts, entry, waited) => grant,
            () = outdated.cancelled() => Ok(None),
            () = peer.gone(), if waits_for_body => {
                Err(Problem::new(Kind::TIMEOUT, "the client went away while it waited for the lock"))
            }
        }
    }

    /// Waits for the lock, or returns the answer for the client instead. `None` if the request must ask again: the
    /// routes were replaced before the lock was granted, or the lock was lost while the request waited for a pending
    /// replacement.
    async fn lock(
        &self,
        lock: &GuardLock,
        (wanted, begun): (&Wanted, Instant),
        parts: &Parts,
        entry: Entry,
        waited: &mut Waited,
    ) -> Result<Option<Grant>, Problem> {
        let shared = &self.shared;
        let once = || Once {
            fingerprint: wanted
                .principal
                .routed()
                .map_or_else(String::new, |routed| {
                    replay::fingerprint(&routed.http, &parts.headers, &lock.caller)
                })
                .into(),
            names_caller: replay::callers(&parts.headers, &lock.caller).next().is_some(),
            max_bytes: lock.max_replay_bytes,
            max_value_bytes: shared.limits.max_value_bytes,
        };
        match shared.service.guard(wanted).await {
            Ok(Guarded::Held(hold)) => {
                let locked = Box::new(Locked::new(*hold, once, shared.metrics.clone(), entry));
                Ok(locked.proceeds(waited).await.then_some(Grant::Locked(locked)))
            }
            Ok(Guarded::Done(kept)) => {
                let replayed = replay::replay(&kept, &once().fingerprint, &wanted.resource)?;
                Ok(Some(Grant::Answered("replayed", replayed)))
            }
            // Only if the store is unavailable. If the store works and only this proxy cannot grant, other proxies
            // may hold the key.
            Err(AcquireError::Store(_)) if lock.fail_open => {
                shared.has_looked.store(true, Relaxed);
                Ok(Some(Grant::Unlocked))
            }
            Err(error) => self.refused(wanted, error, begun).map(Some),
        }
    }

    fn refused(&self, wanted: &Wanted, error: AcquireError, begun: Instant) -> Result<Grant, Problem> {
        let waited_ms = clock::now().ms_since(begun);
        match self.shared.service.refusal(wanted, &error, waited_ms) {
            Some(answer) => Ok(Grant::Answered("contended", contended(answer, &error))),
            None => {
                let is_fault =
                    matches!(error, AcquireError::PolicyFault { .. } | AcquireError::NoPrimitive { .. });
                let is_internal =
                    is_fault || matches!(error, AcquireError::Store(_) | AcquireError::NotYet { .. });
                let problem = Problem::from(error);
                // Anybody may send requests here, and the detail can name the server of the store and its user.
                let problem = if is_internal { problem.hide_detail(SEE_LOG) } else { problem };
                // The application is available, but the policy in front of it cannot decide.
                Err(if is_fault { problem.status(503) } else { problem })
            }
        }
    }
}

/// The lock request that the service gets for an HTTP request.
fn wanted(route: &Route, lock: &GuardLock, asked: Asked, owner: String) -> Wanted {
    let routed = RoutedRequest { policy: route.policy.clone(), http: Arc::new(asked.http) };
    Wanted {
        principal: Principal::Application(routed),
        resource: asked.resource,
        owner,
        mode: lock.mode,
        ttl_ms: lock.ttl_ms,
        wait_ms: lock.wait_ms,
        request_id: None,
        labels: asked.labels,
    }
}

/// What a client is told instead of a detail that is meant for operators.
const SEE_LOG: &str = "the log of the proxy says why";

/// The result of a lock request.
enum Grant {
    /// The route needs no lock.
    NotNeeded,
    Locked(Box<Locked>),
    /// The store is unavailable, and the route is configured to pass requests on without a lock in that case.
    Unlocked,
    Answered(&'static str, Response),
}

/// The policy's answer to a client that does not get its lock. The answer does not name the holder; only operators
/// may see it.
fn contended(answer: RefusalResponse, error: &AcquireError) -> Response {
    let mut problem = Problem::new(Code::Contended, answer.detail)
        .status(answer.status)
        .with("retry_after_ms", answer.retry_after_ms)
        .retry_after_ms(answer.retry_after_ms);
    if let AcquireError::Contended { position, reason, .. } = error {
        problem = problem.with("position", *position);
        if let Some(reason) = reason {
            problem = problem.with("reason", reason.as_str());
        }
    }
    let mut response = problem.into_response();
    let headers = response.headers_mut();
    for (name, value) in answer.headers {
        if let (Ok(name), Ok(value)) = (header::HeaderName::try_from(name), HeaderValue::try_from(value)) {
            headers.insert(name, value);
        }
    }
    response
}

/// Turns the head of a request into the head that the upstream gets. Returns the protocol that the client wants to
/// switch to, if any, and whether the client accepts trailers.
fn rewrite(parts: &mut Parts, body: &Incoming, peer: &Peer, trust: bool) -> (Option<HeaderValue>, bool) {
    let is_http1 = parts.version == hyper::Version::HTTP_11;
    let upgrade = headers::strip_hop_by_hop(&mut parts.headers).filter(|_| is_http1);
    headers::strip_own(&mut parts.headers);
    headers::join_cookies(&mut parts.headers);
    // The client's connection answers `Expect` when the body is first read.
    parts.headers.remove(header::EXPECT);
    // The host in an absolute target takes precedence over the header (RFC 9112, 3.2.2).
    let authority = parts.uri.authority().and_then(|host| HeaderValue::from_str(host.as_str()).ok());
    if let Some(host) = authority {
        parts.headers.insert(header::HOST, host);
    }
    let host = parts.headers.get(header::HOST).cloned();
    headers::forward(&mut parts.headers, peer, host.as_ref(), trust);
    if parts.uri.authority().is_some() {
        let path = parts.uri.path_and_query().cloned();
        let path = path.unwrap_or_else(|| hyper::http::uri::PathAndQuery::from_static("/"));
        parts.uri = hyper::Uri::from(path);
    }
    let takes_trailers =
        parts.version == hyper::Version::HTTP_2 || (is_http1 && parts.headers.contains_key(header::TE));
    parts.version = hyper::Version::HTTP_11;
    if !body.is_end_stream() && body.size_hint().exact().is_none() {
        // Set explicitly: for some methods, the HTTP library assumes no body if no header gives its length.
        parts.headers.insert(header::TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
    }
    if let Some(protocol) = &upgrade {
        parts.headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        parts.headers.insert(header::UPGRADE, protocol.clone());
    }
    (upgrade, takes_trailers)
}

/// An upstream's answer without a body.
fn empty(head: hyper::http::response::Parts) -> Response {
    Response::from_parts(head, Body::full(bytes::Bytes::new()))
}

fn upstream_failed(detail: impl Into<std::borrow::Cow<'static, str>>) -> Problem {
    Problem::new(Kind::UPSTREAM_FAILED, detail)
}
