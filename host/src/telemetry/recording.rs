//! The metrics of the recording of lock requests.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::registry::Registry;

use super::metric::register;

/// The metrics of a recording.
pub struct Recording {
    written: Counter,
    dropped: Counter,
}

impl Recording {
    pub(super) fn register(registry: &mut Registry) -> Recording {
        let written = "Lines that were written to the recording";
        let dropped = "Lines that were not recorded, because the disk was too slow or full";
        Recording {
            written: register(registry, "recorded_lines", written, Counter::default()),
            dropped: register(registry, "recording_dropped_lines", dropped, Counter::default()),
        }
    }

    /// Counts lines that were written.
    pub fn written(&self, lines: u64) {
        self.written.inc_by(lines);
    }

    /// Counts lines that were dropped.
    pub fn dropped(&self, lines: u64) {
        self.dropped.inc_by(lines);
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Metrics, assert_has};

    #[test]
    fn every_metric_has_its_documented_name() {
        let metrics = Metrics::default();
        metrics.recording.written(1);
        metrics.recording.dropped(1);
        let lines = ["lockkeeper_recorded_lines_total 1", "lockkeeper_recording_dropped_lines_total 1"];
        assert_has(&metrics, &lines);
    }
}
