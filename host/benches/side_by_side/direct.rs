//! The other side: a client that runs the lease's SQL itself, on a connection of its own.

use std::time::{Duration, Instant};

use anyhow::Result;
use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Opts, Statement};

/// One row a key; one statement takes it, one lets it go. The token comes back as the insert id.
const ACQUIRE: &str = "UPDATE direct.lk SET tok = LAST_INSERT_ID(IF(req = ? AND own = ?, tok, tok + 1)), \
    exp = UTC_TIMESTAMP(6) + INTERVAL ? MICROSECOND, req = ?, own = ? \
    WHERE k = ? AND (own = 0 OR exp < UTC_TIMESTAMP(6) OR (own = ? AND req = ?)) \
    AND UTC_TIMESTAMP(6) <= ?";
const RELEASE: &str = "UPDATE direct.lk SET own = 0 WHERE k = ? AND own = ? AND tok = ?";
const TTL_US: u64 = 60_000_000;
/// The statement has a deadline, as it must; this client never gives up.
const DEADLINE: &str = "2100-01-01 00:00:00";

pub struct Direct {
    conn: Conn,
    acquire: Statement,
    release: Statement,
    owner: u64,
    request: u64,
}

/// Makes the table, and a row for each key.
pub async fn prepare(url: &str, keys: &[String]) -> Result<()> {
    let mut conn = Conn::new(Opts::from_url(url)?).await?;
    conn.query_drop("CREATE DATABASE IF NOT EXISTS direct").await?;
    conn.query_drop(
        "CREATE TABLE IF NOT EXISTS direct.lk (k VARBINARY(255) PRIMARY KEY, tok BIGINT UNSIGNED NOT NULL, \
         own BIGINT UNSIGNED NOT NULL, req BIGINT UNSIGNED NOT NULL, exp DATETIME(6) NOT NULL) ENGINE=InnoDB",
    )
    .await?;
    let rows = keys.iter().map(|key| (key.clone(),));
    conn.exec_batch("INSERT IGNORE INTO direct.lk VALUES (?, 0, 0, 0, UTC_TIMESTAMP(6))", rows).await?;
    Ok(conn.disconnect().await?)
}

impl Direct {
    /// `owner` is not 0, and no other client's.
    pub async fn connect(url: &str, owner: u64) -> Result<Direct> {
        let mut conn = Conn::new(Opts::from_url(url)?).await?;
        conn.query_drop("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED").await?;
        let acquire = conn.prep(ACQUIRE).await?;
        let release = conn.prep(RELEASE).await?;
        Ok(Direct { conn, acquire, release, owner, request: 0 })
    }

    /// One try: the token, or none where somebody else has the key.
    pub async fn try_acquire(&mut self, key: &str) -> Result<Option<u64>> {
        self.request += 1;
        let (own, req) = (self.owner, self.request);
        let params = (req, own, TTL_US, req, own, key, own, req, DEADLINE);
        self.conn.exec_drop(&self.acquire, params).await?;
        Ok(self.conn.last_insert_id().filter(|token| *token > 0))
    }

    pub async fn release(&mut self, key: &str, token: u64) -> Result<()> {
        Ok(self.conn.exec_drop(&self.release, (key, self.owner, token)).await?)
    }
}

/// What runs once by itself: a row in front of the work, and its outcome behind it.
pub struct DirectOnce {
    conn: Conn,
    insert: Statement,
    finish: Statement,
    read: Statement,
}

impl DirectOnce {
    pub async fn prepare(url: &str) -> Result<()> {
        let mut conn = Conn::new(Opts::from_url(url)?).await?;
        conn.query_drop("CREATE DATABASE IF NOT EXISTS direct").await?;
        conn.query_drop(
            "CREATE TABLE IF NOT EXISTS direct.done (k VARBINARY(255) PRIMARY KEY, outcome VARCHAR(255), \
             created DATETIME(6) NOT NULL) ENGINE=InnoDB",
        )
        .await?;
        Ok(conn.disconnect().await?)
    }

