//! `[http]`: limits on HTTP clients.

use std::time::Duration;

use super::reader::{Section, defaults};
use super::values::MAX_DURATION_MS;

/// Limits on the requests and connections of HTTP clients, for each listener.
#[derive(Clone, Debug)]
pub struct HttpLimits {
    /// The most open connections of a listener. A further connection is answered with 503 and closed.
    pub max_connections: usize,
    /// The most open connections of a listener from one address; `None` if there is no limit. A further connection is
    /// answered with 429 and closed.
    pub max_per_address: Option<usize>,
    /// The size limit of a request line with its headers. A longer head is answered with 431.
    pub max_header_bytes: usize,
    /// The size limit of a request body. A longer body is answered with 413. Guarded routes have no such limit.
    pub max_body_bytes: usize,
    /// The time from the first byte of a request to the end of its headers. Also how long a new connection may be
    /// silent.
    pub header_timeout: Duration,
    /// The time from the end of the headers to the end of the body.
    pub body_timeout: Duration,
    /// How long an idle connection is kept after an answer.
    pub idle_timeout: Duration,
    /// Concurrent requests on one HTTP/2 connection.
    pub max_streams: u32,
    /// Host names, besides IP addresses and `localhost`, by which clients may reach the API and the admin API.
    pub hosts: Vec<String>,
}

impl HttpLimits {
    /// Reads `[http]`.
    pub(super) fn read(section: &Section<'_>) -> HttpLimits {
        let limits = HttpLimits {
            max_connections: section.integer("max_connections", 1..=1_000_000, 20_000),
            max_per_address: Some(section.integer("max_connections_per_address", 0..=1_000_000, 0))
                .filter(|max| *max > 0),
            max_header_bytes: section.integer("max_header_bytes", 1_024..=1_048_576, 16_384),
            max_body_bytes: section.integer("max_body_bytes", 1_024..=16_777_216, 65_536),
            header_timeout: section.milliseconds("header_timeout_ms", 10..=MAX_DURATION_MS, 10_000),
            body_timeout: section.milliseconds("body_timeout_ms", 10..=MAX_DURATION_MS, 10_000),
            idle_timeout: section.milliseconds("idle_timeout_ms", 10..=MAX_DURATION_MS, 75_000),
            max_streams: section.integer("max_streams", 1..=100_000, 256),
            hosts: section.texts("hosts", host_names).unwrap_or_default(),
        };
        section.finish();
        limits
    }
}

impl Default for HttpLimits {
    fn default() -> HttpLimits {
        defaults(HttpLimits::read)
    }
}

fn host_names(names: &[&str]) -> Result<Vec<String>, String> {
    let is_name = |name: &&str| {
        let part = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
        (1..=253).contains(&name.len()) && name.bytes().all(part)
    };
    match names.iter().find(|name| !is_name(name)) {
        Some(name) => Err(format!("has {name:?}, which is not a host name; leave out scheme and port")),
        None => Ok(names.iter().map(|name| (*name).to_owned()).collect()),
    }
}
