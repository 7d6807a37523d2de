//! One transaction for many groups, in two round trips: lock and read the rows, decide, write, commit.

use std::collections::BTreeSet;

use mysql_async::Row;

use super::cache;
use super::codec;
use super::context::Context;
use super::fault::Fault;
use super::link::Link;
use super::queue::Decided;
use super::sql::{self, RowWrite};
use crate::clock;
use crate::coverage::{Branch, reached};
use crate::lock::maps::HashMap;
use crate::lock::record::{self, Env, Holder, Op, Record, Records, Tried};
use crate::lock::{Instant, Key, ServerTime, Token};
use crate::store::Reply;

/// A packet is sent once its statements are this long. Servers accept 16 MB and more.
pub const PACKET_BYTES: usize = 4 << 20;
/// The number of rows that one statement writes.
const STATEMENT_ROWS: usize = 1024;

/// Runs the groups in order. Nothing is applied after `deadline`. On an error nothing was applied, unless the
/// connection broke and `decided` is set; then it is unknown whether the decisions were applied.
pub async fn run(
    context: &Context,
    link: &mut Link,
    work: (&[Vec<Op>], &mut [Option<Tried>]),
    deadline: Instant,
    decided: &mut Option<Decided>,
) -> Result<(), Fault> {
    let result = transact(context, link, work, deadline, decided).await;
    if matches!(result, Err(Fault::Conflict { .. } | Fault::Rejected { .. })) {
        // A failed statement rolls back only itself; a COMMIT would keep the others.
        link.rollback().await?;
    }
    result
}

async fn transact(
    context: &Context,
    link: &mut Link,
    (groups, tried): (&[Vec<Op>], &mut [Option<Tried>]),
    deadline: Instant,
    decided: &mut Option<Decided>,
) -> Result<(), Fault> {
    let keys: BTreeSet<&Key> = groups.iter().flatten().flat_map(Op::keys).collect();
    let asked_at = clock::now();
    let mut sets = link.exchange(sql::lock_rows(keys.iter().copied())).await?;
    link.learn(context, sets.pop(), asked_at)?;
    context.check_watched()?;
    link.check_member()?;
    let stored = read_rows(sets.pop().unwrap_or_default())?;
    let (mut records, revisions) = assemble(&keys, stored);
    let env = environment(context, link, &records, &keys, (link.sample.now, link.sample.now));
    let batch_id = link.next_batch_id();
    let outcomes = record::run(&mut records, groups, tried, &env, batch_id);
    let replies = outcomes.into_iter().map(|outcomes| Reply { outcomes, asked_at, now: env.now }).collect();
    let writes = writes(&records, &revisions, env.now);
    if writes.is_empty() {
        link.rollback().await?;
        remember(context, link, &records, &revisions, env.now);
        *decided = Some(Decided { batch_id, replies });
        return Ok(());
    }
    *decided = Some(Decided { batch_id, replies });
    commit(link, writes, deadline).await?;
    remember(context, link, &records, &revisions, env.now);
    Ok(())
}

/// The inputs for decisions at `now`, the server's time. `earliest` is the earliest time that the server's
/// clock can show.
pub fn environment<'a>(
    context: &Context,
    link: &Link,
    records: &Records,
    keys: impl IntoIterator<Item = &'a &'a Key>,
    (earliest, now): (ServerTime, ServerTime),
) -> Env {
    let sample = &link.sample;
    let own = clock::now();
    let (doubt, set_back_us, waits_until, steady) = {
        let steps = context.clock_steps();
        let steady = steps.is_steady(own, record::BATCH_ID_KEPT_US);
        (steps.doubt(own), steps.set_back_us(own), steps.waits_until(), steady)
    };
    let is_in_doubt = |holder: &Holder| holder.free_at() <= now && !doubt.has_ended(holder, earliest);
    let records = keys.into_iter().filter_map(|key| records.get(key));
    let takeover = doubt.by_us == 0 || !records.flat_map(|record| &record.holders).any(is_in_doubt);
    if !takeover {
        reached(Branch::ClockDoubt);
    }
    Env {
        now,
        floor: Token::floor_of_epoch(sample.epoch).max(Token(sample.floor)),
        renamed: Token(sample.renamed),
        others: Token(sample.counter),
        grants_from: sample.grants_from.max(now.plus_us(waits_until.us_since(own))),
        takeover,
        longest_us: context.longest_us(),
        set_back_us,
        steady,
    }
}

type Stored = HashMap<Key, (Record, u64)>;

fn read_rows(rows: Vec<Row>) -> Result<Stored, Fault> {
    rows.into_iter().map(read_row).collect()
}

