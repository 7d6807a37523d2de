//! One round trip: decides on remembered rows, and writes them only if the server still has the same rows.
//!
//! A decision depends on the server's time. It is made for the latest time that the server's clock can show,
//! and the statement applies only if the clock shows at least the earliest. If a lease or a delay of the rows
//! ends between the two, the decision could differ, so this path is not taken.
//!
//! Every key must change, because only written rows are compared with the server's rows. The stored outcome
//! of a `once` is an exception: nothing changes it before it expires, so it is used without a comparison.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;

use super::batch::PACKET_BYTES;
use super::cache;
use super::queue::{Attempt, Decided};
use super::rows::{environment, next_revision, row_write};
use crate::clock;
use crate::coverage::{Branch, reached};
use crate::lock::record::{self, BatchId, Op, Outcome, Record, Records};
use crate::lock::{Instant, Key, ServerTime};
use crate::mysql::clock_steps;
use crate::mysql::context::Context;
use crate::mysql::session::fault::Fault;
use crate::mysql::session::link::Link;
use crate::mysql::sql::{LOCK_WAIT_S, RowWrite};
use crate::store::Reply;

/// A sample of the clock is used for this long, in microseconds.
const SAMPLE_US: u64 = 1_000_000;

/// Runs the groups if the remembered rows allow it. False: nothing was applied, and the server has to be
/// asked.
pub async fn try_run(context: &Context, link: &mut Link, attempt: &mut Attempt<'_>) -> Result<bool, Fault> {
    let asked_at = clock::now();
    // The statement may wait for the lock of the last row after it has read the time, so leave room for that.
    let deadline = Instant(attempt.deadline.0.saturating_sub(u64::from(LOCK_WAIT_S) * 1_000_000));
    let fresh = asked_at.us_since(link.sample.after) <= SAMPLE_US
        && link.sample.before.0 > context.sampled_after.load(Ordering::SeqCst);
    if deadline <= asked_at || !fresh || !link.sysdate_moves || !link.throttle.try_now() {
        reached(Branch::FastStale);
        return Ok(false);
    }
    let batch_id = link.next_batch_id();
    let Some(mut plan) = Plan::new(context, link, attempt.groups, asked_at, batch_id) else {
        return Ok(false);
    };
    attempt.decided = Some(Decided { batch_id, replies: std::mem::take(&mut plan.replies) });
    let applied = plan.apply(link, deadline).await?;
    link.throttle.note(applied);
    if applied {
        plan.finish(context, link);
    } else {
        attempt.decided = None;
    }
    Ok(applied)
}

/// The rows to write, and the replies once they are written.
struct Plan {
    records: Records,
    writes: Vec<RowWrite>,
    /// The new revisions of all rows that were used, once the plan is applied.
    revisions: Vec<(Key, u64)>,
    replies: Vec<Reply>,
    earliest: ServerTime,
    latest: ServerTime,
}

impl Plan {
    /// `None` if a row is unknown, would not change, or may change with time.
    fn new(
        context: &Context,
        link: &Link,
        groups: &[Vec<Op>],
        asked_at: Instant,
        batch_id: BatchId,
    ) -> Option<Plan> {
        let (earliest, latest) = {
            let steps = context.clock_steps();
            let may_decide = steps.is_watched() && steps.waits_until() <= asked_at;
            steps.server_time(asked_at).filter(|_| may_decide)?
        };
        if link.sample.grants_from > earliest {
            return None;
        }
        let ops = || groups.iter().flatten();
        let keys: BTreeSet<&Key> = ops().flat_map(Op::keys).collect();
        let mut records = Records::default();
        let mut known = BTreeMap::new();
        for &key in &keys {
            let Some(row) = context.cache.take(key, link.cache_scope()) else {
                if !ops().filter(|op| op.keys().contains(key)).all(is_likely_new) {
                    reached(Branch::FastUnknown);
                    return None;
                }
                reached(Branch::FastUnseen);
                records.insert(key.clone(), None);
                continue;
            };
            if changes_between(&row.record, earliest, latest) {
                reached(Branch::FastMoves);
                return None;
            }
            known.insert(key, row.revision);
            records.insert(key.clone(), Some(row.record));
        }
        let env = environment(context, link, &records, &keys, (earliest, latest));
        let outcomes = record::run(&mut records, groups, &mut [], &env, batch_id);
        let reply = |outcomes| Reply { outcomes, asked_at, now: latest };
        let replies: Vec<Reply> = outcomes.into_iter().map(reply).collect();
        let (mut writes, mut revisions) = (Vec::new(), Vec::new());
        for (key, record, _) in records.changed() {
            let last = known.remove(key);
            let revision = next_revision(last.as_ref(), latest);
            if last.is_some_and(|last| revision != last + 1) {
                return None;
            }
            revisions.push((key.clone(), revision));
            writes.push(row_write(key, record, revision, latest));
        }
        let outcomes = replies.iter().flat_map(|reply| &reply.outcomes);
        let changed: BTreeSet<&Key> = records.changed().map(|(key, _, _)| key).collect();
        let believed = ops().zip(outcomes).all(|(op, outcome)| {
            matches!(outcome, Outcome::Done(_)) || op.keys().iter().all(|key| changed.contains(key))
        });
        let bytes: usize = writes.iter().map(|write| write.state.len()).sum();
        if !believed || bytes > PACKET_BYTES {
            return None;
        }
        revisions.extend(known.into_iter().map(|(key, revision)| (key.clone(), revision)));
        Some(Plan { records, writes, revisions, replies, earliest, latest })
    }

