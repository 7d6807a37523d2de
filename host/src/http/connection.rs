//! One connection, from its first byte to its end.

use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::task::Poll;
use std::time::Duration;

use hyper::body::Body as _;
use hyper::header::{CONNECTION, HeaderValue};
use hyper::server::conn::{http1, http2};
use hyper::service::Service;
use hyper::{Method, StatusCode, Version};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::time::Sleep;
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, debug, debug_span, warn};

use super::activity::{Activity, UnderWay, Verdict};
use super::gate::Refusal;
use super::problem::{Kind, Problem, Told, Why};
use super::socket::Socket;
use super::{Handler, Http, Peer, Request, Response, request_id};
use crate::clock;
use crate::config::HttpLimits;
use crate::net::{Connection, Stream};

/// The smallest buffer that hyper accepts.
const MIN_BUFFER: usize = 8 * 1024;
/// How often a silent HTTP/2 client is sent a ping.
const PING_EVERY: Duration = Duration::from_secs(20);
/// How long an HTTP/2 client may take to answer a ping.
const PING_TIMEOUT: Duration = Duration::from_secs(20);
/// The limit of buffered answers per HTTP/2 connection.
const MAX_SEND_BUFFER: usize = 64 * 1024;

/// Serves a connection.
pub async fn run<H: Handler>(connection: Connection, http: Arc<Http<H>>) {
    let Connection { stream, mut peer, handshake_deadline, stop } = connection;
    if H::WATCHES_PEERS {
        peer.watch(&stream);
    }
    let peer = Arc::new(Peer::new(peer));
    let activity = Activity::new();
    let mut socket =
        Socket::new(stream, http.limits.max_header_bytes, Arc::clone(&activity), Arc::clone(&peer));
    let sniffed = tokio::select! {
        sniffed = tokio::time::timeout_at(handshake_deadline, socket.sniff()) => sniffed,
        () = stop.cancelled() => return,
    };
    match sniffed {
        Ok(Ok(http2)) => {
            let requests = Requests { http, activity, peer };
            // Boxed: the HTTP/2 state is several times larger, and every connection would pay for it.
            if http2 {
                Box::pin(run_http2(socket, requests, stop)).await;
            } else {
                Box::pin(run_http1(socket, requests, stop)).await;
            }
        }
        Ok(Err(error)) => debug!(%error, "a connection broke"),
        // No request has begun, so there is nothing to answer.
        Err(_elapsed) if activity.is_quiet() => {}
        Err(_elapsed) => Box::pin(timed_out(socket.into_stream(), &http)).await,
    }
}

async fn run_http1<H: Handler>(socket: Socket, requests: Requests<H>, stop: CancellationToken) {
    let Requests { http, activity, peer } = requests.clone();
    let limit = http.limits.max_header_bytes;
    let mut connection = http1::Builder::new()
        .header_read_timeout(None)
        .max_buf_size(limit.max(MIN_BUFFER))
        .max_header_size(limit)
        // Answers are small: one write of a copied buffer is cheaper than a vectored write.
        .writev(false)
        .serve_connection(TokioIo::new(socket), requests);
    let mut watchdog = pin!(Watchdog::new(&http.limits, &activity, &stop));
    let mut stopping = false;
    let end = poll_fn(|cx| {
        if let Poll::Ready(ended) = connection.poll_without_shutdown(cx) {
            return Poll::Ready(End::Http(ended));
        }
        if activity.is_refused() {
            return Poll::Ready(End::Refused);
        }
        match watchdog.as_mut().poll(cx) {
            Poll::Ready(Alarm::Stop) => stopping = true,
            Poll::Ready(Alarm::Close) => return Poll::Ready(End::Quiet),
            Poll::Ready(Alarm::SlowHeaders) => return Poll::Ready(End::SlowHeaders),
            Poll::Pending => {}
        }
        // The HTTP library does not see incomplete headers, and would close the connection despite them.
        if stopping && !activity.is_in_headers() {
            stopping = false;
            Pin::new(&mut connection).graceful_shutdown();
            return connection.poll_without_shutdown(cx).map(End::Http);
        }
        Poll::Pending
    })
    .await;
    let parts = connection.into_parts();
    let socket = parts.io.into_inner();
    if let End::Http(Err(error)) = &end {
        debug!(%error, "a connection broke");
    }
    // Boxed, so that a waiting connection does not reserve memory for its end.
    match end {
        End::Http(Ok(()))
            if let Some(run) = peer.take_upgrade()
                && socket.refusal().is_none() =>
        {
            let (stream, held) = socket.into_parts();
            let upgraded = run(stream, [&parts.read_buf[..], &held].concat().into());
            tokio::select! {
                () = upgraded => {}
                () = stop.cancelled() => {}
            }
        }
        // The client must not take the partial answer for a complete one.
        End::Http(Err(_)) if activity.is_ended_by_close() => socket.into_stream().reset(),
        End::Http(_) if socket.end_seen() => {}
        End::Http(_) => Box::pin(socket.into_stream().linger()).await,
        // Part of a request that arrived together with the previous request looks idle to the activity state.
        End::Quiet if parts.read_buf.is_empty() && !socket.holds_bytes() => {}
        End::Refused => Box::pin(refuse(socket, &http)).await,
        End::Quiet | End::SlowHeaders => Box::pin(timed_out(socket.into_stream(), &http)).await,
    }
}

