//! Runs batches of groups, including groups that are retried because their answer was lost.
//!
//! A batch is one transaction: all of it was applied, or nothing. Each record that a batch changes keeps the
//! [`BatchId`] for a while. So if a connection broke before the answer came, the records tell whether the batch
//! was applied, regardless of later changes.

use super::apply::apply;
use super::{BatchId, Env, MAX_BATCH_IDS, Op, Outcome, Record, Records};
use crate::lock::Key;

/// How long a batch id is kept, in microseconds: longer than any call is retried (`store.timeout_ms` is 60 s at
/// most).
pub const BATCH_ID_KEPT_US: u64 = 180_000_000;

/// An earlier try of a group, whose answer was lost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tried {
    /// The batch of that try.
    pub batch_id: BatchId,
    /// The answer if that batch was applied.
    pub outcomes: Vec<Outcome>,
}

/// The fate of a batch whose answer was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Applied,
    NotApplied,
    Unknown,
}

/// Decides the groups in order, and stores `batch_id` in the records that they change.
///
/// `tried` has an entry for each group, or is empty. Afterwards it lacks the tries that were not applied; their
/// groups are decided anew. In the other groups, operations that must not be applied twice get their earlier
/// answer, or [`Outcome::Unknown`] if the records do not tell whether they were applied. All other operations
/// are decided again.
///
/// # Panics
/// If `records` lacks a key of an operation.
pub fn run(
    records: &mut Records,
    groups: &[Vec<Op>],
    tried: &mut [Option<Tried>],
    env: &Env,
    batch_id: BatchId,
) -> Vec<Vec<Outcome>> {
    // This comes before any change: no record has the id of this batch yet.
    for (group, place) in groups.iter().zip(tried.iter_mut()) {
        if place.as_ref().is_some_and(|tried| fate(records, group, tried) == Fate::NotApplied) {
            *place = None;
        }
    }
    let mut outcomes = Vec::with_capacity(groups.len());
    for (n, group) in groups.iter().enumerate() {
        outcomes.push(match tried.get(n).and_then(Option::as_ref) {
            None => group.iter().map(|op| apply(records, op, env)).collect(),
            Some(tried) => again(records, group, tried, env),
        });
    }
    records.changed_mut().for_each(|record| sign(record, batch_id, env));
    outcomes
}

/// The outcomes of a group whose earlier try was applied, or may have been.
fn again(records: &mut Records, group: &[Op], tried: &Tried, env: &Env) -> Vec<Outcome> {
    let fate = fate(records, group, tried);
    let outcome = |(op, before): (&Op, &Outcome)| match (happens_once(op), fate) {
        (false, _) => apply(records, op, env),
        (true, Fate::Applied) => before.clone(),
        (true, _) => Outcome::Unknown,
    };
    group.iter().zip(&tried.outcomes).map(outcome).collect()
}

/// Whether the operation must not be applied twice. Every other operation finds its earlier effect, or has no
/// effect the second time.
fn happens_once(op: &Op) -> bool {
    matches!(op, Op::Release(_) | Op::Commit(_) | Op::Force { .. } | Op::Restore(_))
}

fn fate(records: &Records, group: &[Op], tried: &Tried) -> Fate {
    let Some(key) = witness(group, &tried.outcomes) else { return Fate::NotApplied };
    // A row is kept for longer than any call is retried, so a missing row was never written.
    let Some(record) = records.get(key).filter(|_| records.is_stored(key)) else { return Fate::NotApplied };
    match &record.batch_ids[..] {
        batch_ids if batch_ids.contains(&tried.batch_id) => Fate::Applied,
        // The last writer was an earlier version without batch ids, or there were so many writers that some ids
        // are gone.
        batch_ids if batch_ids.is_empty() || batch_ids.len() >= MAX_BATCH_IDS => Fate::Unknown,
        _ => Fate::NotApplied,
    }
}

/// A key whose record the group has changed if it was applied; `None` if it is safe to decide the group anew.
fn witness<'a>(group: &'a [Op], outcomes: &[Outcome]) -> Option<&'a Key> {
    let changed = |outcome: &Outcome| match outcome {
        Outcome::Released { .. } | Outcome::Committed { .. } | Outcome::Restored { .. } => true,
        Outcome::Forced { holders } => *holders > 0,
        _ => false,
    };
    let mut parts = group.iter().zip(outcomes);
    parts.find(|(op, outcome)| happens_once(op) && changed(outcome)).map(|(op, _)| &op.keys()[0])
}

/// Replaces the connection's last batch id by this one.
fn sign(record: &mut Record, batch_id: BatchId, env: &Env) {
    let is_old = |other: &BatchId| env.steady && other.at.plus_us(BATCH_ID_KEPT_US) <= env.now;
    record.batch_ids.retain(|other| other.writer != batch_id.writer && !is_old(other));
    if record.batch_ids.len() >= MAX_BATCH_IDS {
        record.batch_ids.remove(0);
    }
    record.batch_ids.push(batch_id);
}
