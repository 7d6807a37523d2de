//! Buyers press the button again and again, and each time another server gets the order.

use std::process::ExitCode;
use std::time::Duration;

use mysql_async::Conn;
use mysql_async::prelude::Queryable;
use serde_json::json;
use stage::{Numbers, Proxy, Result, Stage, Worker, ensure};
use tokio::time::sleep;

const SERVERS: u32 = 4;
const CARTS: u32 = 25;

/// What a proxy's config.toml says of `orders/*`: an outcome is kept for a day.
const SETTINGS: &str = "primitive = \"once\"\nwait_ms = 30000\nkeep_ms = 86400000";

/// Orders what is in the cart, unless that has been done. The order's number.
async fn submit(db: &mut Conn, cart: u32) -> Result<u64> {
    let known = "SELECT id FROM orders WHERE cart = ?";
    if let Some(order) = db.exec_first(known, (cart,)).await? {
        return Ok(order);
    }
    take_payment().await;
    db.exec_drop("INSERT INTO orders (cart) VALUES (?)", (cart,)).await?;
    Ok(db.last_insert_id().unwrap_or_default())
}

/// The same, for the first who comes; the others are told what came of it.
async fn submit_once(proxy: &Proxy, db: &mut Conn, cart: u32) -> Result<u64> {
    let begun = proxy.post("/v1/once/begin", json!({"resource": format!("orders/{cart}")})).await?;
    if begun["state"] == "done" {
        return Ok(begun["outcome"]["order"].as_u64().unwrap_or_default());
    }
    let order = submit(db, cart).await?;
    let done = json!({"lease_id": begun["lease_id"], "outcome": {"order": order}});
    proxy.post("/v1/once/finish", done).await?;
    Ok(order)
}

async fn take_payment() {
    sleep(Duration::from_millis(20)).await;
}

/// A web server: each worker process is one.
async fn work(mut server: Worker) -> Result<()> {
    for cart in 0..CARTS {
        let order = match &server.proxy {
            None => submit(&mut server.db, cart).await?,
            Some(proxy) => submit_once(proxy, &mut server.db, cart).await?,
        };
        server.db.exec_drop("INSERT INTO answers VALUES (?, ?)", (cart, order)).await?;
    }
    Ok(())
}

async fn play(stage: &Stage) -> Result<Numbers> {
    stage.sql("CREATE TABLE orders (id INT AUTO_INCREMENT PRIMARY KEY, cart INT NOT NULL)").await?;
    stage.sql("CREATE TABLE answers (cart INT NOT NULL, order_id INT NOT NULL)").await?;
    stage.run_workers(SERVERS).await?;
    let carts = stage.number("SELECT COUNT(DISTINCT cart) FROM orders").await?;
    ensure!(carts == u64::from(CARTS), "only {carts} of {CARTS} carts were ordered");
    let orders = stage.number("SELECT COUNT(*) FROM orders").await?;
    let told = "SELECT COUNT(*) FROM \
        (SELECT cart FROM answers GROUP BY cart HAVING COUNT(DISTINCT order_id) > 1) x";
    let rows = vec![
        ("carts", carts),
        ("submitted", u64::from(SERVERS * CARTS)),
        ("buyers told several order numbers", stage.number(told).await?),
        ("orders paid", orders),
    ];
    Ok(Numbers { rows, faults: vec![("paid again", orders - carts)] })
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    stage::main("duplicate-submit", SETTINGS, play, work).await
}
