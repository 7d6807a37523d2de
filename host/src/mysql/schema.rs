//! The tables, and the row that all proxies share: schema version, server identity, epoch, floor.

use std::sync::atomic::Ordering;

use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Error};

use super::link::Fault;
use super::preflight::Server;
use super::sql::{self, COUNTER, LEASES, META, NOW_US, ROWS};
use super::store::Shared;
use crate::lock::Token;

/// What this program knows. A higher one is refused, a lower one is migrated.
const VERSION: u32 = 2;

/// Added to the longest lease after a fail-over, in microseconds, for clocks that differ.
const QUARANTINE_MARGIN_US: u64 = 1_000_000;

/// Who the server is, and the epoch of its tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    pub server: String,
    pub epoch: u64,
}

/// Makes what is missing, and raises the epoch where the server is not the one that the tables were
/// last used on. Safe to be run by several proxies at once.
pub async fn prepare(conn: &mut Conn, server: &Server, shared: &Shared) -> Result<Identity, Fault> {
    let recorded = match read(conn, "").await? {
        Some((VERSION, recorded)) => recorded,
        _ => {
            create(conn, server).await?;
            let missing = || Fault::Broken { why: format!("{META} stays empty"), slug: "schema" };
            read(conn, "").await?.ok_or_else(missing)?.1
        }
    };
    if !shared.probed.load(Ordering::Relaxed) {
        probe(conn).await?;
        shared.probed.store(true, Ordering::Relaxed);
    }
    if is_current(&recorded, server, shared) {
        return Ok(recorded);
    }
    raise_epoch(conn, server, shared).await
}

/// The version of the tables and the recorded identity; `None` where the tables or the row are missing.
async fn read(conn: &mut Conn, lock: &str) -> Result<Option<(u32, Identity)>, Fault> {
    let sql = format!("SELECT version,identity,epoch FROM {META} WHERE id=1 {lock}");
    let row: Option<(u32, Vec<u8>, u64)> = match conn.query_first(sql).await {
        Err(Error::Server(error)) if error.code == 1146 => return Ok(None),
        row => row?,
    };
    let Some((version, identity, epoch)) = row else { return Ok(None) };
    if version > VERSION {
        let why = format!(
            "the tables are of schema version {version}, this program knows {VERSION}: upgrade Lockkeeper"
        );
        return Err(Fault::Broken { why, slug: "schema" });
    }
    let server = String::from_utf8_lossy(&identity).into_owned();
    Ok(Some((version, Identity { server, epoch })))
}

/// Makes the tables that are missing. The row comes last: where it has this version, the tables are there.
async fn create(conn: &mut Conn, server: &Server) -> Result<(), Fault> {
    let leases = format!(
        "CREATE TABLE IF NOT EXISTS {LEASES} (\
         k VARBINARY(1024) NOT NULL PRIMARY KEY COMMENT 'the lock key',\
         token BIGINT UNSIGNED NOT NULL COMMENT 'the last fencing token that was given out',\
         until_us BIGINT UNSIGNED NOT NULL COMMENT 'the last write, or the last moment at which a lease \
         or delay ends: microseconds since 1970',\
         revision BIGINT UNSIGNED NOT NULL COMMENT 'rises with every write',\
         state MEDIUMTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL COMMENT 'holders, delays and \
         ended leases, as JSON'\
         ) ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARACTER SET binary"
    );
    let meta = format!(
        "CREATE TABLE IF NOT EXISTS {META} (\
         id TINYINT UNSIGNED NOT NULL PRIMARY KEY,\
         version INT UNSIGNED NOT NULL COMMENT 'of these tables',\
         identity VARBINARY(255) NOT NULL COMMENT 'the server that tokens were last given out by',\
         epoch BIGINT UNSIGNED NOT NULL COMMENT 'the upper bits of new tokens',\
         floor BIGINT UNSIGNED NOT NULL COMMENT 'the highest token of a deleted row',\
         grants_from BIGINT UNSIGNED NOT NULL COMMENT 'no lease is granted before: microseconds since 1970'\
         ) ENGINE=InnoDB DEFAULT CHARACTER SET binary"
    );
    let counter = format!(
        "CREATE TABLE IF NOT EXISTS {COUNTER} (\
         id TINYINT UNSIGNED NOT NULL PRIMARY KEY,\
         token BIGINT UNSIGNED NOT NULL COMMENT 'the last token of keys whose lock is not a row of {LEASES}'\
         ) ENGINE=InnoDB DEFAULT CHARACTER SET binary"
    );
    let rows = format!(
        "CREATE TABLE IF NOT EXISTS {ROWS} (\
         k VARBINARY(1024) NOT NULL PRIMARY KEY COMMENT 'a key that is guarded by the lock of its row'\
         ) ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARACTER SET binary"
    );
    for table in [leases, meta, counter, rows] {
        conn.query_drop(table).await?;
    }
    conn.query_drop(format!("INSERT IGNORE INTO {COUNTER} VALUES (1,0)")).await?;
    let identity = quoted(&server.identity);
    let row = format!(
        "INSERT INTO {META} VALUES (1,{VERSION},{identity},0,0,0) ON DUPLICATE KEY UPDATE version={VERSION}"
    );
    conn.query_drop(row).await?;
    Ok(())
}

