//! The interface of the front that answers the requests of a listener.

use std::future::Future;
use std::sync::Arc;

use super::body::{Request, Response};
use super::peer::Peer;
use crate::config::HttpLimits;
use crate::telemetry::Metrics;

/// Answers the requests of one listener.
pub trait Handler: Send + Sync + 'static {
    /// The front's name in metrics and logs.
    const FRONT: &'static str;
    /// Whether the handler uses [`gone`](crate::net::Peer::gone), which costs a file descriptor per connection.
    const WATCHES_PEERS: bool = false;

    /// Answers one request of `peer`. The future is dropped when the client goes away.
    fn handle(&self, request: Request, peer: &Arc<Peer>) -> impl Future<Output = Response> + Send;
}

/// A handler, and what its listener needs besides: HTTP as a [`Protocol`](crate::net::Protocol).
pub struct Http<H> {
    pub handler: H,
    pub limits: HttpLimits,
    pub metrics: Metrics,
}
