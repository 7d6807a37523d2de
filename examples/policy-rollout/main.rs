//! An evening's work: a policy is replaced step by step, and two flawed candidates never reach a client.

use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};
use stage::{Proxy, Result, Rows, Scene, bail, ensure};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

/// The proxy records every request.
const SETTINGS: &str = "[recording]\ndir = \"recordings\"\n";

const PRINTERS: u32 = 100;
/// The clients of each printer.
const OF_BIG: u32 = 3;
const OF_SMALL: u32 = 1;
/// How long a client prints.
const PRINTS: Duration = Duration::from_millis(150);
/// How long each load is recorded or measured.
const MEASURED: Duration = Duration::from_secs(6);
/// How long it takes until no waiter is left from before the policy went live.
const SETTLED: Duration = Duration::from_secs(2);
/// How long the story waits for a canary.
const PATIENCE: Duration = Duration::from_secs(240);

/// How long the clients of a tenant waited, in milliseconds.
type Waits = Arc<Mutex<Vec<u64>>>;

/// Clients of two tenants that print, until they are told to stop.
struct Load {
    big: Waits,
    small: Waits,
    refused: Waits,
    is_over: Arc<AtomicBool>,
    clients: JoinSet<Result<()>>,
}

impl Load {
    fn start(api: &str) -> Load {
        let mut load = Load {
            big: Waits::default(),
            small: Waits::default(),
            refused: Waits::default(),
            is_over: Arc::default(),
            clients: JoinSet::new(),
        };
        for n in 0..PRINTERS {
            let printer = if n == 0 { "printers/lobby".to_owned() } else { format!("printers/{n}") };
            for client in 0..OF_BIG + OF_SMALL {
                let (tenant, waits) =
                    if client < OF_BIG { ("big", &load.big) } else { ("small", &load.small) };
                let client = Client {
                    proxy: Proxy::new(api),
                    ask: json!({
                        "resource": printer,
                        "owner": format!("{tenant}-{n}-{client}"),
                        "wait_ms": 60_000,
                        "labels": {"group": tenant},
                    }),
                    waits: waits.clone(),
                    refused: load.refused.clone(),
                    is_over: load.is_over.clone(),
                };
                load.clients.spawn(client.prints());
            }
        }
        load
    }

    /// The 99th percentiles of the waits of both tenants from now on, in milliseconds.
    async fn measured(&self) -> [u64; 2] {
        let both = [&self.big, &self.small];
        both.iter().for_each(|waits| waits.lock().expect("no client panics").clear());
        sleep(MEASURED).await;
        both.map(|waits| {
            let mut waits = waits.lock().expect("no client panics").clone();
            waits.sort_unstable();
            waits.get(waits.len() * 99 / 100).copied().unwrap_or_default()
        })
    }

    /// How many requests got no lock.
    async fn stop(mut self) -> Result<u64> {
        self.is_over.store(true, Relaxed);
        while let Some(client) = self.clients.join_next().await {
            client??;
        }
        Ok(self.refused.lock().expect("no client panics").len() as u64)
    }
}

struct Client {
    proxy: Proxy,
    ask: Value,
    waits: Waits,
    refused: Waits,
    is_over: Arc<AtomicBool>,
}

impl Client {
    async fn prints(self) -> Result<()> {
        while !self.is_over.load(Relaxed) {
            let (status, lease) = self.proxy.try_post("/v1/acquire", self.ask.clone()).await?;
            if status != 200 {
                eprintln!("{status}: {lease}");
                self.refused.lock().expect("no client panics").push(1);
                sleep(PRINTS).await;
                continue;
            }
            let waited = lease["waited_ms"].as_u64().unwrap_or_default();
            self.waits.lock().expect("no client panics").push(waited);
            sleep(PRINTS).await;
            self.proxy.post("/v1/release", json!({"lease_id": lease["lease_id"]})).await?;
        }
        Ok(())
    }
}

/// The scene's `lockkeeper policy` command, with its exit code and its JSON.
async fn policy(scene: &Scene, args: &[&str]) -> Result<(i32, Value)> {
    let all = [&["policy"], args, &["--json"]].concat();
    let (code, out) = scene.lockkeeper(&all).await?;
    Ok((code, serde_json::from_str(&out).unwrap_or_default()))
}

/// Waits until the canary has gone live, or was rolled back. Returns its end, as the record of the policy has it.
async fn until_settled(scene: &Scene) -> Result<Value> {
    let (until, mut share) = (Instant::now() + PATIENCE, Value::Null);
    loop {
        let (_, list) = policy(scene, &["list"]).await?;
        let record = &list["policies"][0]["fleet"];
        if record["phase"] == "settled" {
            return Ok(record.clone());
        }
        if record["canary"]["share"] != share && !record["canary"].is_null() {
            share = record["canary"]["share"].clone();
            println!("   the canary decides for {share} % of the keys");
        }
        ensure!(Instant::now() < until, "the canary does not end: {record}");
        sleep(Duration::from_millis(200)).await;
    }
}

