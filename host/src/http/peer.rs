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

/// Who is asking. One for each connection, whatever the number of its requests.
pub struct Peer {
    /// Where the connection comes from; an IPv4 address also where the listener is an IPv6 one.
    pub address: SocketAddr,
    /// Whether the client speaks TLS to the proxy.
    pub tls: bool,
    upgrade: Mutex<Option<Upgrade>>,
    /// The connection once more, to be told when it is closed.
    socket: Option<OwnedFd>,
    /// The last answer was a 101.
    switched: AtomicBool,
    /// For how long the client may take nothing, in milliseconds.
    patience_ms: AtomicU64,
    /// The client has closed its side.
    closed: AtomicBool,
    /// When something last came over HTTP/2, microseconds of [`clock::now`].
    heard_at: AtomicU64,
}

/// A client that resets a stream was heard of less than this ago when the stream is dropped. One that has not
/// answered a ping was not.
const LATELY_MS: u32 = 1_000;

/// What goes on with a connection that speaks HTTP no more.
pub type Upgrade = Box<dyn FnOnce(Stream, Bytes) -> BoxFuture<'static, ()> + Send>;

impl Peer {
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

    /// Lets the client take nothing of its answers for `limit`, where the connection would have ended before. HTTP/2
    /// clients must answer a ping meanwhile, which shows that they read.
    pub fn set_patience(&self, limit: Duration) {
        let limit_ms = limit.as_millis() as u64;
        if self.patience_ms.fetch_max(limit_ms, Relaxed) < limit_ms
            && let Some(socket) = &self.socket
            && let Err(error) = socket2::SockRef::from(socket).set_tcp_user_timeout(Some(limit))
        {
            tracing::debug!(%error, "a client's time to read cannot be set");
        }
    }

    /// Whether a request that is dropped was ended by its client, which closed the connection or reset the stream.
    /// Of a connection that broke or fell silent, the client may not know yet.
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

    /// Has [`Peer::gone`] tell.
    pub(super) fn watch(&mut self, stream: &TcpStream) {
        self.socket = stream.as_fd().try_clone_to_owned().ok();
    }

    /// Tells when the client has closed its side. The library tells, too, by dropping the handler, but not
    /// while a part of the request's body has not been asked for: it does not read on then.
    pub async fn gone(&self) {
        let watched = self.socket.as_ref().and_then(|socket| socket.try_clone().ok());
        let watched = watched.and_then(|socket| TcpStream::from_std(socket.into()).ok());
        if let Some(watched) = watched {
            while let Ok(ready) = watched.ready(Interest::READABLE).await {
                if ready.is_read_closed() {
                    return;
                }
                // What has arrived is not for us: only news are.
                let _ = watched.try_io(Interest::READABLE, || Err::<(), _>(io::ErrorKind::WouldBlock.into()));
            }
        }
        std::future::pending::<()>().await;
    }

    /// Says what to do with the connection when the answer under way, which must be a 101 to an HTTP/1.1
    /// request that has an `Upgrade`, has been written.
    ///
    /// `run` gets the connection and what the client sent early, which is nothing for clients that wait for
    /// the 101 as they must: what comes before it is still read as HTTP. Its future is awaited in the
    /// connection's task: the connection counts under `max_connections` until it ends. It is dropped, and
    /// the connection closed, when the proxy shuts down. Where the answer is another one, and over HTTP/2,
    /// `run` is not called.
    pub fn upgrade(&self, run: impl FnOnce(Stream, Bytes) -> BoxFuture<'static, ()> + Send + 'static) {
        *self.upgrade.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(run));
    }

    /// An answer that switches protocols is on its way: no other will follow.
    pub(super) fn switch(&self) {
        self.switched.store(true, Relaxed);
    }

    /// What to do with the connection, where it was switched.
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

    /// The kernel ends a connection whose other side only takes its time, unless it is told to be patient.
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
