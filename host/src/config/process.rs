//! `[runtime]` and `[shutdown]`: the threads of the process, and its end.

use std::time::Duration;

use super::reader::Section;

/// The threads of the process.
#[derive(Clone, Debug)]
pub struct RuntimeConfig {
    /// The number of threads that serve requests.
    pub threads: usize,
}

/// How the process stops.
#[derive(Clone, Debug)]
pub struct ShutdownConfig {
    /// How long a proxy that was asked to stop continues to serve while it reports that it is not ready.
    pub grace: Duration,
    /// The longest time that a shutdown waits for requests in progress.
    pub drain: Duration,
}

impl RuntimeConfig {
    /// Reads `[runtime]`.
    pub(super) fn read(section: &Section<'_>) -> RuntimeConfig {
        // 0 stands for the default.
        let threads = section.integer("threads", 0..=1_024, 0);
        section.finish();
        RuntimeConfig { threads: if threads == 0 { half_of_the_cores() } else { threads } }
    }
}

/// The default number of worker threads. An operation spends nearly all of its time waiting for the server's disk, so
/// more workers cost more in wake-ups than they gain.
fn half_of_the_cores() -> usize {
    std::thread::available_parallelism().map_or(1, |cores| (cores.get() / 2).max(1))
}

impl ShutdownConfig {
    /// Reads `[shutdown]`.
    pub(super) fn read(section: &Section<'_>) -> ShutdownConfig {
        let config = ShutdownConfig {
            grace: section.milliseconds("grace_ms", 0..=600_000, 0),
            drain: section.milliseconds("drain_ms", 0..=600_000, 10_000),
        };
        section.finish();
        config
    }
}
