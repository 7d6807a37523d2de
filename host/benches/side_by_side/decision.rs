//! A single policy decision, with 5 strings and 3 labels: by a fresh instance, and from the cache of plans.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use serde_json::json;

use lockkeeper::config::Config;
use lockkeeper::lock::Mode;
use lockkeeper::policy::{Compiler, Engine, Generation, Language, PlanRequest, Policies};
use lockkeeper::telemetry::Metrics;

use crate::languages;
use crate::report::{Report, Row};
use crate::stats::{median, micros, percentile};

const CALLS: usize = 20_000;

/// Two rows: their names, and the most that they may take, in microseconds.
struct Rows {
    fresh: (&'static str, &'static str, Option<f64>),
    cached: (&'static str, &'static str, Option<f64>),
}

const DEFAULT: Rows = Rows {
    fresh: ("policy decision: fresh instance, plan", "median ≤ 10 µs", Some(10.0)),
    cached: ("policy decision: plan from the cache", "median ≤ 0.5 µs", Some(0.5)),
};
const C: Rows = Rows {
    fresh: ("policy decision in C: fresh instance, plan", "", None),
    cached: ("policy decision in C: plan from the cache", "", None),
};
const JS: Rows = Rows {
    fresh: ("policy decision in JavaScript: fresh instance, plan", "median ≤ 400 µs", Some(400.0)),
    cached: ("policy decision in JavaScript: plan from the cache", "median ≤ 1 µs", Some(1.0)),
};

/// The policy `default`, with its default settings.
pub fn default_policy() -> Result<Arc<Generation>> {
    let config = Config::default();
    let engine = Engine::new(&config.engine, Compiler::InProcess)?;
    let policies = Policies::load(&engine, &config.policies, &config.limits, &Metrics::default())
        .map_err(|rejections| anyhow!("{rejections:?}"))?;
    policies.get("default").ok_or_else(|| anyhow!("there is a default policy"))
}

/// Measures decisions.
pub fn measure(report: &mut Report) -> Result<()> {
    one(report, &DEFAULT, &*default_policy()?)?;
    one(report, &C, &*languages::policy(Language::C)?)?;
    one(report, &JS, &*languages::policy(Language::Js)?)
}

fn one(report: &mut Report, rows: &Rows, generation: &Generation) -> Result<()> {
    let label = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    // The strings are name and owner of the request, and key, group and primitive of the plan, besides the labels.
    let request = |order: usize| PlanRequest {
        resource: format!("orders/{order}/payment"),
        owner: "worker-17@host-3".into(),
        mode: Mode::Exclusive,
        ttl_ms: Some(10_000),
        wait_ms: Some(5_000),
        labels: vec![label("tenant", "acme"), label("region", "eu-west"), label("tier", "gold")],
        http: None,
        seed: 7,
    };
    let plan = |request: &PlanRequest| -> Result<Duration> {
        let begun = Instant::now();
        generation.plan(request).map_err(|error| anyhow!("{error:?}"))?;
        Ok(begun.elapsed())
    };
    let fresh = (0..CALLS).map(|order| plan(&request(order))).collect::<Result<Vec<_>>>()?;
    let same = request(CALLS);
    // The second request is the one that is kept.
    for _ in 0..2 {
        plan(&same)?;
    }
    let cached = (0..CALLS).map(|_| plan(&same)).collect::<Result<Vec<_>>>()?;
    report.add(row(rows.fresh, &fresh));
    report.add(row(rows.cached, &cached));
    Ok(())
}

fn row((name, target, most_us): (&'static str, &'static str, Option<f64>), took: &[Duration]) -> Row {
    let (median, p99) = (micros(median(took)), micros(percentile(took, 0.99)));
    Row {
        name,
        target,
        figure: format!("{median:.1} µs"),
        note: format!("99th percentile {p99:.1} µs over {CALLS} calls"),
        met: most_us.map(|most_us| median <= most_us),
        details: json!({ "median_us": median, "p99_us": p99, "calls": CALLS }),
    }
}
