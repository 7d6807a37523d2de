//! 64 clients with their own keys: each acquires and releases its key as fast as possible.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::Result;
use tokio::task::JoinSet;

use crate::costs::Costs;
use crate::direct::{self, Direct};
use crate::http::{self, Client};
use crate::report::Report;
use crate::rounds::{CLIENTS, Rates, TWICE, finish};
use crate::world::World;

/// Measures the cycles of both sides.
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
    // The first round needs existing rows, caches and prepared statements.
    let warm = Duration::from_millis(500);
    (direct, _) = direct_round(direct, warm).await?;
    (proxy, _) = proxy_round(proxy, warm).await?;

    let run_direct = async |clients| direct_round(clients, length).await;
    let costs = Costs::of(world);
    let run_proxy = async |clients| costs.around(proxy_round(clients, length)).await;
    let rates = Rates::measure(rounds, direct, run_direct, proxy, run_proxy).await?;
    report.add(costs.add_to(rates.row("64 clients, own keys: acquire and release", &TWICE)));
    Ok(())
}

type Directs = Vec<(Direct, String)>;
/// Connections, each with its resource.
pub type Clients = Vec<(Client, String)>;

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

/// Clients of a proxy, each with a resource of its own: the prefix and a number.
pub async fn connected(api: SocketAddr, prefix: &str) -> Result<Clients> {
    let mut clients = Vec::new();
    for client in 0..CLIENTS {
        clients.push((Client::connect(api).await?, format!("{prefix}/{client}")));
    }
    Ok(clients)
}

/// A round of the proxy's clients. Returns the clients, and their rate per second.
pub async fn proxy_round(clients: Clients, length: Duration) -> Result<(Clients, f64)> {
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