fn read_row(row: Row) -> Result<(Key, (Record, u64)), Fault> {
    let rejected = |why: String| Fault::Rejected { why };
    let (key, token, revision, state) = mysql_async::from_row_opt::<(Vec<u8>, u64, u64, Vec<u8>)>(row)
        .map_err(|error| rejected(format!("a row was not written by this program: {error}")))?;
    let text = String::from_utf8_lossy(&key);
    let key = Key::new(&text).ok_or_else(|| rejected(format!("{text:?} is not a key")))?;
    let record = codec::decode(token, &state).map_err(|error| rejected(format!("{text:?}: {error}")))?;
    Ok((key, (record, revision)))
}

fn assemble(keys: &BTreeSet<&Key>, mut stored: Stored) -> (Records, HashMap<Key, u64>) {
    let mut records = Records::default();
    let mut revisions = HashMap::with_capacity_and_hasher(stored.len(), Default::default());
    for &key in keys {
        match stored.remove(key) {
            Some((record, revision)) => {
                revisions.insert(key.clone(), revision);
                records.insert(key.clone(), Some(record));
            }
            None => records.insert(key.clone(), None),
        }
    }
    (records, revisions)
}

struct Writes {
    stored: Vec<RowWrite>,
    new: Vec<RowWrite>,
}

impl Writes {
    fn is_empty(&self) -> bool {
        self.stored.is_empty() && self.new.is_empty()
    }
}

fn writes(records: &Records, revisions: &HashMap<Key, u64>, now: ServerTime) -> Writes {
    let mut writes = Writes { stored: Vec::new(), new: Vec::new() };
    for (key, record, stored) in records.changed() {
        let row = row_write(key, record, next_revision(revisions.get(key), now), now);
        if stored { writes.stored.push(row) } else { writes.new.push(row) }
    }
    writes
}

/// The row as it is to be written for `record`.
pub fn row_write(key: &Key, record: &Record, revision: u64, now: ServerTime) -> RowWrite {
    RowWrite {
        key: key.clone(),
        token: record.token.0,
        until: record.until().max(now),
        revision,
        state: codec::encode(record),
    }
}

/// First revisions are multiples of this, and no revision is one less than a multiple.
const FIRST_REVISIONS: u64 = 4096;

/// The next revision of a row. A new row's revision is taken from the time, so that a row that was deleted
/// and created again gets a different one. No row ever has the revision before a first one, so a writer that
/// takes a row for new cannot match an existing row.
pub fn next_revision(last: Option<&u64>, now: ServerTime) -> u64 {
    match last {
        None => now.0.next_multiple_of(FIRST_REVISIONS),
        Some(last) if (last + 2).is_multiple_of(FIRST_REVISIONS) => last + 2,
        Some(last) => last + 1,
    }
}

async fn commit(link: &mut Link, writes: Writes, deadline: Instant) -> Result<(), Fault> {
    let mut packet = Vec::new();
    for (rows, stored) in [(&writes.stored, true), (&writes.new, false)] {
        for rows in statements(rows) {
            if packet.len() > PACKET_BYTES {
                link.exchange(std::mem::take(&mut packet)).await?;
            }
            packet.extend_from_slice(&sql::write_rows(rows, stored));
            packet.push(b';');
        }
    }
    let latest = link.latest(deadline);
    let floor = (!writes.new.is_empty()).then_some(link.sample.floor);
    packet.extend_from_slice(sql::commit_before(latest, floor).as_bytes());
    link.commit(packet).await.map(drop)
}

/// The rows in order, cut so that no statement is much longer than a packet.
fn statements(mut rows: &[RowWrite]) -> impl Iterator<Item = &[RowWrite]> {
    std::iter::from_fn(move || {
        let mut bytes = 0;
        let fits = |row: &&RowWrite| {
            bytes += row.state.len() + row.key.as_str().len();
            bytes <= PACKET_BYTES
        };
        let count = rows.iter().take(STATEMENT_ROWS).take_while(fits).count().max(1).min(rows.len());
        let (now, later) = rows.split_at(count);
        rows = later;
        (!now.is_empty()).then_some(now)
    })
}

/// Caches the rows that were written, and also those that were only read: a claim often reads an expired
/// lease just before it takes it over.
fn remember(
    context: &Context,
    link: &Link,
    records: &Records,
    revisions: &HashMap<Key, u64>,
    now: ServerTime,
) {
    for (key, &revision) in revisions {
        if let Some(record) = records.get(key) {
            context.cache.put(
                key.clone(),
                cache::Row { record: record.clone(), revision, cache_scope: link.cache_scope() },
            );
        }
    }
    for (key, record, _) in records.changed() {
        let revision = next_revision(revisions.get(key), now);
        let row = cache::Row { record: record.clone(), revision, cache_scope: link.cache_scope() };
        context.cache.put(key.clone(), row);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_row_has_the_revision_before_a_first_one() {
        let mut revision = next_revision(None, ServerTime(1_795_314_151_950_432));
        for _ in 0..3 * FIRST_REVISIONS {
            let next = next_revision(Some(&revision), ServerTime(0));
            assert!(next > revision, "{next} follows {revision}");
            revision = next;
            let time = ServerTime(revision);
            assert_ne!(next_revision(None, time), revision + 1);
        }
    }
}
