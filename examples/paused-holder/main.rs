//! An editor stalls while it holds a document, and another one takes over.

use std::process::ExitCode;
use std::time::Duration;

use mysql_async::Conn;
use mysql_async::prelude::Queryable;
use serde_json::json;
use stage::{Numbers, Proxy, Result, Stage, Worker};
use tokio::time::sleep;

const DOCUMENTS: u32 = 3;
/// What an editor does takes half of its lease.
const TTL_MS: u32 = 2_000;
const WORK: Duration = Duration::from_millis(1_000);

/// Edits the document under a lease that is a row of the application's own table.
async fn edit(editor: &mut Worker, document: u32) -> Result<()> {
    let me = editor.number;
    take_row(&mut editor.db, document, me).await?;
    let text = revise(editor, document).await?;
    let update = "UPDATE documents SET content = ? WHERE id = ?";
    editor.db.exec_drop(update, (text, document)).await?;
    let release = "UPDATE leases SET editor = NULL WHERE id = ? AND editor = ?";
    Ok(editor.db.exec_drop(release, (document, me)).await?)
}

/// Edits it under a lease of the proxy. The table compares the lease's token in the statement that
/// writes: what a later holder has written is not overwritten.
async fn edit_with_token(proxy: &Proxy, editor: &mut Worker, document: u32) -> Result<()> {
    let resource = format!("documents/{document}");
    let wish = json!({"resource": resource, "ttl_ms": TTL_MS, "wait_ms": 30_000});
    let lease = proxy.post("/v1/acquire", wish).await?;
    let token = lease["token"].as_u64();
    let text = revise(editor, document).await?;
    let update = "UPDATE documents SET content = ?, token = ? WHERE id = ? AND token <= ?";
    editor.db.exec_drop(update, (text, token, document, token)).await?;
    // It is 0, too, for a write that changes nothing: this one always adds a line.
    if editor.db.affected_rows() == 0 {
        let refused = "INSERT INTO refused (document) VALUES (?)";
        return Ok(editor.db.exec_drop(refused, (document,)).await?);
    }
    // 410 where it has been lost meanwhile.
    proxy.try_post("/v1/release", json!({"lease_id": lease["lease_id"]})).await?;
    Ok(())
}

/// Reads the document and thinks of a line more.
async fn revise(editor: &mut Worker, document: u32) -> Result<String> {
    let read = "SELECT content FROM documents WHERE id = ?";
    let text: String = editor.db.exec_first(read, (document,)).await?.unwrap_or_default();
    editor.say("working")?;
    sleep(WORK).await;
    Ok(format!("{text}[{}]", editor.number))
}

/// Waits until no lease is in the row, or one that has ended.
async fn take_row(db: &mut Conn, document: u32, me: u32) -> Result<()> {
    let take = format!(
        "UPDATE leases SET editor = ?, until = NOW(6) + INTERVAL {TTL_MS}000 MICROSECOND \
         WHERE id = ? AND (editor IS NULL OR until < NOW(6))"
    );
    loop {
        db.exec_drop(&take, (me, document)).await?;
        if db.affected_rows() == 1 {
            return Ok(());
        }
        sleep(Duration::from_millis(20)).await;
    }
}

/// An editor: each worker process is one, and edits one document.
async fn work(mut editor: Worker) -> Result<()> {
    let document = editor.number % DOCUMENTS;
    match editor.proxy.take() {
        None => edit(&mut editor, document).await,
        Some(proxy) => edit_with_token(&proxy, &mut editor, document).await,
    }
}

async fn play(stage: &Stage) -> Result<Numbers> {
    stage
        .sql("CREATE TABLE documents (id INT PRIMARY KEY, content TEXT NOT NULL, token BIGINT NOT NULL)")
        .await?;
    stage.sql("CREATE TABLE leases (id INT PRIMARY KEY, editor INT, until DATETIME(6))").await?;
    stage.sql("CREATE TABLE refused (document INT NOT NULL)").await?;
    for document in 0..DOCUMENTS {
        stage.sql(&format!("INSERT INTO documents VALUES ({document}, '', 0)")).await?;
        stage.sql(&format!("INSERT INTO leases VALUES ({document}, NULL, NULL)")).await?;
    }
    let (mut stalled, mut next) = (Vec::new(), Vec::new());
    for document in 0..DOCUMENTS {
        let mut editor = stage.start(document).await?;
        editor.until("working").await?;
        editor.pause().await?;
        stalled.push(editor);
    }
    for document in 0..DOCUMENTS {
        next.push(stage.start(DOCUMENTS + document).await?);
    }
    for editor in next {
        editor.ended().await?;
    }
    // Each of the others has taken over a document, has written and is done.
    for editor in stalled {
        editor.resume()?;
        editor.ended().await?;
    }
    let lost = format!("SELECT COUNT(*) FROM documents WHERE content <> CONCAT('[', id + {DOCUMENTS}, ']')");
    let rows = vec![
        ("holders stopped for longer than a lease", u64::from(DOCUMENTS)),
        ("their writes refused", stage.number("SELECT COUNT(*) FROM refused").await?),
    ];
    Ok(Numbers { rows, faults: vec![("later writes overwritten", stage.number(&lost).await?)] })
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    stage::main("paused-holder", "", play, work).await
}