/// Tries what will be needed, and undoes it. No lock has the empty key.
async fn probe(conn: &mut Conn) -> Result<(), Fault> {
    let write = format!(
        "BEGIN;INSERT INTO {LEASES} VALUES (x'',0,0,0,'{{}}') ON DUPLICATE KEY UPDATE token=VALUES(token);\
         UPDATE {META} SET floor=floor WHERE id=1;DELETE FROM {LEASES} WHERE k=x'';ROLLBACK"
    );
    conn.query_drop(write).await?;
    Ok(())
}

/// Whether the tables belong to this server, as far as they and this process know.
fn is_current(recorded: &Identity, server: &Server, shared: &Shared) -> bool {
    if recorded.server != server.identity {
        return false;
    }
    match shared.identity() {
        None => true,
        // What this process has seen is gone: the server has lost writes, or is one that was left
        // behind at a fail-over. Unless another proxy has taken notice of that before us.
        Some(known) if known.server != recorded.server => recorded.epoch > known.epoch,
        Some(known) => recorded.epoch >= known.epoch,
    }
}

/// The tables were last used on another server: what that one granted may be missing here. New
/// tokens are above all it can have given out, and nothing is granted while its leases may run.
async fn raise_epoch(conn: &mut Conn, server: &Server, shared: &Shared) -> Result<Identity, Fault> {
    conn.query_drop("BEGIN").await?;
    let gone = || Fault::Broken { why: format!("{META} is empty"), slug: "schema" };
    let (_, recorded) = read(conn, "FOR UPDATE").await?.ok_or_else(gone)?;
    if is_current(&recorded, server, shared) {
        conn.query_drop("ROLLBACK").await?;
        return Ok(recorded);
    }
    let epoch = shared.identity().map_or(0, |known| known.epoch).max(recorded.epoch) + 1;
    if epoch > Token::MAX_EPOCH {
        let why = format!("the server has changed {epoch} times: fencing tokens are used up");
        return Err(Fault::Broken { why, slug: "schema" });
    }
    let wait_us = u64::from(shared.max_ttl_ms) * 1_000 + QUARANTINE_MARGIN_US;
    let identity = quoted(&server.identity);
    let update = format!(
        "UPDATE {META} SET identity={identity},epoch={epoch},\
         grants_from=GREATEST(grants_from,{NOW_US}+{wait_us}) WHERE id=1;COMMIT"
    );
    conn.query_drop(update).await?;
    shared.metrics.store_error("identity_changed");
    tracing::warn!(
        from = recorded.server,
        to = server.identity,
        epoch,
        wait_ms = wait_us / 1_000,
        "the MySQL server is another one than before: no lease is granted until those of the last one have ended"
    );
    Ok(Identity { server: server.identity.clone(), epoch })
}

fn quoted(identity: &str) -> String {
    let mut text = String::new();
    sql::hex(&mut text, identity.as_bytes());
    text
}
