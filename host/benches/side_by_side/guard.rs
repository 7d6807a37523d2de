//! Guarded routes compared with nginx, with the lock API, with direct requests to the application, and with large
//! bodies.

use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::json;
use tokio::task::JoinSet;

use crate::costs::Costs;
use crate::cycles::proxy_round;
use crate::direct::{self, Direct};
use crate::http::{self, Client};
use crate::nginx::Nginx;
use crate::report::{Report, Row};
use crate::rounds::{CLIENTS, Rates, Target, finish};
use crate::stats::{median, micros, percentile};
use crate::upstream::Upstream;
use crate::world::{Proxy, World, free_address};

mod bodies;

const PASS_THROUGH: &str = "guard: pass-through, 64 connections";
const NGINX: Target = Target { text: "≥ 0.6 times nginx", times: 0.6, ours: "proxy", theirs: "nginx" };
const LOCK_API: Target =
    Target { text: "≥ 0.6 times the lock API", times: 0.6, ours: "guarded", theirs: "lock API" };

/// The limit for a guarded request, beyond an acquire and a release in SQL and the request itself.
const MOST_BESIDE_US: f64 = 300.0;

const WARM: Duration = Duration::from_millis(500);

/// A proxy with guarded routes in front of the upstream. `/locked/{id}` takes a lock for each id; all other paths are
/// passed through.
struct Guard {
    proxy: Proxy,
    address: SocketAddr,
}

impl Guard {
    /// Starts the proxy. `threads` is the setting: 0 stands for half of the cores.
    async fn start(world: &World, name: &str, threads: usize, upstream: &Upstream) -> Result<Guard> {
        let (address, upstream) = (free_address()?, upstream.address);
        let more = format!(
            r#"
[runtime]
threads = {threads}
[[guard]]
listen = "{address}"
[[guard.routes]]
match = {{ path = "/locked/{{id}}" }}
upstream = "http://{upstream}"
policy = "default"
resource = "locked/{{id}}"
[[guard.routes]]
match = {{ path = "/{{*rest}}" }}
upstream = "http://{upstream}"
"#
        );
        Ok(Guard { proxy: world.another_proxy(name, &more).await?, address })
    }
}

/// Measures the guarded routes. `nginx` is the program, if there is one.
pub async fn measure(world: &World, nginx: Option<&Path>, quick: bool, report: &mut Report) -> Result<()> {
    let upstream = Upstream::start()?;
    let length = Duration::from_secs(if quick { 1 } else { 4 });
    let rounds = if quick { 2 } else { 5 };
    match nginx {
        Some(program) => {
            let nginx = Nginx::start(program, &world.dir().join("nginx"), upstream.address).await?;
            report.add(pass_through(world, &nginx, &upstream, rounds, length).await.context("pass-through")?);
        }
        None => report.add(Row {
            name: PASS_THROUGH,
            target: NGINX.text,
            figure: String::new(),
            note: "there is no nginx".to_owned(),
            met: None,
            details: json!({}),
        }),
    }
    let guard = Guard::start(world, "guard", 0, &upstream).await?;
    report.add(latency(world, &guard, &upstream, quick).await.context("latency")?);
    report.add(own_keys(&guard, rounds, length).await.context("own keys")?);
    drop(guard);
    // Use a fresh proxy: memory that earlier measurements left would hide the memory that a body takes.
    let guard = Guard::start(world, "bodies", 0, &upstream).await?;
    report.add(bodies::measure(&guard, quick).await.context("bodies")?);
    Ok(())
}

/// Requests without a lock, through the proxy and through nginx, each with one worker per core.
async fn pass_through(
    world: &World,
    nginx: &Nginx,
    upstream: &Upstream,
    rounds: usize,
    length: Duration,
) -> Result<Row> {
    let cores = std::thread::available_parallelism()?.get();
    let guard = Guard::start(world, "pass-through", cores, upstream).await?;
    let (by_nginx, _) = round(connect(nginx.address, passed).await?, WARM).await?;
    let (by_proxy, _) = round(connect(guard.address, passed).await?, WARM).await?;
    let run = async |clients| round(clients, length).await;
    let costs = Costs::with(world, &guard.proxy);
    let run_guard = async |clients| costs.around(round(clients, length)).await;
    let rates = Rates::measure(rounds, by_nginx, run, by_proxy, run_guard).await?;
    // The rate of the upstream and the load alone.
    let (_, bare) = round(connect(upstream.address, passed).await?, length).await?;
    let mut row = costs.add_to(rates.row(PASS_THROUGH, &NGINX));
    row.note += &format!(", the upstream itself {bare:.0}/s");
    row.details["upstream_per_s"] = json!(bare);
    Ok(row)
}

