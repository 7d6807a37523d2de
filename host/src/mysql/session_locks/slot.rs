//! A connection with an open transaction that holds row locks, and the connection that asks for tokens.

use mysql_async::Row;

use super::tokens::{Counted, counted, number};
use super::{PATIENCE, SESSION_S};
use crate::clock;
use crate::lock::maps::HashSet;
use crate::lock::{Instant, Key};
use crate::mysql::context::Context;
use crate::mysql::pipeline::queue::Responder;
use crate::mysql::session::fault::Fault;
use crate::mysql::session::link::{EXCHANGE_LIMIT, Link};
use crate::mysql::session::spare::SpareLink;
use crate::mysql::sql::{self, ROWS};
use crate::store::Reply;

/// How a row is locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strength {
    Exclusive,
    Shared,
}

/// A transaction that holds row locks.
pub struct Slot {
    /// Absent while the connection is in use.
    pub link: Option<Link>,
    pub keys: Vec<Key>,
    pub heard: Instant,
    /// Releases that free the slot. They are answered once the rows are free for other proxies too.
    pub told_when_free: Vec<(Responder, Reply)>,
    /// Set if the session is not used any more: until when it is kept for holders that may be certain of a
    /// lock on it.
    pub parked_until: Option<Instant>,
}

/// The rows to lock.
pub struct RowLockRequest {
    pub keys: Vec<Key>,
    /// Whether one of the keys is enough.
    pub any: bool,
    pub strength: Strength,
    pub tokens: u64,
    /// All keys that the tokens are for. Some may be locked already.
    pub claimed: Vec<Key>,
}

enum Found {
    Locked(Vec<Key>),
    Missing(Vec<Key>),
    /// Another session has one of the rows; with `any`, all of them.
    Taken,
}

/// The result of [`Slot::lock`].
pub struct Locked {
    pub link: Link,
    pub keys: Vec<Key>,
    pub strength: Strength,
    pub heard: Instant,
    /// The token that new ones are above, and when grants may begin; `None` if another session has one of the
    /// rows.
    pub counted: Option<Counted>,
}

/// The result of [`Slot::free`].
pub struct Freed {
    /// Absent if the connection cannot be used any more.
    pub link: Option<Link>,
}

impl Slot {
    /// A slot on a connection that has locked the rows of `keys`.
    pub fn new(link: Link, keys: Vec<Key>, heard: Instant) -> Slot {
        Slot { link: Some(link), keys, heard, told_when_free: Vec::new(), parked_until: None }
    }

    /// Answers the releases that wait for the rows to be free: all of them, or those whose deadline has
    /// passed.
    pub fn tell_released(&mut self, now: Option<Instant>) {
        let is_due = |responder: &Responder| now.is_none_or(|now| responder.deadline <= now);
        for (responder, reply) in self.told_when_free.extract_if(.., |(responder, _)| is_due(responder)) {
            responder.answer(Ok(reply));
        }
    }

    /// Locks the rows, or none of them, without waiting for other sessions.
    pub async fn lock(
        context: &Context,
        counter: &Counter,
        link: Option<Link>,
        request: RowLockRequest,
    ) -> Result<Locked, Fault> {
        let mut link = match link {
            Some(link) => link,
            None => open(context).await?,
        };
        let mut heard = clock::now();
        let mut found = match within(request.select(&mut link)).await {
            // The server may have closed a spare connection meanwhile.
            Err(Fault::Broken { .. }) => {
                link = open(context).await?;
                heard = clock::now();
                within(request.select(&mut link)).await?
            }
            found => found?,
        };
        if let Found::Missing(keys) = found {
            within(make(&mut link, &keys)).await?;
            heard = clock::now();
            found = within(request.select(&mut link)).await?;
        }
        // A row that clean-up deleted in between is created at the next attempt.
        let Found::Locked(keys) = found else {
            within(link.rollback()).await?;
            return Ok(Locked { link, keys: Vec::new(), strength: request.strength, heard, counted: None });
        };
        let counted = Some(counter.next(context, request.tokens, &request.claimed).await?);
        Ok(Locked { link, keys, strength: request.strength, heard, counted })
    }

    /// Ends the transaction.
    pub async fn free(mut link: Link) -> Result<Freed, Fault> {
        within(async { link.exchange("COMMIT").await.map(drop) }).await?;
        Ok(Freed { link: Some(link) })
    }

    /// Asks the session for a sign of life. Returns the moment at which it was asked.
    pub async fn beat(link: &mut Link) -> Result<Instant, Fault> {
        let asked_at = clock::now();
        let answered = tokio::time::timeout(PATIENCE, link.exchange(sql::used_on())).await;
        let mut sets = answered.unwrap_or_else(|_| Err(Fault::timeout("the session of a row lock")))?;
        link.check_used(&mut sets).map(|()| asked_at)
    }
}

