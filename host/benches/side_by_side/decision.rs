//! A single policy decision: a fresh instance, and a plan with 5 strings and 3 labels.

use std::time::Instant;

use anyhow::{Result, anyhow};
use serde_json::json;

use lockkeeper::config::Config;
use lockkeeper::lock::Mode;
use lockkeeper::policy::{Compiler, Engine, PlanRequest, Policies};
use lockkeeper::telemetry::Metrics;

use crate::report::{Report, Row};
use crate::stats::{median, micros, percentile};

const CALLS: usize = 20_000;
const TARGET_US: f64 = 10.0;

/// Measures a decision.
pub fn measure(report: &mut Report) -> Result<()> {
    let config = Config::default();
    let engine = Engine::new(&config.engine, Compiler::InProcess)?;
    let policies = Policies::load(&engine, &config.policies, &config.limits, &Metrics::default())
        .map_err(|rejections| anyhow!("{rejections:?}"))?;
    let generation = policies.get("default").ok_or_else(|| anyhow!("there is a default policy"))?;
    let label = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    // The strings are name and owner of the request, and key, group and primitive of the plan, besides the labels.
    let request = PlanRequest {
        resource: "orders/42/payment".into(),
        owner: "worker-17@host-3".into(),
        mode: Mode::Exclusive,
        ttl_ms: Some(10_000),
        wait_ms: Some(5_000),
        labels: vec![label("tenant", "acme"), label("region", "eu-west"), label("tier", "gold")],
        http: None,
        seed: 7,
    };
    let mut took = Vec::with_capacity(CALLS);
    for _ in 0..CALLS {
        let begun = Instant::now();
        generation.plan(&request).map_err(|error| anyhow!("{error:?}"))?;
        took.push(begun.elapsed());
    }
    let (median, p99) = (micros(median(&took)), micros(percentile(&took, 0.99)));
    report.add(Row {
        name: "policy decision: fresh instance, plan",
        target: "median ≤ 10 µs",
        figure: format!("{median:.1} µs"),
        note: format!("99th percentile {p99:.1} µs over {CALLS} calls"),
        met: Some(median <= TARGET_US),
        details: json!({ "median_us": median, "p99_us": p99, "calls": CALLS }),
    });
    Ok(())
}
