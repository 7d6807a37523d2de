//! Notices when leases begin and end.

use super::Table;
use super::actions::{Action, Note};
use super::in_flight::BatchItem;
use super::leases::HeldLease;
use super::limits::LOOK_MS;
use super::timer::Timer;
use crate::lock::record::Claim;
use crate::lock::{Instant, Key, Mode};

impl Table {
    /// Adds a lease, or extends it if it is known. Returns whether it is new to this proxy.
    pub(super) fn lease_granted(&mut self, nonce: u64, lease: HeldLease) -> bool {
        if self.leases.get(nonce).is_some() {
            self.renewed(nonce, lease.until);
            return false;
        }
        if lease.mode != Mode::Exclusive {
            for key in &*lease.keys {
                self.queue_of(key).leases += 1;
            }
        }
        self.leases.insert(nonce, lease);
        true
    }

    pub(super) fn renewed(&mut self, nonce: u64, until: Instant) {
        let Some(keys) = self.leases.extend(nonce, until) else { return };
        for key in &*keys {
            if let Some(queue) = self.queues.get_mut(key) {
                queue.due.retain(|due| *due != nonce);
                self.remove_if_idle(key);
            }
        }
    }

    /// Removes the lease; its keys may be asked for again.
    pub(super) fn lease_ended(&mut self, nonce: u64) -> Option<HeldLease> {
        let lease = self.leases.remove(nonce)?;
        for key in &*lease.keys {
            if let Some(queue) = self.queues.get_mut(key) {
                queue.leases = queue.leases.saturating_sub(usize::from(lease.mode != Mode::Exclusive));
                queue.due.retain(|due| *due != nonce);
                queue.ready = true;
                queue.holder = None;
            }
        }
        Some(lease)
    }

    pub(super) fn lease_over(&mut self, nonce: u64, now: Instant) {
        if let Some(lease) = self.lease_ended(nonce) {
            self.actions.push_back(Action::Gone { nonce });
            self.advance_all(&lease.keys, now);
        }
    }

    /// The lease was found lost, unless a release that is in flight has ended it.
    pub(super) fn lease_lost(&mut self, nonce: u64, now: Instant) {
        let mut items = self.in_flight.values().flat_map(|in_flight| &in_flight.items);
        let releases = |item: &BatchItem| matches!(item, BatchItem::Release { release, .. } if release.lease.nonce == nonce);
        if items.any(releases) {
            self.actions.push_back(Action::Gone { nonce });
            return;
        }
        if let Some(lease) = self.leases.get(nonce) {
            let held_ms = now.ms_since(lease.since);
            for (key, token) in lease.keyed_tokens() {
                let owner = lease.owner.clone();
                self.actions.push_back(Action::Note(Note::Lost { key, owner, token, held_ms }));
            }
        }
        self.lease_over(nonce, now);
    }

    /// The lease has ended as far as this proxy knows, so its keys may be asked for. Another proxy may have
    /// renewed it, so the proxy asks the store before it reports the end.
    pub(super) fn lease_due(&mut self, nonce: u64, now: Instant) {
        let Some(keys) = self.leases.get(nonce).map(|lease| lease.keys.clone()) else { return };
        self.timers.insert((now.plus_ms(LOOK_MS), Timer::Look(nonce)));
        for key in &*keys {
            let queue = self.queue_of(key);
            queue.due.push(nonce);
            queue.ready = true;
            queue.holder = None;
        }
        self.advance_all(&keys, now);
    }

    pub(super) fn lease_expired(&mut self, nonce: u64, now: Instant) {
        let Some(lease) = self.lease_ended(nonce) else { return };
        self.note_expired(&lease, now);
        self.advance_all(&lease.keys, now);
    }

    fn note_expired(&mut self, lease: &HeldLease, now: Instant) {
        let held_ms = now.ms_since(lease.since);
        for (key, token) in lease.keyed_tokens() {
            let owner = lease.owner.clone();
            self.actions.push_back(Action::Note(Note::Expired { key, owner, token, held_ms }));
        }
    }

    /// Ends the leases that would exclude this grant: as the store made the grant, they are over, although the
    /// store has not been asked about them. Returns their keys, which may be asked for.
    pub(super) fn leases_followed(&mut self, claim: &Claim, nonce: u64, now: Instant) -> Vec<Key> {
        let mut freed = Vec::new();
        for key in &*claim.keys {
            let due = self.queues.get(key).map_or_else(Vec::new, |queue| queue.due.clone());
            for due in due.into_iter().filter(|due| *due != nonce) {
                let excludes = |mode| mode == Mode::Exclusive;
                let earlier = self.leases.get(due).map(|lease| lease.mode);
                if (excludes(claim.mode) || earlier.is_some_and(excludes))
                    && let Some(lease) = self.lease_ended(due)
                {
                    self.note_expired(&lease, now);
                    freed.extend(lease.keys.iter().cloned());
                }
            }
        }
        freed
    }
}
