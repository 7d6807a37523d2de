//! A web shop without a lock, under load: as it is, and with the proxy in front of it.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::process::{ExitCode, Stdio};
use std::time::Duration;

use clap::Parser as _;
use serde_json::json;
use stage::{Context, Guard, Numbers, Result, Server, Stage, bail, ensure};
use tokio::process::Command;
use tokio::time::{Instant, sleep};

use client::{Answer, Client, together};

mod client;
mod shop;

/// What a user has. The addresses in it are replaced, so that the example disturbs no other program.
const CONFIG: &str = include_str!("config.toml");
const COUNTER: &str = include_str!("counter.py");

const PIECES: u64 = 100;
const CUSTOMERS: u64 = 20;
const ORDERS_EACH: u64 = 10;
const BUYERS: u64 = 5;
const PAID_EACH: u64 = 5;
/// How often an impatient buyer presses the button at once.
const PRESSED: u64 = 3;
const DAYS: u64 = 5;
const CLOCKS: u64 = 3;
const READERS: u64 = 12;
const RUSH: Duration = Duration::from_millis(1_500);
const VISITORS: u64 = 10;
const VISITS_EACH: u64 = 20;

/// What a part of the load has done.
type Part = (Vec<(&'static str, u64)>, (&'static str, u64));

async fn buy(stage: &Stage, shop: &Client) -> Result<Part> {
    let answers = together(CUSTOMERS, |_| {
        let shop = shop.clone();
        async move {
            let mut answers = Vec::new();
            for _ in 0..ORDERS_EACH {
                answers.push(shop.post("/items/1/buy", String::new()).await?);
            }
            Ok(answers)
        }
    });
    expect(answers.await?.iter().flatten(), &[201, 409])?;
    let orders = stage.number("SELECT COUNT(*) FROM orders").await?;
    ensure!(orders >= PIECES, "there were more customers than pieces, and only {orders} orders");
    let rows = vec![
        ("pieces in stock", PIECES),
        ("pieces asked for", CUSTOMERS * ORDERS_EACH),
        ("orders taken", orders),
    ];
    Ok((rows, ("pieces oversold", orders - PIECES)))
}

/// Each buyer presses the button several times at once, and all press it again later.
async fn pay(stage: &Stage, shop: &Client) -> Result<Part> {
    let orders = together(BUYERS, |buyer| {
        let shop = shop.clone();
        async move {
            let mut answers = Vec::new();
            for order in buyer * PAID_EACH + 1..=(buyer + 1) * PAID_EACH {
                let press = |_| {
                    let shop = shop.clone();
                    async move { pay_for(&shop, order).await }
                };
                answers.extend(together(PRESSED, press).await?);
            }
            Ok(answers)
        }
    });
    let mut answers: Vec<_> = orders.await?.into_iter().flatten().collect();
    for order in 1..=BUYERS * PAID_EACH {
        answers.push(pay_for(shop, order).await?);
    }
    expect(answers.iter().map(|(_, answer)| answer), &[200])?;
    let mut told: HashMap<u64, HashSet<_>> = HashMap::new();
    for (order, answer) in &answers {
        told.entry(*order).or_default().insert((answer.status, &answer.body));
    }
    let paid = stage.number("SELECT COUNT(DISTINCT order_id) FROM charges").await?;
    ensure!(paid == BUYERS * PAID_EACH, "only {paid} orders were paid");
    let several = told.values().filter(|answers| answers.len() > 1).count();
    let replayed = answers.iter().filter(|(_, answer)| answer.is_replayed).count();
    let rows = vec![
        ("orders paid", paid),
        ("payments asked for", u64::try_from(answers.len())?),
        ("answers replayed", u64::try_from(replayed)?),
        ("buyers told several charges", u64::try_from(several)?),
    ];
    Ok((rows, ("charged again", stage.number("SELECT COUNT(*) FROM charges").await? - paid)))
}

async fn pay_for(shop: &Client, order: u64) -> Result<(u64, Answer)> {
    let path = format!("/orders/{order}/pay");
    Ok((order, shop.post_again(&path, &format!("payment-of-{order}")).await?))
}

