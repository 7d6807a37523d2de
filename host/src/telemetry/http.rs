//! The metrics of HTTP requests.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

use super::metric::register;

/// The metrics of HTTP requests.
pub struct Http {
    requests: Family<Answered, Counter>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Answered {
    front: &'static str,
    status: u32,
}

impl Http {
    pub(super) fn register(registry: &mut Registry) -> Http {
        let requests = "HTTP requests that were answered";
        Http { requests: register(registry, "http_requests", requests, Family::default()) }
    }

    /// Counts an HTTP request that `front` (`api`, `admin` or `guard`) answered.
    pub fn answered(&self, front: &'static str, status: u16) {
        self.requests.get_or_create(&Answered { front, status: status.into() }).inc();
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Metrics, assert_has};

    #[test]
    fn every_metric_has_its_documented_name() {
        let metrics = Metrics::default();
        metrics.http.answered("api", 409);
        let lines = ["lockkeeper_http_requests_total{front=\"api\",status=\"409\"} 1"];
        assert_has(&metrics, &lines);
    }
}
