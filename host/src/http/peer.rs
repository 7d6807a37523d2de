//! The HTTP client at the other end of a connection.

use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use bytes::Bytes;
use futures_util::future::BoxFuture;

use crate::clock;
use crate::lock::Instant;
use crate::mutex::Mutex;
use crate::net::{self, Stream};

/// The client of a connection: its [`net::Peer`], and what became of its requests. All requests of a connection share
/// one value. Over HTTP/2, a client with a long [patience](net::Peer::set_patience) must still answer pings, which shows
/// that it reads.
pub struct Peer {
    client: net::Peer,
    upgrade: Mutex<Option<Upgrade>>,
    /// Whether the last answer was a 101.
    switched: AtomicBool,
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
    /// A client that has sent nothing yet.
    pub fn new(client: net::Peer) -> Peer {
        Peer {
            client,
            upgrade: Mutex::new(None),
            switched: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            heard_at: AtomicU64::new(0),
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

    /// Sets the use of the connection after the current answer, which must be a 101 to an HTTP/1.1 request with an
    /// `Upgrade` header.
    ///
    /// `run` gets the connection and the bytes that the client sent early. Clients that wait for the 101, as they
    /// must, send none: bytes before the 101 are still read as HTTP. The connection's task awaits the future of
    /// `run`, so the connection counts toward `max_connections` until the future ends. When the proxy shuts down, it
    /// drops the future and closes the connection. `run` is not called if the answer is not a 101, nor over HTTP/2.
    pub fn upgrade(&self, run: impl FnOnce(Stream, Bytes) -> BoxFuture<'static, ()> + Send + 'static) {
        *self.upgrade.lock() = Some(Box::new(run));
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
        self.upgrade.lock().take()
    }
}

impl Deref for Peer {
    type Target = net::Peer;

    fn deref(&self) -> &net::Peer {
        &self.client
    }
}
