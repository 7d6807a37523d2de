//! The log on standard error.

use crate::config::LogConfig;

/// Starts to log to standard error. An error names an invalid filter.
pub fn init_logs(log: &LogConfig) -> Result<(), String> {
    let filter = tracing_subscriber::EnvFilter::try_new(&log.filter)
        .map_err(|error| format!("log.filter: `{}` is not a filter: {error}", log.filter))?;
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let started = if log.json {
        builder.json().flatten_event(true).try_init()
    } else {
        use std::io::IsTerminal;
        builder.with_ansi(std::io::stderr().is_terminal()).try_init()
    };
    started.map_err(|error| format!("logs are already being written: {error}"))
}
