//! Connections of any wire protocol: listening, the limit on connections, TLS, and the drain.
//!
//! [`serve`] accepts the connections of one [`Listener`] and gives each of them to a [`Protocol`], as one task. The
//! protocol reads and writes, until the client leaves or the proxy stops. `http` and `peers` are such protocols.
//!
//! | what | who decides |
//! | --- | --- |
//! | the number of connections, in all and from one address, and what happens to further connections ([`WhenFull`]) | [`Protocol::limits`] |
//! | the time for the TLS handshake | [`Protocol::limits`]; the protocol may use the remaining time for its own handshake |
//! | the length of a message, the time for it, the time between two messages | the protocol |
//! | how a connection ends when the proxy stops | the protocol; [`Connection::stop`] notifies it |
//!
//! The kernel closes the connection of a client whose machine has disappeared, or that reads nothing of what is
//! sent to it ([`Peer::set_patience`]). On a Unix socket, the proxy itself does so.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::warn;

mod addresses;
mod listener;
mod peer;
mod stream;
#[cfg(test)]
mod tests;
mod timed;
mod tls;
mod unix;

pub use addresses::{Addresses, Origin, Place};
pub use listener::{Listener, keep_alive, raise_file_limit};
pub use peer::{Peer, PeerAddress};
pub use stream::Stream;
pub use tls::Tls;

/// Serves the connections of a listener.
pub trait Protocol: Send + Sync + 'static {
    /// The listener's name in logs.
    const NAME: &'static str;

    /// The limits of the listener.
    fn limits(&self) -> Limits;

    /// Called for each connection that is refused because there are too many. Returns the last bytes for the client.
    /// Over TLS they are not sent, as that would cost a handshake.
    fn refuse(&self, _too_many: TooMany) -> Vec<u8> {
        Vec::new()
    }

    /// Serves one connection. The connection counts until the future ends.
    fn serve(self: Arc<Self>, connection: Connection) -> impl Future<Output = ()> + Send;
}

/// What bounds the connections of a listener.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The most open connections.
    pub max_connections: usize,
    /// The most open connections from one address; `None` if there is no limit. Further connections are refused.
    pub max_per_address: Option<usize>,
    /// What becomes of the connections over `max_connections`.
    pub when_full: WhenFull,
    /// The time for the handshake of a connection.
    pub handshake_timeout: Duration,
}

/// What there are too many of when a connection is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TooMany {
    /// Connections of the listener.
    Connections,
    /// Connections from the client's address.
    FromAddress,
}

/// What becomes of a connection over the limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhenFull {
    /// It gets the answer of [`Protocol::refuse`] and is closed: its client can tell a full proxy from a dead network.
    Refuse,
    /// It waits in the listener's backlog until another connection has ended.
    Wait,
}

/// An accepted connection, after the TLS handshake if there is one.
pub struct Connection {
    /// The bytes, decrypted.
    pub stream: Stream,
    /// The client.
    pub peer: Peer,
    /// When the time for the handshake ends.
    pub handshake_deadline: tokio::time::Instant,
    /// Cancelled when the proxy stops: the protocol finishes the requests in progress and takes no other requests.
    pub stop: CancellationToken,
}

/// The number of connections over the limit that are answered at the same time; others are closed unanswered.
const MAX_REFUSALS: usize = 128;

/// Accepts and serves connections until `stop`, then waits until the last connection has ended.
///
/// The caller must limit how long that may take.
pub async fn serve<P: Protocol>(listener: Listener, protocol: P, stop: CancellationToken) {
    let connections = TaskTracker::new();
    tokio::select! {
        biased;
        () = stop.cancelled() => {}
        () = accept_all(listener, Arc::new(protocol), &connections, &stop) => {}
    }
    connections.close();
    connections.wait().await;
}

