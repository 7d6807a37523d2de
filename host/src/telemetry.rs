//! Metrics and logs. Label values are bounded: policies, hooks, reasons and outcomes, but never keys.
//!
//! Each subject has a file with its metrics: a field and a line of `register` for each, a method that counts, and a
//! test of the documented names. Callers write `metrics.store.error(…)`.

use std::ops::Deref;
use std::sync::Arc;

use prometheus_client::registry::Registry;

mod config;
mod delegations;
mod fleet;
mod guard;
mod http;
mod leases;
mod limits;
mod logs;
mod metric;
mod policies;
mod process;
mod recording;
mod store;
mod text;
mod troubles;

pub use logs::init_logs;
pub use policies::{CachedPlans, CallTimes};
pub use text::to_prometheus;
pub use troubles::Subject;

/// All metrics of the proxy. Cheap to clone.
#[derive(Clone)]
pub struct Metrics(Arc<Subjects>);

/// The metrics by subject.
pub struct Subjects {
    registry: Registry,
    /// Acquires, and calls of hooks, by policy.
    pub policies: policies::Policies,
    /// Grants, renewals, releases, and what is held.
    pub leases: leases::Leases,
    /// Transactions of the store.
    pub store: store::Store,
    /// Keys that this proxy decides about in its memory.
    pub delegations: delegations::Delegations,
    /// The proxies of the store, and changes of their policies.
    pub fleet: fleet::Fleet,
    /// HTTP requests.
    pub http: http::Http,
    /// Requests on guarded routes.
    pub guard: guard::Guard,
    /// Limits of clients.
    pub limits: limits::Limits,
    /// Changes of the configuration.
    pub config: config::Config,
    /// The recording of lock requests.
    pub recording: recording::Recording,
    /// What is wrong now.
    pub troubles: troubles::Troubles,
    process: process::Process,
}

impl Deref for Metrics {
    type Target = Subjects;

    fn deref(&self) -> &Subjects {
        &self.0
    }
}

impl Default for Metrics {
    fn default() -> Metrics {
        let mut registry = Registry::default();
        let process = process::Process::register(&mut registry);
        let ours = registry.sub_registry_with_prefix("lockkeeper");
        Metrics(Arc::new(Subjects {
            policies: policies::Policies::register(ours),
            leases: leases::Leases::register(ours),
            store: store::Store::register(ours),
            delegations: delegations::Delegations::register(ours),
            fleet: fleet::Fleet::register(ours),
            http: http::Http::register(ours),
            guard: guard::Guard::register(ours),
            limits: limits::Limits::register(ours),
            config: config::Config::register(ours),
            recording: recording::Recording::register(ours),
            troubles: troubles::Troubles::register(ours),
            process,
            registry,
        }))
    }
}

impl Metrics {
    /// All metrics as OpenMetrics text.
    pub fn encode(&self) -> String {
        self.process.update();
        let mut text = String::with_capacity(16 * 1024);
        // Writing to a String cannot fail.
        let _ = prometheus_client::encoding::text::encode(&mut text, &self.registry);
        text
    }
}

#[cfg(test)]
fn assert_has(metrics: &Metrics, lines: &[&str]) {
    let text = metrics.encode();
    for line in lines {
        assert!(text.contains(line), "{line} is not in\n{text}");
    }
}
