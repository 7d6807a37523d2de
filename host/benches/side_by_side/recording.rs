//! What a recording costs, how fast it is replayed, and how near the replay is to what happens.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use lockkeeper::config::Limits;
use lockkeeper::lock::Mode;
use lockkeeper::policy::builtin;
use lockkeeper::recording::{Ask, End, Header, LeaseName, Line, PlanLine, PolicyLine, StoreTimes};

use crate::cycles::{connected, proxy_round};
use crate::http::{self, Client};
use crate::report::{Report, Row};
use crate::rounds::{Rates, Target};
use crate::world::{Proxy, World};

const COST: Target =
    Target { text: "≥ 0.95 times without", times: 0.95, ours: "with a recording", theirs: "without" };
/// Half of a million events are requests, and half are ends of leases.
const REQUESTS: u64 = 500_000;
const RESOURCES: u64 = 10_000;
const REPLAY_TARGET: Duration = Duration::from_secs(10);
/// How far the replayed waits may be from the real ones.
const NEAR: f64 = 1.2;
/// How long the writer of a recording may keep lines to itself, and a little more.
const FLUSHED: Duration = Duration::from_millis(2_500);

/// Measures all three.
pub async fn measure(world: &World, quick: bool, report: &mut Report) -> Result<()> {
    cost(world, quick, report).await?;
    million(world, quick, report)?;
    reality(world, quick, report).await
}

fn section(dir: &Path) -> String {
    format!("[recording]\ndir = \"{}\"\n", dir.display())
}

/// The cycles of 64 clients with their own keys, with and without a recording of everything.
async fn cost(world: &World, quick: bool, report: &mut Report) -> Result<()> {
    let proxy = world.another_proxy("recorded", &section(&world.dir().join("recorded/recording"))).await?;
    let rates = beside(world, &proxy, "bench/recorded", quick).await?;
    report.add(rates.row("64 clients, own keys: with a recording of everything", &COST));
    Ok(())
}

/// The cycles of 64 clients with their own keys at a proxy that does something besides, and at the proxy that does not.
pub async fn beside(world: &World, proxy: &Proxy, prefix: &str, quick: bool) -> Result<Rates> {
    let (rounds, length) = if quick { (2, 1) } else { (7, 4) };
    let length = Duration::from_secs(length);
    let warm = Duration::from_millis(500);
    let (without, _) = proxy_round(connected(world.api(), prefix).await?, warm).await?;
    let (with, _) = proxy_round(connected(proxy.api(), prefix).await?, warm).await?;
    let run = async |clients| proxy_round(clients, length).await;
    Rates::measure(rounds, without, run, with, run).await
}

/// A replay of a million events, with the reading of the recording.
fn million(world: &World, quick: bool, report: &mut Report) -> Result<()> {
    let requests = if quick { REQUESTS / 50 } else { REQUESTS };
    let dir = world.dir().join("million");
    write(&dir, requests)?;
    let began = Instant::now();
    let told = replay(&["builtin:fair-groups", "--settings", "{}"], &dir)?;
    let took = began.elapsed();
    if told["requests"] != requests {
        bail!("{} of {requests} requests were replayed", told["requests"]);
    }
    report.add(Row {
        name: "replay of a million events under two policies",
        target: "≤ 10 s",
        figure: format!("{:.1} s", took.as_secs_f64()),
        note: format!("{requests} requests and {requests} ends, {RESOURCES} resources"),
        met: Some(took <= REPLAY_TARGET),
        details: json!({ "seconds": took.as_secs_f64(), "requests": requests }),
    });
    Ok(())
}

/// Writes a recording in which 2,000 requests come each second.
fn write(dir: &Path, requests: u64) -> Result<()> {
    fs::create_dir_all(dir)?;
    let component = builtin("default").context("there is a default policy")?;
    fs::write(dir.join("default.wasm"), component)?;
    let mut file = BufWriter::new(File::create(dir.join("recording-1.jsonl"))?);
    let mut line = |line: &Line| -> Result<()> {
        serde_json::to_writer(&mut file, line)?;
        Ok(file.write_all(b"\n")?)
    };
    let header = Header { version: 1, at_us: 0, share: 1.0, limits: Limits::default(), masked: Vec::new() };
    line(&Line::Header(header))?;
    let id = "default@sha256:0".to_owned();
    let (name, component) = ("default".to_owned(), "default.wasm".to_owned());
    line(&Line::Policy(PolicyLine { name, id: id.clone(), settings: serde_json::Map::new(), component }))?;
    let quantiles_us = [600, 800, 1_000, 1_200, 1_500, 2_000];
    line(&Line::Store(StoreTimes { at_us: 0, mean_us: 1_000, quantiles_us }))?;
    for n in 0..requests {
        let resource = format!("orders/{}/pay", n * 7_919 % RESOURCES);
        let lease = LeaseName { key: resource.clone().into(), token: n + 1 };
        let (at_us, waited_us, held_us) = (1_000_000 + n * 500, 1_100, 20_000);
        let plan = PlanLine {
            keys: vec![resource.clone().into()],
            primitive: "lease".into(),
            mode: Mode::Exclusive,
            ttl_ms: 10_000,
            wait_ms: 5_000,
            group: "".into(),
        };
        line(&Line::Ask(Box::new(Ask {
            at_us,
            call: "acquire".into(),
            by: (&id).into(),
            resource: resource.into(),
            owner: format!("worker-{}", n % 200).into(),
            mode: Mode::Exclusive,
            ttl_ms: Some(10_000),
            wait_ms: Some(5_000),
            labels: vec![("group".into(), format!("tenant-{}", n % 20).into())],
            http: None,
            seed: n as u32,
            plan: Some(plan),
            outcome: "granted".into(),
            reason: None,
            waited_us,
            lease: Some(lease.clone()),
        })))?;
        let (at_us, how) = (at_us + waited_us + held_us, "released".into());
        line(&Line::End(End { at_us, lease, how, held_us: 20_000 }))?;
    }
    Ok(file.flush()?)
}

