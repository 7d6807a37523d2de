//! What decides the lock names of guarded requests. All proxies of one store must agree on it.

use std::collections::{BTreeMap, BTreeSet};

use super::guard::{GuardConfig, GuardLock, GuardRoute, Part, Template, TrustForwarded};

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
            let GuardRoute { methods, path, exact_case, extension, ambiguous_paths, headers, lock, .. } =
                route;
            let lock = lock.as_ref().map(|lock| {
                let GuardLock { policy, resource, mode, labels, see_headers, see_body_bytes, caller, .. } =
                    lock;
                (policy, resource, mode, labels, see_headers, see_body_bytes, caller)
            });
            text.push_str(&format!(
                "{methods:?}{path}{exact_case}{extension:?}{ambiguous_paths}{headers:?}{lock:?};"
            ));
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
        let is_read = self.trust_forwarded.is_used() && read.iter().any(is_forwarded);
        let trusted = if is_read { &self.trust_forwarded } else { &TrustForwarded::All(false) };
        let kept: BTreeSet<&str> = self.keep_headers.iter().map(String::as_str).collect();
        let kept: Vec<&&str> = kept.intersection(&read).collect();
        if is_read || !kept.is_empty() { format!("{trusted}{kept:?};") } else { String::new() }
    }
}

impl GuardRoute {
    /// The headers that decide whether a request matches and how its lock is named.
    pub fn reads_headers(&self) -> impl Iterator<Item = &str> {
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
}