    /// False if nothing was applied because the server has other rows or another time.
    async fn apply(&mut self, link: &mut Link, deadline: Instant) -> Result<bool, Fault> {
        let writes = std::mem::take(&mut self.writes);
        if writes.is_empty() {
            reached(Branch::FastTold);
            return Ok(true);
        }
        // If the clock is past the margin, it was set forward, and a lease would be too short.
        let not_after = self.latest.plus_us(clock_steps::MARGIN_US).min(link.latest(deadline));
        match link.write_if_same(writes, (self.earliest, not_after)).await {
            Ok(()) => {
                reached(Branch::FastWritten);
                Ok(true)
            }
            Err(Fault::Conflict { .. } | Fault::Rejected { .. }) => {
                reached(Branch::FastMissed);
                Ok(false)
            }
            Err(fault) => Err(fault),
        }
    }

    fn finish(self, context: &Context, link: &Link) {
        let cache_scope = link.cache_scope();
        for (key, revision) in self.revisions {
            if let Some(record) = self.records.get(&key) {
                context.cache.put(key, cache::Row { record: record.clone(), revision, cache_scope });
            }
        }
    }
}

/// Whether an unknown key is assumed to be missing. A `once` is mostly for a new key.
fn is_likely_new(op: &Op) -> bool {
    matches!(op, Op::Acquire(claim) if claim.keep_ms.is_some() && claim.keys.len() == 1)
}

/// Whether a decision about the record can depend on the time within these bounds.
fn changes_between(record: &Record, earliest: ServerTime, latest: ServerTime) -> bool {
    let within = |at: ServerTime| earliest < at && at <= latest;
    within(record.not_before)
        || record.kept.as_ref().is_some_and(|kept| within(kept.until))
        || record.global_queue.iter().any(|place| within(place.until))
        || record.wanted.iter().any(|mark| within(mark.until))
        || record.holders.iter().any(|holder| {
            [holder.until, holder.over_at(), holder.at_least_until, holder.free_at()].into_iter().any(within)
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mysql::pipeline::backoff::OptimisticThrottle;

    /// A holder stops blocking others a moment after its lease has ended, or after its delay.
    #[test]
    fn a_record_changes_when_its_holder_stops_blocking_others() {
        let state =
            r#"{"holders":[{"nonce":1,"owner":"me","token":1,"since":0,"until":1000000,"ttl_ms":1000}]}"#;
        let mut record = crate::mysql::codec::decode(1, state.as_bytes()).expect("it is a record");
        for delay_ms in [0, 5_000] {
            record.holders[0].delay_ms = delay_ms;
            let holder = &record.holders[0];
            let around = |at: ServerTime| changes_between(&record, ServerTime(at.0 - 1), at);
            assert!(around(holder.until) && around(holder.free_at()), "{delay_ms}");
            assert!(!around(holder.until.plus_ms(50)) && !around(holder.free_at().plus_us(1)), "{delay_ms}");
        }
    }

    #[test]
    fn an_optimistic_write_is_tried_less_often_after_a_failure() {
        let mut throttle = OptimisticThrottle::default();
        assert!(throttle.try_now());
        let mut tries = 0;
        for _ in 0..1_000 {
            if throttle.try_now() {
                throttle.note(false);
                tries += 1;
            }
        }
        assert!((15..30).contains(&tries), "{tries} tries");
        throttle.note(true);
        assert!(throttle.try_now() && throttle.try_now());
    }
}
