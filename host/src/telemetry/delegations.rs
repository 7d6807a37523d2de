//! The metrics of the keys that this proxy decides about in its memory.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use super::metric::{count, register};

/// The metrics of delegations.
pub struct Delegations {
    keys: Gauge,
    events: Family<Labels, Counter>,
    decisions: Counter,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    event: &'static str,
}

impl Delegations {
    pub(super) fn register(registry: &mut Registry) -> Delegations {
        let keys = "Keys that this proxy decides about in its memory";
        let events = "Delegations of keys to this proxy, by what happened to them";
        let decisions = "Operations that this proxy decided in its memory";
        Delegations {
            keys: register(registry, "delegated_keys", keys, Gauge::default()),
            events: register(registry, "delegations", events, Family::default()),
            decisions: register(registry, "delegated_operations", decisions, Counter::default()),
        }
    }

    /// Sets the number of keys that this proxy has now.
    pub fn keys(&self, now: usize) {
        self.keys.set(count(now));
    }

    /// Counts what happened to a delegation: `begun`, `extended`, `returned`, or `lost` if its leases are
    /// lost, or if the store no longer has it when it is to return.
    pub fn event(&self, event: &'static str) {
        self.events.get_or_create(&Labels { event }).inc();
    }

    /// Counts operations that were decided in memory.
    pub fn decided(&self, operations: usize) {
        self.decisions.inc_by(operations as u64);
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Metrics, assert_has};

    #[test]
    fn every_metric_has_its_documented_name() {
        let metrics = Metrics::default();
        metrics.delegations.keys(3);
        metrics.delegations.event("begun");
        metrics.delegations.decided(2);
        let lines = [
            "lockkeeper_delegated_keys 3",
            "lockkeeper_delegations_total{event=\"begun\"} 1",
            "lockkeeper_delegated_operations_total 2",
        ];
        assert_has(&metrics, &lines);
    }
}
