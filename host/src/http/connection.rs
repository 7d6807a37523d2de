//! One connection, from its first byte to its end.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use hyper::server::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio_util::sync::CancellationToken;
use tracing::debug;

use super::activity::Activity;
use super::handler::{Handler, Http};
use super::peer::Peer;
use super::problem::{Kind, Problem};
use super::requests::Requests;
use super::socket::Socket;
use super::watchdog::{Alarm, Watchdog};
use crate::net::{Connection, Stream};

/// The smallest buffer that hyper accepts.
const MIN_BUFFER: usize = 8 * 1024;
/// How often a silent HTTP/2 client is sent a ping.
const PING_EVERY: Duration = Duration::from_secs(20);
/// How long an HTTP/2 client may take to answer a ping.
const PING_TIMEOUT: Duration = Duration::from_secs(20);
/// The limit of buffered answers per HTTP/2 connection.
const MAX_SEND_BUFFER: usize = 64 * 1024;

/// How many bytes of one HTTP/2 request's body a client may send before the handler reads them. A connection as a whole
/// has the window of the library, 1 MiB: several requests whose bodies nobody reads yet do not keep others from theirs.
const STREAM_WINDOW: u32 = 64 * 1024 - 1;

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
        .initial_stream_window_size(STREAM_WINDOW)
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
