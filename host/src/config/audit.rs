//! `[audit]`: the log of refusals and of operators' actions.

use std::path::PathBuf;

use super::reader::Section;

/// The audit log.
#[derive(Clone, Debug, Default)]
pub struct AuditConfig {
    /// The file. `None`: there is no audit log.
    pub file: Option<PathBuf>,
    /// The size at which the file is set aside and a new one is begun, in bytes.
    pub max_bytes: u64,
    /// How many files that were set aside are kept.
    pub keep: u32,
}

impl AuditConfig {
    /// Reads `[audit]`.
    pub(super) fn read(section: &Section<'_>) -> AuditConfig {
        let config = AuditConfig {
            file: section.path("file"),
            max_bytes: section.integer("max_bytes", 4_096..=1_000_000_000_000, 100_000_000),
            keep: section.integer("keep", 1..=1_000, 10),
        };
        section.finish();
        config
    }
}
