//! The tables, and the row that all proxies share: schema version, server identity, epoch, floor.
//!
//! Since version 3, proxies forget their remembered rows whenever the floor rises. A proxy of an earlier
//! version on the same tables would not.

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::context::Context;
use super::fault::{self, Fault};
use super::identity::{FRESH, Identity, InUseHeartbeat, VERSION, create_heartbeat, read, read_heartbeat};
use super::preflight::Server;
use super::prober;
use super::servers::ServerInUse;
use super::sql::{self, CLOCK, COUNTER, LATEST_FLOOR, LEASES, META, NOW_US, ROWS};
use super::wire::Wire;
use crate::clock;
use crate::coverage::{Branch, reached};
use crate::lock::Token;
use crate::random;

/// Added to the longest lease after a change of the server, in microseconds, because clocks differ.
const QUARANTINE_MARGIN_US: u64 = 1_000_000;
/// The same with several servers. By then every proxy that can see the new server has left the old one, which
/// may still accept writes. It covers a probe round, the probe, a transaction, and clock differences.
const FAILOVER_MARGIN_US: u64 = 6_000_000;

/// The gap between the tokens of two epochs if the clock cannot separate them.
const EPOCH_TOKENS: u64 = 1 << 40;
/// How far tokens are ahead of the server's clock at most, in microseconds, once a floor was taken from the
/// clock. So a server that replaces another one begins above every token given out, even if it lacks the
/// last writes.
const AHEAD_US: u64 = 5_000_000;

/// What another server may have given out since the tables were last used here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Doubt {
    None,
    /// Tokens, but no leases yet.
    Tokens,
    /// Leases that are missing here.
    Leases,
}

/// Creates missing tables, and raises the epoch if another server may have been in use since the tables were
/// last used here. Several proxies may run this at the same time.
pub async fn prepare(
    wire: &mut Wire,
    server: &Server,
    context: &Context,
    server_in_use: &ServerInUse,
) -> Result<Identity, Fault> {
    let is_known = context.probed.load(Ordering::Relaxed) == server_in_use.generation;
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
        context.probed.store(server_in_use.generation, Ordering::Relaxed);
    }
    let mut heartbeat = None;
    if !context.servers.is_single() {
        heartbeat = Some(match read_heartbeat(wire).await? {
            Some(heartbeat) => heartbeat,
            None => create_heartbeat(wire).await?,
        });
    }
    let identity = match doubt(&recorded, server, context, heartbeat.as_ref()) {
        Doubt::None => recorded,
        _ => settle(wire, server, context, server_in_use).await?,
    };
    if heartbeat.is_some() {
        let asked_at = clock::now();
        let age = read_heartbeat(wire).await?.and_then(|heartbeat| heartbeat.age());
        let left = age.map_or(Duration::ZERO, |age| FRESH.saturating_sub(age));
        context.servers.extend(server_in_use.generation, asked_at.plus_us(left.as_micros() as u64));
    }
    Ok(identity)
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
    let identity = quoted(&server.identity);
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
    let mut key = String::new();
    sql::hex(&mut key, &[[0; 8], random::number::<[u8; 8]>()].concat());
    let write = format!(
        "BEGIN;INSERT INTO {LEASES} VALUES ({key},0,0,0,'{{}}');UPDATE {LEASES} SET token=1 WHERE k={key};\
         UPDATE {META} SET floor=floor WHERE id=1;UPDATE {CLOCK} SET by_us=by_us WHERE id=1;DELETE FROM {LEASES} WHERE k={key};ROLLBACK"
    );
    wire.exchange(write).await?;
    Ok(())
}

/// Whether the tables belong to this server, as far as the record and this process know.
fn is_current(recorded: &Identity, server: &Server, known: Option<&Identity>) -> bool {
    if recorded.server != server.identity {
        return false;
    }
    match known {
        None => true,
        // The record lacks what this process has seen: the server has lost writes, or was left behind at a
        // fail-over. If the recorded floor is higher, another proxy has already handled that.
        Some(known) if known.server != recorded.server => recorded.floor > known.floor,
        Some(known) => recorded.epoch >= known.epoch && recorded.floor >= known.floor,
    }
}

/// `heartbeat` is given if another server may have been in use meanwhile.
fn doubt(
    recorded: &Identity,
    server: &Server,
    context: &Context,
    heartbeat: Option<&InUseHeartbeat>,
) -> Doubt {
    if !is_current(recorded, server, context.identity().as_ref()) {
        return Doubt::Leases;
    }
    let Some(heartbeat) = heartbeat else { return Doubt::None };
    // A proxy that took another server into use waited at least this long before it granted a lease.
    let first_lease = Duration::from_micros(u64::from(context.max_ttl_ms) * 1_000 + QUARANTINE_MARGIN_US);
    match heartbeat.age() {
        Some(age) if age < FRESH => Doubt::None,
        Some(age) if age < first_lease => Doubt::Tokens,
        _ => Doubt::Leases,
    }
}

