//! The client at the other end of a connection.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

use bytes::Bytes;
use futures_util::future::BoxFuture;

use super::Stream;

/// Who is asking. One for each connection, whatever the number of its requests.
pub struct Peer {
    /// Where the connection comes from; an IPv4 address also where the listener is an IPv6 one.
    pub address: SocketAddr,
    /// Whether the client speaks TLS to the proxy.
    pub tls: bool,
    upgrade: Mutex<Option<Upgrade>>,
    /// The last answer was a 101.
    switched: AtomicBool,
}

/// What goes on with a connection that speaks HTTP no more.
pub type Upgrade = Box<dyn FnOnce(Stream, Bytes) -> BoxFuture<'static, ()> + Send>;

impl Peer {
    pub fn new(address: SocketAddr, tls: bool) -> Peer {
        let address = SocketAddr::new(address.ip().to_canonical(), address.port());
        Peer { address, tls, upgrade: Mutex::new(None), switched: AtomicBool::new(false) }
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
