//! `[upstreams]`: settings that the upstreams of all guarded routes share.

use std::time::Duration;

use super::reader::{Section, defaults};
use super::values::MAX_DURATION_MS;

/// Settings that all upstreams share.
#[derive(Clone, Debug)]
pub struct UpstreamLimits {
    /// The longest time to connect to an upstream.
    pub connect_timeout: Duration,
    /// How long an idle connection is kept for the next request. It must be shorter than the upstream's own limit, or
    /// the upstream may close the connection while a request is on its way.
    pub keepalive: Duration,
    /// Concurrent requests to one upstream; further requests are answered with 503.
    pub max_requests: usize,
    /// The size limit of an answer's status line and headers.
    pub max_header_bytes: usize,
    /// How long an upstream that refused a connection is skipped while another upstream is available.
    pub down: Duration,
    /// The interval of the requests for a route's `health` path.
    pub health_every: Duration,
}

impl UpstreamLimits {
    /// Reads `[upstreams]`.
    pub(super) fn read(section: &Section<'_>) -> UpstreamLimits {
        let limits = UpstreamLimits {
            connect_timeout: section.milliseconds("connect_timeout_ms", 10..=60_000, 2_000),
            keepalive: section.milliseconds("keepalive_ms", 0..=MAX_DURATION_MS, 4_000),
            max_requests: section.integer("max_requests", 1..=100_000, 1_024),
            max_header_bytes: section.integer("max_header_bytes", 8_192..=1_048_576, 65_536),
            down: section.milliseconds("down_ms", 0..=MAX_DURATION_MS, 5_000),
            health_every: section.milliseconds("health_every_ms", 100..=MAX_DURATION_MS, 2_000),
        };
        section.finish();
        limits
    }
}

impl Default for UpstreamLimits {
    fn default() -> UpstreamLimits {
        defaults(UpstreamLimits::read)
    }
}