async fn run_http2<H: Handler>(socket: Socket, requests: Requests<H>, stop: CancellationToken) {
    let Requests { http, activity, .. } = requests.clone();
    let connection = http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .keep_alive_interval(PING_EVERY)
        .keep_alive_timeout(PING_TIMEOUT)
        .max_concurrent_streams(http.limits.max_streams)
        .max_header_list_size(http.limits.max_header_bytes.try_into().unwrap_or(u32::MAX))
        .max_send_buf_size(MAX_SEND_BUFFER)
        .serve_connection(TokioIo::new(socket), requests);
    let mut connection = pin!(connection);
    let mut watchdog = pin!(Watchdog::new(&http.limits, &activity, &stop));
    let mut leaving = false;
    loop {
        let alarm = tokio::select! {
            ended = connection.as_mut() => {
                if let Err(error) = ended {
                    debug!(%error, "a connection broke");
                }
                return;
            }
            alarm = watchdog.as_mut() => alarm,
        };
        if leaving && !matches!(alarm, Alarm::Stop) {
            return;
        }
        // The client learns which of its requests were accepted, and gets one more timeout to finish.
        leaving = true;
        connection.as_mut().graceful_shutdown();
    }
}

enum End {
    Http(hyper::Result<()>),
    /// The connection was idle for too long.
    Quiet,
    SlowHeaders,
    /// The gate does not let the next request through.
    Refused,
}

enum Alarm {
    /// The proxy is shutting down. Raised once.
    Stop,
    Close,
    SlowHeaders,
}

/// Raises an alarm when a connection should end. Its single timer is reset only when it fires and when incomplete
/// headers arrive, so an ordinary request costs no timer operation.
struct Watchdog<'a, S> {
    limits: &'a HttpLimits,
    activity: &'a Activity,
    timer: Pin<Box<Sleep>>,
    /// Whether the timer is set for the end of the headers.
    headers_timed: bool,
    stop: Option<Pin<Box<S>>>,
}

impl<'a> Watchdog<'a, ()> {
    fn new(
        limits: &'a HttpLimits,
        activity: &'a Activity,
        stop: &'a CancellationToken,
    ) -> Watchdog<'a, impl Future<Output = ()> + 'a> {
        Watchdog {
            limits,
            activity,
            timer: Box::pin(tokio::time::sleep(limits.header_timeout)),
            headers_timed: false,
            stop: Some(Box::pin(stop.cancelled())),
        }
    }
}

impl<S: Future<Output = ()>> Future for Watchdog<'_, S> {
    type Output = Alarm;

    fn poll(mut self: Pin<&mut Self>, cx: &mut std::task::Context<'_>) -> Poll<Alarm> {
        let this = &mut *self;
        if let Some(stop) = &mut this.stop
            && stop.as_mut().poll(cx).is_ready()
        {
            this.stop = None;
            return Poll::Ready(if this.activity.is_quiet() { Alarm::Close } else { Alarm::Stop });
        }
        let in_headers = this.activity.is_in_headers();
        if in_headers && !this.headers_timed {
            this.timer.as_mut().reset(tokio::time::Instant::now());
        }
        this.headers_timed = in_headers;
        while this.timer.as_mut().poll(cx).is_ready() {
            let wait = match this.activity.verdict(clock::now(), this.limits) {
                Verdict::Wait(left) => left,
                Verdict::SlowHeaders => return Poll::Ready(Alarm::SlowHeaders),
                Verdict::Idle => {
                    this.timer.as_mut().reset(tokio::time::Instant::now() + this.limits.header_timeout);
                    return Poll::Ready(Alarm::Close);
                }
            };
            this.timer.as_mut().reset(tokio::time::Instant::now() + wait);
        }
        Poll::Pending
    }
}

