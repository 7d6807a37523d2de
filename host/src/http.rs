//! The HTTP server that the fronts share, and its limits.
//!
//! One accept loop a listener; HTTP/1.1, and HTTP/2 for a client that opens with its preface (prior
//! knowledge) or asks for it in the handshake of TLS. Each connection is one task. What a client may cost is bounded:
//!
//! | what | limit (`[http]` of config.toml) | answer |
//! | --- | --- | --- |
//! | connections | `max_connections` | 503, closed |
//! | header bytes | `max_header_bytes` | 431, closed |
//! | body bytes | `max_body_bytes` | 413, closed |
//! | time to agree on TLS and send the headers | `header_timeout_ms` | 408, closed |
//! | time to send the body | `body_timeout_ms` | 408, closed |
//! | time between requests | `idle_timeout_ms` | closed |
//! | HTTP/2 requests at once | `max_streams` | the client waits |
//!
//! A request that another server could take for something else (RFC 9112 leaves some room) gets 400 and
//! the connection is closed: [`gate`] says which.
//!
//! A client over `max_connections` is answered rather than left in the listener's backlog, where
//! it could not tell a full proxy from a dead network; over TLS, where that would cost a handshake, it is
//! closed.
//!
//! A connection that ends, or an HTTP/2 stream that is reset, drops the future of its handler: that
//! is how waiters leave the queue. Half-closed connections count as ended.
//!
//! A handler that answers 101 says with [`Peer::upgrade`] what becomes of the connection.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hyper::body::Incoming;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::Semaphore;
use tokio_rustls::rustls::ServerConfig;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{debug, warn};

use crate::config::HttpLimits;
use crate::telemetry::Metrics;

mod activity;
mod body;
mod connection;
mod gate;
mod origin;
mod peer;
mod problem;
mod request_id;
mod socket;
mod stream;
mod target;
#[cfg(test)]
mod tests;
mod tls;

pub use body::{Body, BodyError, BrokenBody, json, read_body};
pub use origin::check as check_origin;
pub use peer::Peer;
pub use problem::{Kind, Problem, Told};
pub use stream::Stream;
pub use target::{Query, decode_path};
pub use tls::{TlsError, tls_config};

pub type Request = hyper::Request<Incoming>;
pub type Response = hyper::Response<Body>;

/// What answers the requests of one listener.
pub trait Handler: Send + Sync + 'static {
    /// The front's name in metrics and logs.
    const FRONT: &'static str;
    /// Whether it asks for [`Peer::gone`], which costs a file descriptor for each connection.
    const WATCHES_PEERS: bool = false;

    /// Answers one request of `peer`. Dropped where the client goes away.
    fn handle(&self, request: Request, peer: &Arc<Peer>) -> impl Future<Output = Response> + Send;
}

/// Where connections come from, and whether they speak TLS.
pub struct Listener {
    pub tcp: TcpListener,
    pub tls: Option<Arc<ServerConfig>>,
}

impl Listener {
    pub fn plain(tcp: TcpListener) -> Listener {
        Listener { tcp, tls: None }
    }

    /// With what [`tls_config`] made.
    pub fn tls(tcp: TcpListener, config: Arc<ServerConfig>) -> Listener {
        Listener { tcp, tls: Some(config) }
    }
}

/// Connections that are told that there are too many, at the same time; more are closed unanswered.
const MAX_REFUSALS: usize = 128;
/// Connections that may wait to be accepted.
const BACKLOG: u32 = 4096;
/// After this long without a sign of the peer, the kernel asks for one.
const KEEPALIVE_AFTER: Duration = Duration::from_secs(15);
const KEEPALIVE_EVERY: Duration = Duration::from_secs(5);
/// A client that acknowledged nothing, or took nothing of what is sent to it, for this long is gone; see also
/// [`Peer::set_patience`].
const PEER_TIMEOUT: Duration = Duration::from_secs(30);

/// Listens at an address. Port 0 takes any free one.
pub fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    let listener = socket.listen(BACKLOG)?;
    // Accepted sockets inherit these, which saves a few system calls for each.
    socket2::SockRef::from(&listener).set_tcp_nodelay(true)?;
    keep_alive(&listener)?;
    socket2::SockRef::from(&listener).set_tcp_user_timeout(Some(PEER_TIMEOUT))?;
    Ok(listener)
}

/// Has the kernel find out when the other side's machine is gone without a word. A program that only takes its time is
/// not: its machine answers.
pub fn keep_alive(socket: &impl std::os::fd::AsFd) -> io::Result<()> {
    let options = socket2::SockRef::from(socket);
    let keepalive = socket2::TcpKeepalive::new()
        .with_time(KEEPALIVE_AFTER)
        .with_interval(KEEPALIVE_EVERY)
        .with_retries(3);
    options.set_tcp_keepalive(&keepalive)
}

/// Raises the process's limit of open files as far as it may. The number that is allowed now.
///
/// Shells start processes with 1,024, which is less than `max_connections` asks for.
pub fn raise_file_limit() -> u64 {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let wanted = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, wanted) {
        debug!(%error, "the limit of open files stays as it is");
    }
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// Accepts and serves connections until `stop`; then lets the requests under way finish.
///
/// Returns when the last connection has ended. How long that may take is the caller's to limit.
pub async fn serve<H: Handler>(
    listener: Listener,
    handler: H,
    limits: HttpLimits,
    metrics: Metrics,
    stop: CancellationToken,
) {
    let connections = TaskTracker::new();
    let places = Arc::new(Semaphore::new(limits.max_connections));
    let refusals = Arc::new(Semaphore::new(MAX_REFUSALS));
    let shared = Arc::new(connection::ConnectionContext { handler, limits, metrics, stop: stop.clone() });
    loop {
        let accepted = tokio::select! {
            biased;
            () = stop.cancelled() => break,
            accepted = listener.tcp.accept() => accepted,
        };
        let (stream, address) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                accept_failed(&error).await;
                continue;
            }
        };
        if let Ok(place) = Arc::clone(&places).try_acquire_owned() {
            let (tls, shared) = (listener.tls.clone(), Arc::clone(&shared));
            connections.spawn(async move {
                connection::run(stream, address, tls, shared).await;
                drop(place);
            });
        } else {
            shared.metrics.http(H::FRONT, 503);
            if listener.tls.is_none() {
                refuse(stream, &shared, &refusals);
            }
        }
    }
    drop(listener);
    connections.close();
    connections.wait().await;
}

/// Tells a client that there are too many connections, while there are not too many of those.
fn refuse<H: Handler>(
    stream: TcpStream,
    shared: &connection::ConnectionContext<H>,
    refusals: &Arc<Semaphore>,
) {
    let Ok(place) = Arc::clone(refusals).try_acquire_owned() else { return };
    let problem = Problem::new(
        Kind::Overloaded,
        format!("the proxy has {} connections, which is its limit", shared.limits.max_connections),
    )
    .with("bound", "http.max_connections")
    .retry_after_ms(1_000);
    tokio::spawn(async move {
        connection::answer_and_close(Stream::Plain(stream), &problem).await;
        drop(place);
    });
}

/// Out of file descriptors or memory: waiting is all that helps; anything else is one client's affair.
async fn accept_failed(error: &io::Error) {
    let clients_affair = matches!(
        error.kind(),
        io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset | io::ErrorKind::Interrupted
    );
    if !clients_affair {
        warn!(%error, "cannot accept connections");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}