/// Several machines have the same schedule.
async fn report(stage: &Stage, shop: &Client) -> Result<Part> {
    let mut answers = Vec::new();
    for day in 1..=DAYS {
        let start = |_| {
            let shop = shop.clone();
            async move { shop.post(&format!("/reports/2026-11-0{day}"), String::new()).await }
        };
        answers.extend(together(CLOCKS, start).await?);
    }
    let allowed: &[u16] = if stage.has_proxy() { &[200, 201, 423] } else { &[200, 201] };
    expect(&answers, allowed)?;
    let days = stage.number("SELECT COUNT(DISTINCT day) FROM reports").await?;
    ensure!(days == DAYS, "only {days} days have a report");
    let rows = vec![("reports due", DAYS), ("reports started", u64::try_from(answers.len())?)];
    Ok((rows, ("reports made again", stage.number("SELECT COUNT(*) FROM reports").await? - days)))
}

/// Of each computation, how many others of the page were under way when it began.
const BESIDE: &str = "SELECT a.id, COUNT(b.id) AS n FROM computations a LEFT JOIN computations b \
    ON b.page = a.page AND b.id <> a.id AND b.began <= a.began AND b.ended > a.began GROUP BY a.id";

/// A page falls out of the cache again and again while many read it.
async fn read(stage: &Stage, shop: &Client) -> Result<Part> {
    let closing = Instant::now() + RUSH;
    let answers = together(READERS, |_| {
        let shop = shop.clone();
        async move {
            let mut answers = Vec::new();
            while Instant::now() < closing {
                answers.push(shop.get("/catalogue/1").await?);
                sleep(Duration::from_millis(10)).await;
            }
            Ok(answers)
        }
    });
    let answers: Vec<_> = answers.await?.into_iter().flatten().collect();
    expect(&answers, &[200])?;
    let computed = stage.number("SELECT COUNT(*) FROM computations").await?;
    ensure!(computed >= 2, "the page was computed {computed} times, and never fell out of the cache");
    let beside = stage.number(&format!("SELECT COUNT(*) FROM ({BESIDE}) x WHERE n > 0")).await?;
    let rows = vec![("pages answered", u64::try_from(answers.len())?), ("pages computed", computed)];
    Ok((rows, ("pages computed beside another", beside)))
}

/// The count is what is in the counter's file at the end.
async fn count(folder: &Path, counter: &Client) -> Result<Part> {
    let answers = together(VISITORS, |_| {
        let counter = counter.clone();
        async move {
            let mut answers = Vec::new();
            for _ in 0..VISITS_EACH {
                answers.push(counter.post("/counter/visits", String::new()).await?);
            }
            Ok(answers)
        }
    });
    expect(answers.await?.iter().flatten(), &[200])?;
    let counted: u64 = std::fs::read_to_string(folder.join("visits"))?.trim().parse()?;
    let visits = VISITORS * VISITS_EACH;
    let lost = visits.checked_sub(counted).context("more visits were counted than there were")?;
    Ok((vec![("visits (Python)", visits)], ("visits not counted (Python)", lost)))
}

/// A price change waits for its supplier's offer. Meanwhile an operator takes its lock away, and another one
/// sets the price. The offer comes, and with it a write that is too late.
async fn change_prices(stage: &Stage, shop: &Client, guard: Option<&Guard>) -> Result<Part> {
    let change = |supplier: &'static str| {
        let shop = shop.clone();
        tokio::spawn(
            async move { shop.post("/items/2/price", json!({"supplier": supplier}).to_string()).await },
        )
    };
    let asked = |supplier: &str| format!("SELECT COUNT(*) FROM offers WHERE supplier = '{supplier}'");
    let offer = |supplier: &str, price: u64| {
        format!("UPDATE offers SET price = {price} WHERE supplier = '{supplier}'")
    };
    let slow = change("slow");
    until(stage, &asked("slow"), 1).await?;
    if let Some(guard) = guard {
        let (status, taken) = guard.admin.delete("/v1/locks/items%2F2").await?;
        ensure!(status == 200 && taken["holders"] == 1, "the price change holds no lock: {status} {taken}");
    }
    let quick = change("quick");
    until(stage, &asked("quick"), 1).await?;
    stage.sql(&offer("quick", 1_500)).await?;
    expect([&quick.await??], &[200])?;
    stage.sql(&offer("slow", 1_800)).await?;
    // What the client is told is the proxy's to decide, as the lock was lost: what is written counts.
    let _ = slow.await?;
    until(stage, "SELECT COUNT(*) FROM price_changes", 2).await?;
    let refused = stage.number("SELECT COUNT(*) FROM price_changes WHERE is_stale").await?;
    let overwritten = "SELECT COUNT(*) FROM items WHERE sku = 2 AND price <> 1500";
    Ok((
        vec![("stale prices refused", refused)],
        ("later prices overwritten", stage.number(overwritten).await?),
    ))
}

