//! The other side: a client that runs the SQL of a lease itself, on its own connection.

use std::time::{Duration, Instant};

use anyhow::Result;
use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Opts, Statement};

/// Each key has a row. One statement takes it, and one releases it. The token is returned as the insert id.
const ACQUIRE: &str = "UPDATE direct.lk SET tok = LAST_INSERT_ID(IF(req = ? AND own = ?, tok, tok + 1)), \
    exp = UTC_TIMESTAMP(6) + INTERVAL ? MICROSECOND, req = ?, own = ? \
    WHERE k = ? AND (own = 0 OR exp < UTC_TIMESTAMP(6) OR (own = ? AND req = ?)) \
    AND UTC_TIMESTAMP(6) <= ?";
const RELEASE: &str = "UPDATE direct.lk SET own = 0 WHERE k = ? AND own = ? AND tok = ?";
const TTL_US: u64 = 60_000_000;
/// The statement must have a deadline, but this client never gives up.
const DEADLINE: &str = "2100-01-01 00:00:00";

/// A client that takes and releases leases.
pub struct Direct {
    conn: Conn,
    acquire: Statement,
    release: Statement,
    owner: u64,
    request: u64,
}

/// Creates the table, with a row for each key.
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
    /// Connects a client. `owner` is not 0, and differs between clients.
    pub async fn connect(url: &str, owner: u64) -> Result<Direct> {
        let mut conn = Conn::new(Opts::from_url(url)?).await?;
        conn.query_drop("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED").await?;
        let acquire = conn.prep(ACQUIRE).await?;
        let release = conn.prep(RELEASE).await?;
        Ok(Direct { conn, acquire, release, owner, request: 0 })
    }

    /// Tries once. Returns the token, or `None` if another client has the key.
    pub async fn try_acquire(&mut self, key: &str) -> Result<Option<u64>> {
        self.request += 1;
        let (own, req) = (self.owner, self.request);
        let params = (req, own, TTL_US, req, own, key, own, req, DEADLINE);
        self.conn.exec_drop(&self.acquire, params).await?;
        Ok(self.conn.last_insert_id().filter(|token| *token > 0))
    }

    /// Releases the lease with this token.
    pub async fn release(&mut self, key: &str, token: u64) -> Result<()> {
        Ok(self.conn.exec_drop(&self.release, (key, self.owner, token)).await?)
    }
}

/// A client that does work once: it inserts a row before the work, and stores the outcome after it.
pub struct DirectOnce {
    conn: Conn,
    insert: Statement,
    finish: Statement,
    read: Statement,
}

impl DirectOnce {
    /// Creates the table.
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

    /// Connects a client.
    pub async fn connect(url: &str) -> Result<DirectOnce> {
        let mut conn = Conn::new(Opts::from_url(url)?).await?;
        conn.query_drop("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED").await?;
        let insert = conn.prep("INSERT IGNORE INTO direct.done VALUES (?, NULL, UTC_TIMESTAMP(6))").await?;
        let finish = conn.prep("UPDATE direct.done SET outcome = ? WHERE k = ?").await?;
        let read = conn.prep("SELECT outcome FROM direct.done WHERE k = ?").await?;
        Ok(DirectOnce { conn, insert, finish, read })
    }

    /// Does the work of a key once, or reads its outcome.
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

/// A client that takes named locks on its own connection.
pub struct DirectNamed {
    conn: Conn,
    get: Statement,
    release: Statement,
}

impl DirectNamed {
    /// Connects a client.
    pub async fn connect(url: &str) -> Result<DirectNamed> {
        let mut conn = Conn::new(Opts::from_url(url)?).await?;
        let get = conn.prep("SELECT GET_LOCK(?, 10)").await?;
        let release = conn.prep("SELECT RELEASE_LOCK(?)").await?;
        Ok(DirectNamed { conn, get, release })
    }

    /// Takes and releases a named lock.
    pub async fn cycle(&mut self, name: &str) -> Result<()> {
        for statement in [&self.get, &self.release] {
            let done: Option<Option<i64>> = self.conn.exec_first(statement, (name,)).await?;
            anyhow::ensure!(done.flatten() == Some(1), "{name} could not be had, or let go");
        }
        Ok(())
    }
}

/// A number that the server reports.
async fn number(url: &str, sql: &str) -> Result<u64> {
    let mut conn = Conn::new(Opts::from_url(url)?).await?;
    let number: Option<u64> = conn.query_first(sql).await?;
    conn.disconnect().await?;
    Ok(number.unwrap_or_default())
}

/// The number of connections, without the one that asks.
pub async fn connections(url: &str) -> Result<u64> {
    number(url, "SELECT COUNT(*)-1 FROM information_schema.processlist WHERE user<>'event_scheduler'").await
}

/// The number of deadlocks since the server's start (error 1213).
pub async fn deadlocks(url: &str) -> Result<u64> {
    number(url, "SELECT COUNT FROM information_schema.innodb_metrics WHERE name='lock_deadlocks'").await
}

/// The statements per second from all clients.
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

/// The number of waiters in the global queue of a key.
pub async fn in_line(url: &str, key: &str) -> Result<usize> {
    let places = "SELECT COALESCE(JSON_LENGTH(state,'$.line.places'),0) FROM lockkeeper_lease WHERE k=";
    Ok(number(url, &format!("{places}'{key}'")).await? as usize)
}
