//! Entering and leaving the queues.

use std::collections::BTreeSet;

use super::Table;
use super::actions::{Action, Verdict};
use super::chores::{Abandon, Chore};
use super::entry::{Entry, OwnLease};
use super::events::{Waiter, WaiterId};
use super::in_flight::BatchItem;
use super::limits::{MAX_POLL_MS, OVERDUE_MS, RUN_MAX};
use super::queue::{Known, QueuePosition};
use super::timer::Timer;
use crate::lock::record::{Claim, Denial, HeldBy};
use crate::lock::{Instant, Key, Mode, Token};

impl Table {
    pub(super) fn enqueue(&mut self, waiter: Waiter, now: Instant) {
        let id = waiter.id;
        if self.shutting_down {
            self.actions.push_back(Action::Finish { waiter: id, verdict: Verdict::ShuttingDown });
            return;
        }
        let full =
            |key: &Key| self.queues.get(key).is_some_and(|q| q.len() >= waiter.max_waiters.max(1) as usize);
        // The store must learn of a waiter with a ticket at once, to give it a place in the global queue.
        let asks_at_once = waiter.claim.global.is_some();
        let may_have_its_lease = waiter.claim.may_have_its_lease();
        let may_rejoin = may_have_its_lease || asks_at_once;
        if waiter.claim.keys.iter().any(full) && !may_have_its_lease {
            let verdict = self.turned_away(&waiter, now);
            self.actions.push_back(Action::Finish { waiter: id, verdict });
            return;
        }
        let over = waiter.claim.keys.iter().any(full);
        let keys = waiter.claim.keys.clone();
        let deadline = now.plus_ms(waiter.wait_ms);
        self.arrivals += 1;
        let place = QueuePosition { rank: waiter.rank, arrival: self.arrivals };
        let entry = Entry {
            place,
            arrived: now,
            deadline,
            in_flight: None,
            cancelled: false,
            attempts: 0,
            last_sleep_ms: 0,
            denial: None,
            store_error: None,
            unsure_until: None,
            replan: None,
            in_global_queue: false,
            again: false,
            own_lease: OwnLease::NotSought,
            marks: false,
            waiter,
        };
        self.timers.insert((deadline, Timer::Deadline(id)));
        self.reopen(&keys);
        self.join_queues(id, &entry);
        self.waiters.insert(id, entry);
        self.advance_all(&keys, now);
        let waits = self.waiters.get(&id).is_some_and(|entry| entry.in_flight.is_none());
        if waits && asks_at_once && self.joins_later(id, now) {
            return;
        }
        if waits && may_rejoin {
            self.probe(id, over);
        } else if waits && deadline <= now {
            self.deadline(id, now);
        }
    }

    /// If a queue is empty, the next waiter asks the store: the key may have been released through another
    /// proxy, or its holders may leave room.
    fn reopen(&mut self, keys: &[Key]) {
        for key in keys {
            if let Some(queue) = self.queues.get_mut(key).filter(|queue| queue.len() == 0) {
                queue.ready = true;
            }
        }
    }

    /// The verdict for a waiter if its queue is full. A waiter that would not have waited needs no room in the
    /// queue: it gets the answer that it would have got there.
    pub(super) fn turned_away(&self, waiter: &Waiter, now: Instant) -> Verdict {
        if waiter.wait_ms > 0 {
            return Verdict::TooManyWaiters { limit: waiter.max_waiters };
        }
        let keys = &waiter.claim.keys;
        let lengths = keys.iter().filter_map(|key| self.queues.get(key)).map(|queue| queue.len() as u32);
        self.contended(keys, None, lengths.max().unwrap_or(0) + 1, None, now)
    }

    pub(super) fn join_queues(&mut self, id: WaiterId, entry: &Entry) {
        for key in &*entry.waiter.claim.keys {
            self.queue_of(key).join(entry.place, id, &entry.waiter.group);
        }
    }

