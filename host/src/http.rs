//! The HTTP server that the fronts share, and its limits.
//!
//! Each listener has one accept loop, and each connection is one task. The server speaks HTTP/1.1, and HTTP/2 with a
//! client that starts with its preface (prior knowledge) or negotiates it in the TLS handshake. The cost of a client
//! is bounded:
//!
//! | what | limit (`[http]` of config.toml) | answer |
//! | --- | --- | --- |
//! | connections | `max_connections` | 503, closed |
//! | header bytes | `max_header_bytes` | 431, closed |
//! | body bytes | `max_body_bytes` | 413, closed |
//! | time for the TLS handshake and the headers | `header_timeout_ms` | 408, closed |
//! | time to send the body | `body_timeout_ms` | 408, closed |
//! | time between requests | `idle_timeout_ms` | closed |
//! | concurrent HTTP/2 requests | `max_streams` | the client waits |
//!
//! A request that another server could interpret differently (RFC 9112 leaves some room) gets 400, and the connection
//! is closed. [`gate`] defines these requests.
//!
//! A client over `max_connections` gets an answer instead of waiting in the listener's backlog, where it could not
//! tell a full proxy from a dead network. Over TLS, an answer would cost a handshake, so the connection is closed.
//!
//! When a connection ends or an HTTP/2 stream is reset, the future of its handler is dropped; this is how waiters
//! leave the queue. A half-closed connection counts as ended.
//!
//! A handler that answers 101 passes the new use of the connection to [`Peer::upgrade`].

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

/// A request whose body has not been read.
pub type Request = hyper::Request<Incoming>;
/// An answer with its body.
pub type Response = hyper::Response<Body>;

/// Answers the requests of one listener.
pub trait Handler: Send + Sync + 'static {
    /// The front's name in metrics and logs.
    const FRONT: &'static str;
    /// Whether the handler uses [`Peer::gone`], which costs a file descriptor per connection.
    const WATCHES_PEERS: bool = false;

    /// Answers one request of `peer`. The future is dropped when the client goes away.
    fn handle(&self, request: Request, peer: &Arc<Peer>) -> impl Future<Output = Response> + Send;
}

/// A listening socket, with the TLS configuration if its connections use TLS.
pub struct Listener {
    /// The listening socket.
    pub tcp: TcpListener,
    /// The TLS configuration. `None`: connections do not use TLS.
    pub tls: Option<Arc<ServerConfig>>,
}

impl Listener {
    /// A listener without TLS.
    pub fn plain(tcp: TcpListener) -> Listener {
        Listener { tcp, tls: None }
    }

    /// A listener with TLS; `config` comes from [`tls_config`].
    pub fn tls(tcp: TcpListener, config: Arc<ServerConfig>) -> Listener {
        Listener { tcp, tls: Some(config) }
    }
}

/// The number of connections over the limit that are answered at the same time; others are closed unanswered.
const MAX_REFUSALS: usize = 128;
/// The number of connections that may wait to be accepted.
const BACKLOG: u32 = 4096;
/// The kernel starts to probe a peer that has been silent for this long.
const KEEPALIVE_AFTER: Duration = Duration::from_secs(15);
/// The time between two probes of a silent peer.
const KEEPALIVE_EVERY: Duration = Duration::from_secs(5);
/// A client that acknowledges nothing, or reads nothing of what is sent to it, for this long counts as gone; see also
/// [`Peer::set_patience`].
const PEER_TIMEOUT: Duration = Duration::from_secs(30);

/// Listens on an address. Port 0 selects any free port.
pub fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    let listener = socket.listen(BACKLOG)?;
    // Accepted sockets inherit these options, which saves a few system calls per connection.
    socket2::SockRef::from(&listener).set_tcp_nodelay(true)?;
    keep_alive(&listener)?;
    socket2::SockRef::from(&listener).set_tcp_user_timeout(Some(PEER_TIMEOUT))?;
    Ok(listener)
}

/// Lets the kernel detect that the peer's machine has disappeared. A slow program is not affected, because its
/// machine still answers.
pub fn keep_alive(socket: &impl std::os::fd::AsFd) -> io::Result<()> {
    let options = socket2::SockRef::from(socket);
    let keepalive = socket2::TcpKeepalive::new()
        .with_time(KEEPALIVE_AFTER)
        .with_interval(KEEPALIVE_EVERY)
        .with_retries(3);
    options.set_tcp_keepalive(&keepalive)
}

/// Raises the process's limit of open files to its maximum, and returns the resulting limit.
///
/// Shells start processes with a limit of 1,024, which is less than `max_connections` needs.
pub fn raise_file_limit() -> u64 {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let wanted = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, wanted) {
        debug!(%error, "the limit of open files cannot be raised");
    }
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// Accepts and serves connections until `stop`, then lets the requests in progress finish.
///
/// Returns when the last connection has ended. The caller must limit how long that may take.
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

/// Tells a client that there are too many connections, unless too many clients are being told already.
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

/// Handles a failed accept. If file descriptors or memory are exhausted, only waiting helps; other errors concern a
/// single client.
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