    pub async fn connect(url: &str) -> Result<DirectOnce> {
        let mut conn = Conn::new(Opts::from_url(url)?).await?;
        conn.query_drop("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED").await?;
        let insert = conn.prep("INSERT IGNORE INTO direct.done VALUES (?, NULL, UTC_TIMESTAMP(6))").await?;
        let finish = conn.prep("UPDATE direct.done SET outcome = ? WHERE k = ?").await?;
        let read = conn.prep("SELECT outcome FROM direct.done WHERE k = ?").await?;
        Ok(DirectOnce { conn, insert, finish, read })
    }

    pub async fn once(&mut self, key: &str, is_duplicate: bool) -> Result<()> {
        self.conn.exec_drop(&self.insert, (key,)).await?;
        let is_first = self.conn.affected_rows() == 1;
        anyhow::ensure!(is_first != is_duplicate, "{key} is not what it should be");
        if is_first {
            return Ok(self.conn.exec_drop(&self.finish, ("{\"done\":1}", key)).await?);
        }
        let outcome: Option<String> = self.conn.exec_first(&self.read, (key,)).await?;
        anyhow::ensure!(outcome.is_some(), "{key} has no outcome");
        Ok(())
    }
}

/// A named lock on a connection of its own.
pub struct DirectNamed {
    conn: Conn,
    get: Statement,
    release: Statement,
}

impl DirectNamed {
    pub async fn connect(url: &str) -> Result<DirectNamed> {
        let mut conn = Conn::new(Opts::from_url(url)?).await?;
        let get = conn.prep("SELECT GET_LOCK(?, 10)").await?;
        let release = conn.prep("SELECT RELEASE_LOCK(?)").await?;
        Ok(DirectNamed { conn, get, release })
    }

    pub async fn cycle(&mut self, name: &str) -> Result<()> {
        for statement in [&self.get, &self.release] {
            let done: Option<Option<i64>> = self.conn.exec_first(statement, (name,)).await?;
            anyhow::ensure!(done.flatten() == Some(1), "{name} could not be had, or let go");
        }
        Ok(())
    }
}

/// One number that the server tells.
async fn number(url: &str, sql: &str) -> Result<u64> {
    let mut conn = Conn::new(Opts::from_url(url)?).await?;
    let number: Option<u64> = conn.query_first(sql).await?;
    conn.disconnect().await?;
    Ok(number.unwrap_or_default())
}

/// Connections beside the one that asks.
pub async fn connections(url: &str) -> Result<u64> {
    number(url, "SELECT COUNT(*)-1 FROM information_schema.processlist WHERE user<>'event_scheduler'").await
}

/// Deadlocks since the server was started (error 1213).
pub async fn deadlocks(url: &str) -> Result<u64> {
    number(url, "SELECT COUNT FROM information_schema.innodb_metrics WHERE name='lock_deadlocks'").await
}

/// What the server is asked in a second, by everybody.
pub async fn statements_per_s(url: &str, length: Duration) -> Result<f64> {
    let mut conn = Conn::new(Opts::from_url(url)?).await?;
    let mut counted = Vec::new();
    let began = Instant::now();
    for wait in [Duration::ZERO, length] {
        tokio::time::sleep(wait).await;
        let count: Option<(String, u64)> = conn.query_first("SHOW GLOBAL STATUS LIKE 'Questions'").await?;
        counted.push(count.map_or(0, |(_, count)| count));
    }
    let seconds = began.elapsed().as_secs_f64();
    conn.disconnect().await?;
    Ok(counted[1].saturating_sub(counted[0]) as f64 / seconds)
}

/// How many have a place in the line of a key.
pub async fn in_line(url: &str, key: &str) -> Result<usize> {
    let places = "SELECT COALESCE(JSON_LENGTH(state,'$.line.places'),0) FROM lockkeeper_lease WHERE k=";
    Ok(number(url, &format!("{places}'{key}'")).await? as usize)
}
