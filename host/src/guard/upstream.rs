//! The choice of an upstream, and the connections to upstreams.

use std::cmp::Reverse;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::socket::{Patience, Socket};
use super::upload::Upload;
use crate::clock;
use crate::config::UpstreamLimits;
use crate::lock::Instant;
use crate::mutex::Mutex;
use crate::net;
use crate::random;
use crate::vital;

type Request = hyper::Request<Upload>;
type Response = hyper::Response<Incoming>;

/// One upstream, shared by all routes that lead to it.
pub struct Target {
    /// `host:port`.
    name: String,
    limits: UpstreamLimits,
    /// Kept connections; the most recently used one is last.
    kept: Mutex<Vec<Kept>>,
    places: Arc<Semaphore>,
    /// Set when the upstream refused a connection: until this time, other upstreams are preferred.
    down_until: AtomicU64,
    /// The result of the last health check.
    is_sick: AtomicBool,
}

struct Kept {
    link: Link,
    until: Instant,
}

/// A connection to an upstream.
struct Link {
    sender: SendRequest<Upload>,
    patience: Patience,
}

/// A connection that is in use.
pub struct Connection {
    link: Link,
    target: Arc<Target>,
    was_kept: bool,
    is_last: bool,
    _place: OwnedSemaphorePermit,
}

/// Why a request got no answer.
#[derive(Debug, thiserror::Error)]
pub enum SendError {
    /// No connection to the upstream could be opened, so the request was not sent.
    #[error("{name} cannot be reached: {source}")]
    Connect {
        /// The upstream, as `host:port`.
        name: String,
        /// The error of the connection attempt.
        source: io::Error,
    },
    /// The upstream has as many requests in progress as it may have, so the request was not sent.
    #[error("{name} has {limit} requests under way, which is the limit")]
    Busy {
        /// The upstream, as `host:port`.
        name: String,
        /// The value of `upstreams.max_requests`.
        limit: usize,
    },
    /// The request was not sent.
    #[error("the lease ended before the request could be sent")]
    Late,
    /// The request may have arrived.
    #[error("{name} gave no whole answer: {source}")]
    Broken {
        /// The upstream, as `host:port`.
        name: String,
        /// The error of the connection.
        source: hyper::Error,
    },
}

impl SendError {
    /// Whether a time-out was the reason.
    pub fn is_timeout(&self) -> bool {
        let mut cause = std::error::Error::source(self);
        while let Some(error) = cause {
            let kind = error.downcast_ref::<io::Error>().map(io::Error::kind);
            if kind == Some(io::ErrorKind::TimedOut) {
                return true;
            }
            cause = error.source();
        }
        false
    }
}

/// Sends a request to one of the targets, and waits for the head of the answer. A target that neither takes data nor
/// answers for `patience` is given up.
///
/// The request is sent only while `may_leave` returns true. A request that was not sent is tried again: on another
/// target if a target cannot be reached, and on another connection if a kept connection had just been closed. A
/// request that may have been sent is never sent again.
pub async fn send(
    targets: &[Arc<Target>],
    mut request: Request,
    patience: Duration,
    may_leave: impl Fn() -> bool,
) -> Result<(Response, Connection), SendError> {
    let mut last = None;
    for target in in_order(targets) {
        loop {
            let mut connection = match target.connection(patience).await {
                Ok(connection) => connection,
                Err(error) => {
                    last = Some(error);
                    break;
                }
            };
            // Opening a connection may take seconds.
            if !may_leave() {
                return Err(SendError::Late);
            }
            match connection.link.sender.try_send_request(request).await {
                Ok(response) => return Ok((response, connection)),
                Err(mut failed) => {
                    let unsent = failed.take_message();
                    let error = SendError::Broken { name: target.name.clone(), source: failed.into_error() };
                    let Some(unsent) = unsent else { return Err(error) };
                    request = unsent;
                    if !connection.was_kept {
                        last = Some(error);
                        break;
                    }
                }
            }
        }
    }
    let none =
        || SendError::Connect { name: "the upstream".to_owned(), source: io::ErrorKind::NotFound.into() };
    Err(last.unwrap_or_else(none))
}

/// The targets that work before those that do not, and the least busy first.
fn in_order(targets: &[Arc<Target>]) -> Vec<&Arc<Target>> {
    let mut order: Vec<&Arc<Target>> = targets.iter().collect();
    if order.len() > 1 {
        let now = clock::now();
        let start = random::within(0..order.len());
        order.rotate_left(start);
        order.sort_by_key(|target| (!target.is_up(now), Reverse(target.places.available_permits())));
    }
    order
}

