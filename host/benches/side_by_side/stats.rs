//! Medians and percentiles of measured values.

use std::time::Duration;

/// The value below which `share` (0 to 1) of the values lie; 0 if there are no values.
pub fn percentile(values: &[Duration], share: f64) -> Duration {
    let mut sorted = values.to_vec();
    sorted.sort_unstable();
    let at = (sorted.len() as f64 * share) as usize;
    sorted.get(at.min(sorted.len().saturating_sub(1))).copied().unwrap_or_default()
}

/// The median of durations.
pub fn median(values: &[Duration]) -> Duration {
    percentile(values, 0.5)
}

/// The median of rates, one for each round.
pub fn median_rate(rates: &[f64]) -> f64 {
    let mut sorted = rates.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or_default()
}

/// Microseconds.
pub fn micros(value: Duration) -> f64 {
    value.as_secs_f64() * 1e6
}

/// Milliseconds.
pub fn millis(value: Duration) -> f64 {
    value.as_secs_f64() * 1e3
}
