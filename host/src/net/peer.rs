//! The client at the other end of a connection.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use tokio::io::Interest;
use tokio::net::TcpStream;

use super::Stream;
use super::addresses::{Origin, Place};

/// A client that acknowledges nothing, or reads nothing of what is sent to it, for this long counts as gone; see also
/// [`Peer::set_patience`].
pub const PEER_TIMEOUT: Duration = Duration::from_secs(30);

/// Where a client's connection comes from. In logs: `10.0.0.7:5000`, or `unix:uid=1000,pid=77`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerAddress {
    /// A TCP address; an IPv4 client of an IPv6 listener has an IPv4 address here too.
    Tcp(SocketAddr),
    /// The process that has connected to a Unix socket.
    Unix {
        /// Its effective user, as the kernel has recorded it at the connection.
        uid: u32,
        /// Its process id; `None` if the process cannot be seen from here.
        pid: Option<i32>,
    },
}

impl PeerAddress {
    /// The IP address; `None` for a Unix socket.
    pub fn ip(&self) -> Option<IpAddr> {
        match self {
            PeerAddress::Tcp(address) => Some(address.ip()),
            PeerAddress::Unix { .. } => None,
        }
    }

    /// What counts as one address where clients are limited by it.
    pub fn origin(&self) -> Origin {
        match self {
            PeerAddress::Tcp(address) => Origin::of_ip(address.ip()),
            PeerAddress::Unix { uid, .. } => Origin::User(*uid),
        }
    }
}

impl From<SocketAddr> for PeerAddress {
    fn from(address: SocketAddr) -> PeerAddress {
        PeerAddress::Tcp(SocketAddr::new(address.ip().to_canonical(), address.port()))
    }
}

impl fmt::Display for PeerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PeerAddress::Tcp(address) => address.fmt(f),
            PeerAddress::Unix { uid, pid: Some(pid) } => write!(f, "unix:uid={uid},pid={pid}"),
            PeerAddress::Unix { uid, pid: None } => write!(f, "unix:uid={uid}"),
        }
    }
}

/// The client of a connection.
pub struct Peer {
    /// Where the client is.
    pub address: PeerAddress,
    /// Whether the client speaks TLS to the proxy.
    pub tls: bool,
    /// The URIs and DNS names of the client's certificate; empty if it has none. An authority of the listener has signed
    /// the certificate.
    pub names: Vec<String>,
    /// The place of the connection among those from its address; `None` if these are not counted. It counts until the last
    /// copy of this is dropped.
    pub place: Option<Arc<Place>>,
    /// A duplicate of the connection's descriptor, to detect that the client has closed it.
    socket: Option<OwnedFd>,
    /// How long the client may read nothing, in milliseconds.
    patience_ms: Arc<AtomicU64>,
}

impl Peer {
    /// A client that has just connected.
    pub fn new(address: impl Into<PeerAddress>, tls: bool) -> Peer {
        Peer {
            address: address.into(),
            tls,
            names: Vec::new(),
            place: None,
            socket: None,
            patience_ms: Arc::new(AtomicU64::new(PEER_TIMEOUT.as_millis() as u64)),
        }
    }

    /// Enables [`Peer::gone`] and [`Peer::set_patience`], which costs a file descriptor.
    pub fn watch(&mut self, stream: &Stream) {
        self.socket = stream.socket().try_clone_to_owned().ok();
        if let Stream::Unix(stream) = stream {
            self.patience_ms = Arc::clone(&stream.patience_ms);
        }
    }

    /// Allows the client to read nothing of what is sent to it for `limit`, if that is longer than before.
    pub fn set_patience(&self, limit: Duration) {
        let limit_ms = limit.as_millis() as u64;
        if self.patience_ms.fetch_max(limit_ms, Relaxed) < limit_ms
            && let PeerAddress::Tcp(_) = self.address
            && let Some(socket) = &self.socket
            && let Err(error) = socket2::SockRef::from(socket).set_tcp_user_timeout(Some(limit))
        {
            tracing::debug!(%error, "the read time-out of a client cannot be set");
        }
    }

    /// Returns when the client has closed its side, even while nothing reads from the connection. Never returns for
    /// a client that is not [watched](Peer::watch).
    pub async fn gone(&self) {
        let watched = self.socket.as_ref().and_then(|socket| socket.try_clone().ok());
        // Only its readiness is used, which a Unix socket has as well.
        let watched = watched.and_then(|socket| TcpStream::from_std(socket.into()).ok());
        if let Some(watched) = watched {
            while let Ok(ready) = watched.ready(Interest::READABLE).await {
                if ready.is_read_closed() {
                    return;
                }
                // The data belongs to the protocol; only a change of readiness matters here.
                let _ = watched.try_io(Interest::READABLE, || Err::<(), _>(io::ErrorKind::WouldBlock.into()));
            }
        }
        std::future::pending::<()>().await;
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, BorrowedFd};

    use super::*;
    use crate::net::{self, Listener};

    /// The kernel would end a connection with a slow peer, unless a longer limit is set.
    #[tokio::test]
    async fn client_connections_have_a_tcp_timeout_and_upstream_connections_have_none() {
        let limit_of = |socket: BorrowedFd<'_>| socket2::SockRef::from(&socket).tcp_user_timeout().unwrap();
        let listener = Listener::bind(&"127.0.0.1:0".parse().unwrap()).unwrap();
        let upstream = TcpStream::connect(listener.address().unwrap().to_string()).await.unwrap();
        net::keep_alive(&upstream).unwrap();
        assert!(socket2::SockRef::from(&upstream).keepalive().unwrap());
        assert_eq!(limit_of(upstream.as_fd()), None, "how long it may take is the route's to say");

        let (client, address) = listener.accept().await.unwrap();
        let mut peer = Peer::new(address, false);
        peer.watch(&client);
        assert_eq!(limit_of(client.socket()), Some(PEER_TIMEOUT));
        peer.set_patience(Duration::from_secs(120));
        peer.set_patience(Duration::from_secs(60));
        assert_eq!(
            limit_of(client.socket()),
            Some(Duration::from_secs(120)),
            "the longest of its answers counts"
        );
    }
}
