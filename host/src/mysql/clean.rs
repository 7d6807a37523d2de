//! Deletes rows that nobody has used for long, a few at a time.
//!
//! A deleted row's token goes into the floor in the same transaction, so that the key's next token
//! is above it. Rows that somebody works on are skipped.

use std::sync::Arc;
use std::time::Duration;

use mysql_async::Row;

use super::lanes::Backoff;
use super::link::{Fault, Link};
use super::sql::{self, LEASES, META, NOW_US, ROWS};
use super::store::Shared;
use crate::clock;
use crate::lock::Instant;

/// Rows that one transaction deletes.
const CHUNK: usize = 500;
/// Between two transactions of one sweep.
const PAUSE: Duration = Duration::from_millis(20);
const EXCHANGE_LIMIT: Duration = Duration::from_secs(10);
const LONGEST_REST: Duration = Duration::from_secs(60);
const SHORTEST_REST: Duration = Duration::from_millis(200);

/// Sweeps over the table again and again until the store is closed.
pub async fn run(shared: Arc<Shared>) {
    let rest = (shared.clean_after / 4).clamp(SHORTEST_REST, LONGEST_REST);
    let mut backoff = Backoff::new();
    let mut rows_swept = clock::now();
    loop {
        let mut wait = rest;
        tokio::select! {
            () = shared.stop.cancelled() => return,
            swept = sweep(&shared, &mut rows_swept) => match swept {
                Ok(0) => backoff = Backoff::new(),
                Ok(deleted) => tracing::debug!(deleted, "deleted the rows of idle keys"),
                Err(fault) => {
                    tracing::debug!("could not delete the rows of idle keys: {fault}");
                    wait = rest.min(backoff.next() * 10);
                }
            }
        }
        tokio::select! {
            () = shared.stop.cancelled() => return,
            () = tokio::time::sleep(wait) => {}
        }
    }
}

/// How many rows were deleted.
async fn sweep(shared: &Shared, rows_swept: &mut Instant) -> Result<usize, Fault> {
    let mut link = Link::open(shared).await?;
    let mut deleted = 0;
    let mut after = Vec::new();
    loop {
        let step = tokio::time::timeout(EXCHANGE_LIMIT, chunk(shared, &mut link, &after)).await;
        let (count, next) = step.unwrap_or_else(|_| Err(Fault::timeout("deleting idle rows")))?;
        deleted += count;
        let Some(next) = next else { break };
        after = next;
        tokio::time::sleep(PAUSE).await;
    }
    if clock::now().us_since(*rows_swept) >= shared.clean_after.as_micros() as u64 {
        let step = tokio::time::timeout(EXCHANGE_LIMIT, free_rows(&mut link)).await;
        deleted += step.unwrap_or_else(|_| Err(Fault::timeout("deleting free rows")))?;
        *rows_swept = clock::now();
    }
    link.close().await;
    Ok(deleted)
}

/// Deletes the rows that nobody has locked. When they were last locked is not known; one that is wanted
/// again is made again.
async fn free_rows(link: &mut Link) -> Result<usize, Fault> {
    let mut deleted = 0;
    let mut after = Vec::new();
    loop {
        let locked = format!(
            "BEGIN;SELECT k FROM {ROWS} WHERE k>{} ORDER BY k LIMIT {CHUNK} FOR UPDATE SKIP LOCKED",
            hexed(&after)
        );
        let free = keys(link.exchange(locked).await?.pop());
        let Some(last) = free.last().cloned() else {
            link.rollback().await?;
            return Ok(deleted);
        };
        let delete = format!("DELETE FROM {ROWS} WHERE k IN ({});COMMIT", list(&free));
        link.exchange(delete).await?;
        deleted += free.len();
        after = last;
        tokio::time::sleep(PAUSE).await;
    }
}

/// Deletes idle rows from behind `after`; the last key that was looked at, where there may be more.
async fn chunk(shared: &Shared, link: &mut Link, after: &[u8]) -> Result<(usize, Option<Vec<u8>>), Fault> {
    let idle = format!("until_us<{NOW_US}-{}", shared.clean_after.as_micros());
    // Without locks, for it may look at many rows that are in use.
    let found =
        format!("SELECT k FROM {LEASES} WHERE k>{} AND {idle} ORDER BY k LIMIT {CHUNK}", hexed(after));
    let found = keys(link.exchange(found).await?.pop());
    let Some(last) = found.last().cloned() else { return Ok((0, None)) };
    let next = (found.len() == CHUNK).then_some(last);
    let locked = format!(
        "BEGIN;SELECT k,token FROM {LEASES} FORCE INDEX (PRIMARY) WHERE k IN ({}) AND {idle} \
         ORDER BY k FOR UPDATE SKIP LOCKED",
        list(&found)
    );
    let rows = link.exchange(locked).await?.pop().unwrap_or_default();
    let highest = rows.iter().filter_map(|row| row.get::<u64, _>(1)).max();
    let gone = keys(Some(rows));
    let Some(highest) = highest else {
        link.rollback().await?;
        return Ok((0, next));
    };
    // The floor is locked in the packet that commits: everybody's writes look at it, and a proxy that stops
    // here would hold them all up. `sql::write_if_same` locks it before the rows: where one of these rows
    // comes into use just now, the server ends one of the two transactions, and that is tried again.
    let delete = format!(
        "DELETE FROM {LEASES} WHERE k IN ({});\
         UPDATE {META} SET floor=GREATEST(floor,{highest}) WHERE id=1;COMMIT",
        list(&gone)
    );
    link.exchange(delete).await?;
    Ok((gone.len(), next))
}

fn keys(rows: Option<Vec<Row>>) -> Vec<Vec<u8>> {
    rows.unwrap_or_default().into_iter().filter_map(|mut row| row.take::<Vec<u8>, _>(0)).collect()
}

fn hexed(bytes: &[u8]) -> String {
    let mut text = String::new();
    sql::hex(&mut text, bytes);
    text
}

fn list(keys: &[Vec<u8>]) -> String {
    keys.iter().map(|key| hexed(key)).collect::<Vec<_>>().join(",")
}