/// Runs `lockkeeper policy replay`. Returns its report.
fn replay(args: &[&str], recording: &Path) -> Result<Value> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lockkeeper"));
    command.args(["policy", "replay", "--json"]).args(args).arg("--recording").arg(recording);
    let output = command.output().context("cannot start the replay")?;
    if !output.status.success() {
        bail!("the replay failed: {}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// Runs the same load under two policies, and compares the waits with those that a replay of the first run says.
async fn reality(world: &World, quick: bool, report: &mut Report) -> Result<()> {
    let length = Duration::from_secs(if quick { 2 } else { 15 });
    let dir = world.dir().join("reality/recording");
    let proxy = world.another_proxy("reality", &section(&dir)).await?;
    load(proxy.api(), "bench/mixed", length).await?;
    load(proxy.api(), "fair/mixed", length).await?;
    tokio::time::sleep(FLUSHED).await;
    drop(proxy);
    let common = ["builtin:fair-groups", "--settings", "{}", "--arrivals", "closed", "--by", "label:group"];
    let first = replay(&[&common[..], &["--policy", "default"]].concat(), &dir)?;
    let second = replay(&[&common[..], &["--policy", "fair"]].concat(), &dir)?;
    let (mut worst, mut figures) = (1.0_f64, Vec::new());
    for group in ["large", "small"] {
        for (policy, real, said) in [("default", &first, "before"), ("fair", &second, "after")] {
            for percentile in ["p50_ms", "p99_ms"] {
                let real = wait(real, group, "recorded", percentile)?;
                let said = wait(&first, group, said, percentile)?;
                worst = worst.max(real / said).max(said / real);
                figures.push(json!({
                    "policy": policy, "group": group, "percentile": percentile, "real_ms": real, "replayed_ms": said,
                }));
            }
        }
    }
    let shown = |figure: &Value| {
        let ms = |side: &str| figure[side].as_f64().unwrap_or_default();
        let (policy, group, percentile) = (&figure["policy"], &figure["group"], &figure["percentile"]);
        let (real, said) = (ms("real_ms"), ms("replayed_ms"));
        format!("{policy} {group} {percentile} {real:.1}, {said:.1}").replace('"', "").replace("_ms", "")
    };
    let shown: Vec<String> = figures.iter().map(shown).collect();
    report.add(Row {
        name: "waits of two groups under two policies, real and replayed",
        target: "within 1.2 times",
        figure: format!("{worst:.2} times"),
        note: format!("in ms, real and replayed: {}", shown.join("; ")),
        met: Some(worst <= NEAR),
        details: json!({ "worst": worst, "waits": figures }),
    });
    Ok(())
}

fn wait(report: &Value, group: &str, side: &str, percentile: &str) -> Result<f64> {
    let groups = report["groups"].as_array().context("no groups")?;
    let group = groups.iter().find(|found| found["name"] == group).context("the group is missing")?;
    group[side][percentile].as_f64().context("no percentile")
}

/// Thirty clients that take the lock again and again, and two that take it now and then.
async fn load(api: SocketAddr, resource: &'static str, length: Duration) -> Result<()> {
    let (end, mut clients) = (Instant::now() + length, JoinSet::new());
    for n in 0..32 {
        let (group, pause_ms) = if n < 30 { ("large", 0) } else { ("small", 60) };
        clients.spawn(async move {
            let mut client = Client::connect(api).await?;
            let body = json!({
                "resource": resource, "owner": format!("{group}-{n}"), "labels": {"group": group},
                "wait_ms": 60_000, "ttl_ms": 10_000,
            });
            let acquire = http::post("/v1/acquire", &body.to_string());
            while Instant::now() < end {
                let lease = client.acquire(&acquire).await?;
                tokio::time::sleep(Duration::from_millis(5)).await;
                client.release(&lease).await?;
                tokio::time::sleep(Duration::from_millis(pause_ms)).await;
            }
            anyhow::Ok(())
        });
    }
    while let Some(ended) = clients.join_next().await {
        ended??;
    }
    Ok(())
}
