//! Deletes rows that were not used for a long time, some at a time.
//!
//! First the floor is raised above the tokens of these rows, so that the next token of each key is above its
//! last one. Then the rows that have not changed since the rise are deleted. They were written in an earlier
//! [`CacheScope`](super::pipeline::cache::CacheScope), so a proxy that remembers one of them does not use it any more.
//! Rows that are in use are skipped.

use std::sync::Arc;
use std::time::Duration;

use mysql_async::Row;

use super::context::Context;
use super::pipeline::backoff::Backoff;
use super::session::fault::Fault;
use super::session::link::Link;
use super::sql::{self, LEASES, ROWS};
use crate::clock;
use crate::coverage::{Branch, reached};
use crate::lock::maps::HashSet;
use crate::lock::{Instant, ServerTime};

/// The number of rows for one rise of the floor. Each rise makes all proxies forget their remembered rows.
const PAGE: usize = 10_000;
/// The number of rows that one transaction deletes.
const CHUNK: usize = 500;
/// The pause between two transactions of a sweep.
const PAUSE: Duration = Duration::from_millis(20);
const EXCHANGE_LIMIT: Duration = Duration::from_secs(10);
const LONGEST_REST: Duration = Duration::from_secs(60);
const SHORTEST_REST: Duration = Duration::from_millis(200);

/// Sweeps the tables again and again until the store is closed.
pub async fn run(context: Arc<Context>) {
    let rest = (context.config.clean_after / 4).clamp(SHORTEST_REST, LONGEST_REST);
    let mut backoff = Backoff::new();
    let mut rows_swept = clock::now();
    loop {
        let mut wait = rest;
        tokio::select! {
            biased;
            () = context.stop.cancelled() => return,
            swept = sweep(&context, &mut rows_swept) => match swept {
                Ok(0) => backoff = Backoff::new(),
                Ok(deleted) => tracing::debug!(deleted, "deleted the rows of idle keys"),
                Err(fault) => {
                    tracing::debug!("could not delete the rows of idle keys: {fault}");
                    wait = rest.min(backoff.next() * 10);
                }
            }
        }
        tokio::select! {
            biased;
            () = context.stop.cancelled() => return,
            () = tokio::time::sleep(wait) => {}
        }
    }
}

/// Sweeps once. Returns the number of deleted rows.
async fn sweep(context: &Context, rows_swept: &mut Instant) -> Result<usize, Fault> {
    let mut link = Link::open(context).await?;
    let mut deleted = 0;
    let mut after = Vec::new();
    loop {
        let idle = within_limit("looking for idle rows", page(context, &mut link, &after)).await?;
        let Some(last) = idle.last() else { break };
        after.clone_from(&last.key);
        for rows in idle.chunks(CHUNK) {
            deleted += within_limit("deleting idle rows", delete(&mut link, rows)).await?;
            tokio::time::sleep(PAUSE).await;
        }
        if idle.len() < PAGE {
            break;
        }
    }
    if clock::now().us_since(*rows_swept) >= context.config.clean_after.as_micros() as u64 {
        deleted += within_limit("deleting free rows", free_rows(&mut link)).await?;
        *rows_swept = clock::now();
    }
    link.close().await;
    Ok(deleted)
}

/// Deletes the guard rows that are not locked. It is unknown when they were last locked; a row that is needed
/// again is created again.
async fn free_rows(link: &mut Link) -> Result<usize, Fault> {
    let mut deleted = 0;
    let mut after = Vec::new();
    loop {
        let locked = format!(
            "BEGIN;SELECT k FROM {ROWS} WHERE k>{} ORDER BY k LIMIT {CHUNK} FOR UPDATE SKIP LOCKED",
            sql::hexed(&after)
        );
        let free = keys(link.exchange(locked).await?.pop());
        let Some(last) = free.last().cloned() else {
            link.rollback().await?;
            return Ok(deleted);
        };
        let delete = format!("DELETE FROM {ROWS} WHERE k IN ({});COMMIT", sql::hexed_list(&free));
        link.exchange(delete).await?;
        deleted += free.len();
        after = last;
        tokio::time::sleep(PAUSE).await;
    }
}

