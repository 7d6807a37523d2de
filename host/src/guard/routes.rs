//! The routes of the guarded listeners, and their upstreams.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use hyper::http::request::Parts;

use super::upstream::Target;
use crate::config::{GuardConfig, GuardRoute, Matched, TrustForwarded, UpstreamLimits};
use crate::http::Problem;
use crate::mutex::Mutex;
use crate::route;

/// The current routes of a listener.
pub struct Routes {
    /// Whether forwarding headers of earlier proxies are kept.
    pub trust_forwarded: TrustForwarded,
    /// Headers that are passed on although some applications misinterpret them.
    pub keep_headers: Vec<String>,
    routes: Vec<Arc<Route>>,
}

/// A route with its upstreams.
pub struct Route {
    pub config: Arc<GuardRoute>,
    pub targets: Vec<Arc<Target>>,
    /// The name of the policy; empty if the route has no lock.
    pub policy: Arc<str>,
}

/// The upstreams of all routes, by name. The state of an upstream survives a reload.
pub struct Targets {
    limits: UpstreamLimits,
    by_name: Mutex<HashMap<String, Weak<Target>>>,
}

impl Targets {
    /// Creates an empty set.
    pub fn new(limits: &UpstreamLimits) -> Targets {
        Targets { limits: limits.clone(), by_name: Mutex::default() }
    }

    fn get(&self, name: &str) -> Arc<Target> {
        let mut by_name = self.by_name.lock();
        if let Some(target) = by_name.get(name).and_then(Weak::upgrade) {
            return target;
        }
        let target = Arc::new(Target::new(name, &self.limits));
        by_name.retain(|_, target| target.strong_count() > 0);
        by_name.insert(name.to_owned(), Arc::downgrade(&target));
        target
    }

    /// All upstreams that a route uses.
    pub fn all(&self) -> Vec<Arc<Target>> {
        let by_name = self.by_name.lock();
        by_name.values().filter_map(Weak::upgrade).collect()
    }
}

impl Routes {
    /// Builds the routes of one listener from its configuration.
    pub fn new(config: &GuardConfig, targets: &Targets) -> Routes {
        let route = |config: &GuardRoute| {
            let policy = config.lock.as_ref().map_or("", |lock| &lock.policy).into();
            let targets = config.upstreams.iter().map(|name| targets.get(name)).collect();
            Arc::new(Route { config: Arc::new(config.clone()), targets, policy })
        };
        Routes {
            trust_forwarded: config.trust_forwarded.clone(),
            keep_headers: config.keep_headers.clone(),
            routes: config.routes.iter().map(route).collect(),
        }
    }

    /// Finds the first route that matches, with the values that its path pattern captured.
    ///
    /// # Errors
    /// No route matches, or applications may interpret the path in different ways.
    pub fn find(&self, parts: &Parts) -> Result<(Arc<Route>, Matched), Problem> {
        let (at, matched) = route::find(self.routes.iter().map(|route| &*route.config), parts)?;
        Ok((self.routes[at].clone(), matched))
    }

    /// All routes, in the order of the configuration.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Route>> {
        self.routes.iter()
    }
}
