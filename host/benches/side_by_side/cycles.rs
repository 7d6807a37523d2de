//! 64 clients, each with a key of its own: acquire, then release, as fast as it goes.

use std::time::{Duration, Instant};

use anyhow::Result;
use serde_json::json;
use tokio::task::JoinSet;

use crate::direct::{self, Direct};
use crate::http::{self, Client};
use crate::report::{Report, Row};
use crate::stats::median_rate;
use crate::world::World;

const CLIENTS: u64 = 64;

pub async fn measure(world: &World, quick: bool, report: &mut Report) -> Result<()> {
    let (rounds, length) = if quick { (2, 1) } else { (5, 4) };
    let length = Duration::from_secs(length);
    let keys: Vec<String> = (0..CLIENTS).map(|client| format!("bench/own/{client}")).collect();
    direct::prepare(world.url(), &keys).await?;
    let mut direct = Vec::new();
    let mut proxy = Vec::new();
    for (client, key) in (1..).zip(&keys) {
        direct.push((Direct::connect(world.url(), client).await?, key.clone()));
        proxy.push((Client::connect(world.api()).await?, key.clone()));
    }
    // Rows, caches and statements are made before the first round.
    let warm = Duration::from_millis(500);
    (direct, _) = direct_round(direct, warm).await?;
    (proxy, _) = proxy_round(proxy, warm).await?;

    let (mut direct_rates, mut proxy_rates) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let rate;
        (direct, rate) = direct_round(direct, length).await?;
        direct_rates.push(rate);
        let rate;
        (proxy, rate) = proxy_round(proxy, length).await?;
        proxy_rates.push(rate);
    }
    let (by_sql, by_proxy) = (median_rate(&direct_rates), median_rate(&proxy_rates));
    let ratio = by_proxy / by_sql;
    report.add(Row {
        name: "64 clients, own keys: acquire and release",
        target: "≥ 2 times direct",
        figure: format!("{ratio:.2} times"),
        note: format!("proxy {by_proxy:.0}/s, direct {by_sql:.0}/s"),
        met: Some(ratio >= 2.0),
        details: json!({ "ratio": ratio, "proxy_per_s": proxy_rates, "direct_per_s": direct_rates }),
    });
    Ok(())
}

type Directs = Vec<(Direct, String)>;
type Clients = Vec<(Client, String)>;

async fn direct_round(clients: Directs, length: Duration) -> Result<(Directs, f64)> {
    let began = Instant::now();
    let mut tasks = JoinSet::new();
    for (mut client, key) in clients {
        tasks.spawn(async move {
            let mut cycles = 0u64;
            while began.elapsed() < length {
                if let Some(token) = client.try_acquire(&key).await? {
                    client.release(&key, token).await?;
                    cycles += 1;
                }
            }
            anyhow::Ok(((client, key), cycles))
        });
    }
    finish(tasks, began).await
}

async fn proxy_round(clients: Clients, length: Duration) -> Result<(Clients, f64)> {
    let began = Instant::now();
    let mut tasks = JoinSet::new();
    for (mut client, key) in clients {
        tasks.spawn(async move {
            let request = http::acquire(&key, &key, 0);
            let mut cycles = 0u64;
            while began.elapsed() < length {
                let lease = client.acquire(&request).await?;
                client.release(&lease).await?;
                cycles += 1;
            }
            anyhow::Ok(((client, key), cycles))
        });
    }
    finish(tasks, began).await
}

/// The clients, and cycles a second.
pub async fn finish<T: 'static>(
    mut tasks: JoinSet<Result<(T, u64)>>,
    began: Instant,
) -> Result<(Vec<T>, f64)> {
    let mut clients = Vec::new();
    let mut cycles = 0;
    while let Some(done) = tasks.join_next().await {
        let (client, count) = done??;
        clients.push(client);
        cycles += count;
    }
    Ok((clients, cycles as f64 / began.elapsed().as_secs_f64()))
}