    /// Asks the store, without regard to the queue, whether the waiter already has its grant. `over`: the queue
    /// has no room for the waiter if it has no grant.
    pub(super) fn probe(&mut self, id: WaiterId, over: bool) {
        self.submit(vec![BatchItem::Rejoin { waiter: id, over }]);
    }

    pub(super) fn cancel(&mut self, id: WaiterId, now: Instant) {
        let Some(entry) = self.waiters.get_mut(&id) else { return };
        if entry.in_flight.is_some() {
            entry.cancelled = true;
        } else {
            self.leave(id, now);
        }
    }

    /// Takes the waiter out of its queues and lets the next one move up.
    pub(super) fn leave(&mut self, id: WaiterId, now: Instant) -> Option<Entry> {
        let entry = self.drop_out(id)?;
        let keys = entry.waiter.claim.keys.clone();
        self.advance_all(&keys, now);
        Some(entry)
    }

    /// Takes a waiter without a grant out of its queues, and undoes a grant that it may have.
    pub(super) fn drop_out(&mut self, id: WaiterId) -> Option<Entry> {
        self.undo_unsure(id);
        let entry = self.remove(id)?;
        debug_assert!(entry.in_flight.is_none(), "the answer decides on a waiter that is asked for");
        self.leave_line(&entry);
        Some(entry)
    }

    /// Undoes a grant that the waiter may have without an answer.
    pub(super) fn undo_unsure(&mut self, id: WaiterId) {
        let Some(entry) = self.waiters.get_mut(&id) else { return };
        if let Some(until) = entry.unsure_until.take() {
            let claim = &entry.waiter.claim;
            let (keys, attempt) = (claim.keys.clone(), claim.attempt);
            let charge = entry.waiter.charge.clone();
            self.chore_later(Chore::Abandon(Abandon { keys, attempt, until, _charge: charge }));
        }
    }

    pub(super) fn remove(&mut self, id: WaiterId) -> Option<Entry> {
        let entry = self.waiters.remove(&id)?;
        self.timers.remove(&(entry.deadline, Timer::Deadline(id)));
        for key in &*entry.waiter.claim.keys {
            if let Some(queue) = self.queues.get_mut(key) {
                queue.leave(entry.place, &entry.waiter.group);
                if queue.len() == 0
                    && let Some(proxy) = queue.marked.take()
                {
                    self.timers.insert((Instant(0), Timer::Leave(key.clone(), proxy, None)));
                }
            }
        }
        Some(entry)
    }

    /// The waiter's deadline has passed. If a batch for the waiter is in flight, its answer decides; so does a
    /// batch that the waiter is next after.
    pub(super) fn deadline(&mut self, id: WaiterId, now: Instant) {
        let Some(entry) = self.waiters.get(&id) else { return };
        if entry.in_flight.is_some() {
            return;
        }
        if self.looks_again(id, now) {
            return;
        }
        let Some(entry) = self.waiters.get(&id) else { return };
        if self.is_next_after_batch(entry) {
            let is_overdue = now > entry.deadline.plus_ms(OVERDUE_MS);
            match self.waiters.get_mut(&id).filter(|_| is_overdue) {
                // Each batch may take as long as the store's time-out, and others may follow.
                Some(entry) => {
                    entry.store_error =
                        Some("the store took too long to answer the waiters ahead".to_owned());
                    self.give_up(id, None, now);
                }
                None => self.late.push(id),
            }
            return;
        }
        if !self.ask_once(id) {
            self.give_up(id, None, now);
        }
    }