/// Resolves a doubt. If probes show that all other servers are behind, there is no doubt; else raises the
/// epoch.
async fn settle(
    wire: &mut Wire,
    server: &Server,
    context: &Context,
    server_in_use: &ServerInUse,
) -> Result<Identity, Fault> {
    if !context.servers.is_single() {
        prober::probe(context, clock::now()).await;
    }
    wire.exchange("BEGIN").await?;
    let gone = || Fault::Broken { why: format!("{META} is empty"), slug: "schema" };
    let (_, recorded) = read(wire, "FOR UPDATE").await?.ok_or_else(gone)?;
    let heartbeat = if context.servers.is_single() { None } else { read_heartbeat(wire).await? };
    let mut doubt = doubt(&recorded, server, context, heartbeat.as_ref());
    let mut why = match context.identity() {
        Some(known) if recorded.server == server.identity => {
            format!("it lacks grants of {}", known.server)
        }
        _ => format!("its tables were last used on {}", recorded.server),
    };
    if doubt != Doubt::None && is_current(&recorded, server, context.identity().as_ref()) {
        match context.servers.others_are_behind(server_in_use.index, &recorded) {
            Ok(()) => doubt = Doubt::None,
            Err(others) => {
                why = format!(
                    "it was out of use, and locks may have been granted meanwhile on {others}, which cannot be \
                     reached; remove a server that is gone for good from store.url"
                );
            }
        }
    }
    if doubt == Doubt::None {
        if heartbeat.is_some() {
            wire.exchange(InUseHeartbeat::set()).await?;
        }
        wire.exchange("COMMIT").await?;
        return Ok(recorded);
    }
    raise_epoch(wire, server, context, &recorded, doubt, &why).await
}

/// Begins a new epoch: new tokens are above every token that another server can have given out, and no lease
/// is granted while a lease of that server may run. With [`Doubt::Tokens`], only the floor rises. The open
/// transaction has locked the record.
async fn raise_epoch(
    wire: &mut Wire,
    server: &Server,
    context: &Context,
    recorded: &Identity,
    doubt: Doubt,
    why: &str,
) -> Result<Identity, Fault> {
    let (mut floor, mut epoch) = context.servers.highest();
    for known in [context.identity().as_ref(), Some(recorded)].into_iter().flatten() {
        floor = floor.max(known.floor);
        epoch = epoch.max(known.epoch);
    }
    let now: Option<u64> = wire.first(format!("SELECT {NOW_US}")).await?;
    let floor = next_floor(floor, now.unwrap_or_default());
    let (epoch, wait_us) = match doubt {
        Doubt::Leases => (epoch + 1, u64::from(context.max_ttl_ms) * 1_000 + margin_us(context)),
        Doubt::None | Doubt::Tokens => (recorded.epoch, 0),
    };
    if epoch > Token::MAX_EPOCH || floor > Token::floor_of_epoch(Token::MAX_EPOCH).0 {
        let why = format!("the server has changed {epoch} times: fencing tokens are used up");
        return Err(Fault::Broken { why, slug: "schema" });
    }
    let identity = quoted(&server.identity);
    let heartbeat = if context.servers.is_single() { String::new() } else { InUseHeartbeat::set() + ";" };
    let update = format!(
        "UPDATE {META} SET identity={identity},epoch={epoch},floor=GREATEST(floor,{floor}),\
         grants_from=GREATEST(grants_from,{NOW_US}+{wait_us}) WHERE id=1;{heartbeat}COMMIT"
    );
    fault::exchange(wire, update).await?;
    if doubt == Doubt::Leases {
        reached(Branch::EpochRaised);
        context.metrics.store_error("identity_changed");
        tracing::warn!(
            from = (recorded.server != server.identity).then_some(&*recorded.server),
            server = server.identity,
            epoch,
            wait_ms = wait_us / 1_000,
            "the MySQL server has changed, or may have: {why}; no lease is granted until the leases of the \
             other server have ended"
        );
    } else {
        reached(Branch::TokensRaised);
        tracing::info!("tokens continue above {floor}: {why}");
    }
    Ok(Identity { server: server.identity.clone(), epoch, floor })
}

/// A floor above every token that was given out above `highest`. The time plus [`AHEAD_US`] is such a floor,
/// because a key has less than one grant a microsecond; so it is also above the tokens of servers that cannot
/// be asked. If the clock may have been set back, [`EPOCH_TOKENS`] tokens are skipped instead.
fn next_floor(highest: u64, now_us: u64) -> u64 {
    let next = now_us.saturating_add(AHEAD_US);
    if highest + 1_000_000 < next && now_us < LATEST_FLOOR { next } else { highest + EPOCH_TOKENS }
}

fn margin_us(context: &Context) -> u64 {
    if context.servers.is_single() { QUARANTINE_MARGIN_US } else { FAILOVER_MARGIN_US }
}

fn quoted(identity: &str) -> String {
    let mut text = String::new();
    sql::hex(&mut text, identity.as_bytes());
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_floor_is_above_what_can_have_been_given_out() {
        let day_us = 86_400_000_000;
        let now = 20_000 * day_us;
        let next = now + AHEAD_US;
        assert_eq!(next_floor(0, now), next);
        assert_eq!(next_floor(next - day_us, now), next);
        assert_eq!(next_floor(next, now), next + EPOCH_TOKENS, "at the same time as before");
        assert_eq!(next_floor(now + day_us, now), now + day_us + EPOCH_TOKENS, "the clock was set back");
        assert_eq!(next_floor(7, u64::MAX), 7 + EPOCH_TOKENS, "the clock is out of its mind");
    }

    #[test]
    fn a_mark_from_the_future_is_none() {
        let age = |used_us, now_us| InUseHeartbeat { used_us, now_us }.age().map(|age| age.as_micros());
        assert_eq!(age(10_000_000, 12_000_000), Some(2_000_000));
        assert_eq!(age(13_000_000, 12_000_000), Some(0));
        assert_eq!(age(90_000_000, 12_000_000), None);
        assert_eq!(age(0, 12_000_000), Some(12_000_000));
    }
}
