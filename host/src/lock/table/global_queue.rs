//! Waiters in the global queue: the store keeps a place for each of them.
//!
//! Each waiter asks the store once when it arrives, ahead of this proxy's queue, and thereby gets its place.
//! After a release, the proxy finds the next waiter in the global queue and notifies that waiter's proxy. A
//! proxy extends the places of its waiters for as long as they wait.

use super::Table;
use super::actions::Action;
use super::entry::Entry;
use super::events::WaiterId;
use super::in_flight::BatchItem;
use super::limits::{JOIN_MS, KEEP_PLACES_MS};
use super::timer::Timer;
use crate::lock::maps::HashSet;
use crate::lock::record::{Denial, GlobalQueueChange, Grant, NextWaiter};
use crate::lock::{Instant, Key};

impl Table {
    pub(super) fn change_global_queue(&mut self, key: Key, change: GlobalQueueChange) {
        self.submit(vec![BatchItem::GlobalQueue { key, change }]);
    }

    /// Probes for a batch that may free these keys, to find the next waiter, which may be another proxy's. They read the
    /// records that the batch reads in any case. Keys of a session are freed for this proxy alone, and have no probes.
    pub(super) fn looks(keys: &[Key]) -> impl Iterator<Item = BatchItem> {
        let shared = keys.iter().filter(|key| !key.space().rests_on_session());
        shared.map(|key| BatchItem::GlobalQueue { key: key.clone(), change: GlobalQueueChange::Look })
    }

    /// The key is free: lets the next waiter ask for it, on this proxy or through a notification to another.
    pub(super) fn notify_next_waiter(&mut self, key: &Key, next_waiter: NextWaiter) {
        let waiters = self.queues.get(key).into_iter().flat_map(|queue| queue.in_order());
        let has_it = |entry: &&Entry| next_waiter.ticket.is_some() && entry.ticket() == next_waiter.ticket;
        let first = waiters.filter_map(|id| self.waiters.get(id)).find(has_it);
        match first.map(|entry| (entry.waiter.id, entry.in_flight.is_none() && !entry.cancelled)) {
            // The waiter may stand behind others in this proxy's queue, but the order of the store decides.
            Some((waiter, false)) => {
                if let Some(entry) = self.waiters.get_mut(&waiter) {
                    entry.again = true;
                }
            }
            Some((waiter, true)) => {
                self.submit(vec![BatchItem::Rejoin { waiter, over: false }]);
            }
            None => self.actions.push_back(Action::NotifyPeer { key: key.clone(), next_waiter }),
        }
    }

    /// A note that this proxy waits may stand for waiters that came later. A ticket stands for one waiter,
    /// which has gone.
    pub(super) fn orphan(&mut self, key: Key, next_waiter: NextWaiter, now: Instant) {
        let NextWaiter { proxy, ticket } = next_waiter;
        if ticket.is_none() && self.queues.get(&key).is_some_and(|queue| queue.len() > 0) {
            return self.wake(&key, now);
        }
        self.change_global_queue(key, GlobalQueueChange::Leave { proxy, ticket });
    }

    /// The store now has a note that this proxy waits, if the claim asked for one.
    pub(super) fn marked(&mut self, id: WaiterId, denial: &Denial) {
        let Some(entry) = self.waiters.get(&id).filter(|entry| entry.marks) else { return };
        let claim = &entry.waiter.claim;
        let keys = if claim.any { std::slice::from_ref(&denial.key) } else { &*claim.keys };
        for key in keys {
            if let Some(queue) = self.queues.get_mut(key) {
                queue.marked = Some(claim.proxy.clone());
            }
        }
    }

    /// The waiter was granted these keys, which has removed the notes that this proxy waits for them.
    pub(super) fn unmarked(&mut self, id: WaiterId, grant: &Grant) {
        let Some(entry) = self.waiters.get(&id).filter(|entry| entry.waiter.claim.global.is_none()) else {
            return;
        };
        let keys = grant.chosen.as_ref().map_or(&*entry.waiter.claim.keys, std::slice::from_ref);
        for key in keys {
            if let Some(queue) = self.queues.get_mut(key) {
                queue.marked = None;
            }
        }
    }

    /// Whether the waiter joins the global queue a moment later, together with others. A waiter behind another
    /// waiter of this proxy in the global queue is not next, and a write for each arrival would delay the next
    /// one.
    fn join_together(&mut self, id: WaiterId, now: Instant) -> bool {
        let Some(entry) = self.waiters.get(&id) else { return false };
        let claim = &entry.waiter.claim;
        let ([key], true, true) =
            (&*claim.keys, claim.request.is_none(), claim.global.is_some() && claim.waits)
        else {
            return false;
        };
        let (key, place) = (key.clone(), entry.place);
        let Some(queue) = self.queues.get(&key) else { return false };
        let in_line = |id: WaiterId| self.waiters.get(&id).is_some_and(|entry| entry.in_global_queue);
        if !queue.ahead_of(place).any(in_line) {
            return false;
        }
        self.join_later(key, id, now);
        true
    }

