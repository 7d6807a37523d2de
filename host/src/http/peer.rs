//! The client at the other end of a connection.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use tokio::io::Interest;
use tokio::net::TcpStream;

use super::{PEER_TIMEOUT, Stream};
use crate::clock;
use crate::lock::Instant;

/// The client of a connection. All requests of a connection share one value.
pub struct Peer {
    /// The client's address; an IPv4 client of an IPv6 listener has an IPv4 address here too.
    pub address: SocketAddr,
    /// Whether the client speaks TLS to the proxy.
    pub tls: bool,
    upgrade: Mutex<Option<Upgrade>>,
    /// A duplicate of the connection's descriptor, to detect that the client has closed it.
    socket: Option<OwnedFd>,
    /// Whether the last answer was a 101.
    switched: AtomicBool,
    /// How long the client may read nothing, in milliseconds.
    patience_ms: AtomicU64,
    /// Whether the client has closed its side.
    closed: AtomicBool,
    /// When data last arrived over HTTP/2, in microseconds of [`clock::now`].
    heard_at: AtomicU64,
}

/// When a client resets a stream, data from it arrived less than this time before the drop of the stream. From a
/// client that did not answer a ping, nothing arrived.
const LATELY_MS: u32 = 1_000;

/// The further use of a connection that no longer speaks HTTP.
pub type Upgrade = Box<dyn FnOnce(Stream, Bytes) -> BoxFuture<'static, ()> + Send>;

impl Peer {
    /// A client that has just connected.
    pub fn new(address: SocketAddr, tls: bool) -> Peer {
        let address = SocketAddr::new(address.ip().to_canonical(), address.port());
        Peer {
            address,
            tls,
            upgrade: Mutex::new(None),
            socket: None,
            switched: AtomicBool::new(false),
            patience_ms: AtomicU64::new(PEER_TIMEOUT.as_millis() as u64),
            closed: AtomicBool::new(false),
            heard_at: AtomicU64::new(0),
        }
    }

    /// Allows the client to read nothing of its answers for `limit`, if that is longer than before. An HTTP/2 client
    /// must still answer pings, which shows that it reads.
    pub fn set_patience(&self, limit: Duration) {
        let limit_ms = limit.as_millis() as u64;
        if self.patience_ms.fetch_max(limit_ms, Relaxed) < limit_ms
            && let Some(socket) = &self.socket
            && let Err(error) = socket2::SockRef::from(socket).set_tcp_user_timeout(Some(limit))
        {
            tracing::debug!(%error, "the read time-out of a client cannot be set");
        }
    }

    /// Whether the client itself ended a dropped request, by closing the connection or resetting the stream. If the
    /// connection broke or fell silent, the client may not know that its request has ended.
    pub fn left(&self) -> bool {
        let heard_at = Instant(self.heard_at.load(Relaxed));
        self.closed.load(Relaxed) || clock::now() < heard_at.plus_ms(LATELY_MS)
    }

    pub(super) fn closed(&self) {
        self.closed.store(true, Relaxed);
    }

    pub(super) fn heard(&self) {
        self.heard_at.store(clock::now().0, Relaxed);
    }

    /// Enables [`Peer::gone`].
    pub(super) fn watch(&mut self, stream: &TcpStream) {
        self.socket = stream.as_fd().try_clone_to_owned().ok();
    }

    /// Returns when the client has closed its side. The HTTP library detects this too and drops the handler, but not
    /// while a part of the request's body has not been asked for, because it does not read then.
    pub async fn gone(&self) {
        let watched = self.socket.as_ref().and_then(|socket| socket.try_clone().ok());
        let watched = watched.and_then(|socket| TcpStream::from_std(socket.into()).ok());
        if let Some(watched) = watched {
            while let Ok(ready) = watched.ready(Interest::READABLE).await {
                if ready.is_read_closed() {
                    return;
                }
                // The data belongs to the HTTP library; only a change of readiness matters here.
                let _ = watched.try_io(Interest::READABLE, || Err::<(), _>(io::ErrorKind::WouldBlock.into()));
            }
        }
        std::future::pending::<()>().await;
    }

    /// Sets the use of the connection after the current answer, which must be a 101 to an HTTP/1.1 request with an
    /// `Upgrade` header.
    ///
    /// `run` gets the connection and the bytes that the client sent early. Clients that wait for the 101, as they
    /// must, send none: bytes before the 101 are still read as HTTP. The connection's task awaits the future of
    /// `run`, so the connection counts toward `max_connections` until the future ends. When the proxy shuts down, it
    /// drops the future and closes the connection. `run` is not called if the answer is not a 101, nor over HTTP/2.
    pub fn upgrade(&self, run: impl FnOnce(Stream, Bytes) -> BoxFuture<'static, ()> + Send + 'static) {
        *self.upgrade.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(run));
    }

    /// Records that a 101 answer is being sent; no other answer follows it.
    pub(super) fn switch(&self) {
        self.switched.store(true, Relaxed);
    }

    /// The further use of the connection, if its protocol was switched.
    pub(super) fn take_upgrade(&self) -> Option<Upgrade> {
        if !self.switched.load(Relaxed) {
            return None;
        }
        self.upgrade.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http;

    /// The kernel would end a connection with a slow peer, unless a longer limit is set.
    #[tokio::test]
    async fn clients_have_a_time_limit_of_their_own_and_upstreams_none() {
        let limit_of = |stream: &TcpStream| socket2::SockRef::from(stream).tcp_user_timeout().unwrap();
        let listener = http::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let upstream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        http::keep_alive(&upstream).unwrap();
        assert!(socket2::SockRef::from(&upstream).keepalive().unwrap());
        assert_eq!(limit_of(&upstream), None, "how long it may take is the route's to say");

        let (client, address) = listener.accept().await.unwrap();
        let mut peer = Peer::new(address, false);
        peer.watch(&client);
        assert_eq!(limit_of(&client), Some(PEER_TIMEOUT));
        peer.set_patience(Duration::from_secs(120));
        peer.set_patience(Duration::from_secs(60));
        assert_eq!(limit_of(&client), Some(Duration::from_secs(120)), "the longest of its answers counts");
    }
}
