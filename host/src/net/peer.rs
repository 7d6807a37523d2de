//! The client at the other end of a connection.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use tokio::io::Interest;
use tokio::net::TcpStream;

use super::Stream;
use super::addresses::{Place, network_of};

/// A client that acknowledges nothing, or reads nothing of what is sent to it, for this long counts as gone; see also
/// [`Peer::set_patience`].
pub const PEER_TIMEOUT: Duration = Duration::from_secs(30);

/// The client of a connection.
pub struct Peer {
    /// The client's address; an IPv4 client of an IPv6 listener has an IPv4 address here too.
    pub address: SocketAddr,
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
    patience_ms: AtomicU64,
}

impl Peer {
    /// A client that has just connected.
    pub fn new(address: SocketAddr, tls: bool) -> Peer {
        let address = SocketAddr::new(address.ip().to_canonical(), address.port());
        Peer {
            address,
            tls,
            names: Vec::new(),
            place: None,
            socket: None,
            patience_ms: AtomicU64::new(PEER_TIMEOUT.as_millis() as u64),
        }
    }

    /// What counts as the client's address where clients are limited by it: see [`network_of`].
    pub fn network(&self) -> Option<IpAddr> {
        Some(network_of(self.address.ip()))
    }

    /// Enables [`Peer::gone`] and [`Peer::set_patience`], which costs a file descriptor.
    pub fn watch(&mut self, stream: &Stream) {
        self.socket = stream.tcp().as_fd().try_clone_to_owned().ok();
    }

    /// Allows the client to read nothing of what is sent to it for `limit`, if that is longer than before.
    pub fn set_patience(&self, limit: Duration) {
        let limit_ms = limit.as_millis() as u64;
        if self.patience_ms.fetch_max(limit_ms, Relaxed) < limit_ms
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
    use super::*;
    use crate::net;

    /// The kernel would end a connection with a slow peer, unless a longer limit is set.
    #[tokio::test]
    async fn client_connections_have_a_tcp_timeout_and_upstream_connections_have_none() {
        let limit_of = |stream: &TcpStream| socket2::SockRef::from(stream).tcp_user_timeout().unwrap();
        let listener = net::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let upstream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        net::keep_alive(&upstream).unwrap();
        assert!(socket2::SockRef::from(&upstream).keepalive().unwrap());
        assert_eq!(limit_of(&upstream), None, "how long it may take is the route's to say");

        let (client, address) = listener.accept().await.unwrap();
        let client = Stream::Plain(client);
        let mut peer = Peer::new(address, false);
        peer.watch(&client);
        assert_eq!(limit_of(client.tcp()), Some(PEER_TIMEOUT));
        peer.set_patience(Duration::from_secs(120));
        peer.set_patience(Duration::from_secs(60));
        assert_eq!(
            limit_of(client.tcp()),
            Some(Duration::from_secs(120)),
            "the longest of its answers counts"
        );
    }
}