/// The connection that asks for the numbers of tokens.
pub struct Counter(SpareLink);

impl Default for Counter {
    fn default() -> Counter {
        Counter(SpareLink::lasting(SESSION_S))
    }
}

impl Counter {
    /// See [`number`]. The rows of `keys` are locked. `keys` are all keys of the claims, including those that
    /// this proxy had locked before: another proxy with a shared lock may have given such a key a higher
    /// token since.
    pub async fn next(&self, context: &Context, tokens: u64, keys: &[Key]) -> Result<Counted, Fault> {
        // Read before the numbers are asked for: a membership that ends meanwhile must not count as a later one.
        let until = context.membership.until();
        let mut answer = self.0.ask(context, number(keys.iter()), EXCHANGE_LIMIT).await?;
        let first = answer.sets.pop();
        let counted = within(counted(&mut answer.link, first, tokens, keys.iter(), until)).await?;
        answer.keep();
        Ok(counted)
    }
}

async fn open(context: &Context) -> Result<Link, Fault> {
    let mut link = Link::open(context).await?;
    within(link.keep_idle(SESSION_S)).await?;
    Ok(link)
}

impl RowLockRequest {
    async fn select(&self, link: &mut Link) -> Result<Found, Fault> {
        if self.any {
            // LIMIT 1 would hide a missing row, so look for missing rows first.
            let sql = format!("SELECT k FROM {ROWS} WHERE k IN ({})", list(&self.keys));
            let missing = self.missing(link.exchange(sql).await?);
            if !missing.is_empty() {
                return Ok(Found::Missing(missing));
            }
        }
        let mariadb = link.server.name.starts_with("MariaDB");
        let locking = match self.strength {
            _ if self.any => "LIMIT 1 FOR UPDATE SKIP LOCKED",
            Strength::Exclusive => "FOR UPDATE NOWAIT",
            Strength::Shared if mariadb => "LOCK IN SHARE MODE NOWAIT",
            Strength::Shared => "FOR SHARE NOWAIT",
        };
        // The server in use is read once the rows are locked, because another node may be in use by then.
        let sql = format!(
            "BEGIN;SELECT k FROM {ROWS} FORCE INDEX (PRIMARY) WHERE k IN ({}) ORDER BY k {locking};{}",
            list(&self.keys),
            sql::used_on()
        );
        let mut sets = match link.exchange(sql).await {
            // 3572 on MySQL, 1205 on MariaDB.
            Err(Fault::Conflict { .. }) => return Ok(Found::Taken),
            sets => sets?,
        };
        link.check_used(&mut sets)?;
        let missing = self.missing(sets);
        match missing.len() {
            0 => Ok(Found::Locked(self.keys.clone())),
            _ if !self.any => Ok(Found::Missing(missing)),
            all if all == self.keys.len() => Ok(Found::Taken),
            _ => {
                let locked = self.keys.iter().find(|key| !missing.contains(key));
                Ok(Found::Locked(locked.into_iter().cloned().collect()))
            }
        }
    }

    /// The keys without a row.
    fn missing(&self, sets: Vec<Vec<Row>>) -> Vec<Key> {
        let rows = sets.into_iter().flatten().filter_map(|mut row| row.take::<Vec<u8>, _>(0));
        let rows: HashSet<Vec<u8>> = rows.collect();
        self.keys.iter().filter(|key| !rows.contains(key.as_str().as_bytes())).cloned().collect()
    }
}

/// Creates rows, in a transaction of its own. Other sessions may create or lock the same rows at the same
/// time.
async fn make(link: &mut Link, keys: &[Key]) -> Result<(), Fault> {
    let rows: Vec<String> =
        keys.iter().map(|key| format!("({})", sql::hexed(key.as_str().as_bytes()))).collect();
    let sql = format!("ROLLBACK;INSERT IGNORE INTO {ROWS} (k) VALUES {}", rows.join(","));
    match link.exchange(sql).await {
        Ok(_) | Err(Fault::Conflict { .. }) => Ok(()),
        Err(fault) => Err(fault),
    }
}

fn list(keys: &[Key]) -> String {
    sql::hexed_list(keys.iter().map(Key::as_str))
}

async fn within<T>(work: impl Future<Output = Result<T, Fault>>) -> Result<T, Fault> {
    tokio::time::timeout(EXCHANGE_LIMIT, work).await.unwrap_or_else(|_| Err(Fault::timeout("a row lock")))
}