/// The 99th percentile of a tenant's waits under both policies, as a replay has it.
fn replayed(report: &Value, tenant: &str) -> Result<[u64; 2]> {
    let groups = report["groups"].as_array().into_iter().flatten();
    let Some(group) = groups.into_iter().find(|group| group["name"] == tenant) else {
        bail!("the replay knows no tenant `{tenant}`: {report}");
    };
    Ok(["before", "after"].map(|side| group[side]["p99_ms"].as_f64().unwrap_or_default().round() as u64))
}

async fn play(scene: &Scene) -> Result<Rows> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("policy-rollout");
    let mut built = Vec::new();
    for name in ["apart", "brittle"] {
        built.push(scene.build_policy(&here.join(name)).await?);
    }
    let [apart, brittle] = &built[..] else { bail!("two policies were built") };
    let recording = scene.folder().join("recordings").display().to_string();

    println!(
        "1. record two tenants: {OF_BIG} clients of `big` and {OF_SMALL} of `small` at each of {PRINTERS} printers"
    );
    let load = Load::start(&scene.api);
    let [big, small] = load.measured().await;
    println!("   99th percentile of the waits: big {big} ms, small {small} ms");

    println!("2. replay a fair policy on what was recorded");
    let args = ["replay", "builtin:fair-groups", "--recording", &recording, "--by", "label:group"];
    let (code, report) =
        policy(scene, &[&args[..], &["--fail-on", "lost-exclusion,fault,refused"]].concat()).await?;
    ensure!(code == 0, "the fair policy fails: {}", report["failed"]);
    let [was, is] = replayed(&report, "small")?;
    println!(
        "   99th percentile of small: {was} ms, and {is} ms with the fair policy; nothing loses its exclusion"
    );

    println!("3. replay a candidate that gives each tenant keys of its own");
    let args = ["replay", apart, "--recording", &recording, "--fail-on", "lost-exclusion"];
    let (code, report) = policy(scene, &args).await?;
    let lost = report["lost_exclusion"].as_u64().unwrap_or_default();
    ensure!(code == 7 && lost > 0, "the replay does not stop it: {code}");
    println!(
        "   stopped: {lost} pairs of resources no longer exclude each other, such as {}",
        report["lost_examples"][0]["requests"]
    );

    println!("4. ask the fair policy beside the live one");
    let args = ["shadow", "default", "builtin:fair-groups", "--share", "100%", "--for", "3s"];
    let (code, report) =
        policy(scene, &[&args[..], &["--fail-on", "lost-exclusion,fault,refused"]].concat()).await?;
    ensure!(code == 0, "the shadow fails: {code} {}", report["failed"]);
    let asked = report["hooks"][0]["calls"].as_u64().unwrap_or_default();
    ensure!(asked > 0, "the shadow has seen nothing: {report}");
    println!("   {asked} requests compared: nothing loses its exclusion, nothing is refused, nothing fails");

    println!("5. let it decide for a growing share of the keys");
    let args = ["canary", "default", "builtin:fair-groups", "--share", "5%", "--steps", "25%,100%"];
    let (code, begun) = policy(scene, &[&args[..], &["--every", "1s", "--guard", "p99=5x"]].concat()).await?;
    ensure!(code == 0, "no canary: {begun}");
    let fair = until_settled(scene).await?;
    ensure!(fair["note"].is_null(), "the canary was rolled back: {}", fair["note"]);
    // The queues of before are served first.
    sleep(SETTLED).await;
    let [fair_big, fair_small] = load.measured().await;
    println!("   live; 99th percentile of the waits: big {fair_big} ms, small {fair_small} ms");

    println!("6. a candidate that fails for one of the printers");
    let (code, begun) =
        policy(scene, &["canary", "default", brittle, "--share", "25%", "--steps", "100%", "--every", "1s"])
            .await?;
    ensure!(code == 0, "no canary: {begun}");
    let kept = until_settled(scene).await?;
    let why = kept["note"].as_str().unwrap_or_default();
    ensure!(why.contains("it failed") && kept["digest"] == fair["digest"], "it was not rolled back: {kept}");
    println!("   rolled back by itself: {why}");

    let refused = load.stop().await?;
    println!("   requests without a lock during all this: {refused}");
    ensure!(refused == 0, "clients noticed the candidates");
    ensure!(fair_small < small, "the fair policy did not help: {fair_small} ms after {small} ms");
    Ok(vec![
        ("p99 of small before, ms", small),
        ("p99 of small, replayed before, ms", was),
        ("p99 of small, replayed fair, ms", is),
        ("p99 of small, fair and live, ms", fair_small),
        ("p99 of big before, ms", big),
        ("p99 of big, fair and live, ms", fair_big),
        ("pairs that would lose their exclusion", lost),
        ("requests that a shadow compared", asked),
        ("requests that got no lock", refused),
    ])
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    stage::tell("policy-rollout", SETTINGS, play).await
}