impl Target {
    /// Creates an upstream without connections.
    pub fn new(name: &str, limits: &UpstreamLimits) -> Target {
        Target {
            name: name.to_owned(),
            limits: limits.clone(),
            kept: Mutex::default(),
            places: Arc::new(Semaphore::new(limits.max_requests)),
            down_until: AtomicU64::new(0),
            is_sick: AtomicBool::new(false),
        }
    }

    /// The address of the upstream, as `host:port`.
    pub fn name(&self) -> &str {
        &self.name
    }

    fn is_up(&self, now: Instant) -> bool {
        !self.is_sick.load(Relaxed) && self.down_until.load(Relaxed) <= now.0
    }

    /// Records the result of a health check. Returns whether it differs from the last result.
    pub fn note_health(&self, is_sick: bool) -> bool {
        self.is_sick.swap(is_sick, Relaxed) != is_sick
    }

    /// A kept connection, or a new one.
    async fn connection(self: &Arc<Target>, patience: Duration) -> Result<Connection, SendError> {
        let busy = || SendError::Busy { name: self.name.clone(), limit: self.limits.max_requests };
        let place = self.places.clone().try_acquire_owned().map_err(|_| busy())?;
        let kept = self.take_kept();
        let was_kept = kept.is_some();
        let link = match kept {
            Some(link) => link,
            None => self.connect().await.map_err(|source| {
                let until = clock::now().plus_us(self.limits.down.as_micros() as u64);
                self.down_until.store(until.0, Relaxed);
                SendError::Connect { name: self.name.clone(), source }
            })?,
        };
        link.patience.set(patience);
        Ok(Connection { link, target: self.clone(), was_kept, is_last: false, _place: place })
    }

    fn take_kept(&self) -> Option<Link> {
        let now = clock::now();
        let mut kept = self.kept.lock();
        // The oldest connections are at the front.
        let expired = kept.iter().take_while(|kept| kept.until <= now).count();
        kept.drain(..expired);
        let ready = kept.iter().rposition(|kept| kept.link.sender.is_ready())?;
        Some(kept.remove(ready).link)
    }

    async fn connect(&self) -> io::Result<Link> {
        #[cfg(any(test, feature = "simulation"))]
        if let Some(open) = simulated::APPLICATION.with_borrow(Clone::clone) {
            return self.speak(open().await).await;
        }
        let limit = self.limits.connect_timeout;
        let late = |_| {
            let why = format!("no connection within {} ms", limit.as_millis());
            io::Error::new(io::ErrorKind::TimedOut, why)
        };
        let stream = tokio::time::timeout(limit, TcpStream::connect(&self.name)).await.map_err(late)??;
        stream.set_nodelay(true)?;
        net::keep_alive(&stream)?;
        self.speak(stream).await
    }

    async fn speak<S>(&self, stream: S) -> io::Result<Link>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let mut builder = http1::Builder::new();
        builder.max_buf_size(self.limits.max_header_bytes);
        let patience = Patience::default();
        let socket = Socket::new(stream, patience.clone());
        let (sender, connection) = builder.handshake(TokioIo::new(socket)).await.map_err(io::Error::other)?;
        let name = self.name.clone();
        vital::detach(async move {
            if let Err(error) = connection.with_upgrades().await {
                tracing::debug!(upstream = name, %error, "the connection to an upstream broke");
            }
        });
        Ok(Link { sender, patience })
    }

    /// Closes kept connections that are closed by the upstream or unused for too long.
    pub fn sweep(&self) {
        let now = clock::now();
        let mut kept = self.kept.lock();
        kept.retain(|kept| kept.until > now && !kept.link.sender.is_closed());
    }
}

impl Connection {
    /// The name of the upstream.
    pub fn target(&self) -> &str {
        &self.target.name
    }

    /// Prevents other requests from being sent on this connection.
    pub fn is_last(&mut self) {
        self.is_last = true;
    }

    /// Keeps the connection for the next request. Must be called when the whole answer has arrived.
    pub fn keep(self) {
        let keepalive = self.target.limits.keepalive;
        if keepalive > Duration::ZERO && !self.is_last && !self.link.sender.is_closed() {
            let until = clock::now().plus_us(keepalive.as_micros() as u64);
            let mut kept = self.target.kept.lock();
            kept.push(Kept { link: self.link, until });
        }
    }
}
/// The application of a simulation.
#[cfg(any(test, feature = "simulation"))]
pub mod simulated {
    use std::cell::RefCell;
    use std::sync::Arc;

    use futures_util::future::BoxFuture;
    use tokio::io::DuplexStream;

    /// Opens a connection to the application.
    pub type Open = Arc<dyn Fn() -> BoxFuture<'static, DuplexStream> + Send + Sync>;

    thread_local! {
        /// The application of the simulation that runs on this thread.
        pub static APPLICATION: RefCell<Option<Open>> = const { RefCell::new(None) };
    }
}
