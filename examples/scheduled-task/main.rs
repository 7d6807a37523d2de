//! Four nodes have the same schedule, and clocks that differ a little.

use std::process::ExitCode;
use std::time::Duration;

use mysql_async::Conn;
use mysql_async::prelude::Queryable;
use serde_json::json;
use stage::{Numbers, Proxy, Result, Stage, Worker, ensure};
use tokio::time::{Instant, sleep, sleep_until};

const NODES: u32 = 4;
const HOURS: u32 = 5;
/// An hour, as long as this example has time for.
const HOUR: Duration = Duration::from_millis(400);
/// Each node's clock is behind the one before it.
const SKEW: Duration = Duration::from_millis(50);

/// What a proxy's config.toml says of `reports/*`.
const SETTINGS: &str = "primitive = \"once\"\nwait_ms = 30000";

/// Sends the report of an hour.
async fn send_report(db: &mut Conn, hour: u32) -> Result<()> {
    sleep(Duration::from_millis(20)).await;
    Ok(db.exec_drop("INSERT INTO sent (hour) VALUES (?)", (hour,)).await?)
}

/// The same, by the first node that comes. The others wait for its outcome: were it to die, one of
/// them would be the first.
async fn send_report_once(proxy: &Proxy, db: &mut Conn, hour: u32) -> Result<()> {
    let task = proxy.post("/v1/once/begin", json!({"resource": format!("reports/{hour}")})).await?;
    if task["state"] == "first" {
        send_report(db, hour).await?;
        let done = json!({"lease_id": task["lease_id"], "outcome": "sent"});
        proxy.post("/v1/once/finish", done).await?;
    }
    Ok(())
}

/// A node: each worker process is one.
async fn work(mut node: Worker) -> Result<()> {
    let midnight = Instant::now() + SKEW * node.number;
    for hour in 0..HOURS {
        sleep_until(midnight + HOUR * hour).await;
        match &node.proxy {
            None => send_report(&mut node.db, hour).await?,
            Some(proxy) => send_report_once(proxy, &mut node.db, hour).await?,
        }
    }
    Ok(())
}

async fn play(stage: &Stage) -> Result<Numbers> {
    stage.sql("CREATE TABLE sent (id INT AUTO_INCREMENT PRIMARY KEY, hour INT NOT NULL)").await?;
    stage.run_workers(NODES).await?;
    let hours = stage.number("SELECT COUNT(DISTINCT hour) FROM sent").await?;
    ensure!(hours == u64::from(HOURS), "only {hours} of {HOURS} reports were sent");
    let sent = stage.number("SELECT COUNT(*) FROM sent").await?;
    let rows = vec![("nodes", u64::from(NODES)), ("reports due", hours), ("reports sent", sent)];
    Ok(Numbers { rows, faults: vec![("sent again", sent - hours)] })
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    stage::main("scheduled-task", SETTINGS, play, work).await
}