/// Waits until a query answers with this number.
async fn until(stage: &Stage, query: &str, number: u64) -> Result<()> {
    let giving_up = Instant::now() + Duration::from_secs(60);
    while stage.number(query).await? != number {
        ensure!(Instant::now() < giving_up, "it never was {number}: {query}");
        sleep(Duration::from_millis(10)).await;
    }
    Ok(())
}

/// That nothing but what the load is about has gone wrong.
fn expect<'a>(answers: impl IntoIterator<Item = &'a Answer>, statuses: &[u16]) -> Result<()> {
    for answer in answers {
        if !statuses.contains(&answer.status) {
            bail!("an answer {}: {}", answer.status, String::from_utf8_lossy(&answer.body).trim());
        }
    }
    Ok(())
}

async fn play(stage: &Stage) -> Result<Numbers> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["shop", "--listen", "127.0.0.1:0", "--url", stage.database()]);
    let shop = Server::start(command).await?;
    let folder = tempfile::tempdir()?;
    let counter = counter(folder.path()).await?;
    if counter.is_none() && !stage.has_proxy() {
        println!("There is no python3 on this machine: the counter in Python was left out.");
    }
    let guard = match stage.has_proxy() {
        true => Some(stage.guard(&config(&shop, counter.as_ref())).await?),
        false => None,
    };
    let reached =
        |server: &Server| Client::new(guard.as_ref().map_or(&server.address, |guard| &guard.address));

    let client = reached(&shop);
    let mut parts = vec![
        buy(stage, &client).await?,
        pay(stage, &client).await?,
        report(stage, &client).await?,
        read(stage, &client).await?,
        change_prices(stage, &client, guard.as_ref()).await?,
    ];
    if let Some(counter) = &counter {
        parts.push(count(folder.path(), &reached(counter)).await?);
    }
    if let Some(guard) = guard {
        guard.stop().await;
    }
    let (rows, faults): (Vec<_>, Vec<_>) = parts.into_iter().unzip();
    Ok(Numbers { rows: rows.concat(), faults })
}

/// The counter, if the machine has Python.
async fn counter(folder: &Path) -> Result<Option<Server>> {
    let mut python = Command::new("python3");
    let version = python.arg("--version").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    if !version.status().await.is_ok_and(|status| status.success()) {
        return Ok(None);
    }
    let script = folder.join("counter.py");
    std::fs::write(&script, COUNTER)?;
    let mut command = Command::new("python3");
    command.arg(script).args(["--listen", "127.0.0.1:0", "--folder"]).arg(folder);
    Server::start(command).await.map(Some)
}

/// The user's configuration, with the addresses of this time.
fn config(shop: &Server, counter: Option<&Server>) -> String {
    let config = CONFIG.replace("127.0.0.1:7080", "127.0.0.1:0");
    let config = config.replace("http://127.0.0.1:9000", &shop.address);
    match counter {
        Some(counter) => config.replace("http://127.0.0.1:9001", &counter.address),
        None => config,
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let mut args = std::env::args_os();
    if args.nth(1).is_some_and(|role| role == "shop") {
        let args = shop::Args::parse_from(std::env::args_os().skip(1));
        return match shop::run(&args).await {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("error: {error:#}");
                ExitCode::FAILURE
            }
        };
    }
    // Its processes are servers, and no workers.
    stage::main("web-shop", "", play, async |_| Ok(())).await
}
