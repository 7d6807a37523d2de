//! Metrics of the process itself, under the names that dashboards expect.

use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use super::metric::{Size, register};
use crate::clock;

/// The metrics of the process.
pub struct Process {
    resident: Size,
    open_files: Gauge,
}

impl Process {
    pub(super) fn register(registry: &mut Registry) -> Process {
        let memory = "Memory of the process that is in RAM";
        let process = Process {
            resident: register(registry, "process_resident_memory_bytes", memory, Size::default()),
            open_files: register(registry, "process_open_fds", "Files that are open", Gauge::default()),
        };
        let started = Size::default();
        started.set(clock::wall_us() as f64 / 1e6);
        registry.register("process_start_time_seconds", "When the process started, since 1970", started);
        process
    }

    /// Updates the values that are read on demand. Without /proc, they stay 0.
    pub fn update(&self) {
        if let Some(bytes) = resident_bytes() {
            self.resident.set(bytes as f64);
        }
        if let Ok(files) = std::fs::read_dir("/proc/self/fd") {
            self.open_files.set(i64::try_from(files.count()).unwrap_or(i64::MAX));
        }
    }
}

fn resident_bytes() -> Option<u64> {
    let pages = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = pages.split(' ').nth(1)?.parse().ok()?;
    Some(pages * rustix::param::page_size() as u64)
}

#[cfg(test)]
mod tests {
    use super::super::{Metrics, assert_has};

    #[test]
    fn every_metric_has_its_documented_name() {
        assert_has(&Metrics::default(), &["process_resident_memory_bytes ", "process_start_time_seconds "]);
    }
}