/// Guarded requests, and acquire and release of the lock API. Each client has its own key.
async fn own_keys(guard: &Guard, rounds: usize, length: Duration) -> Result<Row> {
    let mut by_api = Vec::new();
    for client in 0..CLIENTS {
        by_api.push((Client::connect(guard.proxy.api()).await?, format!("bench/guard/{client}")));
    }
    let (by_api, _) = proxy_round(by_api, WARM).await?;
    let (guarded, _) = round(connect(guard.address, locked).await?, WARM).await?;
    let run_api = async |clients| proxy_round(clients, length).await;
    let run_guarded = async |clients| round(clients, length).await;
    let rates = Rates::measure(rounds, by_api, run_api, guarded, run_guarded).await?;
    Ok(rates.row("guard: own keys, 64 connections", &LOCK_API))
}

/// The time that the guard adds to one request, besides the SQL of a lease. The three measurements alternate.
async fn latency(world: &World, guard: &Guard, upstream: &Upstream, quick: bool) -> Result<Row> {
    let times = if quick { 200 } else { 3000 };
    let key = "bench/guard".to_owned();
    direct::prepare(world.url(), std::slice::from_ref(&key)).await?;
    let mut direct = Direct::connect(world.url(), 1).await?;
    let mut bare = Client::connect(upstream.address).await?;
    let mut guarded = Client::connect(guard.address).await?;
    let request = locked(0);
    let (mut by_sql, mut by_upstream, mut by_guard) = (Vec::new(), Vec::new(), Vec::new());
    // The first ones are a warm-up.
    for turn in 0..times + times / 10 {
        let began = Instant::now();
        let token = direct.try_acquire(&key).await?.context("the key is free")?;
        direct.release(&key, token).await?;
        let sql_took = began.elapsed();

        let began = Instant::now();
        bare.exchange(&request).await?;
        let upstream_took = began.elapsed();

        let began = Instant::now();
        guarded.exchange(&request).await?;
        let guard_took = began.elapsed();
        if turn >= times / 10 {
            by_sql.push(sql_took);
            by_upstream.push(upstream_took);
            by_guard.push(guard_took);
        }
    }
    let [sql_us, upstream_us, guarded_us] =
        [&by_sql, &by_upstream, &by_guard].map(|took| micros(median(took)));
    let added_us = guarded_us - upstream_us;
    Ok(Row {
        name: "guard: added latency at 1 connection",
        target: "≤ direct acquire and release + 300 µs",
        figure: format!("{added_us:.0} µs"),
        note: format!("guarded {guarded_us:.0} µs, upstream {upstream_us:.0} µs, direct {sql_us:.0} µs"),
        met: Some(added_us <= sql_us + MOST_BESIDE_US),
        details: json!({
            "added_median_us": added_us,
            "guarded_median_us": guarded_us,
            "upstream_median_us": upstream_us,
            "direct_median_us": sql_us,
            "guarded_p99_us": micros(percentile(&by_guard, 0.99)),
            "upstream_p99_us": micros(percentile(&by_upstream, 0.99)),
            "direct_p99_us": micros(percentile(&by_sql, 0.99)),
        }),
    })
}

fn passed(_: u64) -> Vec<u8> {
    http::get("/passed")
}

fn locked(client: u64) -> Vec<u8> {
    http::post(&format!("/locked/{client}"), "{\"amount\":1}")
}

/// Connections, each with the request that it repeats.
type Clients = Vec<(Client, Vec<u8>)>;

async fn connect(address: SocketAddr, request: fn(u64) -> Vec<u8>) -> Result<Clients> {
    let mut clients = Vec::new();
    for client in 0..CLIENTS {
        clients.push((Client::connect(address).await?, request(client)));
    }
    Ok(clients)
}

async fn round(clients: Clients, length: Duration) -> Result<(Clients, f64)> {
    let began = Instant::now();
    let mut tasks = JoinSet::new();
    for (mut client, request) in clients {
        tasks.spawn(async move {
            let mut requests = 0u64;
            while began.elapsed() < length {
                client.exchange(&request).await?;
                requests += 1;
            }
            anyhow::Ok(((client, request), requests))
        });
    }
    finish(tasks, began).await
}
