//! The metrics of the proxies that share a store.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use super::metric::{Outcome, count, register};

/// The metrics of the fleet.
pub struct Fleet {
    members: Gauge,
    changes: Family<Outcome, Counter>,
    notifications: Family<Outcome, Counter>,
    rules_differ: Gauge,
}

impl Fleet {
    pub(super) fn register(registry: &mut Registry) -> Fleet {
        let changes = "Changes of a policy on all proxies, by outcome";
        let notifications = "Notifications from other proxies, by outcome";
        Fleet {
            members: register(registry, "fleet_members", "Proxies of this store that live", Gauge::default()),
            changes: register(registry, "fleet_changes", changes, Family::default()),
            rules_differ: register(
                registry,
                "fleet_rules_differ",
                "Whether the rules of who may do what are not those of the store",
                Gauge::default(),
            ),
            notifications: register(registry, "fleet_notifications", notifications, Family::default()),
        }
    }

    /// Sets the number of proxies of this store that are not gone, as of the last heartbeat.
    pub fn members(&self, now: usize) {
        self.members.set(count(now));
    }

    /// Counts a policy change that this proxy followed with its fleet. `outcome` is `live`, `called_off`, `canary`,
    /// `canary_rolled_back` or `rolled_back`.
    pub fn change(&self, outcome: &'static str) {
        self.changes.get_or_create(&Outcome { outcome }).inc();
    }

    /// Sets whether the rules of this proxy are not those of its store.
    pub fn rules_differ(&self, now: bool) {
        self.rules_differ.set(now.into());
    }

    /// Counts a notification of another proxy. `outcome` is `woken`, or `refused` for a connection whose caller did not
    /// prove that it is a proxy of this store.
    pub fn notification(&self, outcome: &'static str) {
        self.notifications.get_or_create(&Outcome { outcome }).inc();
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Metrics, assert_has};

    #[test]
    fn every_metric_has_its_documented_name() {
        let metrics = Metrics::default();
        metrics.fleet.members(3);
        metrics.fleet.change("live");
        metrics.fleet.notification("refused");
        metrics.fleet.rules_differ(true);
        let lines = [
            "lockkeeper_fleet_members 3",
            "lockkeeper_fleet_changes_total{outcome=\"live\"} 1",
            "lockkeeper_fleet_notifications_total{outcome=\"refused\"} 1",
            "lockkeeper_fleet_rules_differ 1",
        ];
        assert_has(&metrics, &lines);
    }
}
