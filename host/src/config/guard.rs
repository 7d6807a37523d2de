//! `[[guard]]`: listeners that pass requests on to an application, under locks.

mod forwarded;
mod lock;
mod pattern;
mod route;

pub use forwarded::TrustForwarded;
pub use lock::{GuardLock, MAX_SEEN_BYTES};
pub use pattern::{Fit, Matched, Part, PathPattern, Template};
pub use route::{Extension, GuardRoute};

use super::limits::Limits;
use super::listen::ListenAddress;
use super::listeners::ListenerConfig;
use super::policies::{NO_LOCK, PolicyConfig};
use super::reader::Section;
use super::tls::TlsFiles;
use super::values::{NAME_RULE, header_names, is_plain_name};

/// The longest name of an application, which becomes part of a name in the store.
const MAX_APPLICATION: usize = 48;

/// A listener and its routes.
#[derive(Clone, Debug)]
pub struct GuardConfig {
    /// The address that the listener binds.
    pub listen: ListenAddress,
    /// The name of the application behind the listener. All proxies of one store must derive the same lock names for
    /// requests to the same application.
    pub application: String,
    /// The certificate and key. `None`: the listener speaks plain HTTP.
    pub tls: Option<TlsFiles>,
    /// The clients whose `X-Forwarded-…` and `Forwarded` headers the proxy appends to. It replaces those of others.
    pub trust_forwarded: TrustForwarded,
    /// Client headers, in lower case, that are passed on although some applications confuse them with another header
    /// or part of the request.
    pub keep_headers: Vec<String>,
    /// Never empty. The first route that matches a request wins.
    pub routes: Vec<GuardRoute>,
}

/// Reads `[[guard]]`, and collects warnings for operators. `others`: the listeners that are no guards.
pub(super) fn read(
    top: &Section<'_>,
    policies: &[PolicyConfig],
    limits: &Limits,
    others: &ListenerConfig,
) -> (Vec<GuardConfig>, Vec<String>) {
    let mut guards: Vec<GuardConfig> = Vec::new();
    let mut silent = Vec::new();
    for section in top.list("guard") {
        let listen = section.required("listen", ListenAddress::parse);
        let mode = ListenAddress::mode(&section);
        let listen = listen.map(|listen| listen.with_mode(mode));
        let is_taken = |listen: &&ListenAddress| {
            let guards = guards.iter().map(|guard| &guard.listen);
            others.addresses().chain(guards).any(|other| listen.is_taken_by(other))
        };
        if let Some(listen) = listen.as_ref().filter(is_taken) {
            section.complain("listen", format!("is {listen}, which another listener has"));
        }
        let sections = section.list("routes");
        if sections.is_empty() {
            section.complain_of_it("has no [[guard.routes]]; it needs at least one");
        }
        let mut routes: Vec<GuardRoute> = Vec::new();
        for route in &sections {
            if routes.iter().any(GuardRoute::takes_all) {
                route.complain_of_it("is never reached: a route before it takes every request");
            }
            if !route.holds("policy") {
                silent.push((guards.len(), routes.len()));
            }
            routes.extend(GuardRoute::read(route, policies, limits));
        }
        let tls = TlsFiles::read(&section, listen.as_ref(), false);
        let application =
            section.parsed("application", "default".to_owned(), |text, _| match is_plain_name(text) {
                true if text.len() <= MAX_APPLICATION => Ok(text.to_owned()),
                true => Err(format!("has {} characters; may have {MAX_APPLICATION}", text.len())),
                false => Err(format!("is `{text}`; {NAME_RULE}")),
            });
        let trust_forwarded = TrustForwarded::read(&section);
        let keep_headers = section.texts("keep_headers", header_names).unwrap_or_default();
        section.finish();
        if let Some(listen) = listen {
            guards.push(GuardConfig { listen, application, tls, trust_forwarded, keep_headers, routes });
        }
    }
    let warnings = unlocked(&guards, &silent);
    (guards, warnings)
}

/// Warnings about routes that do not say whether they take a lock, if other routes lock the same application.
fn unlocked(guards: &[GuardConfig], silent: &[(usize, usize)]) -> Vec<String> {
    let routes = || guards.iter().flat_map(|guard| &guard.routes);
    let is_locked =
        |upstream: &&String| routes().any(|route| route.lock.is_some() && route.upstreams.contains(upstream));
    let warning = |(n, m): &(usize, usize)| {
        let route = guards.get(*n)?.routes.get(*m)?;
        let upstream = route.upstreams.iter().find(is_locked)?;
        Some(format!(
            "guard[{n}].routes[{m}] passes requests for {} to http://{upstream} without a lock, and other routes lock \
             requests to it; say policy = \"{NO_LOCK}\" if that is meant",
            route.path
        ))
    };
    silent.iter().filter_map(warning).collect()
}
