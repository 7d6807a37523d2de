//! A page that everybody reads falls out of the cache.

use std::process::ExitCode;
use std::time::Duration;

use mysql_async::Conn;
use mysql_async::prelude::Queryable;
use serde_json::json;
use stage::{Numbers, Proxy, Result, Stage, Worker, ensure};
use tokio::time::{Instant, sleep};

const SERVERS: u32 = 12;
/// How long the servers are asked for the page.
const RUSH: Duration = Duration::from_millis(2_500);

/// The page, from the cache if it is there.
async fn page(db: &mut Conn) -> Result<String> {
    match cached(db).await? {
        Some(page) => Ok(page),
        None => load(db).await,
    }
}

/// The same. Who misses it waits for who loads it, and looks again.
async fn page_with_lock(proxy: &Proxy, db: &mut Conn) -> Result<String> {
    if let Some(page) = cached(db).await? {
        return Ok(page);
    }
    let lease = proxy.post("/v1/acquire", json!({"resource": "cache/front", "wait_ms": 30_000})).await?;
    let page = page(db).await;
    proxy.post("/v1/release", json!({"lease_id": lease["lease_id"]})).await?;
    page
}

async fn cached(db: &mut Conn) -> Result<Option<String>> {
    Ok(db.query_first("SELECT page FROM cache WHERE name = 'front' AND until > NOW(6)").await?)
}

/// Makes the page with a slow query, and keeps it for half a second.
async fn load(db: &mut Conn) -> Result<String> {
    db.query_drop("INSERT INTO loads (began) VALUES (NOW(6))").await?;
    let load = db.last_insert_id();
    let page: Option<String> = db.query_first("SELECT CONCAT('<h1>page</h1>', SLEEP(0.2))").await?;
    let keep = "REPLACE INTO cache VALUES ('front', ?, NOW(6) + INTERVAL 500000 MICROSECOND)";
    db.exec_drop(keep, (&page,)).await?;
    db.exec_drop("UPDATE loads SET ended = NOW(6) WHERE id = ?", (load,)).await?;
    Ok(page.unwrap_or_default())
}

/// A web server: each worker process is one.
async fn work(mut server: Worker) -> Result<()> {
    let closing = Instant::now() + RUSH;
    while Instant::now() < closing {
        let page = match &server.proxy {
            None => page(&mut server.db).await?,
            Some(proxy) => page_with_lock(proxy, &mut server.db).await?,
        };
        ensure!(page.starts_with("<h1>"), "an empty page");
        server.db.query_drop("INSERT INTO answers VALUES ()").await?;
        sleep(Duration::from_millis(10)).await;
    }
    Ok(())
}

/// Of each load, how many others were under way when it began.
const BESIDE: &str = "SELECT a.id, COUNT(b.id) AS n FROM loads a LEFT JOIN loads b \
    ON b.id <> a.id AND b.began <= a.began AND b.ended > a.began GROUP BY a.id";

async fn play(stage: &Stage) -> Result<Numbers> {
    stage.sql("CREATE TABLE cache (name VARCHAR(40) PRIMARY KEY, page TEXT, until DATETIME(6))").await?;
    stage.sql("CREATE TABLE answers (id INT AUTO_INCREMENT PRIMARY KEY)").await?;
    let loads = "id INT AUTO_INCREMENT PRIMARY KEY, began DATETIME(6), ended DATETIME(6)";
    stage.sql(&format!("CREATE TABLE loads ({loads})")).await?;
    stage.run_workers(SERVERS).await?;
    let rows = vec![
        ("pages answered", stage.number("SELECT COUNT(*) FROM answers").await?),
        ("slow queries", stage.number("SELECT COUNT(*) FROM loads").await?),
        ("at the same time, at most", stage.number(&format!("SELECT MAX(n) + 1 FROM ({BESIDE}) x")).await?),
    ];
    ensure!(rows[1].1 >= 2, "the page was loaded {} times, and never fell out of the cache", rows[1].1);
    let beside = stage.number(&format!("SELECT COUNT(*) FROM ({BESIDE}) x WHERE n > 0")).await?;
    Ok(Numbers { rows, faults: vec![("slow queries beside another", beside)] })
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    stage::main("cache", "", play, work).await
}
