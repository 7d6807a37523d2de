//! Many clients at once, with the two sides in alternating rounds.

use std::time::Instant;

use anyhow::Result;
use serde_json::json;
use tokio::task::JoinSet;

use crate::report::Row;
use crate::stats::median_rate;

/// The number of clients.
pub const CLIENTS: u64 = 64;

/// The target of at least twice the direct rate.
pub const TWICE: Target = Target { text: "≥ 2 times direct", times: 2.0, ours: "proxy", theirs: "direct" };
/// The target of at least half the direct rate.
pub const HALF: Target = Target { text: "≥ 0.5 times direct", times: 0.5, ..TWICE };

/// The names of the two sides, and the least ratio of our rate to the other side's rate.
pub struct Target {
    pub text: &'static str,
    pub times: f64,
    pub ours: &'static str,
    pub theirs: &'static str,
}

/// The rates of both sides, one for each round.
#[derive(Default)]
pub struct Rates {
    theirs: Vec<f64>,
    ours: Vec<f64>,
}

impl Rates {
    /// Runs both sides in turn. A side receives its clients and returns them.
    pub async fn measure<T, O>(
        rounds: usize,
        mut theirs: Vec<T>,
        run_theirs: impl AsyncFn(Vec<T>) -> Result<(Vec<T>, f64)>,
        mut ours: Vec<O>,
        run_ours: impl AsyncFn(Vec<O>) -> Result<(Vec<O>, f64)>,
    ) -> Result<Rates> {
        let mut rates = Rates::default();
        for _ in 0..rounds {
            let rate;
            (theirs, rate) = run_theirs(theirs).await?;
            rates.theirs.push(rate);
            let rate;
            (ours, rate) = run_ours(ours).await?;
            rates.ours.push(rate);
        }
        Ok(rates)
    }

    /// The row with the medians and their ratio.
    pub fn row(self, name: &'static str, target: &Target) -> Row {
        let (theirs, ours) = (median_rate(&self.theirs), median_rate(&self.ours));
        let ratio = ours / theirs;
        let field = |side: &str| format!("{}_per_s", side.to_lowercase().replace(' ', "_"));
        Row {
            name,
            target: target.text,
            figure: format!("{ratio:.2} times"),
            note: format!("{} {ours:.0}/s, {} {theirs:.0}/s", target.ours, target.theirs),
            met: Some(ratio >= target.times),
            details: json!({
                "ratio": ratio,
                (field(target.ours)): self.ours,
                (field(target.theirs)): self.theirs,
            }),
        }
    }
}

/// Waits for the clients of a round. Returns the clients, and their total rate per second.
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
