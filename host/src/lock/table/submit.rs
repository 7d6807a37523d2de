//! Sends batches to the store.

use super::Table;
use super::actions::Action;
use super::chores::Abandon;
use super::events::SubmissionId;
use super::in_flight::{BatchItem, InFlight};
use super::timer::Timer;
use crate::lock::Key;
use crate::lock::record::Op;

impl Table {
    /// Sends a batch to the store and marks its waiters and their keys as in flight.
    pub(super) fn submit(&mut self, items: Vec<BatchItem>) {
        self.tickets += 1;
        let ticket = SubmissionId(self.tickets);
        let mut ops = Vec::with_capacity(items.len());
        let mut keys = Vec::new();
        for item in &items {
            match item {
                BatchItem::Release { release, .. } => ops.push(Op::Release(release.clone())),
                BatchItem::Abandon(Abandon { keys, attempt, .. }) => {
                    ops.push(Op::Abandon { keys: keys.clone(), attempt: *attempt });
                }
                BatchItem::Look { lease } => {
                    ops.push(Op::Raise { lease: lease.clone(), tokens: None });
                }
                BatchItem::GlobalQueue { key, change } => {
                    ops.push(Op::GlobalQueue { key: key.clone(), change: change.clone() });
                }
                BatchItem::Rejoin { waiter, .. } | BatchItem::Acquire { waiter } => {
                    let Some(entry) = self.waiters.get_mut(waiter) else { continue };
                    entry.in_flight = Some(ticket);
                    let mut claim = entry.waiter.claim.clone();
                    if claim.global.is_none() {
                        // A waiter behind a lease of this proxy meets no other proxy, so no note is needed that
                        // this proxy waits.
                        let holder = |key: &Key| self.queues.get(key)?.holder.as_ref();
                        let is_own = |key: &Key| holder(key).is_some_and(|known| known.own);
                        let releases = matches!(items.first(), Some(BatchItem::Release { .. }));
                        claim.waits &= releases || !claim.keys.iter().all(is_own);
                        entry.marks = claim.waits;
                    }
                    if let BatchItem::Rejoin { over, .. } = item {
                        entry.in_global_queue |= claim.global.is_some() && !over;
                        ops.push(match entry.in_global_queue {
                            true => Op::Acquire(claim),
                            false => Op::Rejoin(claim),
                        });
                        continue;
                    }
                    entry.in_global_queue |= claim.global.is_some();
                    entry.attempts += 1;
                    keys.extend(claim.keys.iter().cloned());
                    ops.push(Op::Acquire(claim));
                }
            }
        }
        for key in &keys {
            if let Some(queue) = self.queues.get_mut(key) {
                queue.in_flight = Some(ticket);
                if let Some(at) = queue.poll_at.take() {
                    self.timers.remove(&(at, Timer::Poll(key.clone())));
                }
            }
        }
        self.in_flight.insert(ticket, InFlight { items, keys });
        self.actions.push_back(Action::Submit { ticket, ops });
    }
}
