//! Eight processes sell the same hundred pieces to two hundred customers.

use std::process::ExitCode;
use std::time::Duration;

use mysql_async::Conn;
use mysql_async::prelude::Queryable;
use serde_json::json;
use stage::{Numbers, Proxy, Result, Stage, Worker, ensure};

const PIECES: u64 = 100;
const SHOPS: u32 = 8;
const CUSTOMERS: u32 = 25;

/// Sells one piece, if there is one.
async fn sell(db: &mut Conn) -> Result<()> {
    let pieces: u64 = db.query_first("SELECT pieces FROM stock WHERE item = 17").await?.unwrap_or(0);
    if pieces > 0 {
        take_payment().await;
        db.exec_drop("UPDATE stock SET pieces = ? WHERE item = 17", (pieces - 1,)).await?;
        db.query_drop("INSERT INTO orders (item) VALUES (17)").await?;
    }
    Ok(())
}

/// The same, by one process at a time.
async fn sell_with_lock(proxy: &Proxy, db: &mut Conn) -> Result<()> {
    let lease = proxy.post("/v1/acquire", json!({"resource": "stock/17", "wait_ms": 30_000})).await?;
    let sold = sell(db).await;
    proxy.post("/v1/release", json!({"lease_id": lease["lease_id"]})).await?;
    sold
}

async fn take_payment() {
    tokio::time::sleep(Duration::from_millis(5)).await;
}

/// A shop: each worker process is one.
async fn work(mut shop: Worker) -> Result<()> {
    for _ in 0..CUSTOMERS {
        match &shop.proxy {
            None => sell(&mut shop.db).await?,
            Some(proxy) => sell_with_lock(proxy, &mut shop.db).await?,
        }
    }
    Ok(())
}

async fn play(stage: &Stage) -> Result<Numbers> {
    stage.sql("CREATE TABLE stock (item INT PRIMARY KEY, pieces BIGINT NOT NULL)").await?;
    stage.sql("CREATE TABLE orders (id INT AUTO_INCREMENT PRIMARY KEY, item INT NOT NULL)").await?;
    stage.sql(&format!("INSERT INTO stock VALUES (17, {PIECES})")).await?;
    stage.run_workers(SHOPS).await?;
    let orders = stage.number("SELECT COUNT(*) FROM orders").await?;
    ensure!(orders >= PIECES, "there were more customers than pieces, and only {orders} orders");
    let rows = vec![
        ("pieces in stock", PIECES),
        ("customers", u64::from(SHOPS * CUSTOMERS)),
        ("orders taken", orders),
        ("pieces left in the table", stage.number("SELECT pieces FROM stock").await?),
    ];
    Ok(Numbers { rows, faults: vec![("oversold", orders - PIECES)] })
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    stage::main("stock", "", play, work).await
}
