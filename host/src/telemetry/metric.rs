//! What several subjects need to register and label their metrics.

use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Metric, Registry, Unit};

/// Registers a metric. The registry's copy and the returned one share their values.
pub fn register<M: Metric + Clone>(registry: &mut Registry, name: &str, help: &str, metric: M) -> M {
    registry.register(name, help, metric.clone());
    metric
}

/// As [`register`], for a metric in seconds: `_seconds` is added to its name.
pub fn register_seconds<M: Metric + Clone>(registry: &mut Registry, name: &str, help: &str, metric: M) -> M {
    registry.register_with_unit(name, help, Unit::Seconds, metric.clone());
    metric
}

/// The label of a metric that is counted by outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Outcome {
    /// The outcome.
    pub outcome: &'static str,
}

/// A gauge for a size, which is never negative.
pub type Size = Gauge<f64, AtomicU64>;

/// Buckets for waits and holds: from a millisecond to an hour.
pub fn long() -> Histogram {
    Histogram::new([
        0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1., 2.5, 5., 10., 30., 60., 300., 3600.,
    ])
}

/// A number as the value of a gauge.
pub fn count(number: usize) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}
