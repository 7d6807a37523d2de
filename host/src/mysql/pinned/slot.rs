//! One connection with one open transaction, and the connection that counts tokens.

use std::collections::HashSet;
use std::time::Duration;

use mysql_async::Row;
use tokio::sync::Mutex;

use super::{SESSION_S, raise, raised};
use crate::clock;
use crate::lock::{Instant, Key, ServerTime, Token};
use crate::mysql::lanes::EXCHANGE_LIMIT;
use crate::mysql::link::{Fault, Link};
use crate::mysql::queue::Ticket;
use crate::mysql::sql::{self, ROWS};
use crate::mysql::store::Shared;
use crate::store::Reply;

/// How a row is locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strength {
    Exclusive,
    Shared,
}

/// A transaction that holds row locks.
pub struct Slot {
    /// Absent while somebody talks on it.
    pub link: Option<Link>,
    pub keys: Vec<Key>,
    pub heard: Instant,
    /// Whose release frees it: they hear so when it is free for others, too.
    pub told_when_free: Vec<(Ticket, Reply)>,
}

/// What came of asking for rows.
pub struct Locked {
    pub link: Link,
    pub keys: Vec<Key>,
    pub strength: Strength,
    pub heard: Instant,
    /// The highest token that may be given out, and when grants may begin; `None` where another session has
    /// one of the rows.
    pub raised: Option<(Token, ServerTime)>,
}

pub struct Freed {
    pub link: Link,
}

pub struct Beat {
    pub link: Link,
    pub heard: Instant,
}

impl Slot {
    pub fn new(link: Link, keys: Vec<Key>, heard: Instant) -> Slot {
        Slot { link: Some(link), keys, heard, told_when_free: Vec::new() }
    }

    /// Locks the rows, or none of them, without waiting for anybody.
    pub async fn lock(
        shared: &Shared,
        counter: &Counter,
        link: Option<Link>,
        keys: Vec<Key>,
        strength: Strength,
        tokens: u64,
    ) -> Result<Locked, Fault> {
        let mut link = match link {
            Some(link) => link,
            None => open(shared).await?,
        };
        let mut heard = clock::now();
        let mut stored = match within(select(&mut link, &keys, strength)).await {
            // A spare connection may have been closed while nobody looked.
            Err(Fault::Broken { .. }) => {
                link = open(shared).await?;
                heard = clock::now();
                within(select(&mut link, &keys, strength)).await?
            }
            stored => stored?,
        };
        let missing = |stored: &HashSet<Vec<u8>>| -> Vec<Key> {
            keys.iter().filter(|key| !stored.contains(key.as_str().as_bytes())).cloned().collect()
        };
        if let Some(rows) = &stored
            && !missing(rows).is_empty()
        {
            let new = missing(rows);
            within(make(&mut link, &new)).await?;
            heard = clock::now();
            stored = within(select(&mut link, &keys, strength)).await?;
        }
        // One that was cleaned up in between is made at the next attempt.
        let had = stored.is_some_and(|rows| missing(&rows).is_empty());
        let raised = match had {
            true => Some(counter.raise(shared, tokens, &keys).await?),
            false => {
                within(async { link.rollback().await }).await?;
                None
            }
        };
        Ok(Locked { link, keys, strength, heard, raised })
    }

    pub async fn free(mut link: Link) -> Result<Freed, Fault> {
        within(async { link.exchange("COMMIT").await.map(drop) }).await?;
        Ok(Freed { link })
    }

    pub async fn beat(mut link: Link) -> Result<Beat, Fault> {
        let heard = clock::now();
        within(async { link.exchange("DO 0").await.map(drop) }).await?;
        Ok(Beat { link, heard })
    }
}

/// The connection on which tokens are counted: each number is committed before it is given out.
#[derive(Default)]
pub struct Counter {
    /// Taken out while it is used: whoever gives up half-way leaves none behind.
    link: Mutex<Option<Link>>,
}

impl Counter {
    /// See [`raise`]. The rows of `keys` are locked.
    pub async fn raise(
        &self,
        shared: &Shared,
        tokens: u64,
        keys: &[Key],
    ) -> Result<(Token, ServerTime), Fault> {
        let mut place = self.link.lock().await;
        let mut link = match place.take() {
            Some(link) => link,
            None => open(shared).await?,
        };
        let statement = |link: &Link| raise(tokens, link.sample.epoch, keys.iter());
        let sql = statement(&link);
        let mut sets = match within(link.exchange(sql)).await {
            // It was idle for longer than the server keeps it.
            Err(Fault::Broken { .. }) => {
                link = open(shared).await?;
                let sql = statement(&link);
                within(link.exchange(sql)).await?
            }
            sets => sets?,
        };
        *place = Some(link);
        let (highest, from) = raised(sets.pop())?;
        Ok((Token(highest.0 - tokens), from))
    }
}

async fn open(shared: &Shared) -> Result<Link, Fault> {
    let mut link = Link::open(shared).await?;
    within(link.exchange(format!("SET SESSION wait_timeout={SESSION_S}"))).await?;
    Ok(link)
}

/// The keys whose rows are there, all locked now; `None` where another session has one of them.
async fn select(
    link: &mut Link,
    keys: &[Key],
    strength: Strength,
) -> Result<Option<HashSet<Vec<u8>>>, Fault> {
    let mut sql = format!("BEGIN;SELECT k FROM {ROWS} FORCE INDEX (PRIMARY) WHERE k IN (");
    list(&mut sql, keys);
    let mariadb = link.server.name.starts_with("MariaDB");
    sql.push_str(match strength {
        Strength::Exclusive => ") ORDER BY k FOR UPDATE NOWAIT",
        Strength::Shared if mariadb => ") ORDER BY k LOCK IN SHARE MODE NOWAIT",
        Strength::Shared => ") ORDER BY k FOR SHARE NOWAIT",
    });
    match link.exchange(sql).await {
        Ok(mut sets) => {
            let rows: Vec<Row> = sets.pop().unwrap_or_default();
            Ok(Some(rows.into_iter().filter_map(|mut row| row.take::<Vec<u8>, _>(0)).collect()))
        }
        // 3572 on MySQL, 1205 on MariaDB.
        Err(Fault::Conflict { .. }) => {
            link.rollback().await?;
            Ok(None)
        }
        Err(fault) => Err(fault),
    }
}

/// Makes rows, in a transaction of its own: whoever else makes or locks one of them meanwhile is right, too.
async fn make(link: &mut Link, keys: &[Key]) -> Result<(), Fault> {
    let mut sql = format!("ROLLBACK;INSERT IGNORE INTO {ROWS} (k) VALUES (");
    for (n, key) in keys.iter().enumerate() {
        if n > 0 {
            sql.push_str("),(");
        }
        list(&mut sql, std::slice::from_ref(key));
    }
    sql.push(')');
    match link.exchange(sql).await {
        Ok(_) | Err(Fault::Conflict { .. }) => Ok(()),
        Err(fault) => Err(fault),
    }
}

fn list(sql: &mut String, keys: &[Key]) {
    for (n, key) in keys.iter().enumerate() {
        if n > 0 {
            sql.push(',');
        }
        sql::hex(sql, key.as_str().as_bytes());
    }
}

async fn within<T>(work: impl Future<Output = Result<T, Fault>>) -> Result<T, Fault> {
    let limit: Duration = EXCHANGE_LIMIT;
    tokio::time::timeout(limit, work).await.unwrap_or_else(|_| Err(Fault::timeout("a row lock")))
}
