//! The metrics of guarded routes.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

use super::metric::{Outcome, register};

/// The metrics of guarded routes.
pub struct Guard {
    requests: Family<Outcome, Counter>,
    lost: Counter,
}

impl Guard {
    pub(super) fn register(registry: &mut Registry) -> Guard {
        let requests = "Requests on guarded routes, by outcome";
        let lost = "Guarded requests whose lease was lost while the upstream worked";
        Guard {
            requests: register(registry, "guard_requests", requests, Family::default()),
            lost: register(registry, "guard_lost", lost, Counter::default()),
        }
    }

    /// Counts an answered request on a guarded route. `outcome` is `passed` (no lock), `locked`, `unlocked`,
    /// `replayed`, or the problem's slug.
    pub fn answered(&self, outcome: &'static str) {
        self.requests.get_or_create(&Outcome { outcome }).inc();
    }

    /// Counts a guarded request whose lease was lost while the upstream worked.
    pub fn lost(&self) {
        self.lost.inc();
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Metrics, assert_has};

    #[test]
    fn every_metric_has_its_documented_name() {
        let metrics = Metrics::default();
        metrics.guard.answered("locked");
        metrics.guard.lost();
        let lines =
            ["lockkeeper_guard_requests_total{outcome=\"locked\"} 1", "lockkeeper_guard_lost_total 1"];
        assert_has(&metrics, &lines);
    }
}
