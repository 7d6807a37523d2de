//! `[[guard]]`: listeners whose requests are passed on to an application, under locks.

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
    pub listen: SocketAddr,
    /// Which application is behind it. Proxies of one store name requests to one application alike.
    pub application: String,
    pub tls: Option<TlsFiles>,
    /// Whether clients are believed what they say in `X-Forwarded-…` and `Forwarded`: then the proxy adds
    /// to it, else it replaces it.
    pub trust_forwarded: bool,
    /// Headers of clients that are passed on although some applications take them for another part of the request;
    /// in lower case.
    pub keep_headers: Vec<String>,
    /// The first match wins. Never empty.
    pub routes: Vec<GuardRoute>,
}

/// PEM files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    pub cert: PathBuf,
    pub key: PathBuf,
}

/// Requests of one kind, and what becomes of them.
#[derive(Clone, Debug)]
pub struct GuardRoute {
    /// In upper case; none stands for all, and GET for HEAD as well.
    pub methods: Vec<String>,
    pub path: PathPattern,
    /// Whether capital letters in the path count. Where they do not, a request cannot get past its lock in capital
    /// letters.
    pub exact_case: bool,
    /// Whether paths are passed on that applications read in different ways.
    pub ambiguous_paths: bool,
    /// Names in lower case; `None` stands for any value.
    pub headers: Vec<(String, Option<String>)>,
    /// `host:port`, at least one.
    pub upstreams: Vec<String>,
    /// `None`: passed on without a lock.
    pub lock: Option<GuardLock>,
    /// From the end of the request to the head of the answer.
    pub response_timeout: Duration,
    /// Between two pieces of a body, each way.
    pub idle_timeout: Duration,
    /// A path that is asked for now and then; an upstream that does not answer with success is not used.
    pub health: Option<String>,
}

/// The most of a body that a route can let its policy see.
pub const MAX_SEEN_BYTES: usize = 8_192;

/// The lock of a route's requests.
#[derive(Clone, Debug)]
pub struct GuardLock {
    pub policy: String,
    pub resource: Template,
    pub mode: Mode,
    pub ttl_ms: Option<u32>,
    pub wait_ms: Option<u32>,
    pub labels: Vec<(String, Template)>,
    /// Headers that the policy may see, in lower case.
    pub see_headers: Vec<String>,
    /// How much of the body the policy may see.
    pub see_body_bytes: usize,
    /// Whether requests are passed on without their lock while the store is unavailable.
    pub fail_open: bool,
    /// Headers that say who sends a request, in lower case: a kept answer is given to the same sender only.
    pub caller: Vec<String>,
    /// Of an answer that is kept for a `once`, with its headers.
    pub max_replay_bytes: usize,
}

/// What decides how the requests to each application are named, as text that is the same for the same naming.
pub fn naming(guards: &[GuardConfig]) -> BTreeMap<String, String> {
    let mut by_application: BTreeMap<String, String> = BTreeMap::new();
    for guard in guards {
        let text = by_application.entry(guard.application.clone()).or_default();
        if !text.is_empty() {
            // A route that moves to another listener names the requests of that one.
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
    /// What decides about headers before the routes read them; empty where they read none of those.
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
    /// The headers that a request is matched by, and named by.
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

    /// Whether the lock is named by something in the body.
    pub fn names_body(&self) -> bool {
        let labels = self.labels.iter().map(|(_, template)| template);
        labels.chain([&self.resource]).any(Template::reads_body)
    }
}

/// What all upstreams have in common.
#[derive(Clone, Debug)]
pub struct UpstreamLimits {
    pub connect_timeout: Duration,
    /// How long a connection is kept for the next request. Shorter than the upstream keeps it, or
    /// the upstream may close it while a request is on its way.
    pub keepalive: Duration,
    /// Requests at once to one upstream; more are answered 503.
    pub max_requests: usize,
    /// The status line and headers of an answer.
    pub max_header_bytes: usize,
    /// How long an upstream that refused a connection is not asked, while there is another.
    pub down: Duration,
    /// How often the `health` path of a route is asked for.
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