async fn accept_all<P: Protocol>(
    listener: Listener,
    protocol: Arc<P>,
    connections: &TaskTracker,
    stop: &CancellationToken,
) {
    let Limits { max_connections, max_per_address, when_full, handshake_timeout } = protocol.limits();
    let tls = listener.tls().cloned();
    let places = Arc::new(Semaphore::new(max_connections));
    let addresses = max_per_address.map(|max| Arc::new(Addresses::new(max)));
    let refusals = Arc::new(Semaphore::new(MAX_REFUSALS));
    let refuse = |stream, too_many| {
        let last_words = protocol.refuse(too_many);
        if tls.is_none() {
            close_with(stream, last_words, &refusals);
        }
    };
    loop {
        let place = tokio::select! {
            biased;
            place = Arc::clone(&places).acquire_owned() => place,
            (stream, _) = accept(&listener, P::NAME), if when_full == WhenFull::Refuse => {
                refuse(stream, TooMany::Connections);
                continue;
            }
        };
        let (stream, address) = accept(&listener, P::NAME).await;
        let of_address = addresses.as_ref().map(|addresses| addresses.take(address.origin()));
        if let Some(None) = of_address {
            refuse(stream, TooMany::FromAddress);
            continue;
        }
        let of_address = of_address.flatten().map(Arc::new);
        let handshake_deadline = tokio::time::Instant::now() + handshake_timeout;
        let (protocol, tls, stop) = (Arc::clone(&protocol), tls.clone(), stop.clone());
        connections.spawn(async move {
            // Boxed, so that the connection does not reserve memory for its beginning.
            let opened = Box::pin(open(stream, address, of_address, tls, handshake_deadline, stop)).await;
            if let Some((connection, refused)) = opened {
                tokio::select! {
                    biased;
                    () = refused => {}
                    () = protocol.serve(connection) => {}
                }
            }
            drop(place);
        });
    }
}

/// Ends when the certificate of a client is no longer valid.
type Refused = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Performs the TLS handshake, if there is one. `None` if it fails. The returned future ends when the client's certificate
/// is no longer valid.
async fn open(
    stream: Stream,
    address: PeerAddress,
    of_address: Option<Arc<Place>>,
    tls: Option<Arc<Tls>>,
    handshake_deadline: tokio::time::Instant,
    stop: CancellationToken,
) -> Option<(Connection, Refused)> {
    let mut peer = Peer::new(address, tls.is_some());
    let stream = match (stream, &tls) {
        // Boxed, so that a connection does not reserve memory for the handshake.
        (Stream::Plain(stream), Some(tls)) => tokio::select! {
            stream = Box::pin(tls.handshake(stream, handshake_deadline)) => stream?,
            () = stop.cancelled() => return None,
        },
        (stream, _) => stream,
    };
    peer.place = of_address;
    let chain = match &stream {
        Stream::Tls(stream) => tls::client_chain(stream.get_ref().1),
        _ => Vec::new(),
    };
    peer.names = tls::client_names(&chain);
    let refused: Refused = match tls {
        Some(tls) if !chain.is_empty() => Box::pin(async move { tls.until_refused(chain).await }),
        _ => Box::pin(std::future::pending()),
    };
    Some((Connection { stream, peer, handshake_deadline, stop }, refused))
}

/// Sends the last bytes to a client, unless too many clients are being told already.
fn close_with(stream: Stream, last_words: Vec<u8>, refusals: &Arc<Semaphore>) {
    let Ok(place) = Arc::clone(refusals).try_acquire_owned() else { return };
    tokio::spawn(async move {
        stream.close_with(&last_words).await;
        drop(place);
    });
}

/// The next connection. If file descriptors or memory are exhausted, only waiting helps; other errors concern a
/// single client.
async fn accept(listener: &Listener, name: &str) -> (Stream, PeerAddress) {
    use io::ErrorKind::{ConnectionAborted, ConnectionReset, Interrupted};
    loop {
        match listener.accept().await {
            Ok(accepted) => return accepted,
            Err(error) if matches!(error.kind(), ConnectionAborted | ConnectionReset | Interrupted) => {}
            Err(error) => {
                warn!(listener = name, %error, "cannot accept connections");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}
