//! The metrics of leases: grants, renewals, releases, and what is held.

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use super::metric::{Outcome, count, long, register, register_seconds};

/// The metrics of leases.
pub struct Leases {
    grants: Family<Primitive, Counter>,
    renewals: Family<Outcome, Counter>,
    releases: Family<Outcome, Counter>,
    commits: Family<Outcome, Counter>,
    holds: Family<How, Histogram>,
    waiters: Gauge,
    leases: Gauge,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Primitive {
    primitive: &'static str,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct How {
    how: &'static str,
}

impl Leases {
    pub(super) fn register(registry: &mut Registry) -> Leases {
        let holds = Family::new_with_constructor(long as fn() -> Histogram);
        let leases = "Leases that this proxy granted or keeps alive";
        Leases {
            grants: register(registry, "grants", "Leases that were granted, by primitive", Family::default()),
            renewals: register(registry, "renewals", "Renewals, by outcome", Family::default()),
            releases: register(registry, "releases", "Releases, by outcome", Family::default()),
            commits: register(registry, "commits", "Commits of a version, by outcome", Family::default()),
            holds: register_seconds(registry, "hold", "From the grant of a lease to its end", holds),
            waiters: register(registry, "waiters", "Acquires that wait for a lock", Gauge::default()),
            leases: register(registry, "leases", leases, Gauge::default()),
        }
    }

    /// Counts a granted lease.
    pub fn grant(&self, primitive: &'static str) {
        self.grants.get_or_create(&Primitive { primitive }).inc();
    }

    /// Counts a renewal.
    pub fn renewal(&self, outcome: &'static str) {
        self.renewals.get_or_create(&Outcome { outcome }).inc();
    }

    /// Counts a release.
    pub fn release(&self, outcome: &'static str) {
        self.releases.get_or_create(&Outcome { outcome }).inc();
    }

    /// Counts an answered commit of a version. `outcome` is `committed` or the problem's slug.
    pub fn commit(&self, outcome: &'static str) {
        self.commits.get_or_create(&Outcome { outcome }).inc();
    }

    /// Counts the end of a lease, `held` after its grant. `how` is `released`, `expired`, `handed_off` or `lost`.
    pub fn ended(&self, how: &'static str, held: Duration) {
        self.holds.get_or_create(&How { how }).observe(held.as_secs_f64());
    }

    /// Sets the number of acquires that wait for a lock.
    pub fn waiting(&self, now: usize) {
        self.waiters.set(count(now));
    }

    /// Sets the number of leases that this proxy granted or keeps alive.
    pub fn held(&self, now: usize) {
        self.leases.set(count(now));
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Metrics, assert_has};
    use super::*;

    #[test]
    fn every_metric_has_its_documented_name() {
        let metrics = Metrics::default();
        metrics.leases.grant("advisory");
        metrics.leases.renewal("renewed");
        metrics.leases.release("released");
        metrics.leases.commit("committed");
        metrics.leases.ended("expired", Duration::from_secs(2));
        metrics.leases.waiting(5);
        metrics.leases.held(6);
        let lines = [
            "lockkeeper_grants_total{primitive=\"advisory\"} 1",
            "lockkeeper_renewals_total{outcome=\"renewed\"} 1",
            "lockkeeper_releases_total{outcome=\"released\"} 1",
            "lockkeeper_commits_total{outcome=\"committed\"} 1",
            "lockkeeper_hold_seconds_count{how=\"expired\"} 1",
            "lockkeeper_waiters 5",
            "lockkeeper_leases 6",
        ];
        assert_has(&metrics, &lines);
    }
}
