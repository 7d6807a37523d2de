//! Which route a request takes.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use hyper::http::request::Parts;

use super::upstream::Target;
use crate::config::{GuardConfig, GuardRoute, UpstreamLimits};
use crate::http::Problem;

/// The routes of a listener, as they are now.
pub struct Routes {
    pub trust_forwarded: bool,
    routes: Vec<Arc<Route>>,
}

pub struct Route {
    pub config: GuardRoute,
    pub targets: Vec<Arc<Target>>,
    /// The name of the policy; empty where there is no lock.
    pub policy: Arc<str>,
}

/// The upstreams of all routes, by name: what is known of one outlives a reload.
pub struct Targets {
    limits: UpstreamLimits,
    by_name: Mutex<HashMap<String, Weak<Target>>>,
}

impl Targets {
    pub fn new(limits: &UpstreamLimits) -> Targets {
        Targets { limits: limits.clone(), by_name: Mutex::default() }
    }

    fn get(&self, name: &str) -> Arc<Target> {
        let mut by_name = self.by_name.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(target) = by_name.get(name).and_then(Weak::upgrade) {
            return target;
        }
        let target = Arc::new(Target::new(name, &self.limits));
        by_name.retain(|_, target| target.strong_count() > 0);
        by_name.insert(name.to_owned(), Arc::downgrade(&target));
        target
    }

    /// All that a route leads to.
    pub fn all(&self) -> Vec<Arc<Target>> {
        let by_name = self.by_name.lock().unwrap_or_else(PoisonError::into_inner);
        by_name.values().filter_map(Weak::upgrade).collect()
    }
}

/// What the names of a route's path stand for in a request.
pub type Captures = Vec<(String, String)>;

impl Routes {
    pub fn new(config: &GuardConfig, targets: &Targets) -> Routes {
        let route = |config: &GuardRoute| {
            let policy = config.lock.as_ref().map_or("", |lock| &lock.policy).into();
            let targets = config.upstreams.iter().map(|name| targets.get(name)).collect();
            Arc::new(Route { config: config.clone(), targets, policy })
        };
        Routes { trust_forwarded: config.trust_forwarded, routes: config.routes.iter().map(route).collect() }
    }

    /// The first route that fits, with the captures of its path.
    ///
    /// # Errors
    /// Where none does, or the path is one that applications read in different ways.
    pub fn find(&self, parts: &Parts) -> Result<(Arc<Route>, Captures), Problem> {
        let path = parts.uri.path();
        if has_dots(path) {
            let detail = "a part of the path is `.` or `..`, which would be read in different ways";
            return Err(Problem::invalid("path", detail));
        }
        for route in &self.routes {
            if let Some(captures) = fits(&route.config, parts, path) {
                return Ok((route.clone(), captures));
            }
        }
        Err(Problem::not_found(path))
    }

    pub fn iter(&self) -> impl Iterator<Item = &Arc<Route>> {
        self.routes.iter()
    }
}

fn fits(route: &GuardRoute, parts: &Parts, path: &str) -> Option<Captures> {
    let method = parts.method.as_str();
    if !route.methods.is_empty() && !route.methods.iter().any(|known| known == method) {
        return None;
    }
    let has = |(name, wanted): &(String, Option<String>)| {
        let mut values = parts.headers.get_all(name).iter();
        values.any(|value| wanted.as_ref().is_none_or(|wanted| value.as_bytes() == wanted.as_bytes()))
    };
    if !route.headers.iter().all(has) {
        return None;
    }
    route.path.captures(path)
}

/// Whether a segment means this folder or the one above, however it is spelt.
fn has_dots(path: &str) -> bool {
    let dots = |part: &str| {
        let part = part.replace("%2e", ".").replace("%2E", ".");
        // What follows a semicolon is a parameter to some, who look at the rest alone.
        let name = part.split(';').next().unwrap_or_default();
        name == "." || name == ".."
    };
    path.contains(['.', '%']) && path.split(['/', '\\']).flat_map(split_encoded).any(dots)
}

/// At slashes that are percent-encoded.
fn split_encoded(part: &str) -> impl Iterator<Item = &str> {
    part.split("%2f")
        .flat_map(|part| part.split("%2F"))
        .flat_map(|part| part.split("%5c"))
        .flat_map(|part| part.split("%5C"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dots_are_found_however_they_are_spelt() {
        for path in [
            "/a/../b",
            "/a/./b",
            "/..",
            "/a/%2e%2E/b",
            "/a/.%2e",
            "/a%2f..%2fb",
            "/a/..;x/b",
            "/a\\..\\b",
            "/a/%2e%5c",
        ] {
            assert!(has_dots(path), "{path}");
        }
        for path in ["/a.b/c", "/...", "/a/%20", "/.well-known/x", "/a..b"] {
            assert!(!has_dots(path), "{path}");
        }
    }
}
