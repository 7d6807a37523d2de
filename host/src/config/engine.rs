//! `[engine]`: limits on one call of a policy, and on its compilation; where compiled policies are kept.

use std::path::PathBuf;
use std::time::Duration;

use super::reader::{Section, defaults};
use super::values::MAX_DURATION_MS;

/// Limits on one call of a policy, and on its compilation; where compiled policies are kept.
#[derive(Clone, Debug)]
pub struct EngineLimits {
    /// The approximate number of WebAssembly instructions.
    pub fuel: u64,
    /// The longest duration of the call.
    pub time: Duration,
    /// The size limit of all linear memories of the call together.
    pub memory_bytes: usize,
    /// The size limit of a component file.
    pub max_component_bytes: usize,
    /// The most processor time that the compilation of a component may take.
    pub compile_time: Duration,
    /// The most memory that the compilation of a component may use.
    pub compile_memory_bytes: u64,
    /// The folder of compiled components. `None`: each start compiles them.
    pub cache_dir: Option<PathBuf>,
    /// The size limit of the files in that folder together.
    pub cache_bytes: u64,
    /// The size limit of one answer.
    pub max_answer_bytes: usize,
    /// The most concurrent calls.
    pub instances: u32,
    /// After this many consecutive faults, a hook is not called for the time `suspend`.
    pub faults_to_suspend: u32,
    /// How long a hook is not called after `faults_to_suspend` faults.
    pub suspend: Duration,
}

impl EngineLimits {
    /// Reads `[engine]`.
    pub(super) fn read(section: &Section<'_>) -> EngineLimits {
        let limits = EngineLimits {
            fuel: section.integer("fuel", 10_000..=1_000_000_000_000, 10_000_000),
            time: section.milliseconds("time_ms", 1..=10_000, 10),
            memory_bytes: section.integer("memory_bytes", 65_536..=268_435_456, 16 << 20),
            max_component_bytes: section.integer("max_component_bytes", 1_024..=67_108_864, 2 << 20),
            compile_time: section.seconds("compile_time_s", 1..=600, 20),
            compile_memory_bytes: section.integer(
                "compile_memory_bytes",
                67_108_864..=17_179_869_184,
                512 << 20,
            ),
            cache_dir: section.path("cache_dir"),
            cache_bytes: section.integer("cache_bytes", 1_048_576..=1_099_511_627_776, 256 << 20),
            max_answer_bytes: section.integer("max_answer_bytes", 1_024..=1_048_576, 65_536),
            instances: section.integer("instances", 1..=1_000, 64),
            faults_to_suspend: section.integer("faults_to_suspend", 1..=1_000_000, 10),
            suspend: section.milliseconds("suspend_ms", 0..=MAX_DURATION_MS, 1_000),
        };
        section.finish();
        limits
    }
}

impl Default for EngineLimits {
    fn default() -> EngineLimits {
        defaults(EngineLimits::read)
    }
}
