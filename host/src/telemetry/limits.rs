//! The metrics of the limits of clients.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

use super::metric::register;

/// The metrics of the limits of clients.
pub struct Limits {
    refusals: Family<Limit, Counter>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Limit {
    limit: String,
}

impl Limits {
    pub(super) fn register(registry: &mut Registry) -> Limits {
        let refusals = "Requests and connections that were refused for a limit of their client, by limit";
        Limits { refusals: register(registry, "limit_refusals", refusals, Family::default()) }
    }

    /// Counts a request or a connection that was refused for the limit with this name. It is no text of a client.
    pub fn refused(&self, limit: &str) {
        self.refusals.get_or_create(&Limit { limit: limit.to_owned() }).inc();
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Metrics, assert_has};

    #[test]
    fn every_metric_has_its_documented_name() {
        let metrics = Metrics::default();
        metrics.limits.refused("leases");
        assert_has(&metrics, &["lockkeeper_limit_refusals_total{limit=\"leases\"} 1"]);
    }
}
