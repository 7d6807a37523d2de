//! Delegated keys, which the proxy grants from its memory, beside Redis that syncs each write.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::json;
use tokio::task::JoinSet;

use crate::contended::{Served, in_all, queued, served};
use crate::costs::Costs;
use crate::cycles::{Clients, connected, proxy_round};
use crate::http::{self, Client};
use crate::redis::{self, Redis};
use crate::report::{Report, Row};
use crate::rounds::{CLIENTS, Rates, Target, finish};
use crate::stats::{median, median_rate, micros, millis, percentile};
use crate::world::World;

const BESIDE_REDIS: Target =
    Target { text: "≥ 0.8 times Redis", times: 0.8, ours: "proxy", theirs: "Redis" };
const OWN_AND_ANY: Target =
    Target { text: "≥ 0.7 times own keys", times: 0.7, ours: "in turn", theirs: "own keys" };
/// How often a client of Redis asks for a key that is held.
const POLL: Duration = Duration::from_millis(100);
/// The resources of the clients that have their own.
const OWN: &str = "delegated/own";
const RESOURCES: u64 = 10_000;
const WAIT_MS: u32 = 600_000;

/// Measures both sides.
pub async fn measure(world: &World, program: Option<&Path>, quick: bool, report: &mut Report) -> Result<()> {
    let Some(program) = program else {
        eprintln!("  without redis-server, delegated keys are not measured");
        return Ok(());
    };
    let redis = Redis::start(program, &world.dir().join("redis")).await?;
    single(world, &redis, quick, report).await?;
    own_keys(world, &redis, quick, report).await?;
    any_keys(world, quick, report).await?;
    one_key(world, &redis, quick, report).await?;
    two_proxies(world, quick, report).await
}

/// The time that one client alone needs to acquire and release.
async fn single(world: &World, redis: &Redis, quick: bool, report: &mut Report) -> Result<()> {
    let times = if quick { 200 } else { 3_000 };
    let (mut theirs, mut ours) = (redis.connect(1).await?, Client::connect(world.api()).await?);
    let request = http::acquire("delegated/single", "single", 0);
    let (mut by_redis, mut by_proxy) = (Vec::new(), Vec::new());
    for turn in 0..times + times / 10 {
        let began = Instant::now();
        theirs.try_acquire("single").await?;
        theirs.release("single").await?;
        let redis_took = began.elapsed();
        let began = Instant::now();
        let lease = ours.acquire(&request).await?;
        ours.release(&lease).await?;
        if turn >= times / 10 {
            by_proxy.push(began.elapsed());
            by_redis.push(redis_took);
        }
    }
    let (redis_us, proxy_us) = (micros(median(&by_redis)), micros(median(&by_proxy)));
    report.add(Row {
        name: "1 client, delegated: acquire and release",
        target: "≥ 0.8 times as fast as Redis",
        figure: format!("{:.2} times", redis_us / proxy_us),
        note: format!("proxy {proxy_us:.0} µs, Redis {redis_us:.0} µs"),
        met: Some(redis_us >= 0.8 * proxy_us),
        details: json!({
            "proxy_median_us": proxy_us,
            "redis_median_us": redis_us,
            "proxy_p99_us": micros(percentile(&by_proxy, 0.99)),
            "redis_p99_us": micros(percentile(&by_redis, 0.99)),
        }),
    });
    Ok(())
}

async fn own_keys(world: &World, redis: &Redis, quick: bool, report: &mut Report) -> Result<()> {
    let (rounds, length) = rounds(quick);
    let mut theirs = Vec::new();
    for client in 0..CLIENTS {
        theirs.push((redis.connect(client).await?, format!("own/{client}")));
    }
    let (ours, _) = proxy_round(connected(world.api(), OWN).await?, Duration::from_millis(500)).await?;
    let run_redis = async |clients| redis_round(clients, length).await;
    let costs = Costs::of(world);
    let run_proxy = async |clients| costs.around(proxy_round(clients, length)).await;
    let rates = Rates::measure(rounds, theirs, run_redis, ours, run_proxy).await?;
    report
        .add(costs.add_to(rates.row("64 clients, own keys, delegated: acquire and release", &BESIDE_REDIS)));
    Ok(())
}

fn rounds(quick: bool) -> (usize, Duration) {
    if quick { (2, Duration::from_secs(1)) } else { (5, Duration::from_secs(4)) }
}

async fn redis_round(
    clients: Vec<(redis::Client, String)>,
    length: Duration,
) -> Result<(Vec<(redis::Client, String)>, f64)> {
    let began = Instant::now();
    let mut tasks = JoinSet::new();
    for (mut client, key) in clients {
        tasks.spawn(async move {
            let mut cycles = 0;
            while began.elapsed() < length {
                client.try_acquire(&key).await?;
                client.release(&key).await?;
                cycles += 1;
            }
            anyhow::Ok(((client, key), cycles))
        });
    }
    finish(tasks, began).await
}

/// Each client takes one key after another of 10,000.
async fn any_keys(world: &World, quick: bool, report: &mut Report) -> Result<()> {
    let (rounds, length) = rounds(quick);
    let run_own = async |clients| proxy_round(clients, length).await;
    let costs = Costs::of(world);
    let run_any = async |clients| costs.around(any_round(clients, length)).await;
    let (own, any) = (connected(world.api(), OWN).await?, connected(world.api(), OWN).await?);
    // Each key is delegated once.
    let (any, _) = any_round(any, 2 * length).await?;
    let rates = Rates::measure(rounds, own, run_own, any, run_any).await?;
    report.add(costs.add_to(rates.row("64 clients, 10,000 keys in turn, delegated", &OWN_AND_ANY)));
    Ok(())
}