/// A row of the lease table, as it was found idle.
struct Idle {
    key: Vec<u8>,
    revision: u64,
}

/// The next idle rows after `after`. The floor is raised above their tokens.
async fn page(context: &Context, link: &mut Link, after: &[u8]) -> Result<Vec<Idle>, Fault> {
    let Some(idle_since) = idle_since(context) else { return Ok(Vec::new()) };
    // Without locks, because it may read many rows that are in use.
    let found = format!(
        "SELECT k,revision,token FROM {LEASES} WHERE k>{} AND until_us<{} ORDER BY k LIMIT {PAGE}",
        sql::hexed(after),
        idle_since.0
    );
    let rows = link.exchange(found).await?.pop().unwrap_or_default();
    let rows = rows.into_iter().filter_map(|row| mysql_async::from_row_opt::<(Vec<u8>, u64, u64)>(row).ok());
    let (mut idle, mut highest) = (Vec::new(), 0);
    for (key, revision, token) in rows {
        idle.push(Idle { key, revision });
        highest = highest.max(token);
    }
    if !idle.is_empty() {
        link.exchange(sql::raise_floor(highest)).await?;
    }
    Ok(idle)
}

/// The time before which everything in an idle row ended. If the server's clock was set forward, the time is
/// earlier by that much, because the rows of running leases would look idle.
fn idle_since(context: &Context) -> Option<ServerTime> {
    let now = clock::now();
    let steps = context.clock_steps();
    let (earliest, _) = steps.server_time(now).filter(|_| steps.is_watched())?;
    let unsure_us = steps.doubt(now).by_us.saturating_add(context.config.clean_after.as_micros() as u64);
    Some(ServerTime(earliest.0.saturating_sub(unsure_us)))
}

/// Deletes the rows that have not changed since the floor was raised. Returns their number.
async fn delete(link: &mut Link, idle: &[Idle]) -> Result<usize, Fault> {
    let wanted: Vec<&[u8]> = idle.iter().map(|row| &*row.key).collect();
    let locked = format!(
        "BEGIN;SELECT k,revision FROM {LEASES} FORCE INDEX (PRIMARY) WHERE k IN ({}) \
         ORDER BY k FOR UPDATE SKIP LOCKED",
        sql::hexed_list(&wanted)
    );
    let rows = link.exchange(locked).await?.pop().unwrap_or_default();
    let rows = rows.into_iter().filter_map(|row| mysql_async::from_row_opt::<(Vec<u8>, u64)>(row).ok());
    let unchanged: HashSet<(Vec<u8>, u64)> = rows.collect();
    let is_unchanged = |row: &&Idle| unchanged.contains(&(row.key.clone(), row.revision));
    let gone: Vec<&[u8]> = idle.iter().filter(is_unchanged).map(|row| &*row.key).collect();
    if gone.is_empty() {
        link.rollback().await?;
        return Ok(0);
    }
    link.exchange(format!("DELETE FROM {LEASES} WHERE k IN ({});COMMIT", sql::hexed_list(&gone))).await?;
    reached(Branch::RowsDeleted);
    Ok(gone.len())
}

async fn within_limit<T>(what: &str, step: impl Future<Output = Result<T, Fault>>) -> Result<T, Fault> {
    tokio::time::timeout(EXCHANGE_LIMIT, step).await.unwrap_or_else(|_| Err(Fault::timeout(what)))
}

fn keys(rows: Option<Vec<Row>>) -> Vec<Vec<u8>> {
    rows.unwrap_or_default().into_iter().filter_map(|mut row| row.take::<Vec<u8>, _>(0)).collect()
}
