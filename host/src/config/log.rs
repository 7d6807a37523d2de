//! `[log]`: the log on standard error.

use super::reader::Section;

/// The format and filter of the log.
#[derive(Clone, Debug)]
pub struct LogConfig {
    /// Whether the log is JSON instead of text.
    pub json: bool,
    /// A `tracing` filter, e.g. `info` or `lockkeeper=debug`.
    pub filter: String,
}

impl LogConfig {
    /// Reads `[log]`.
    pub(super) fn read(section: &Section<'_>) -> LogConfig {
        let config = LogConfig {
            json: section.parsed("format", false, |text, _| match text {
                "text" => Ok(false),
                "json" => Ok(true),
                other => Err(format!("is `{other}`; must be \"text\" or \"json\"")),
            }),
            filter: section.parsed("filter", "info".to_owned(), |text, _| {
                match tracing_subscriber::EnvFilter::try_new(text) {
                    Ok(_) => Ok(text.to_owned()),
                    Err(error) => Err(format!("`{text}` is not a log filter: {error}")),
                }
            }),
        };
        section.finish();
        config
    }
}
