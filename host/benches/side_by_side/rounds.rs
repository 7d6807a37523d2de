//! Many clients at once, the two sides by turns.

use std::time::Instant;

use anyhow::Result;
use serde_json::json;
use tokio::task::JoinSet;

use crate::report::Row;
use crate::stats::median_rate;

pub const CLIENTS: u64 = 64;

pub const TWICE: Target = Target { text: "≥ 2 times direct", times: 2.0, ours: "proxy", theirs: "direct" };
pub const HALF: Target = Target { text: "≥ 0.5 times direct", times: 0.5, ..TWICE };

/// The two sides by their names, and how many times the other side's rate ours is to be, at least.
pub struct Target {
    pub text: &'static str,
    pub times: f64,
    pub ours: &'static str,
    pub theirs: &'static str,
}

/// Rates of the other side and of ours, one a round.
#[derive(Default)]
pub struct Rates {
    theirs: Vec<f64>,
    ours: Vec<f64>,
}

impl Rates {
    /// Lets both sides run by turns. A side gets its clients and gives them back.
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

    /// The medians, and how they compare.
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
