//! A million held leases: memory, a start, and a policy change beside traffic.

use std::time::{Duration, Instant};

use anyhow::Result;
use serde_json::json;
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::decision::default_policy;
use crate::http::{self, Client};
use crate::report::{Report, Row};
use crate::rounds::CLIENTS;
use crate::stats::{millis, percentile};
use crate::world::{Proxy, World};

const MOST_MIB: f64 = 600.0;
const MOST_START: Duration = Duration::from_secs(2);
const MOST_SLOWER: f64 = 2.0;
/// How long it takes at most until a proxy has recorded that all leases have their keys.
const NOTED: Duration = Duration::from_secs(3);
/// For how long the traffic without a policy change is measured.
const ORDINARY: Duration = Duration::from_secs(10);

/// Measures a proxy that has granted all leases, a change of the policy that named them, and the proxy's successor. On a
/// server of its own, so that no other proxy examines the leases at the same time.
pub async fn measure(quick: bool, report: &mut Report) -> Result<()> {
    let leases = if quick { 20_000 } else { 1_000_000 };
    let mut world = World::start().await?;
    let measured = measure_in(&mut world, leases, report).await;
    world.stop().await;
    measured
}

async fn measure_in(world: &mut World, leases: u64, report: &mut Report) -> Result<()> {
    let proxy = world.proxy();
    let empty = proxy.memory()?;
    fill(proxy, leases).await?;
    memory_row(leases, empty, proxy.memory()?, report);

    let component = default_policy()?.component();
    // A custom section, which means nothing.
    let other = [&*component, b"\0\x06\x05bench"].concat();
    let wait = async {
        tokio::time::sleep(ORDINARY).await;
        Ok(())
    };
    let ordinary = traffic(proxy, wait).await?;
    let began = Instant::now();
    let during = traffic(proxy, proxy.push("held", &other)).await?;
    change_row(leases, began.elapsed(), &ordinary, &during, proxy.memory()?, report);

    // The successor has the policy of its configuration again.
    proxy.push("held", &component).await?;
    tokio::time::sleep(NOTED).await;
    let started = world.kill_and_start().await?;
    start_row(leases, started, world.proxy_memory()?, report);
    Ok(())
}

/// Acquires the leases, for longer than the bench runs.
async fn fill(proxy: &Proxy, leases: u64) -> Result<()> {
    let mut tasks = JoinSet::new();
    for client in 0..CLIENTS {
        let api = proxy.api();
        tasks.spawn(async move {
            let mut connection = Client::connect(api).await?;
            for lease in (client..leases).step_by(CLIENTS as usize) {
                let body =
                    format!("{{\"resource\":\"held/{lease}\",\"owner\":\"{client}\",\"ttl_ms\":3600000}}");
                connection.acquire(&http::post("/v1/acquire", &body)).await?;
            }
            anyhow::Ok(())
        });
    }
    while let Some(done) = tasks.join_next().await {
        done??;
    }
    Ok(())
}

/// The times of acquires and releases of other keys while `work` runs.
async fn traffic(proxy: &Proxy, work: impl Future<Output = Result<()>>) -> Result<Vec<Duration>> {
    let (stop, stopped) = watch::channel(());
    let mut tasks = JoinSet::new();
    for client in 0..CLIENTS {
        let (api, stopped) = (proxy.api(), stopped.clone());
        tasks.spawn(async move {
            let mut connection = Client::connect(api).await?;
            let request = http::acquire(&format!("bench/beside/{client}"), "client", 0);
            let mut times = Vec::new();
            while stopped.has_changed().is_ok() {
                let began = Instant::now();
                let lease = connection.acquire(&request).await?;
                connection.release(&lease).await?;
                times.push(began.elapsed());
            }
            anyhow::Ok(times)
        });
    }
    let done = work.await;
    drop(stop);
    let mut times = Vec::new();
    while let Some(client) = tasks.join_next().await {
        times.extend(client??);
    }
    done.map(|()| times)
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

fn memory_row(leases: u64, empty: u64, memory: u64, report: &mut Report) {
    let each = (memory.saturating_sub(empty)) / leases;
    report.add(Row {
        name: "1,000,000 held leases: resident memory",
        target: "≤ 600 MiB",
        figure: format!("{:.0} MiB", mib(memory)),
        note: format!("{leases} leases, {each} bytes each"),
        met: Some(mib(memory) <= MOST_MIB),
        details: json!({ "leases": leases, "resident_bytes": memory, "empty_bytes": empty }),
    });
}

fn change_row(
    leases: u64,
    took: Duration,
    ordinary: &[Duration],
    during: &[Duration],
    memory: u64,
    report: &mut Report,
) {
    let (before, beside) = (millis(percentile(ordinary, 0.99)), millis(percentile(during, 0.99)));
    report.add(Row {
        name: "1,000,000 held leases: traffic beside a policy change",
        target: "99th percentile ≤ 2 times the ordinary",
        figure: format!("{:.2} times", beside / before),
        note: format!("{beside:.1} ms, {before:.1} ms; the change took {:.1} s", took.as_secs_f64()),
        met: Some(beside <= MOST_SLOWER * before),
        details: json!({
            "leases": leases, "change_s": took.as_secs_f64(), "ordinary_p99_ms": before, "during_p99_ms": beside,
            "longest_ms": millis(percentile(during, 1.0)), "cycles": during.len(), "resident_bytes": memory,
        }),
    });
}

fn start_row(leases: u64, took: Duration, memory: u64, report: &mut Report) {
    report.add(Row {
        name: "1,000,000 held leases: start",
        target: "ready in ≤ 2 s",
        figure: format!("{:.2} s", took.as_secs_f64()),
        note: format!("{:.0} MiB afterwards", mib(memory)),
        met: Some(took <= MOST_START),
        details: json!({ "leases": leases, "start_s": took.as_secs_f64(), "resident_bytes": memory }),
    });
}
