//! Many clients at once, the two sides by turns.

use std::time::Instant;

use anyhow::Result;
use serde_json::json;
use tokio::task::JoinSet;

use crate::report::{Report, Row};
use crate::stats::median_rate;

pub const CLIENTS: u64 = 64;

pub const TWICE: (&str, f64) = ("≥ 2 times direct", 2.0);
pub const HALF: (&str, f64) = ("≥ 0.5 times direct", 0.5);

/// Rates of what was done directly and through the proxy, one a round.
#[derive(Default)]
pub struct Rates {
    direct: Vec<f64>,
    proxy: Vec<f64>,
}

impl Rates {
    /// Lets both sides run by turns. A side gets its clients and gives them back.
    pub async fn measure<D, P>(
        rounds: usize,
        mut direct: Vec<D>,
        run_direct: impl AsyncFn(Vec<D>) -> Result<(Vec<D>, f64)>,
        mut proxy: Vec<P>,
        run_proxy: impl AsyncFn(Vec<P>) -> Result<(Vec<P>, f64)>,
    ) -> Result<Rates> {
        let mut rates = Rates::default();
        for _ in 0..rounds {
            let rate;
            (direct, rate) = run_direct(direct).await?;
            rates.direct.push(rate);
            let rate;
            (proxy, rate) = run_proxy(proxy).await?;
            rates.proxy.push(rate);
        }
        Ok(rates)
    }

    /// The medians, and how they compare: the proxy is to be at least `least` times as fast.
    pub fn report(self, name: &'static str, (target, least): (&'static str, f64), report: &mut Report) {
        let (direct, proxy) = (median_rate(&self.direct), median_rate(&self.proxy));
        let ratio = proxy / direct;
        report.add(Row {
            name,
            target,
            figure: format!("{ratio:.2} times"),
            note: format!("proxy {proxy:.0}/s, direct {direct:.0}/s"),
            met: Some(ratio >= least),
            details: json!({ "ratio": ratio, "proxy_per_s": self.proxy, "direct_per_s": self.direct }),
        });
    }
}

/// Waits for the clients of one round: them, and what they did a second.
pub async fn finish<C: 'static>(
    mut tasks: JoinSet<Result<(C, u64)>>,
    began: Instant,
) -> Result<(Vec<C>, f64)> {
    let mut clients = Vec::new();
    let mut turns = 0;
    while let Some(done) = tasks.join_next().await {
        let (client, count) = done??;
        clients.push(client);
        turns += count;
    }
    Ok((clients, turns as f64 / began.elapsed().as_secs_f64()))
}
