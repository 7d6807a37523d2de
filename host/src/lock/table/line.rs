//! Waiters whose order holds over all proxies: the store has a place for each of them.
//!
//! Each asks the store once when it comes, past the queue of this proxy, and has its place then. Who
//! releases looks whose turn it is and rings that proxy; places are kept as long as their waiters are here.

use super::flights::Part;
use super::{Action, Entry, JOIN_MS, KEEP_PLACES_MS, Table, Timer, WaiterId};
use crate::lock::record::{LineChange, Turn};
use crate::lock::{Instant, Key, LeaseRef};

impl Table {
    pub(super) fn line(&mut self, key: Key, change: LineChange, out: &mut Vec<Action>) {
        self.fly(vec![Part::Line { key, change }], out);
    }

    /// What a release asks besides: whose turn it is, where the order may hold over all proxies.
    pub(super) fn looks(&self, lease: &LeaseRef) -> Vec<Part> {
        let claim = self.leases.claim(lease.nonce);
        if claim.is_some_and(|claim| claim.line.is_none()) {
            return Vec::new();
        }
        let look = |key: &Key| Part::Line { key: key.clone(), change: LineChange::Look };
        lease.keys.iter().map(look).collect()
    }

    /// The key is free: whoever is first asks for it, here or elsewhere.
    pub(super) fn turn(&mut self, key: &Key, turn: Turn, out: &mut Vec<Action>) {
        let waiters = self.queues.get(key).into_iter().flat_map(|queue| queue.in_order());
        let has_it =
            |entry: &&Entry| entry.waiter.claim.line.as_ref().is_some_and(|own| own.ticket == turn.ticket);
        let first = waiters.filter_map(|id| self.waiters.get(id)).find(has_it);
        match first.map(|entry| (entry.waiter.id, entry.flight.is_none() && !entry.cancelled)) {
            // It may stand behind others in this proxy's queue: the store's order counts.
            Some((waiter, false)) => {
                if let Some(entry) = self.waiters.get_mut(&waiter) {
                    entry.again = true;
                }
            }
            Some((waiter, true)) => {
                self.fly(vec![Part::Rejoin { waiter, over: false }], out);
            }
            None => out.push(Action::Ring { key: key.clone(), turn }),
        }
    }

    /// Whether the waiter takes its place a moment later, with others: one that stands behind a waiter of this
    /// proxy which is in line is not next, and a write for each arrival would hold up who is.
    pub(super) fn join_together(&mut self, id: WaiterId, now: Instant) -> bool {
        let Some(entry) = self.waiters.get(&id) else { return false };
        let claim = &entry.waiter.claim;
        let ([key], true, true) =
            (&*claim.keys, claim.request.is_none(), claim.line.as_ref().is_some_and(|own| own.joins))
        else {
            return false;
        };
        let (key, place) = (key.clone(), entry.place);
        let Some(queue) = self.queues.get(&key) else { return false };
        let in_line = |id: WaiterId| self.waiters.get(&id).is_some_and(|entry| entry.in_line);
        if !queue.ahead_of(place).any(in_line) {
            return false;
        }
        if let Some(queue) = self.queues.get_mut(&key) {
            queue.joining.push(id);
            if queue.joining.len() == 1 {
                self.timers.insert((now.plus_ms(JOIN_MS), Timer::Join(key)));
            }
        }
        true
    }

    pub(super) fn join(&mut self, key: &Key, out: &mut Vec<Action>) {
        let joining = self.queues.get_mut(key).map(|queue| std::mem::take(&mut queue.joining));
        let waits = |id: &WaiterId| {
            let entry = self.waiters.get(id);
            entry.is_some_and(|entry| entry.flight.is_none() && !entry.in_line && !entry.cancelled)
        };
        let joining = joining.into_iter().flatten().filter(waits);
        let parts: Vec<Part> = joining.map(|waiter| Part::Rejoin { waiter, over: false }).collect();
        if !parts.is_empty() {
            self.fly(parts, out);
        }
    }

    pub(super) fn leave_line(&mut self, entry: &Entry) {
        let claim = &entry.waiter.claim;
        if let Some(own) = claim.line.as_ref().filter(|_| entry.in_line) {
            for key in &*claim.keys {
                self.timers.insert((Instant(0), Timer::Leave(key.clone(), own.ticket)));
            }
        }
    }

    pub(super) fn keep_places_later(&mut self, id: WaiterId, now: Instant) {
        let Some(entry) = self.waiters.get(&id).filter(|entry| entry.in_line) else { return };
        let at = now.plus_ms(KEEP_PLACES_MS);
        for key in &*entry.waiter.claim.keys {
            if let Some(queue) = self.queues.get_mut(key)
                && queue.keep_at.is_none()
            {
                queue.keep_at = Some(at);
                self.timers.insert((at, Timer::Keep(key.clone())));
            }
        }
    }

    pub(super) fn keep_places(&mut self, key: &Key, now: Instant, out: &mut Vec<Action>) {
        let Some(queue) = self.queues.get_mut(key) else { return };
        queue.keep_at = None;
        let entries = queue.in_order().filter_map(|id| self.waiters.get(id)).filter(|entry| entry.in_line);
        let (mut tickets, mut any) = (Vec::new(), None);
        for entry in entries {
            tickets.extend(entry.waiter.claim.line.as_ref().map(|own| own.ticket));
            any = Some(entry.waiter.id);
        }
        if let Some(any) = any {
            self.keep_places_later(any, now);
            self.line(key.clone(), LineChange::Keep { tickets }, out);
        }
    }
}