/// Answers the requests of one connection.
struct Requests<H> {
    http: Arc<Http<H>>,
    activity: Arc<Activity>,
    peer: Arc<Peer>,
}

impl<H> Clone for Requests<H> {
    fn clone(&self) -> Requests<H> {
        Requests {
            http: Arc::clone(&self.http),
            activity: Arc::clone(&self.activity),
            peer: Arc::clone(&self.peer),
        }
    }
}

impl<H: Handler> Service<Request> for Requests<H> {
    type Response = Response;
    type Error = Infallible;
    // Boxed, so that an idle connection does not reserve memory for the largest handler.
    type Future = Pin<Box<dyn Future<Output = Result<Response, Infallible>> + Send>>;

    fn call(&self, request: Request) -> Self::Future {
        let under_way = self.activity.begin();
        let this = self.clone();
        let id = request_id::of(request.headers());
        let version = request.version();
        if !tracing::enabled!(tracing::Level::DEBUG) {
            return Box::pin(async move {
                let response = this.ask(request).await;
                Ok(this.finish(response, id, version, under_way))
            });
        }
        let span = debug_span!("request", front = H::FRONT, id = ?id, method = %request.method(), path = request.uri().path());
        let answer = async move {
            let response = this.ask(request).await;
            debug!(status = response.status().as_u16(), "answered");
            Ok(this.finish(response, id, version, under_way))
        };
        Box::pin(answer.instrument(span))
    }
}

impl<H: Handler> Requests<H> {
    async fn ask(&self, request: Request) -> Response {
        // Over HTTP/1, the gate has refused it already.
        if request.method() == Method::CONNECT {
            return Problem::from(Refusal::Connect).into_response();
        }
        self.http.handler.handle(request, &self.peer).await
    }

    fn finish(
        &self,
        mut response: Response,
        id: HeaderValue,
        version: Version,
        under_way: UnderWay,
    ) -> Response {
        let status = response.status();
        self.http.metrics.http.answered(H::FRONT, status.as_u16());
        if status.is_server_error()
            && response.extensions().get::<Told>().is_none()
            && let Some(unsaid) = should_warn()
        {
            let why = response.extensions().get::<Why>().map(|why| why.0.as_str());
            warn!(front = H::FRONT, status = status.as_u16(), request_id = ?id, why, unsaid, "answered with an error");
        }
        if version >= Version::HTTP_2 {
            response.headers_mut().remove(CONNECTION);
        } else if status == StatusCode::SWITCHING_PROTOCOLS {
            self.peer.switch();
        }
        if version < Version::HTTP_11 && response.body().size_hint().exact().is_none() {
            self.activity.set_ended_by_close();
        }
        response.headers_mut().insert(request_id::X_REQUEST_ID, id);
        response.body_mut().keep(under_way);
        response
    }
}

/// Whether to log a warning for a failure, and how many failures were not logged since the last warning. At most ten
/// warnings a second are logged, so that an outage of the store does not flood the log.
fn should_warn() -> Option<u64> {
    static LAST: AtomicU64 = AtomicU64::new(0);
    static UNSAID: AtomicU64 = AtomicU64::new(0);
    let tenth = clock::now().0 / 100_000;
    if LAST.swap(tenth, Relaxed) == tenth {
        UNSAID.fetch_add(1, Relaxed);
        return None;
    }
    Some(UNSAID.swap(0, Relaxed))
}

async fn refuse<H: Handler>(socket: Socket, http: &Http<H>) {
    let Some(refusal) = socket.refusal() else { return };
    let problem = Problem::from(refusal);
    http.metrics.http.answered(H::FRONT, problem.status_code());
    socket.into_stream().close_with(&problem.to_http1()).await;
}

async fn timed_out<H: Handler>(stream: Stream, http: &Http<H>) {
    http.metrics.http.answered(H::FRONT, 408);
    let detail = format!("the headers did not arrive within {} ms", http.limits.header_timeout.as_millis());
    stream.close_with(&Problem::new(Kind::TIMEOUT, detail).to_http1()).await;
}
