//! `[recording]`: requests that are recorded, so that other policies can be tried on them.

use std::path::PathBuf;

use super::reader::{Section, defaults};

/// What is recorded of the lock requests of this proxy, and where.
#[derive(Clone, Debug)]
pub struct RecordingConfig {
    /// The folder. `None`: nothing is recorded.
    pub dir: Option<PathBuf>,
    /// The part of the keys that is recorded, from 0 to 1.
    pub share: f64,
    /// The size at which a file is ended and the next one is begun, in bytes.
    pub file_bytes: u64,
    /// How many files are kept in the folder.
    pub files: u32,
    /// How the names of resources, keys and owners are recorded.
    pub names: Masking,
    /// The labels whose values are recorded as they are, whatever `names` says.
    pub labels: Vec<String>,
    /// The headers of guarded requests whose values are recorded, in lower case.
    pub headers: Vec<String>,
}

/// How a name is recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Masking {
    /// As it is.
    Plain,
    /// A keyed hash of each part between slashes.
    Segments,
    /// One keyed hash.
    Hash,
}

impl RecordingConfig {
    /// Reads `[recording]`.
    pub(super) fn read(section: &Section<'_>) -> RecordingConfig {
        let config = RecordingConfig {
            dir: section.path("dir"),
            share: f64::from(section.integer("share_percent", 1..=100, 100_u32)) / 100.0,
            file_bytes: section.integer("file_bytes", 65_536..=1_000_000_000_000, 67_108_864),
            files: section.integer("files", 1..=10_000, 8),
            names: section.parsed("names", Masking::Plain, |text, _| match text {
                "plain" => Ok(Masking::Plain),
                "segments" => Ok(Masking::Segments),
                "hash" => Ok(Masking::Hash),
                _ => Err("must be \"plain\", \"segments\" or \"hash\"".to_owned()),
            }),
            labels: section
                .texts("labels", |names| Ok(names.iter().map(|name| (*name).to_owned()).collect()))
                .unwrap_or_default(),
            headers: section
                .texts("headers", |names| Ok(names.iter().map(|name| name.to_ascii_lowercase()).collect()))
                .unwrap_or_default(),
        };
        section.finish();
        config
    }
}

impl Default for RecordingConfig {
    fn default() -> RecordingConfig {
        defaults(RecordingConfig::read)
    }
}
