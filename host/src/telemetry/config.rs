//! The metrics of the configuration.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

use super::metric::{Outcome, register};

/// The metrics of the configuration.
pub struct Config {
    loads: Family<Outcome, Counter>,
}

impl Config {
    pub(super) fn register(registry: &mut Registry) -> Config {
        let loads = "Changes of the configuration's guarded routes, by outcome";
        Config { loads: register(registry, "config_loads", loads, Family::default()) }
    }

    /// Counts a changed configuration that went live (`live`) or was refused (`refused`).
    pub fn load(&self, outcome: &'static str) {
        self.loads.get_or_create(&Outcome { outcome }).inc();
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Metrics, assert_has};

    #[test]
    fn every_metric_has_its_documented_name() {
        let metrics = Metrics::default();
        metrics.config.load("live");
        let lines = ["lockkeeper_config_loads_total{outcome=\"live\"} 1"];
        assert_has(&metrics, &lines);
    }
}
