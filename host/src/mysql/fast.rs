//! One key, one statement: decide on a remembered row, and write it only if it is still that row.
//!
//! A decision needs the server's time. It is made for the latest time that the server can have, and
//! the statement applies only while the server's time is at least the earliest it can have: between
//! the two no lease and no delay of the row may end, or the decision could differ.

use super::batch::{environment, row_write};
use super::cache;
use super::link::Fault;
use super::link::{LOCK_WAIT_S, Link};
use super::sql;
use super::steps;
use super::store::Shared;
use crate::clock;
use crate::lock::record::{self, Op, Record, Records};
use crate::lock::{Instant, Key, ServerTime};
use crate::store::Reply;

/// The clock is looked at again after this long, in microseconds.
const SAMPLE_US: u64 = 1_000_000;

/// Runs the group if a remembered row allows. `None`: nothing was applied, ask the server.
pub async fn try_run(
    shared: &Shared,
    link: &mut Link,
    group: &[Op],
    deadline: Instant,
) -> Result<Option<Reply>, Fault> {
    let Some(key) = only_key(group) else { return Ok(None) };
    let asked_at = clock::now();
    // The time is looked at before a statement waits for a row's lock, so leave room for that.
    let deadline_us = deadline.us_since(asked_at).saturating_sub(u64::from(LOCK_WAIT_S) * 1_000_000);
    if asked_at.us_since(link.sample.after) > SAMPLE_US || deadline_us == 0 {
        return Ok(None);
    }
    let Some(row) = shared.cache.take(key, link.sample.epoch) else { return Ok(None) };
    let (earliest, latest) = (link.sample.earliest(asked_at), link.sample.latest(asked_at));
    if changes_between(&row.record, earliest, latest) || link.sample.grants_from > earliest {
        return Ok(None);
    }
    let token = row.record.token.0;
    let mut records = Records::default();
    records.insert(key.clone(), Some(row.record));
    let env = environment(shared, link, &records, &[key], latest);
    let outcomes = group.iter().map(|op| record::apply(&mut records, op, &env)).collect();
    let Some((_, record, _)) = records.changed().next() else { return Ok(None) };
    // Beyond this the server's clock was set forward since, and the lease would be short.
    let not_after = latest.plus_us(deadline_us.min(steps::MARGIN_US));
    let revision = row.revision + 1;
    let write = row_write(key, record, revision, latest);
    let sql = sql::write_if_same(&write, token, row.revision, (earliest, not_after));
    if link.change(sql).await? == 0 {
        return Ok(None);
    }
    let row = cache::Row { record: record.clone(), revision, epoch: row.epoch };
    shared.cache.put(key.clone(), row);
    Ok(Some(Reply { outcomes, asked_at, now: latest }))
}

/// The key that the group is about; `None` where there are several.
fn only_key(group: &[Op]) -> Option<&Key> {
    let key = group.first()?.keys().first()?;
    group.iter().all(|op| op.keys().len() == 1 && op.keys()[0] == *key).then_some(key)
}

/// Whether a decision about the record can depend on where between the two the time is.
fn changes_between(record: &Record, earliest: ServerTime, latest: ServerTime) -> bool {
    let within = |at: ServerTime| earliest < at && at <= latest;
    within(record.not_before)
        || record.holders.iter().any(|holder| {
            within(holder.until)
                || within(holder.at_least_until)
                || within(holder.until.plus_ms(holder.delay_ms))
        })
}
