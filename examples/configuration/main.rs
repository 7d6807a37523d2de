//! Six operators change one configuration, each a few settings of it.

use std::process::ExitCode;
use std::time::Duration;

use mysql_async::Conn;
use mysql_async::prelude::Queryable;
use serde_json::{Value, json};
use stage::{Numbers, Proxy, Result, Stage, Worker};
use tokio::time::sleep;

const OPERATORS: u32 = 6;
const CHANGES: u32 = 10;

/// What a proxy's config.toml says of `configuration/*`.
const SETTINGS: &str = "primitive = \"version\"";

/// Changes one setting of the document in the table.
async fn change(db: &mut Conn, setting: &str) -> Result<()> {
    let document: Option<String> = db.query_first("SELECT document FROM configuration").await?;
    let document = edited(document.as_deref().map(serde_json::from_str).transpose()?, setting).await;
    Ok(db.exec_drop("UPDATE configuration SET document = ?", (document.to_string(),)).await?)
}

/// Changes one setting of the document at the proxy, if it still is at the version that was read; else
/// once more from there. The table has a copy for readers, which a slow writer cannot set back.
async fn change_version(proxy: &Proxy, db: &mut Conn, setting: &str) -> Result<()> {
    let resource = "configuration/shop";
    loop {
        let read = proxy.post("/v1/versions/read", json!({"resource": resource})).await?;
        let document = edited(read.get("value").cloned(), setting).await;
        let commit = json!({"resource": resource, "version": read["version"], "value": document});
        let (status, committed) = proxy.try_post("/v1/versions/commit", commit).await?;
        match status {
            200 => return publish(db, &document, &committed["version"]).await,
            409 => db.query_drop("INSERT INTO conflicts VALUES ()").await?,
            _ => anyhow::bail!("{committed}"),
        }
    }
}

async fn publish(db: &mut Conn, document: &Value, version: &Value) -> Result<()> {
    let version = version.as_u64();
    let update = "UPDATE configuration SET document = ?, version = ? WHERE version < ?";
    Ok(db.exec_drop(update, (document.to_string(), version, version)).await?)
}

/// The document with a setting more. People think before they save.
async fn edited(document: Option<Value>, setting: &str) -> Value {
    let mut document = document.unwrap_or_else(|| json!({}));
    sleep(Duration::from_millis(10)).await;
    document[setting] = json!("on");
    document
}

/// An operator: each worker process is one.
async fn work(mut operator: Worker) -> Result<()> {
    for n in 0..CHANGES {
        let setting = format!("feature-{}-{n}", operator.number);
        match &operator.proxy {
            None => change(&mut operator.db, &setting).await?,
            Some(proxy) => change_version(proxy, &mut operator.db, &setting).await?,
        }
    }
    Ok(())
}

async fn play(stage: &Stage) -> Result<Numbers> {
    stage.sql("CREATE TABLE configuration (document TEXT NOT NULL, version BIGINT NOT NULL)").await?;
    stage.sql("INSERT INTO configuration VALUES ('{}', 0)").await?;
    stage.sql("CREATE TABLE conflicts (id INT AUTO_INCREMENT PRIMARY KEY)").await?;
    stage.run_workers(OPERATORS).await?;
    let made = u64::from(OPERATORS * CHANGES);
    let kept = stage.number("SELECT JSON_LENGTH(document) FROM configuration").await?;
    let rows = vec![
        ("settings changed", made),
        ("settings in the document", kept),
        ("changes made again on a newer version", stage.number("SELECT COUNT(*) FROM conflicts").await?),
    ];
    Ok(Numbers { rows, faults: vec![("changes lost", made - kept)] })
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    stage::main("configuration", SETTINGS, play, work).await
}
