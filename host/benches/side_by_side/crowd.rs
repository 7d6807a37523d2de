//! 10,000 clients that wait for one key: their cost, and the time from a release to the next grant.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::json;
use tokio::sync::mpsc;

use crate::http::{self, Client, Lease};
use crate::report::{Report, Row};
use crate::stats::{median, millis, percentile};
use crate::world::World;

const WAIT_MS: u32 = 3_600_000;
const MOST_MIB: f64 = 256.0;
const MOST_MS: f64 = 50.0;

/// A waiter that was granted the key, and the time at which it knew.
struct Granted {
    client: Client,
    lease: Lease,
    at: Instant,
}

/// Measures the crowd.
pub async fn measure(world: &World, quick: bool, report: &mut Report) -> Result<()> {
    let (clients, handoffs) = if quick { (1000, 50) } else { (10_000, 300) };
    let mut holder = Client::connect(world.api()).await?;
    let mut lease = holder.acquire(&http::acquire("bench/crowd", "holder", 0)).await?;
    let (sender, mut granted) = mpsc::unbounded_channel();
    gather(world, clients, &sender).await?;
    drop(sender);
    // The last clients are still joining the queue.
    tokio::time::sleep(Duration::from_secs(2)).await;
    if let Ok(early) = granted.try_recv() {
        early?;
        bail!("a waiter was granted a key that is held");
    }
    let mut memory = world.proxy_memory()?;

    let mut times = Vec::new();
    for _ in 0..handoffs {
        let began = Instant::now();
        holder.send(&http::release(&lease)).await?;
        let next: Granted = granted.recv().await.context("every waiter is gone")??;
        times.push(next.at - began);
        holder.released().await?;
        // The connection of the old holder is closed, so there is one client fewer.
        (holder, lease) = (next.client, next.lease);
    }
    memory = memory.max(world.proxy_memory()?);
    rows(clients, &times, memory, report);
    Ok(())
}

/// Connects the waiters, a few at a time, and sends their acquires.
async fn gather(
    world: &World,
    clients: usize,
    granted: &mpsc::UnboundedSender<Result<Granted>>,
) -> Result<()> {
    for number in 0..clients {
        let mut client = Client::connect(world.api()).await?;
        client.send(&http::acquire("bench/crowd", &format!("client-{number}"), WAIT_MS)).await?;
        let granted = granted.clone();
        tokio::spawn(async move {
            let lease = client.granted().await;
            let at = Instant::now();
            // After the measurement nobody receives this.
            let _ = granted.send(lease.map(|lease| Granted { client, lease, at }));
        });
    }
    Ok(())
}

fn rows(clients: usize, times: &[Duration], memory: u64, report: &mut Report) {
    let mib = memory as f64 / f64::from(1 << 20);
    report.add(Row {
        name: "10,000 waiting clients: resident memory",
        target: "≤ 256 MiB",
        figure: format!("{mib:.0} MiB"),
        note: format!("{clients} clients on one key"),
        met: Some(mib <= MOST_MIB),
        details: json!({ "clients": clients, "resident_bytes": memory }),
    });
    let ms = millis(median(times));
    report.add(Row {
        name: "10,000 waiting clients: release to next grant",
        target: "median < 50 ms",
        figure: format!("{ms:.1} ms"),
        note: format!("99th percentile {:.1} ms", millis(percentile(times, 0.99))),
        met: Some(ms < MOST_MS),
        details: json!({ "median_ms": ms, "p99_ms": millis(percentile(times, 0.99)), "handoffs": times.len() }),
    });
}
