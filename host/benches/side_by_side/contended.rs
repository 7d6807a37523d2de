//! 64 clients that compete for one key: how many are served, how long they wait, and in which order.

use std::net::SocketAddr;
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

/// The key of the other side, whose clients retry at a fixed interval.
const DIRECT_KEY: &str = "bench/one";

/// What the clients of one side saw in all rounds.
#[derive(Default)]
struct Side {
    rates: Vec<f64>,
    /// The time from a client's first attempt to its grant. A wait that the end of a round interrupted counts with
    /// its duration so far, because starved clients must not drop out of the figures.
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

/// The names of the measurements in the report.
struct Names {
    grants: &'static str,
    wait: &'static str,
    order: &'static str,
}

const ONE: Names = Names {
    grants: "64 clients, one key: grants",
    wait: "64 clients, one key: 99th percentile of the wait",
    order: "64 clients, one key: order of grants",
};
const FLEET: Names = Names {
    grants: "two proxies, 32 clients each, one key, global order: grants",
    wait: "two proxies, one key, global order: 99th percentile of the wait",
    order: "two proxies, one key, global order: order of grants",
};

/// Clients that are distributed over proxies and use resources with this prefix.
struct Crowd {
    apis: Vec<SocketAddr>,
    prefix: &'static str,
    names: Names,
}

/// Measures one proxy against direct clients.
pub async fn measure(world: &World, quick: bool, report: &mut Report) -> Result<()> {
    let crowd = Crowd { apis: vec![world.api()], prefix: "bench", names: ONE };
    crowd.measure(world, quick, report).await?;
    crowd.order(world, quick, report).await.map(drop)
}

/// As [`measure`], over two proxies and with a global queue.
pub async fn fleet(world: &World, quick: bool, report: &mut Report) -> Result<()> {
    let other = world.another_proxy("other", "").await?;
    let crowd = Crowd { apis: vec![world.api(), other.api()], prefix: "global", names: FLEET };
    crowd.measure(world, quick, report).await?;
    let wake_ups = crowd.order(world, quick, report).await?;
    // Clients arrive one after another, alternately at one proxy and the other.
    let name = "two proxies: from the release to the grant on the other one";
    report.add(handoff_row(name, "median < 20 ms", 20.0, &wake_ups));
    crowd.waiting(world, quick, report).await?;
    elsewhere(&crowd.apis, quick, report).await
}

/// How long it took from releases to the grants that followed. The median has to be below `limit_ms`.
fn handoff_row(name: &'static str, target: &'static str, limit_ms: f64, delays: &[Duration]) -> Row {
    let (middle, slow) = (millis(median(delays)), millis(percentile(delays, 0.99)));
    Row {
        name,
        target,
        figure: format!("{middle:.1} ms"),
        note: format!("99th percentile {slow:.1} ms"),
        met: Some(middle < limit_ms),
        details: json!({ "median_ms": middle, "p99_ms": slow, "handoffs": delays.len() }),
    }
}

/// Measures how soon a client of one proxy is granted a key that a client of another proxy releases, with the default
/// policy. The waiter has waited long enough for its proxy to poll seldom.
async fn elsewhere(apis: &[SocketAddr], quick: bool, report: &mut Report) -> Result<()> {
    let (handoffs, waits) = if quick { (6, 200) } else { (40, 500) };
    let mut delays = Vec::new();
    let mut holder = Client::connect(apis[0]).await?;
    let mut lease = holder.acquire(&http::acquire("bench/wake-up", "client-0", WAIT_MS)).await?;
    for handoff in 1..=handoffs {
        let mut waiter = Client::connect(apis[handoff % apis.len()]).await?;
        waiter.send(&http::acquire("bench/wake-up", &format!("client-{handoff}"), WAIT_MS)).await?;
        let granted = tokio::spawn(async move {
            let lease = waiter.granted().await?;
            anyhow::Ok((waiter, lease, Instant::now()))
        });
        tokio::time::sleep(Duration::from_millis(waits)).await;
        let released = Instant::now();
        holder.release(&lease).await?;
        let (next, next_lease, at) = granted.await??;
        delays.push(at.saturating_duration_since(released));
        (holder, lease) = (next, next_lease);
    }
    holder.release(&lease).await?;
    let name = "two proxies, default policy: from the release to the grant on the other one";
    report.add(handoff_row(name, "median < 5 ms", 5.0, &delays));
    Ok(())
}

impl Crowd {
    fn api(&self, client: usize) -> SocketAddr {
        self.apis[client % self.apis.len()]
    }

