//! The older text format of metrics.

/// Converts OpenMetrics text to the older Prometheus format (0.0.4), which declares a counter by the name of its
/// sample.
pub fn to_prometheus(open_metrics: &str) -> String {
    let mut text = String::with_capacity(open_metrics.len());
    let mut help = None;
    for line in open_metrics.lines() {
        if line.starts_with("# HELP ") {
            help = Some(line);
            continue;
        }
        if line.starts_with("# UNIT ") || line == "# EOF" {
            continue;
        }
        if let Some(name) = line.strip_prefix("# TYPE ").and_then(|rest| rest.strip_suffix(" counter")) {
            let about =
                help.take().and_then(|help| help.get("# HELP ".len() + name.len()..)).unwrap_or_default();
            text.push_str(&format!("# HELP {name}_total{about}\n# TYPE {name}_total counter\n"));
            continue;
        }
        for line in help.take().into_iter().chain([line]) {
            text.push_str(line);
            text.push('\n');
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::Metrics;
    use super::*;

    #[test]
    fn the_older_format_declares_counters_by_their_samples() {
        let metrics = Metrics::default();
        metrics.http.answered("api", 200);
        let text = to_prometheus(&metrics.encode());
        let counter = "# HELP lockkeeper_http_requests_total HTTP requests that were answered.\n\
                       # TYPE lockkeeper_http_requests_total counter\n\
                       lockkeeper_http_requests_total{front=\"api\",status=\"200\"} 1\n";
        assert!(text.contains(counter), "{text}");
        assert!(text.contains("# TYPE lockkeeper_waiters gauge\nlockkeeper_waiters 0\n"), "{text}");
        assert!(!text.contains("# EOF") && !text.contains("# UNIT"), "{text}");
    }
}
