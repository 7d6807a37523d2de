//! 64 clients that do work once; one in ten requests repeats work that was already done.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use tokio::task::JoinSet;

use crate::costs::Costs;
use crate::direct::DirectOnce;
use crate::http::{self, Client};
use crate::report::Report;
use crate::rounds::{CLIENTS, Rates, TWICE, finish};
use crate::world::World;

/// One in this many requests is a duplicate.
const DUPLICATES: u64 = 10;

/// The name of a client's n-th request: a new name, or the name before it again.
fn name(client: u64, n: u64) -> String {
    let n = if n % DUPLICATES == DUPLICATES - 1 { n - 1 } else { n };
    format!("once/{client}/{n}")
}

/// Measures both sides.
pub async fn measure(world: &World, quick: bool, report: &mut Report) -> Result<()> {
    let (rounds, length) = if quick { (2, 1) } else { (5, 3) };
    let length = Duration::from_secs(length);
    DirectOnce::prepare(world.url()).await?;
    let mut direct = Vec::new();
    let mut proxy = Vec::new();
    for client in 0..CLIENTS {
        direct.push((DirectOnce::connect(world.url()).await?, client, 0));
        proxy.push((Client::connect(world.api()).await?, client, 0));
    }
    let run_direct = async |clients| direct_round(clients, length).await;
    let costs = Costs::of(world);
    let run_proxy = async |clients| costs.around(proxy_round(clients, length)).await;
    let rates = Rates::measure(rounds, direct, run_direct, proxy, run_proxy).await?;
    report.add(costs.add_to(rates.row("64 clients, once: 10 % duplicates", &TWICE)));
    Ok(())
}

type Directs = Vec<(DirectOnce, u64, u64)>;
type Clients = Vec<(Client, u64, u64)>;

async fn direct_round(clients: Directs, length: Duration) -> Result<(Directs, f64)> {
    let began = Instant::now();
    let mut tasks = JoinSet::new();
    for (mut direct, client, mut n) in clients {
        tasks.spawn(async move {
            let first = n;
            while began.elapsed() < length {
                direct.once(&name(client, n), n % DUPLICATES == DUPLICATES - 1).await?;
                n += 1;
            }
            anyhow::Ok(((direct, client, n), n - first))
        });
    }
    finish(tasks, began).await
}

async fn proxy_round(clients: Clients, length: Duration) -> Result<(Clients, f64)> {
    let began = Instant::now();
    let mut tasks = JoinSet::new();
    for (mut http, client, mut n) in clients {
        tasks.spawn(async move {
            let first = n;
            while began.elapsed() < length {
                let begun = http.begin(&http::begin(&name(client, n))).await?;
                let is_duplicate = n % DUPLICATES == DUPLICATES - 1;
                ensure!(begun.is_none() == is_duplicate, "{} is not what it should be", name(client, n));
                if let Some(lease) = begun {
                    http.finish(&lease).await?;
                }
                n += 1;
            }
            anyhow::Ok(((http, client, n), n - first))
        });
    }
    finish(tasks, began).await
}
