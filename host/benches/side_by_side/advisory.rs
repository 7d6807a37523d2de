//! 64 clients with their own named locks: through the proxy, and with `GET_LOCK` on 64 connections.

use std::time::{Duration, Instant};

use anyhow::Result;
use serde_json::json;
use tokio::task::JoinSet;

use crate::cycles::proxy_round;
use crate::direct::{DirectNamed, connections};
use crate::http::Client;
use crate::report::{Report, Row};
use crate::rounds::{CLIENTS, HALF, Rates, finish};
use crate::world::World;

/// The most server connections that the proxy may use.
const MOST_CONNECTIONS: u64 = 8;

/// Measures both sides.
pub async fn measure(world: &World, quick: bool, report: &mut Report) -> Result<()> {
    let (rounds, length) = if quick { (2, 1) } else { (5, 4) };
    let length = Duration::from_secs(length);
    let warm = Duration::from_millis(500);
    let mut proxy = Vec::new();
    for client in 0..CLIENTS {
        proxy.push((Client::connect(world.api()).await?, format!("advisory/{client}")));
    }
    (proxy, _) = proxy_round(proxy, warm).await?;
    // Only the proxy is connected now.
    let used = connections(world.url()).await?;
    let mut direct = Vec::new();
    for client in 0..CLIENTS {
        direct.push((DirectNamed::connect(world.url()).await?, format!("direct-{client}")));
    }
    (direct, _) = direct_round(direct, warm).await?;

    let run_direct = async |clients| direct_round(clients, length).await;
    let run_proxy = async |clients| proxy_round(clients, length).await;
    let rates = Rates::measure(rounds, direct, run_direct, proxy, run_proxy).await?;
    report.add(rates.row("64 clients, own keys, advisory: acquire and release", &HALF));
    report.add(Row {
        name: "the same: connections to MySQL",
        target: "≤ 8",
        figure: used.to_string(),
        note: format!("direct {CLIENTS}"),
        met: Some(used <= MOST_CONNECTIONS),
        details: json!({ "connections": used }),
    });
    Ok(())
}

type Directs = Vec<(DirectNamed, String)>;

async fn direct_round(clients: Directs, length: Duration) -> Result<(Directs, f64)> {
    let began = Instant::now();
    let mut tasks = JoinSet::new();
    for (mut client, name) in clients {
        tasks.spawn(async move {
            let mut cycles = 0u64;
            while began.elapsed() < length {
                client.cycle(&name).await?;
                cycles += 1;
            }
            anyhow::Ok(((client, name), cycles))
        });
    }
    finish(tasks, began).await
}
