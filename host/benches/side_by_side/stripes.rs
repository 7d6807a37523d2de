//! 64 clients on 10,000 resources that share one lock, or a hundred locks.

use std::time::{Duration, Instant};

use anyhow::Result;
use serde_json::json;
use tokio::task::JoinSet;

use crate::http::{self, Client};
use crate::report::{Report, Row};
use crate::rounds::{CLIENTS, finish};
use crate::world::World;

const RESOURCES: u64 = 10_000;

/// Measures the rate of both.
pub async fn measure(world: &World, quick: bool, report: &mut Report) -> Result<()> {
    let length = Duration::from_secs(if quick { 1 } else { 4 });
    let central = round(world, "central", length).await?;
    let striped = round(world, "striped", length).await?;
    report.add(Row {
        name: "64 clients, 10,000 resources: 1 and 100 stripes",
        target: "",
        figure: format!("{:.1} times", striped / central),
        note: format!("1 stripe {central:.0}/s, 100 stripes {striped:.0}/s"),
        met: None,
        details: json!({ "central_per_s": central, "striped_per_s": striped }),
    });
    Ok(())
}

async fn round(world: &World, prefix: &'static str, length: Duration) -> Result<f64> {
    let mut tasks = JoinSet::new();
    let began = Instant::now();
    for client in 0..CLIENTS {
        let mut http = Client::connect(world.api()).await?;
        tasks.spawn(async move {
            let mut cycles = 0;
            while began.elapsed() < length {
                let resource = (client + cycles * CLIENTS * 7) % RESOURCES;
                let request = http::acquire(&format!("{prefix}/{resource}"), &client.to_string(), 60_000);
                let lease = http.acquire(&request).await?;
                http.release(&lease).await?;
                cycles += 1;
            }
            anyhow::Ok(((), cycles))
        });
    }
    finish(tasks, began).await.map(|(_, rate)| rate)
}
