//! The HTTP server that the fronts share, and its limits.
//!
//! HTTP is a [`Protocol`] of [`net`], which accepts the connections. The server speaks HTTP/1.1, and HTTP/2 with a
//! client that starts with its preface (prior knowledge) or negotiates it in the TLS handshake. The cost of a client
//! is bounded:
//!
//! | what | limit (`[http]` of config.toml) | answer |
//! | --- | --- | --- |
//! | connections | `max_connections` | 503, closed |
//! | connections from one address | `max_connections_per_address` | 429, closed |
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
//! When a connection ends or an HTTP/2 stream is reset, the future of its handler is dropped; this is how waiters
//! leave the queue. A half-closed connection counts as ended.
//!
//! The bytes of a client pass `socket`, where `gate` judges them, the HTTP library, `requests`, and the front's
//! [`Handler`]. `connection` drives a connection from its first byte to its end. `activity` tracks what the
//! connection is doing, and `watchdog` decides when it should end.
//!
//! A handler that answers 101 passes a function to [`Peer::upgrade`], which then uses the connection.

use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use crate::config::HttpLimits;
use crate::net::{self, Connection, Listener, Protocol, TooMany, WhenFull};
use crate::telemetry::Metrics;

mod activity;
mod body;
mod connection;
pub(crate) mod gate;
mod handler;
mod origin;
mod peer;
mod problem;
mod request_id;
mod requests;
mod socket;
mod target;
#[cfg(test)]
mod tests;
mod watchdog;

pub use body::{Body, BodyError, BrokenBody, Request, Response, json, read_body};
pub use handler::Handler;
pub use origin::check as check_origin;
pub use peer::Peer;
pub use problem::{Kind, Problem, Told};
pub use request_id::RequestId;
pub use target::{Query, decode_form, decode_path};

use handler::Http;
use socket::{HTTP1, HTTP2};

/// The names of HTTP in the TLS handshake, the preferred name first.
pub const ALPN: &[&[u8]] = &[HTTP2, HTTP1];

/// Serves HTTP on a listener until `stop`, then lets the requests in progress finish.
///
/// Returns when the last connection has ended. The caller must limit how long that may take.
pub async fn serve<H: Handler>(
    listener: Listener,
    handler: H,
    limits: HttpLimits,
    metrics: Metrics,
    stop: CancellationToken,
) {
    net::serve(listener, Http { handler, limits, metrics }, stop).await;
}

impl<H: Handler> Protocol for Http<H> {
    const NAME: &'static str = H::FRONT;

    fn limits(&self) -> net::Limits {
        net::Limits {
            max_connections: self.limits.max_connections,
            max_per_address: self.limits.max_per_address,
            when_full: WhenFull::Refuse,
            handshake_timeout: self.limits.header_timeout,
        }
    }

    fn refuse(&self, too_many: TooMany) -> Vec<u8> {
        let problem = match too_many {
            TooMany::Connections => {
                let limit = self.limits.max_connections;
                let detail = format!("the proxy has {limit} connections, which is its limit");
                Problem::new(Kind::OVERLOADED, detail).with("bound", "http.max_connections")
            }
            TooMany::FromAddress => {
                let (name, limit) = ("http.max_connections_per_address", self.limits.max_per_address);
                self.metrics.limits.refused(name);
                let detail = "the address of the client has as many connections as it may have";
                Problem::new(Kind::TOO_MANY_CONNECTIONS, detail).with("limit", name).with("bound", limit)
            }
        };
        self.metrics.http.answered(H::FRONT, problem.status_code());
        problem.retry_after_ms(1_000).to_http1()
    }

    async fn serve(self: Arc<Self>, connection: Connection) {
        connection::run(connection, self).await;
    }
}