    /// Asks the store once more whether the lease that blocks the waiter is its own, before the waiter is told
    /// that its key is held. Returns false if there is no reason to ask.
    pub(super) fn looks_again(&mut self, id: WaiterId, now: Instant) -> bool {
        let Some(entry) = self.waiters.get(&id) else { return false };
        let claim = &entry.waiter.claim;
        // It was to join the global queue behind others, and has not asked for anything so far.
        let asks_first = claim.global.is_some()
            && !entry.in_global_queue
            && entry.attempts == 0
            && claim.may_have_its_lease();
        let is_late = entry.deadline <= now;
        let own = self.own_in_the_way(claim, is_late);
        // Another call of the request may have been granted since then.
        let is_new = |own: &HeldBy, last: Option<Token>| is_of_request(own, claim) && Some(own.token) != last;
        let may_find = match entry.own_lease {
            OwnLease::Sought { blocked_by } => own.is_some_and(|own| is_new(own, blocked_by)),
            OwnLease::NotSought => asks_first || own.is_some(),
        };
        if !may_find {
            return false;
        }
        let over = asks_first && is_late;
        let blocked_by = own.map(|own| own.token);
        if let Some(entry) = self.waiters.get_mut(&id) {
            entry.own_lease = if is_late { OwnLease::Sought { blocked_by } } else { OwnLease::NotSought };
        }
        self.probe(id, over);
        true
    }

    /// The lease that blocks the claim, if the same request or the same owner may have that lease. An earlier
    /// call of the request, made through another proxy, may have been granted after this call looked for its
    /// lease. A reentrant claim may be refused for its mode while its owner holds the key: it is looked for
    /// only after the deadline (`late`), because otherwise its policy could not give up.
    fn own_in_the_way(&self, claim: &Claim, late: bool) -> Option<&HeldBy> {
        let is_of_owner = |holder: &HeldBy| late && claim.reentrant && holder.owner == claim.owner;
        let holders = || claim.keys.iter().filter_map(|key| self.known_holder(key)?.held_by.as_ref());
        let of_request = holders().find(|holder| is_of_request(holder, claim));
        of_request.or_else(|| holders().find(|holder| is_of_owner(holder)))
    }

    /// What is known of the lease that blocks the waiters of the key.
    pub(super) fn known_holder(&self, key: &Key) -> Option<&Known> {
        self.queues.get(key)?.holder.as_ref()
    }

    /// The store has no lease of the waiter's request, so any lease of that request that was known has ended.
    pub(super) fn has_no_lease(&mut self, id: WaiterId) {
        let Some(entry) = self.waiters.get(&id) else { return };
        let claim = &entry.waiter.claim;
        let is_own = |known: &mut Known| known.held_by.as_ref().is_some_and(|by| is_of_request(by, claim));
        for key in &*claim.keys {
            if let Some(queue) = self.queues.get_mut(key) {
                queue.holder.take_if(is_own);
            }
        }
    }

    /// A refusal always follows a question to the store: another proxy may have released the lease. Returns
    /// false if the store has already been asked for the waiter, or if waiters ahead of it ask.
    fn ask_once(&mut self, id: WaiterId) -> bool {
        let Some(entry) = self.waiters.get(&id) else { return false };
        let is_next = |key: &Key| {
            let queue = self.queues.get(key);
            queue.is_some_and(|q| q.head() == Some(id) && q.in_flight.is_none() && q.choice.is_none())
        };
        if entry.attempts > 0 || !entry.waiter.claim.keys.iter().all(is_next) {
            return false;
        }
        self.submit(vec![BatchItem::Acquire { waiter: id }]);
        true
    }

    /// Whether nothing stands between the waiter and its own attempt except a batch that may leave room, and
    /// waiters that the attempt would include.
    pub(super) fn is_next_after_batch(&self, entry: &Entry) -> bool {
        let claim = &entry.waiter.claim;
        let mut waits_for_batch = false;
        for key in &*claim.keys {
            let Some(queue) = self.queues.get(key) else { continue };
            let mut along = 0;
            let clear = queue.ahead_of(entry.place).all(|id| {
                self.waiters.get(&id).is_some_and(|ahead| {
                    let other = &ahead.waiter.claim;
                    let leaves_room = claim.mode != Mode::Exclusive && other.mode != Mode::Exclusive;
                    let single = claim.keys.len() == 1 && other.keys.len() == 1;
                    along += usize::from(ahead.in_flight.is_none());
                    let is_asked = ahead.in_flight.is_some() || (single && along < RUN_MAX);
                    ahead.cancelled || (is_asked && leaves_room)
                })
            });
            if !clear || (queue.in_flight.is_none() && !queue.ready) {
                return false;
            }
            waits_for_batch |= queue.in_flight.is_some();
        }
        waits_for_batch
    }

