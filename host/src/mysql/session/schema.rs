//! The tables, and the row that all proxies share: schema version, server identity, epoch, floor.
//!
//! Since version 3, proxies forget their remembered rows whenever the floor rises. A proxy of an earlier
//! version on the same tables would not.

use std::sync::atomic::Ordering;

use super::fault::Fault;
use super::preflight::Server;
use super::wire::Wire;
use crate::mysql::context::Context;
use crate::mysql::failover::identity::{Identity, read};
use crate::mysql::sql::{self, CLOCK, COUNTER, LEASES, META, NOW_US, ROWS, VERSION};
use crate::random;

/// Creates missing tables, and checks the account's privileges once for each server generation. Returns the
/// record of the tables. Several proxies may run this at the same time.
pub async fn prepare(
    wire: &mut Wire,
    server: &Server,
    context: &Context,
    generation: u64,
) -> Result<Identity, Fault> {
    let is_known = context.probed.load(Ordering::Relaxed) == generation;
    let recorded = match read(wire, "").await? {
        Some((version, recorded)) if version == VERSION || is_known => recorded,
        _ => {
            create(wire, server).await?;
            let missing = || Fault::Broken { why: format!("{META} stays empty"), slug: "schema" };
            read(wire, "").await?.ok_or_else(missing)?.1
        }
    };
    if !is_known {
        probe(wire).await?;
        context.probed.store(generation, Ordering::Relaxed);
    }
    Ok(recorded)
}

/// Creates the missing tables. The row is inserted last, so if it has this version, all tables exist. An
/// existing row keeps its version, see [`claim_version`].
async fn create(wire: &mut Wire, server: &Server) -> Result<(), Fault> {
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
         floor BIGINT UNSIGNED NOT NULL COMMENT 'new tokens are above: deleted rows, other servers',\
         grants_from BIGINT UNSIGNED NOT NULL COMMENT 'no lease is granted before: microseconds since 1970'\
         ) ENGINE=InnoDB DEFAULT CHARACTER SET binary"
    );
    let counter = format!(
        "CREATE TABLE IF NOT EXISTS {COUNTER} (\
         id TINYINT UNSIGNED NOT NULL PRIMARY KEY,\
         token BIGINT UNSIGNED NOT NULL COMMENT 'no token above it was given out for keys whose lock is not a \
         row of {LEASES}',\
         base BIGINT UNSIGNED NOT NULL COMMENT 'the token of the number run',\
         run BIGINT UNSIGNED NOT NULL COMMENT 'what UUID_SHORT was then'\
         ) ENGINE=InnoDB DEFAULT CHARACTER SET binary"
    );
    let rows = format!(
        "CREATE TABLE IF NOT EXISTS {ROWS} (\
         k VARBINARY(1024) NOT NULL PRIMARY KEY COMMENT 'a key that is guarded by the lock of its row'\
         ) ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARACTER SET binary"
    );
    let clock = format!(
        "CREATE TABLE IF NOT EXISTS {CLOCK} (\
         id TINYINT UNSIGNED NOT NULL PRIMARY KEY,\
         seen_us BIGINT UNSIGNED NOT NULL COMMENT 'a proxy has watched the clock of the server up to then: \
         microseconds since 1970',\
         stepped_us BIGINT UNSIGNED NOT NULL COMMENT 'the clock was set forward before then, or may have been',\
         by_us BIGINT UNSIGNED NOT NULL COMMENT 'by so much at most',\
         grants_us BIGINT UNSIGNED NOT NULL COMMENT 'grants_from of {META}, put off where the clock was set forward \
         before it'\
         ) ENGINE=InnoDB DEFAULT CHARACTER SET binary"
    );
    for table in [leases, meta, counter, rows, clock] {
        wire.exchange(table).await?;
    }
    wire.exchange(format!("INSERT IGNORE INTO {COUNTER} VALUES (1,0,0,0)")).await?;
    // A proxy of an earlier version, if there was one, watched the clock until now.
    wire.exchange(format!("INSERT IGNORE INTO {CLOCK} VALUES (1,{NOW_US},0,0,0)")).await?;
    let identity = sql::hexed(server.identity.as_bytes());
    let row = format!(
        "INSERT INTO {META} VALUES (1,{VERSION},{identity},0,0,0) ON DUPLICATE KEY UPDATE version=version"
    );
    wire.exchange(row).await?;
    Ok(())
}

/// Makes the tables refuse proxies of earlier versions. Run this once this proxy may write; until then the
/// present proxies of earlier versions continue.
pub fn claim_version() -> String {
    format!("UPDATE {META} SET version={VERSION} WHERE id=1 AND version<{VERSION}")
}

/// Tries the statements that will be needed, and rolls them back. The key is random, so proxies that try at
/// the same time do not block each other.
async fn probe(wire: &mut Wire) -> Result<(), Fault> {
    let key = sql::hexed(&[[0; 8], random::number::<[u8; 8]>()].concat());
    let write = format!(
        "BEGIN;INSERT INTO {LEASES} VALUES ({key},0,0,0,'{{}}');UPDATE {LEASES} SET token=1 WHERE k={key};\
         UPDATE {META} SET floor=floor WHERE id=1;UPDATE {CLOCK} SET by_us=by_us WHERE id=1;DELETE FROM {LEASES} WHERE k={key};ROLLBACK"
    );
    wire.exchange(write).await?;
    Ok(())
}
