//! One transaction for many groups, in two round trips: lock and read the rows, decide, write, commit.

use std::collections::BTreeSet;

use super::cache;
use super::queue::{Attempt, Decided};
use super::rows::{environment, next_revision, read_row, row_write};
use crate::clock;
use crate::lock::maps::HashMap;
use crate::lock::record::{self, Op, Record, Records};
use crate::lock::{Instant, Key, ServerTime};
use crate::mysql::context::Context;
use crate::mysql::session::fault::Fault;
use crate::mysql::session::link::Link;
use crate::mysql::sql::{self, RowWrite};
use crate::store::Reply;

/// A packet is sent once its statements are this long. Servers accept 16 MB and more.
pub const PACKET_BYTES: usize = 4 << 20;
/// The number of rows that one statement writes.
const STATEMENT_ROWS: usize = 1024;

/// Runs the groups in order. On an error nothing was applied, unless the connection broke and `attempt.decided`
/// is set.
pub async fn run(context: &Context, link: &mut Link, attempt: &mut Attempt<'_>) -> Result<(), Fault> {
    let result = transact(context, link, attempt).await;
    if matches!(result, Err(Fault::Conflict { .. } | Fault::Rejected { .. })) {
        // A failed statement rolls back only itself; a COMMIT would keep the others.
        link.rollback().await?;
    }
    result
}

async fn transact(context: &Context, link: &mut Link, attempt: &mut Attempt<'_>) -> Result<(), Fault> {
    let keys: BTreeSet<&Key> = attempt.groups.iter().flatten().flat_map(Op::keys).collect();
    let asked_at = clock::now();
    let rows = link.lock_rows(context, keys.iter().copied()).await?;
    context.check_watched()?;
    link.check_member()?;
    let stored = rows.into_iter().map(read_row).collect::<Result<Stored, Fault>>()?;
    let (mut records, revisions) = assemble(&keys, stored);
    let env = environment(context, link, &records, &keys, (link.sample.now, link.sample.now));
    let batch_id = link.next_batch_id();
    let outcomes = record::run(&mut records, attempt.groups, attempt.tried, &env, batch_id);
    let replies = outcomes.into_iter().map(|outcomes| Reply { outcomes, asked_at, now: env.now }).collect();
    let writes = writes(&records, &revisions, env.now);
    if writes.is_empty() {
        link.rollback().await?;
        remember(context, link, &records, &revisions, env.now);
        attempt.decided = Some(Decided { batch_id, replies });
        return Ok(());
    }
    attempt.decided = Some(Decided { batch_id, replies });
    commit(link, writes, attempt.deadline).await?;
    remember(context, link, &records, &revisions, env.now);
    Ok(())
}

type Stored = HashMap<Key, (Record, u64)>;

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
