//! 64 clients that all want one key: how many are served, how long they wait, and in which order.

use std::time::{Duration, Instant};

use anyhow::Result;
use serde_json::json;
use tokio::task::JoinSet;

use crate::direct::{self, Direct};
use crate::http::{self, Client};
use crate::report::{Report, Row};
use crate::stats::{median, median_rate, millis, percentile};
use crate::world::World;

const CLIENTS: usize = 64;
const RETRY: Duration = Duration::from_millis(50);
const WAIT_MS: u32 = 600_000;

/// What one side's clients saw, over all rounds.
#[derive(Default)]
struct Side {
    rates: Vec<f64>,
    /// From a client's first try to its grant. A wait that the end of a round cut off counts with
    /// the time it had lasted: those who were starved must not drop out of the figure.
    waits: Vec<Duration>,
}

impl Side {
    fn add(&mut self, grants: usize, waits: Vec<Duration>, length: Duration) {
        self.rates.push(grants as f64 / length.as_secs_f64());
        self.waits.extend(waits);
    }

    fn p99(&self) -> Duration {
        percentile(&self.waits, 0.99)
    }
}

pub async fn measure(world: &World, quick: bool, report: &mut Report) -> Result<()> {
    let (rounds, length) = if quick { (1, 2) } else { (3, 6) };
    let length = Duration::from_secs(length);
    direct::prepare(world.url(), &["bench/one".to_owned()]).await?;
    let (mut direct, mut proxy) = (Side::default(), Side::default());
    for round in 0..rounds {
        let (grants, waits) = direct_round(world, length).await?;
        direct.add(grants, waits, length);
        let (grants, waits) = proxy_round(world, length, round).await?;
        proxy.add(grants, waits, length);
    }
    let (by_proxy, by_sql) = (median_rate(&proxy.rates), median_rate(&direct.rates));
    report.add(Row {
        name: "64 clients, one key: grants",
        target: "≥ direct",
        figure: format!("{:.2} times", by_proxy / by_sql),
        note: format!("proxy {by_proxy:.0}/s, direct {by_sql:.0}/s"),
        met: Some(by_proxy >= by_sql),
        details: json!({ "proxy_per_s": proxy.rates, "direct_per_s": direct.rates }),
    });
    let (proxy_ms, direct_ms) = (millis(proxy.p99()), millis(direct.p99()));
    report.add(Row {
        name: "64 clients, one key: 99th percentile of the wait",
        target: "≤ 1/5 of direct",
        figure: format!("1/{:.1}", direct_ms / proxy_ms),
        note: format!("proxy {proxy_ms:.1} ms, direct {direct_ms:.0} ms"),
        met: Some(proxy_ms * 5.0 <= direct_ms),
        details: json!({
            "proxy_p99_ms": proxy_ms,
            "direct_p99_ms": direct_ms,
            "proxy_median_ms": millis(median(&proxy.waits)),
            "direct_median_ms": millis(median(&direct.waits)),
        }),
    });
    Ok(())
}

/// Grants, and waits.
type Served = (usize, Vec<Duration>);

async fn direct_round(world: &World, length: Duration) -> Result<Served> {
    let mut clients = Vec::new();
    for owner in 1..=CLIENTS as u64 {
        clients.push(Direct::connect(world.url(), owner).await?);
    }
    let began = Instant::now();
    let mut tasks = JoinSet::new();
    for mut client in clients {
        tasks.spawn(async move {
            let (mut grants, mut waits) = (0, Vec::new());
            while began.elapsed() < length {
                let asked = Instant::now();
                let token = loop {
                    match client.try_acquire("bench/one").await? {
                        Some(token) => break Some(token),
                        None if began.elapsed() >= length => break None,
                        None => tokio::time::sleep(RETRY).await,
                    }
                };
                waits.push(asked.elapsed());
                if let Some(token) = token {
                    client.release("bench/one", token).await?;
                    grants += 1;
                }
            }
            anyhow::Ok((grants, waits))
        });
    }
    served(tasks).await
}

async fn proxy_round(world: &World, length: Duration, round: usize) -> Result<Served> {
    // A key of its own each round: what the last one's clients left waiting is not in the way.
    let resource = format!("bench/one/{round}");
    let began = Instant::now();
    let mut tasks = JoinSet::new();
    for owner in 0..CLIENTS {
        let mut client = Client::connect(world.api()).await?;
        let request = http::acquire(&resource, &format!("client-{owner}"), WAIT_MS);
        tasks.spawn(async move {
            let (mut grants, mut waits) = (0, Vec::new());
            while began.elapsed() < length {
                let asked = Instant::now();
                let left = length.saturating_sub(began.elapsed());
                let lease = tokio::time::timeout(left, client.acquire(&request)).await;
                waits.push(asked.elapsed());
                // At the end the connection is dropped, and with it the place in the queue.
                let Ok(lease) = lease else { break };
                client.release(&lease?).await?;
                grants += 1;
            }
            anyhow::Ok((grants, waits))
        });
    }
    served(tasks).await
}

async fn served(mut tasks: JoinSet<Result<Served>>) -> Result<Served> {
    let mut all = (0, Vec::new());
    while let Some(done) = tasks.join_next().await {
        let (grants, waits) = done??;
        all.0 += grants;
        all.1.extend(waits);
    }
    Ok(all)
}

/// Clients arrive one after the other while the key is held; then it is let go, and each lets it
/// go in turn. Their tokens say in which order they were served.
pub async fn order(world: &World, quick: bool, report: &mut Report) -> Result<()> {
    let rounds = if quick { 2 } else { 10 };
    let mut wrong = 0;
    let mut watcher = Client::connect(world.api()).await?;
    for _ in 0..rounds {
        let mut holder = Client::connect(world.api()).await?;
        let lease = holder.acquire(&http::acquire("bench/order", "holder", WAIT_MS)).await?;
        let mut tasks = Vec::new();
        for arrival in 0..CLIENTS {
            let mut client = Client::connect(world.api()).await?;
            client.send(&http::acquire("bench/order", &format!("client-{arrival}"), WAIT_MS)).await?;
            tasks.push(tokio::spawn(async move {
                let lease = client.granted().await?;
                client.release(&lease).await?;
                anyhow::Ok(lease.token)
            }));
            // The next one comes when this one has arrived.
            while watcher.get("/v1/locks/bench%2Forder").await?.matches("\"position\":").count() <= arrival {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
        holder.release(&lease).await?;
        let mut last = lease.token;
        for task in tasks {
            let token = task.await??;
            wrong += usize::from(token <= last);
            last = token;
        }
    }
    let grants = rounds * CLIENTS;
    report.add(Row {
        name: "64 clients, one key: order of grants",
        target: "order of arrival, always",
        figure: format!("{wrong} out of order"),
        note: format!("{grants} grants"),
        met: Some(wrong == 0),
        details: json!({ "grants": grants, "out_of_order": wrong }),
    });
    Ok(())
}
