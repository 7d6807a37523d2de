//! The metrics of the store's transactions.

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use super::metric::{register, register_seconds};

const OPERATIONS: [f64; 12] = [1., 2., 4., 8., 16., 32., 64., 128., 256., 512., 1024., 2048.];
const SECONDS: [f64; 12] = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1., 5.];

/// The metrics of the store.
pub struct Store {
    batch_operations: Histogram,
    batch_seconds: Histogram,
    errors: Family<Reason, Counter>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Reason {
    reason: &'static str,
}

impl Store {
    pub(super) fn register(registry: &mut Registry) -> Store {
        let operations = Histogram::new(OPERATIONS);
        let seconds = Histogram::new(SECONDS);
        let took = "From sending a transaction to its commit";
        let errors = "Failures of the store, by reason";
        Store {
            batch_operations: register(
                registry,
                "store_batch_operations",
                "Operations in a transaction",
                operations,
            ),
            batch_seconds: register_seconds(registry, "store_batch", took, seconds),
            errors: register(registry, "store_errors", errors, Family::default()),
        }
    }

    /// Counts a committed transaction of `operations`.
    pub fn batch(&self, operations: usize, took: Duration) {
        self.batch_operations.observe(operations as f64);
        self.batch_seconds.observe(took.as_secs_f64());
    }

    /// Counts a failure of the store; `reason` is a stable slug.
    pub fn error(&self, reason: &'static str) {
        self.errors.get_or_create(&Reason { reason }).inc();
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Metrics, assert_has};
    use super::*;

    #[test]
    fn every_metric_has_its_documented_name() {
        let metrics = Metrics::default();
        metrics.store.batch(17, Duration::from_millis(2));
        metrics.store.error("timeout");
        let lines = [
            "lockkeeper_store_batch_operations_sum 17",
            "lockkeeper_store_batch_seconds_count 1",
            "lockkeeper_store_errors_total{reason=\"timeout\"} 1",
        ];
        assert_has(&metrics, &lines);
    }
}
