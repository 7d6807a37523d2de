//! Listening sockets.

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpSocket};
use tracing::debug;

use super::Stream;
use super::peer::{PEER_TIMEOUT, PeerAddress};
use super::tls::Tls;
use super::unix::UnixSocket;
use crate::config::ListenAddress;

/// A listening socket, with TLS if its connections use TLS.
pub struct Listener {
    socket: Socket,
    tls: Option<Arc<Tls>>,
}

enum Socket {
    Tcp(TcpListener),
    Unix(UnixSocket),
}

impl Listener {
    /// Listens on an address, without TLS. The file of a Unix socket is removed when the listener is dropped.
    ///
    /// # Errors
    /// The address cannot be bound, or another process listens there.
    pub fn bind(address: &ListenAddress) -> io::Result<Listener> {
        let socket = match address {
            ListenAddress::Tcp(address) => Socket::Tcp(bind(*address)?),
            ListenAddress::Unix { path, mode } => Socket::Unix(UnixSocket::bind(path, *mode, BACKLOG)?),
        };
        Ok(Listener { socket, tls: None })
    }

    /// The same listener, whose connections use TLS if it listens on TCP.
    pub fn with_tls(self, tls: Arc<Tls>) -> Listener {
        Listener { tls: Some(tls), ..self }
    }

    /// The address, with the port that the system has chosen for port 0.
    ///
    /// # Errors
    /// The system does not know the address.
    pub fn address(&self) -> io::Result<ListenAddress> {
        Ok(match &self.socket {
            Socket::Tcp(listener) => ListenAddress::Tcp(listener.local_addr()?),
            Socket::Unix(UnixSocket { path, mode, .. }) => {
                ListenAddress::Unix { path: path.clone(), mode: *mode }
            }
        })
    }

    /// `None`: connections do not use TLS.
    pub fn tls(&self) -> Option<&Arc<Tls>> {
        self.tls.as_ref()
    }

    /// The next connection, before TLS.
    pub(super) async fn accept(&self) -> io::Result<(Stream, PeerAddress)> {
        match &self.socket {
            Socket::Tcp(listener) => {
                let (stream, address) = listener.accept().await?;
                Ok((Stream::Plain(stream), address.into()))
            }
            Socket::Unix(socket) => {
                let (stream, address) = socket.accept().await?;
                Ok((Stream::Unix(Box::new(stream)), address))
            }
        }
    }
}

/// The number of connections that may wait to be accepted.
const BACKLOG: u32 = 4096;
/// The kernel starts to probe a peer that has been silent for this long.
const KEEPALIVE_AFTER: Duration = Duration::from_secs(15);
/// The time between two probes of a silent peer.
const KEEPALIVE_EVERY: Duration = Duration::from_secs(5);

fn bind(address: SocketAddr) -> io::Result<TcpListener> {
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
pub fn keep_alive(socket: &impl AsFd) -> io::Result<()> {
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