    pub(super) fn give_up(&mut self, id: WaiterId, reason: Option<String>, now: Instant) {
        let Some(entry) = self.waiters.get(&id) else { return };
        let position = self.position(entry);
        let Some(mut entry) = self.drop_out(id) else { return };
        let verdict = match entry.store_error.take() {
            Some(why) => Verdict::Unavailable { why },
            None => self.contended(&entry.waiter.claim.keys, entry.denial.as_ref(), position, reason, now),
        };
        let keys = entry.waiter.claim.keys.clone();
        self.actions.push_back(Action::Finish { waiter: id, verdict });
        self.advance_all(&keys, now);
    }

    pub(super) fn contended(
        &self,
        keys: &[Key],
        denial: Option<&Denial>,
        position: u32,
        reason: Option<String>,
        now: Instant,
    ) -> Verdict {
        let known = keys.iter().find_map(|key| self.known_holder(key));
        let (holder, left_ms) = match (known, denial) {
            (Some(known), _) => (known.held_by.clone(), known.until.ms_since(now)),
            (None, Some(denial)) => (denial.holder.clone(), ms_of(denial.free_in_us)),
            (None, None) => (None, 0),
        };
        let retry_after_ms = left_ms.clamp(1, MAX_POLL_MS);
        Verdict::Contended { holder, position, retry_after_ms, reason }
    }

    /// The waiter's worst position in its queues; 1 is the next.
    pub(super) fn position(&self, entry: &Entry) -> u32 {
        let places = entry.waiter.claim.keys.iter().filter_map(|key| self.queues.get(key));
        places.map(|queue| queue.ahead_of(entry.place).count() as u32 + 1).max().unwrap_or(1)
    }

    pub(super) fn replan(&mut self, id: WaiterId, claim: Box<Claim>, now: Instant) {
        let Some(entry) = self.waiters.get_mut(&id) else { return };
        if entry.in_flight.is_some() {
            let joins_global_queue = claim.global.is_some() && !entry.in_global_queue;
            entry.replan = Some(claim);
            if joins_global_queue {
                self.joins_global_queue(id, now);
            }
            return;
        }
        self.undo_unsure(id);
        let Some(mut entry) = self.remove(id) else { return };
        let old = entry.waiter.claim.keys.clone();
        let joined = entry.waiter.claim.global.as_ref().and_then(|own| own.joined);
        entry.waiter.claim = *claim;
        if let Some(own) = &mut entry.waiter.claim.global {
            // The batch that was in flight may have returned it.
            own.joined = own.joined.or(joined);
        }
        let new = entry.waiter.claim.keys.clone();
        let joins = entry.waiter.claim.global.is_some() && !entry.in_global_queue;
        entry.waiter.asks_choice &= entry.waiter.claim.global.is_none();
        self.timers.insert((entry.deadline, Timer::Deadline(id)));
        self.join_queues(id, &entry);
        self.waiters.insert(id, entry);
        self.advance_all(&old, now);
        self.advance_all(&new, now);
        let waits = self.waiters.get(&id).is_some_and(|entry| entry.in_flight.is_none());
        if joins && waits && !self.joins_later(id, now) {
            self.probe(id, false);
        }
    }

    pub(super) fn shut_down(&mut self) {
        self.shutting_down = true;
        let queued: BTreeSet<_> =
            self.waiters.iter().filter(|(_, entry)| entry.in_flight.is_none()).map(|(id, _)| *id).collect();
        for id in queued {
            self.drop_out(id);
            self.actions.push_back(Action::Finish { waiter: id, verdict: Verdict::ShuttingDown });
        }
    }
}
fn ms_of(us: u64) -> u32 {
    u32::try_from(us / 1_000).unwrap_or(u32::MAX)
}

/// Whether the lease was granted to a call of the claim's request.
fn is_of_request(holder: &HeldBy, claim: &Claim) -> bool {
    claim.request.is_some() && holder.request == claim.request
}
