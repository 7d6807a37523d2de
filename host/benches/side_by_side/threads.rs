//! What a cycle costs with more threads. On two cores, more threads cannot be faster; but what grows with them here would limit
//! a machine with more cores.

use std::time::Duration;

use anyhow::Result;
use serde_json::json;

use crate::costs::Costs;
use crate::cycles::{connected, proxy_round};
use crate::report::{Report, Row};
use crate::world::World;

const THREADS: [usize; 4] = [1, 2, 4, 8];

/// Measures the cycles of proxies with more and more threads, with a write for each lease and without.
pub async fn measure(world: &World, quick: bool, report: &mut Report) -> Result<()> {
    let length = Duration::from_secs(if quick { 1 } else { 8 });
    let kinds = [
        ("64 clients, own keys: what a cycle costs with 1, 2, 4, 8 threads", "threads"),
        ("64 clients, own keys, delegated: what a cycle costs with 1, 2, 4, 8 threads", "delegated/threads"),
    ];
    let mut details = [json!({}), json!({})];
    let mut figures = [Vec::new(), Vec::new()];
    let mut rates = [Vec::new(), Vec::new()];
    for threads in THREADS {
        let more = format!("[runtime]\nthreads = {threads}\n");
        let proxy = world.another_proxy(&format!("threads-{threads}"), &more).await?;
        for (at, (_, prefix)) in kinds.iter().enumerate() {
            let clients = connected(proxy.api(), &format!("{prefix}/{threads}")).await?;
            let (clients, _) = proxy_round(clients, Duration::from_secs(1)).await?;
            let costs = Costs::with(world, &proxy);
            let (_, rate) = costs.around(proxy_round(clients, length)).await?;
            let [cpu_us, waits, _] = costs.of_a_turn()[0].1;
            figures[at].push(format!("{cpu_us:.0} µs and {waits:.1} waits"));
            rates[at].push(format!("{rate:.0}"));
            details[at][threads.to_string()] = json!({ "per_s": rate, "costs_of_a_turn": costs.json() });
        }
    }
    for (((name, _), details), (figures, rates)) in kinds.iter().zip(details).zip(figures.iter().zip(rates)) {
        let (figure, note) = (figures.join(", "), format!("{}/s", rates.join(", ")));
        report.add(Row { name, target: "", figure, note, met: None, details });
    }
    Ok(())
}