async fn any_round(clients: Clients, length: Duration) -> Result<(Clients, f64)> {
    let began = Instant::now();
    let mut tasks = JoinSet::new();
    for (number, (mut client, own)) in (0..).zip(clients) {
        tasks.spawn(async move {
            let mut cycles = 0;
            while began.elapsed() < length {
                let resource = (number + cycles * CLIENTS * 7) % RESOURCES;
                let request = http::acquire(&format!("delegated/any/{resource}"), &own, WAIT_MS);
                let lease = client.acquire(&request).await?;
                client.release(&lease).await?;
                cycles += 1;
            }
            anyhow::Ok(((client, own), cycles))
        });
    }
    finish(tasks, began).await
}

/// All clients want one key: in order of arrival here, and by polls at Redis.
async fn one_key(world: &World, redis: &Redis, quick: bool, report: &mut Report) -> Result<()> {
    let (rounds, length) = rounds(quick);
    let (mut ours, mut theirs, mut waits) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..rounds {
        let (grants, _) = polled(redis, length).await?;
        theirs.push(grants as f64 / length.as_secs_f64());
        let seen = queued(&[world.api()], &format!("delegated/one/{round}"), length).await?;
        let (grants, took) = in_all(seen);
        ours.push(grants as f64 / length.as_secs_f64());
        waits.extend(took);
    }
    let (by_proxy, by_redis) = (median_rate(&ours), median_rate(&theirs));
    report.add(Row {
        name: "64 clients, one key, delegated: grants",
        target: "≥ 10 times Redis polled every 100 ms",
        figure: format!("{:.1} times", by_proxy / by_redis),
        note: format!("proxy {by_proxy:.0}/s, Redis {by_redis:.0}/s"),
        met: Some(by_proxy >= 10.0 * by_redis),
        details: json!({ "proxy_per_s": ours, "redis_per_s": theirs }),
    });
    let (p99_ms, bound_ms) = (millis(percentile(&waits, 0.99)), 64_000.0 / by_proxy + 5.0);
    report.add(Row {
        name: "64 clients, one key, delegated: 99th percentile of the wait",
        target: "≤ 64 handoffs and 5 ms",
        figure: format!("{p99_ms:.1} ms"),
        note: format!("64 handoffs and 5 ms are {bound_ms:.1} ms"),
        met: Some(p99_ms <= bound_ms),
        details: json!({ "p99_ms": p99_ms, "median_ms": millis(median(&waits)) }),
    });
    Ok(())
}

async fn polled(redis: &Redis, length: Duration) -> Result<Served> {
    let mut tasks = JoinSet::new();
    let began = Instant::now();
    for owner in 0..CLIENTS {
        let mut client = redis.connect(owner).await?;
        tasks.spawn(async move {
            let (mut grants, mut waits) = (0, Vec::new());
            while began.elapsed() < length {
                let asked = Instant::now();
                let is_held = loop {
                    if client.try_acquire("one").await? {
                        break true;
                    }
                    if began.elapsed() >= length {
                        break false;
                    }
                    tokio::time::sleep(POLL).await;
                };
                waits.push(asked.elapsed());
                if is_held {
                    client.release("one").await?;
                    grants += 1;
                }
            }
            anyhow::Ok((grants, waits))
        });
    }
    served(tasks).await
}

/// Clients of two proxies want one key: delegated, and as usual.
async fn two_proxies(world: &World, quick: bool, report: &mut Report) -> Result<()> {
    let (rounds, length) = rounds(quick);
    let other = world.another_proxy("delegating", "").await?;
    let proxies = [world.api(), other.api()];
    // The proxies agree on the secret of their notifications in their first heartbeats.
    tokio::time::sleep(Duration::from_secs(if quick { 0 } else { 5 })).await;
    let (mut ours, mut usual, mut shares) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..rounds {
        let (grants, _) = in_all(queued(&proxies, &format!("bench/both/{round}"), length).await?);
        usual.push(grants as f64 / length.as_secs_f64());
        let seen = queued(&proxies, &format!("delegated/both/{round}"), length).await?;
        let (one, both) = (seen[0].0, in_all(seen).0);
        ours.push(both as f64 / length.as_secs_f64());
        shares.push(one as f64 / both as f64);
    }
    let (by_memory, by_store) = (median_rate(&ours), median_rate(&usual));
    let share = *shares
        .iter()
        .max_by(|one, other| (*one - 0.5).abs().total_cmp(&(*other - 0.5).abs()))
        .context("no rounds")?;
    report.add(Row {
        name: "two proxies, 32 clients each, one key, delegated: grants",
        target: "≥ 3 times not delegated",
        figure: format!("{:.1} times", by_memory / by_store),
        note: format!("delegated {by_memory:.0}/s, not delegated {by_store:.0}/s"),
        met: Some(by_memory >= 3.0 * by_store),
        details: json!({ "delegated_per_s": ours, "not_delegated_per_s": usual }),
    });
    report.add(Row {
        name: "the same: share of one proxy",
        target: "40 to 60 %",
        figure: format!("{:.0} %", share * 100.0),
        note: "the least even of the rounds".to_owned(),
        met: Some((0.4..=0.6).contains(&share)),
        details: json!({ "shares": shares }),
    });
    Ok(())
}