    async fn measure(&self, world: &World, quick: bool, report: &mut Report) -> Result<()> {
        let (rounds, length) = if quick { (1, 2) } else { (3, 6) };
        let length = Duration::from_secs(length);
        direct::prepare(world.url(), &[DIRECT_KEY.to_owned()]).await?;
        let (mut direct, mut proxy) = (Side::default(), Side::default());
        for round in 0..rounds {
            let (grants, waits) = direct_round(world, length).await?;
            direct.add(grants, waits, length);
            let (grants, waits) = self.round(length, round).await?;
            proxy.add(grants, waits, length);
        }
        self.compare(&direct, &proxy, report);
        Ok(())
    }

    fn compare(&self, direct: &Side, proxy: &Side, report: &mut Report) {
        let (by_proxy, by_sql) = (median_rate(&proxy.rates), median_rate(&direct.rates));
        report.add(Row {
            name: self.names.grants,
            target: "≥ direct",
            figure: format!("{:.2} times", by_proxy / by_sql),
            note: format!("proxy {by_proxy:.0}/s, direct {by_sql:.0}/s"),
            met: Some(by_proxy >= by_sql),
            details: json!({ "proxy_per_s": proxy.rates, "direct_per_s": direct.rates }),
        });
        let (proxy_ms, direct_ms) = (millis(proxy.p99()), millis(direct.p99()));
        report.add(Row {
            name: self.names.wait,
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
    }

    async fn round(&self, length: Duration, round: usize) -> Result<Served> {
        // Each round has its own key, so waiters that the last round left behind are not in the way.
        let resource = format!("{}/one/{round}", self.prefix);
        Ok(in_all(queued(&self.apis, &resource, length).await?))
    }

    /// Clients arrive one after another while the key is held. Then the key is released, and each client releases it
    /// in turn. The tokens show the order in which the clients were served.
    async fn order(&self, world: &World, quick: bool, report: &mut Report) -> Result<Vec<Duration>> {
        let rounds = if quick { 2 } else { 10 };
        let mut wrong = 0;
        let mut wake_ups = Vec::new();
        for round in 0..rounds {
            let tokens = self.in_turn(world, &format!("{}/order/{round}", self.prefix)).await?;
            wrong += tokens.windows(2).filter(|pair| pair[0].0 >= pair[1].0).count();
            wake_ups.extend(tokens.windows(2).map(|pair| pair[1].1.saturating_duration_since(pair[0].1)));
        }
        let grants = rounds * CLIENTS;
        let wake_up = millis(median(&wake_ups));
        report.add(Row {
            name: self.names.order,
            target: "order of arrival, always",
            figure: format!("{wrong} out of order"),
            note: format!("{grants} grants; from one grant to the next {wake_up:.1} ms at the median"),
            met: Some(wrong == 0),
            details: json!({ "grants": grants, "out_of_order": wrong, "median_wake_up_ms": wake_up }),
        });
        Ok(wake_ups)
    }

    /// Measures the statements that reach the server while everybody waits for a held key.
    async fn waiting(&self, world: &World, quick: bool, report: &mut Report) -> Result<()> {
        let (resource, length) =
            (format!("{}/waiting", self.prefix), Duration::from_secs(if quick { 2 } else { 5 }));
        let mut holder = Client::connect(self.api(0)).await?;
        let lease = holder.acquire(&http::acquire(&resource, "holder", WAIT_MS)).await?;
        let idle = direct::statements_per_s(world.url(), length).await?;
        let mut waiters = Vec::new();
        for owner in 0..CLIENTS {
            let mut waiter = Client::connect(self.api(owner)).await?;
            waiter.send(&http::acquire(&resource, &format!("client-{owner}"), WAIT_MS)).await?;
            waiters.push(waiter);
        }
        while self.arrived(world, &resource).await? < CLIENTS {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let waiting = direct::statements_per_s(world.url(), length).await?;
        drop(waiters);
        holder.release(&lease).await?;
        let polling = CLIENTS as f64 / RETRY.as_secs_f64();
        report.add(Row {
            name: "two proxies, 64 waiting clients: statements to MySQL",
            target: "≤ 1/10 of polling every 50 ms",
            figure: format!("1/{:.0}", polling / (waiting - idle).max(1.0)),
            note: format!("{:.0}/s, polling {polling:.0}/s", (waiting - idle).max(0.0)),
            met: Some((waiting - idle) * 10.0 <= polling),
            details: json!({ "waiting_per_s": waiting, "nobody_waiting_per_s": idle }),
        });
        Ok(())
    }

    /// The tokens of the clients in order of arrival, each with the time of the grant.
    async fn in_turn(&self, world: &World, resource: &str) -> Result<Vec<(u64, Instant)>> {
        let mut holder = Client::connect(self.api(0)).await?;
        let lease = holder.acquire(&http::acquire(resource, "holder", WAIT_MS)).await?;
        let mut tasks = Vec::new();
        for arrival in 0..CLIENTS {
            let mut client = Client::connect(self.api(arrival)).await?;
            client.send(&http::acquire(resource, &format!("client-{arrival}"), WAIT_MS)).await?;
            tasks.push(tokio::spawn(async move {
                let lease = client.granted().await?;
                let granted = Instant::now();
                client.release(&lease).await?;
                anyhow::Ok((lease.token, granted))
            }));
            // The next client comes after this one has arrived.
            while self.arrived(world, resource).await? <= arrival {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
        let began = Instant::now();
        holder.release(&lease).await?;
        let mut tokens = vec![(lease.token, began)];
        for task in tasks {
            tokens.push(task.await??);
        }
        Ok(tokens)
    }

    /// The number of waiters: in the proxy's queue, or with several proxies in the store's global queue.
    async fn arrived(&self, world: &World, resource: &str) -> Result<usize> {
        if self.apis.len() > 1 {
            return direct::in_line(world.url(), resource).await;
        }
        let mut watcher = Client::connect(self.api(0)).await?;
        let shown = watcher.get(&format!("/v1/locks/{}", resource.replace('/', "%2F"))).await?;
        Ok(shown.matches("\"position\":").count())
    }
}

/// Clients that are spread over proxies want one key. Returns what the clients of each proxy saw.
pub async fn queued(apis: &[SocketAddr], resource: &str, length: Duration) -> Result<Vec<Served>> {
    let began = Instant::now();
    let mut sides: Vec<_> = apis.iter().map(|_| JoinSet::new()).collect();
    for owner in 0..CLIENTS {
        let at = owner % apis.len();
        let client = Client::connect(apis[at]).await?;
        let request = http::acquire(resource, &format!("client-{owner}"), WAIT_MS);
        sides[at].spawn(queue_up(client, request, began, length));
    }
    let mut seen = Vec::new();
    for side in sides {
        seen.push(served(side).await?);
    }
    Ok(seen)
}

/// What the clients of all proxies saw.
pub fn in_all(seen: Vec<Served>) -> Served {
    let grants = seen.iter().map(|(grants, _)| grants).sum();
    (grants, seen.into_iter().flat_map(|(_, waits)| waits).collect())
}

async fn queue_up(mut client: Client, request: Vec<u8>, began: Instant, length: Duration) -> Result<Served> {
    let (mut grants, mut waits) = (0, Vec::new());
    while began.elapsed() < length {
        let asked = Instant::now();
        let left = length.saturating_sub(began.elapsed());
        let lease = tokio::time::timeout(left, client.acquire(&request)).await;
        waits.push(asked.elapsed());
        // At the end the connection is dropped, and the client leaves the queue.
        let Ok(lease) = lease else { break };
        client.release(&lease?).await?;
        grants += 1;
    }
    Ok((grants, waits))
}

/// The number of grants, and the waits.
pub type Served = (usize, Vec<Duration>);

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
                    match client.try_acquire(DIRECT_KEY).await? {
                        Some(token) => break Some(token),
                        None if began.elapsed() >= length => break None,
                        None => tokio::time::sleep(RETRY).await,
                    }
                };
                waits.push(asked.elapsed());
                if let Some(token) = token {
                    client.release(DIRECT_KEY, token).await?;
                    grants += 1;
                }
            }
            anyhow::Ok((grants, waits))
        });
    }
    served(tasks).await
}

pub async fn served(mut tasks: JoinSet<Result<Served>>) -> Result<Served> {
    let mut all = (0, Vec::new());
    while let Some(done) = tasks.join_next().await {
        let (grants, waits) = done??;
        all.0 += grants;
        all.1.extend(waits);
    }
    Ok(all)
}
