//! The server that the tables were last used on, and the time of the last use, as recorded in the tables.

use std::time::Duration;

use crate::lock::Token;
use crate::mysql::session::fault::{self, Fault};
use crate::mysql::session::wire::Wire;
use crate::mysql::sql::{HEARTBEAT, META, NOW_US, VERSION};

/// How long a heartbeat is fresh. No server can be promoted and grant a lease within this time.
pub const FRESH: Duration = Duration::from_secs(4);

/// The last server that the tables were used on, by their own record, with its epoch and floor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    pub server: String,
    pub epoch: u64,
    /// New tokens are above this. The server that was used later has the higher floor.
    pub floor: u64,
}

/// When a proxy last had the server in use. Kept only if there are several servers.
pub struct InUseHeartbeat {
    pub(super) used_us: u64,
    pub(super) now_us: u64,
}

/// The version of the tables and the recorded identity; `None` if the tables or the row are missing.
pub async fn read(wire: &mut Wire, lock: &str) -> Result<Option<(u32, Identity)>, Fault> {
    let sql = format!("SELECT version,identity,epoch,floor FROM {META} WHERE id=1 {lock}");
    let row: Option<(u32, Vec<u8>, u64, u64)> = match wire.first(sql).await {
        Err(error) if fault::is_missing_table(&error) => return Ok(None),
        row => row?,
    };
    let Some((version, identity, epoch, floor)) = row else { return Ok(None) };
    if version > VERSION {
        let why = format!(
            "the tables are of schema version {version}, this program knows {VERSION}: upgrade Lockkeeper"
        );
        return Err(Fault::Broken { why, slug: "schema" });
    }
    let floor = floor.max(Token::floor_of_epoch(epoch.min(Token::MAX_EPOCH)).0);
    let server = String::from_utf8_lossy(&identity).into_owned();
    Ok(Some((version, Identity { server, epoch, floor })))
}

/// `None` if there is no heartbeat yet.
pub async fn read_heartbeat(wire: &mut Wire) -> Result<Option<InUseHeartbeat>, Fault> {
    let row: Option<(u64, u64)> =
        match wire.first(format!("SELECT used_us,{NOW_US} FROM {HEARTBEAT} WHERE id=1")).await {
            Err(error) if fault::is_missing_table(&error) => return Ok(None),
            row => row?,
        };
    Ok(row.map(|(used_us, now_us)| InUseHeartbeat { used_us, now_us }))
}

/// Creates the heartbeat, which has not been renewed yet.
pub async fn create_heartbeat(wire: &mut Wire) -> Result<InUseHeartbeat, Fault> {
    let table = format!(
        "CREATE TABLE IF NOT EXISTS {HEARTBEAT} (\
         id TINYINT UNSIGNED NOT NULL PRIMARY KEY,\
         used_us BIGINT UNSIGNED NOT NULL COMMENT 'a proxy had this server in use: microseconds since 1970'\
         ) ENGINE=InnoDB DEFAULT CHARACTER SET binary"
    );
    wire.exchange(table).await?;
    wire.exchange(format!("INSERT IGNORE INTO {HEARTBEAT} VALUES (1,0)")).await?;
    let missing = || Fault::Broken { why: format!("{HEARTBEAT} stays empty"), slug: "schema" };
    read_heartbeat(wire).await?.ok_or_else(missing)
}

impl InUseHeartbeat {
    /// `None` if the heartbeat is from the future: the clock was set back.
    pub fn age(&self) -> Option<Duration> {
        let ahead = self.used_us > self.now_us + FRESH.as_micros() as u64;
        (!ahead).then(|| Duration::from_micros(self.now_us.saturating_sub(self.used_us)))
    }

    /// The statement that renews the heartbeat, only while it is fresh.
    pub fn renew() -> String {
        let fresh_us = FRESH.as_micros();
        format!("{} AND used_us+{fresh_us}>{NOW_US} AND used_us<{NOW_US}+{fresh_us}", InUseHeartbeat::set())
    }

    /// The statement that renews the heartbeat.
    pub fn set() -> String {
        format!("UPDATE {HEARTBEAT} SET used_us={NOW_US} WHERE id=1")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_heartbeat_far_in_the_future_has_no_age() {
        let age = |used_us, now_us| InUseHeartbeat { used_us, now_us }.age().map(|age| age.as_micros());
        assert_eq!(age(10_000_000, 12_000_000), Some(2_000_000));
        assert_eq!(age(13_000_000, 12_000_000), Some(0));
        assert_eq!(age(90_000_000, 12_000_000), None);
        assert_eq!(age(0, 12_000_000), Some(12_000_000));
    }
}
