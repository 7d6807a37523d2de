//! `[[guard]]`: listeners that pass requests on to an application, under locks.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

mod pattern;
mod read;

pub use pattern::{Fit, Matched, Part, PathPattern, Template};
pub(super) use read::{NO_LOCK, guards, upstreams};

use crate::lock::Mode;

/// A listener and its routes.
#[derive(Clone, Debug)]
pub struct GuardConfig {
    /// The address that the listener binds.
    pub listen: SocketAddr,
    /// The name of the application behind the listener. All proxies of one store must derive the same lock names for
    /// requests to the same application.
    pub application: String,
    /// The certificate and key. `None`: the listener speaks plain HTTP.
    pub tls: Option<TlsFiles>,
    /// Whether to trust the `X-Forwarded-…` and `Forwarded` headers of clients. If so, the proxy appends to these
    /// headers; otherwise it replaces them.
    pub trust_forwarded: bool,
    /// Client headers, in lower case, that are passed on although some applications confuse them with another header
    /// or part of the request.
    pub keep_headers: Vec<String>,
    /// Never empty. The first route that matches a request wins.
    pub routes: Vec<GuardRoute>,
}

/// The paths of PEM files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificate chain.
    pub cert: PathBuf,
    /// The private key.
    pub key: PathBuf,
}

/// A kind of request, and how the proxy handles it.
#[derive(Clone, Debug)]
pub struct GuardRoute {
    /// In upper case. An empty list stands for all methods; GET includes HEAD.
    pub methods: Vec<String>,
    /// The pattern that the path must match.
    pub path: PathPattern,
    /// Whether the case of letters in the path matters. If it does not, a request cannot avoid its lock by spelling
    /// the path in capital letters.
    pub exact_case: bool,
    /// Whether to pass on paths that different applications interpret differently.
    pub ambiguous_paths: bool,
    /// Names in lower case; `None` matches any value.
    pub headers: Vec<(String, Option<String>)>,
    /// Upstreams as `host:port`, at least one.
    pub upstreams: Vec<String>,
    /// `None`: requests are passed on without a lock.
    pub lock: Option<GuardLock>,
    /// The time from the end of the request to the head of the answer.
    pub response_timeout: Duration,
    /// The time between two pieces of a body, in either direction.
    pub idle_timeout: Duration,
    /// A path that is requested periodically. An upstream whose answer is not a success is not used.
    pub health: Option<String>,
}

/// The upper bound of `see_body_bytes`: how much of a body a policy may see.
pub const MAX_SEEN_BYTES: usize = 8_192;

/// The lock of a route's requests.
#[derive(Clone, Debug)]
pub struct GuardLock {
    /// The name of the policy that decides about the lock.
    pub policy: String,
    /// The template for the name of the resource to lock.
    pub resource: Template,
    /// The requested mode.
    pub mode: Mode,
    /// The requested length of the lease. `None`: the policy decides.
    pub ttl_ms: Option<u32>,
    /// The requested longest wait. `None`: the policy decides.
    pub wait_ms: Option<u32>,
    /// The labels of the lock request: their names, and the templates for their values.
    pub labels: Vec<(String, Template)>,
    /// Headers that the policy may see, in lower case.
    pub see_headers: Vec<String>,
    /// How many bytes of the body the policy may see.
    pub see_body_bytes: usize,
    /// Whether requests are passed on without their lock while the store is unavailable.
    pub fail_open: bool,
    /// Headers, in lower case, that identify the sender of a request. A kept answer is only given to the same sender.
    pub caller: Vec<String>,
    /// The size limit of an answer that is kept for a `once`, with its headers.
    pub max_replay_bytes: usize,
}

/// For each application, a text of all settings that decide the lock names of its requests. Two configurations with
/// the same text name the same requests alike.
pub fn naming(guards: &[GuardConfig]) -> BTreeMap<String, String> {
    let mut by_application: BTreeMap<String, String> = BTreeMap::new();
    for guard in guards {
        let text = by_application.entry(guard.application.clone()).or_default();
        if !text.is_empty() {
            // Separates the listeners: a route that moves to another listener names the requests of that listener.
            text.push('|');
        }
        for route in &guard.routes {
            let GuardRoute { methods, path, exact_case, ambiguous_paths, headers, lock, .. } = route;
            let lock = lock.as_ref().map(|lock| {
                let GuardLock { policy, resource, mode, labels, see_headers, see_body_bytes, caller, .. } =
                    lock;
                (policy, resource, mode, labels, see_headers, see_body_bytes, caller)
            });
            text.push_str(&format!("{methods:?}{path}{exact_case}{ambiguous_paths}{headers:?}{lock:?};"));
        }
        text.push_str(&guard.header_rules());
    }
    by_application
}

impl GuardConfig {
    /// The settings that change headers before the routes read them. Empty if the routes read none of those headers.
    fn header_rules(&self) -> String {
        let read: BTreeSet<&str> = self.routes.iter().flat_map(GuardRoute::reads_headers).collect();
        let is_forwarded = |name: &&str| {
            let name = name.replace('_', "-");
            name == "forwarded" || name == "x-real-ip" || name.starts_with("x-forwarded-")
        };
        let trusts = self.trust_forwarded && read.iter().any(is_forwarded);
        let kept: BTreeSet<&str> = self.keep_headers.iter().map(String::as_str).collect();
        let kept: Vec<&&str> = kept.intersection(&read).collect();
        if trusts || !kept.is_empty() { format!("{trusts}{kept:?};") } else { String::new() }
    }
}

impl GuardRoute {
    /// The headers that decide whether a request matches and how its lock is named.
    fn reads_headers(&self) -> impl Iterator<Item = &str> {
        let matched = self.headers.iter().map(|(name, _)| name.as_str());
        matched.chain(self.lock.iter().flat_map(GuardLock::reads_headers))
    }
}

impl GuardLock {
    fn reads_headers(&self) -> impl Iterator<Item = &str> {
        let templates = self.labels.iter().map(|(_, template)| template).chain([&self.resource]);
        let named = templates.flat_map(Template::parts).filter_map(|part| match part {
            Part::Header(name) => Some(name.as_str()),
            _ => None,
        });
        named.chain(self.see_headers.iter().map(String::as_str))
    }

    /// Whether the lock's name or a label contains something from the body.
    pub fn names_body(&self) -> bool {
        let labels = self.labels.iter().map(|(_, template)| template);
        labels.chain([&self.resource]).any(Template::reads_body)
    }
}

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

impl Default for UpstreamLimits {
    fn default() -> UpstreamLimits {
        UpstreamLimits {
            connect_timeout: Duration::from_secs(2),
            keepalive: Duration::from_secs(4),
            max_requests: 1_024,
            max_header_bytes: 65_536,
            down: Duration::from_secs(5),
            health_every: Duration::from_secs(2),
        }
    }
}