    fn join_later(&mut self, key: Key, id: WaiterId, now: Instant) {
        if let Some(queue) = self.queues.get_mut(&key) {
            queue.joining.push(id);
            if queue.joining.len() == 1 {
                self.timers.insert((now.plus_ms(JOIN_MS), Timer::Join(key)));
            }
        }
    }

    /// Whether the waiter joins the global queue a moment later: together with others, or behind a waiter that
    /// has to join first.
    pub(super) fn joins_later(&mut self, id: WaiterId, now: Instant) -> bool {
        let Some(key) = self.held_back_at(id) else { return self.join_together(id, now) };
        self.join_later(key, id, now);
        true
    }

    /// Lets a waiter whose claim is in flight join the global queue after the answer. Waiters that come later
    /// do not pass it.
    pub(super) fn joins_global_queue(&mut self, id: WaiterId, now: Instant) {
        let Some(keys) = self.waiters.get(&id).map(|entry| entry.waiter.claim.keys.clone()) else { return };
        for key in &*keys {
            self.join_later(key.clone(), id, now);
        }
    }

    /// A key at which a waiter ahead of this one has not joined the global queue yet.
    fn held_back_at(&self, id: WaiterId) -> Option<Key> {
        let own = self.waiters.get(&id)?;
        let is_before =
            |other: &WaiterId| self.waiters.get(other).is_some_and(|other| other.place < own.place);
        let is_behind =
            |key: &&Key| self.queues.get(*key).is_some_and(|queue| queue.joining.iter().any(is_before));
        own.waiter.claim.keys.iter().find(is_behind).cloned()
    }

    pub(super) fn join(&mut self, key: &Key, now: Instant) {
        let joining = self.queues.get_mut(key).map(|queue| std::mem::take(&mut queue.joining));
        let (mut items, mut seen) = (Vec::new(), HashSet::default());
        for id in joining.into_iter().flatten().filter(|id| seen.insert(*id)) {
            match self.waiters.get(&id) {
                Some(entry) if entry.in_global_queue || entry.cancelled => {}
                Some(entry) if entry.in_flight.is_some() && entry.replan.is_some() => {
                    self.join_later(key.clone(), id, now);
                }
                Some(entry) if entry.in_flight.is_some() => {}
                Some(_) => match self.held_back_at(id) {
                    Some(key) => self.join_later(key, id, now),
                    None => items.push(BatchItem::Rejoin { waiter: id, over: false }),
                },
                None => {}
            }
        }
        if !items.is_empty() {
            self.submit(items);
        }
    }

    /// Gives up the waiter's places in the global queue, except two kinds of places to which a client can
    /// return: those of a proxy that shuts down, which stay until they expire, and those that the same request
    /// waits for on another connection.
    pub(super) fn leave_line(&mut self, entry: &Entry) {
        let claim = &entry.waiter.claim;
        let Some(own) = claim.global.as_ref().filter(|_| entry.in_global_queue) else { return };
        if own.returns && (self.shutting_down || self.has_another(entry)) {
            return;
        }
        for key in &*claim.keys {
            let leave = Timer::Leave(key.clone(), claim.proxy.clone(), Some(own.number));
            self.timers.insert((Instant(0), leave));
        }
    }

    fn has_another(&self, entry: &Entry) -> bool {
        let queue = self.queues.get(&entry.waiter.claim.keys[0]);
        let mut others = queue.into_iter().flat_map(|queue| queue.in_order());
        let same = |id: &WaiterId| self.waiters.get(id).is_some_and(|other| other.ticket() == entry.ticket());
        others.any(same)
    }

    pub(super) fn keep_places_later(&mut self, id: WaiterId, now: Instant) {
        let Some(entry) = self.waiters.get(&id).filter(|entry| entry.in_global_queue) else { return };
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

    /// Extends the places, at the time for which a timer was set: a queue that was made again has another timer.
    pub(super) fn keep_places(&mut self, key: &Key, at: Instant, now: Instant) {
        let Some(queue) = self.queues.get_mut(key).filter(|queue| queue.keep_at == Some(at)) else { return };
        queue.keep_at = None;
        let entries =
            queue.in_order().filter_map(|id| self.waiters.get(id)).filter(|entry| entry.in_global_queue);
        let (mut tickets, mut any) = (Vec::new(), None);
        for entry in entries {
            tickets.extend(entry.ticket());
            any = Some(entry.waiter.id);
        }
        if let Some(any) = any {
            self.keep_places_later(any, now);
            self.change_global_queue(key.clone(), GlobalQueueChange::Keep { tickets });
        }
    }
}
