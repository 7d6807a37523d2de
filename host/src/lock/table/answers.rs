//! The effects of the store's answers to the batches in flight.

use super::Table;
use super::actions::{Action, Note, Verdict};
use super::chores::{Abandon, Chore};
use super::entry::Entry;
use super::events::{Answered, ReleaseId, SubmissionId, Unheard, Waiter, WaiterId};
use super::in_flight::{BatchItem, InFlight};
use super::leases::HeldLease;
use super::limits::{ABANDON_MS, STORE_RETRY_MS};
use super::queue::Known;
use super::timer::Timer;
use crate::lock::record::{
    Claim, Denial, Grant, HeldBy, MAX_GLOBAL_QUEUE, Outcome, Release, StoredValue, UNKNOWN,
};
use crate::lock::{Instant, Key, LeaseRef, Mode, ServerTime, Token};

/// When a batch was sent, on the proxy's clock, and decided, on the store's clock.
#[derive(Clone, Copy, Debug)]
struct Moment {
    asked_at: Instant,
    server: ServerTime,
}

/// Added to an attempt to get the next one. The first attempt is random; as the step is odd, the sequence does
/// not repeat before it has been through all numbers.
const ATTEMPTS_APART: u64 = 0x9E37_79B9_7F4A_7C15;

impl Table {
    pub(super) fn completed(
        &mut self,
        ticket: SubmissionId,
        result: Result<Answered, Unheard>,
        now: Instant,
    ) {
        let Some(in_flight) = self.in_flight.remove(&ticket) else { return };
        for key in &in_flight.keys {
            if let Some(queue) = self.queues.get_mut(key) {
                queue.in_flight = None;
            }
        }
        let in_flight_keys = in_flight.keys.clone();
        let mut touched = in_flight.keys.clone();
        for item in &in_flight.items {
            if let Some(entry) = item.waiter().and_then(|id| self.waiters.get(&id)) {
                touched.extend(entry.waiter.claim.keys.iter().cloned());
            }
        }
        let unheard = result.as_ref().err().map(|unheard| unheard.why.clone());
        match result {
            Ok(answer) => self.answered(in_flight, answer, &mut touched, now),
            Err(unheard) => {
                for item in in_flight.items {
                    self.lands(&item);
                    self.unanswered(item, &unheard, now);
                }
            }
        }
        if let Some(why) = &unheard {
            self.give_up_behind(&in_flight_keys, why, &mut touched);
        }
        touched.sort_unstable();
        touched.dedup();
        for key in &in_flight_keys {
            if let Some(queue) = self.queues.get_mut(key) {
                queue.ready |= std::mem::take(&mut queue.woken);
            }
        }
        self.advance_all(&touched, now);
        for id in std::mem::take(&mut self.late) {
            self.deadline(id, now);
        }
    }

    /// Ends the waiters whose deadline has passed and which stood behind a batch that failed: they have already
    /// waited for the store's time-out, and do not wait for it again. Call this before the keys are asked for
    /// again, because a waiter that is in flight may not leave before its answer.
    fn give_up_behind(&mut self, keys: &[Key], why: &str, touched: &mut Vec<Key>) {
        let late = std::mem::take(&mut self.late);
        let (behind, other) = late.into_iter().partition(|id| {
            self.waiters.get(id).is_some_and(|entry| {
                entry.in_flight.is_none() && entry.waiter.claim.keys.iter().any(|key| keys.contains(key))
            })
        });
        self.late = other;
        for id in behind {
            if let Some(entry) = self.waiters.get(&id) {
                touched.extend(entry.waiter.claim.keys.iter().cloned());
                self.finish(id, Verdict::Unavailable { why: why.to_owned() });
            }
        }
    }

    /// The answer to this item is processed now. Until then its waiter counts as in flight, so that an earlier
    /// item of the same batch does not cause another request for it.
    fn lands(&mut self, item: &BatchItem) {
        if let Some(entry) = item.waiter().and_then(|id| self.waiters.get_mut(&id)) {
            entry.in_flight = None;
        }
    }

    fn answered(&mut self, in_flight: InFlight, answer: Answered, touched: &mut Vec<Key>, now: Instant) {
        let granted = answer.outcomes.iter().any(|o| matches!(o, Outcome::Granted(g) if !g.repeated));
        let at = Moment { asked_at: answer.asked_at, server: answer.now };
        let mut from_release = false;
        self.looking = in_flight.items.iter().filter_map(BatchItem::looks_at).cloned().collect();
        for (item, outcome) in in_flight.items.into_iter().zip(answer.outcomes) {
            self.lands(&item);
            match item {
                BatchItem::Release { id, release: Release { lease, .. } } => {
                    touched.extend(lease.keys.iter().cloned());
                    from_release |= matches!(outcome, Outcome::Released { levels_left: 0 });
                    self.released(id, &lease, outcome, granted, now);
                }
                BatchItem::Abandon(Abandon { keys, .. }) => {
                    self.chore_done();
                    for key in &*keys {
                        if let Some(queue) = self.queues.get_mut(key) {
                            queue.ready = true;
                        }
                    }
                    touched.extend(keys.iter().cloned());
                }
                BatchItem::GlobalQueue { key, .. } => {
                    if let Outcome::GlobalQueue { next_waiter: Some(next_waiter) } = outcome {
                        self.notify_next_waiter(&key, next_waiter);
                    }
                }
                BatchItem::Look { lease } => {
                    self.chore_done();
                    match outcome {
                        Outcome::Renewed { left_us } => {
                            self.renewed(lease.nonce, answer.asked_at.plus_us(left_us));
                        }
                        _ => self.lease_expired(lease.nonce, now),
                    }
                }
                BatchItem::Acquire { waiter } => {
                    self.attempted(waiter, outcome, at, from_release, now);
                }
                BatchItem::Rejoin { waiter, over } => {
                    self.rejoined(waiter, over, outcome, at, now);
                }
            }
        }
    }

    fn released(
        &mut self,
        id: ReleaseId,
        lease: &LeaseRef,
        outcome: Outcome,
        handed_off: bool,
        now: Instant,
    ) {
        if outcome == Outcome::Unknown {
            // If the lease is over, its end is noticed when it is due.
            self.actions.push_back(Action::Released { id, result: Err(UNKNOWN.to_owned()) });
            return;
        }
        if outcome == Outcome::Forbidden {
            self.actions.push_back(Action::Released { id, result: Ok(outcome) });
            return;
        }
        let over = !matches!(outcome, Outcome::Released { levels_left: 1.. });
        if over
            && self.knows_as(lease)
            && let Some(known) = self.lease_ended(lease.nonce)
        {
            let held_ms = now.ms_since(known.since);
            for (key, token) in known.keyed_tokens() {
                let owner = known.owner.clone();
                self.actions.push_back(Action::Note(Note::Released {
                    key,
                    owner,
                    token,
                    held_ms,
                    handed_off,
                }));
            }
        } else if over {
            for key in &*lease.keys {
                if let Some(queue) = self.queues.get_mut(key) {
                    queue.ready = true;
                }
            }
        }
        self.actions.push_back(Action::Released { id, result: Ok(outcome) });
    }

    fn attempted(&mut self, id: WaiterId, outcome: Outcome, at: Moment, from_release: bool, now: Instant) {
        match outcome {
            Outcome::Granted(grant) => self.granted(id, grant, at, from_release, now),
            Outcome::Held(denial) => self.denied(id, denial, now),
            Outcome::Done(kept) => self.done(id, &kept),
            Outcome::RequestReused { ended } => self.finish(id, Verdict::RequestReused { ended }),
            Outcome::Crowded => {
                self.finish(id, Verdict::TooManyWaiters { limit: MAX_GLOBAL_QUEUE as u32 });
            }
            _ => self.finish(id, Verdict::Full),
        }
    }

    fn granted(&mut self, id: WaiterId, grant: Grant, at: Moment, from_release: bool, now: Instant) {
        if !grant.repeated {
            self.unmarked(id, &grant);
        }
        let Some(entry) = self.remove(id) else { return };
        let Waiter { claim, group, charge, .. } = entry.waiter;
        if entry.cancelled {
            let until = now.plus_ms(claim.ttl_ms).plus_ms(ABANDON_MS);
            let (keys, attempt) = (claim.keys.clone(), claim.attempt);
            self.chore(Chore::Abandon(Abandon { keys, attempt, until, _charge: charge }));
            return;
        }
        let until = at.asked_at.plus_us(grant.left_us);
        let claim = match &grant.chosen {
            Some(key) => claim.of(key),
            None => claim,
        };
        let keys = claim.keys.clone();
        let freed = self.leases_followed(&claim, grant.nonce, now);
        let lease = HeldLease {
            keys: keys.clone(),
            owner: claim.owner.clone(),
            mode: claim.mode,
            tag: claim.tag.clone(),
            since: now,
            until,
            request: claim.request.clone(),
            tokens: grant.tokens.as_slice().into(),
            granted: at.server,
            group: group.clone(),
            charge: charge.lease,
        };
        let new = self.lease_granted(grant.nonce, lease) && !grant.repeated;
        for (key, token) in keys.iter().zip(&grant.tokens) {
            if let Some(queue) = self.queues.get_mut(key) {
                queue.ready = claim.mode != Mode::Exclusive;
                queue.woken &= queue.ready;
                queue.holder = Some(Known::own(held_by(&claim, *token, at.server, &grant), until));
                if new {
                    queue.granted(&group);
                }
            }
            if new {
                let owner = claim.owner.clone();
                self.actions.push_back(Action::Note(Note::Granted {
                    key: key.clone(),
                    owner,
                    token: *token,
                    from_release,
                }));
            }
        }
        let waited_ms = now.ms_since(entry.arrived);
        self.actions.push_back(Action::Finish {
            waiter: id,
            verdict: Verdict::Granted {
                grant,
                keys,
                attempt: claim.attempt,
                asked_at: at.asked_at,
                waited_ms,
            },
        });
        self.advance_all(&freed, now);
    }

    /// Also tells the outcome to all other waiters for the same keys, without asking the store.
    fn done(&mut self, id: WaiterId, kept: &StoredValue) {
        let Some(entry) = self.waiters.get(&id) else { return };
        let keys = &entry.waiter.claim.keys;
        let same = |other: &Entry| {
            let claim = &other.waiter.claim;
            claim.keep_ms.is_some() && claim.keys == *keys && other.in_flight.is_none()
        };
        let waiting = self.queues.get(&keys[0]).into_iter().flat_map(|queue| queue.in_order()).copied();
        let told: Vec<WaiterId> = waiting.filter(|other| self.waiters.get(other).is_some_and(same)).collect();
        for id in told {
            self.finish(id, Verdict::Done(kept.clone()));
        }
    }

    fn denied(&mut self, id: WaiterId, denial: Denial, now: Instant) {
        self.has_no_lease(id);
        // None of several is free.
        let any = self.waiters.get(&id).filter(|entry| entry.waiter.claim.any);
        let keys = any.map_or_else(|| [denial.key.clone()].into(), |entry| entry.waiter.claim.keys.clone());
        if let Some(holder) = &denial.holder {
            self.leases.note_holder(&denial.key, holder.token);
        }
        for key in &*keys {
            if let Some(queue) = self.queues.get_mut(key) {
                let until = now.plus_us(denial.free_in_us.min(u64::from(u32::MAX) * 1_000));
                queue.held_up(&denial, until);
            }
        }
        // One notification is enough: a second one would come when the key is taken.
        let is_told_later = self.looking.contains(&denial.key);
        if let Some(next_waiter) = denial.next_waiter.as_ref().filter(|_| !is_told_later) {
            self.notify_next_waiter(&denial.key, next_waiter.clone());
        }
        self.keep_places_later(id, now);
        self.marked(id, &denial);
        // Members of a quorum that took no part in the refusal may have granted an earlier attempt.
        self.undo_unsure(id);
        if let Some(entry) = self.waiters.get_mut(&id) {
            if let Some(own) = &mut entry.waiter.claim.global {
                own.joined = denial.joined.or(own.joined);
            }
            // A store that asks several servers may still be undoing what some of them granted.
            entry.waiter.claim.attempt = entry.waiter.claim.attempt.wrapping_add(ATTEMPTS_APART).max(1);
            entry.denial = Some(denial);
            entry.store_error = None;
        }
        self.stay_or_go(id, now);
    }

    fn rejoined(&mut self, id: WaiterId, over: bool, outcome: Outcome, at: Moment, now: Instant) {
        if outcome == Outcome::Absent {
            self.has_no_lease(id);
        }
        match outcome {
            Outcome::Absent if over => match self.waiters.get(&id) {
                Some(entry) if entry.deadline <= now && !entry.cancelled => self.give_up(id, None, now),
                Some(entry) => {
                    let verdict = self.turned_away(&entry.waiter, now);
                    self.finish(id, verdict);
                }
                None => {}
            },
            Outcome::Absent => self.stay_or_go(id, now),
            outcome => self.attempted(id, outcome, at, false, now),
        }
    }

    /// After an attempt without a grant: the waiter keeps its position unless its deadline has passed.
    fn stay_or_go(&mut self, id: WaiterId, now: Instant) {
        let Some(entry) = self.waiters.get_mut(&id) else { return };
        if entry.cancelled {
            self.drop_out(id);
        } else if self.shutting_down {
            self.finish(id, Verdict::ShuttingDown);
        } else if entry.replan.is_some() && entry.denial.is_some() && entry.deadline <= now {
            // Its deadline has passed and it was refused, so it does not also wait for batches of its new keys.
            self.give_up(id, None, now);
        } else if let Some(claim) = entry.replan.take() {
            self.replan(id, claim, now);
        } else if entry.deadline <= now {
            self.deadline(id, now);
        } else if std::mem::take(&mut entry.again) {
            self.submit(vec![BatchItem::Rejoin { waiter: id, over: false }]);
        }
    }

    fn finish(&mut self, id: WaiterId, verdict: Verdict) {
        if self.drop_out(id).is_some_and(|entry| !entry.cancelled) {
            self.actions.push_back(Action::Finish { waiter: id, verdict });
        }
    }

    /// The store did not answer: the item may have been applied, if it was sent.
    fn unanswered(&mut self, item: BatchItem, unheard: &Unheard, now: Instant) {
        match item {
            BatchItem::Release { id, .. } => {
                self.actions.push_back(Action::Released { id, result: Err(unheard.why.clone()) });
            }
            BatchItem::Abandon(abandon) => {
                let again = (now < abandon.until).then_some(Chore::Abandon(abandon));
                self.chore_failed(again, now);
            }
            BatchItem::Look { lease: LeaseRef { nonce, .. } } => {
                let end = self.leases.ends_at(nonce);
                let again = end.is_some_and(|end| now < end.plus_ms(ABANDON_MS));
                if !again {
                    // The fate of the lease is unknown, so no note reports it.
                    self.lease_over(nonce, now);
                }
                self.chore_failed(again.then_some(Chore::Look { nonce }), now);
            }
            // A place that is not extended expires.
            BatchItem::GlobalQueue { .. } => {}
            BatchItem::Rejoin { waiter, over } => {
                self.store_failed(waiter, over, unheard, now);
            }
            BatchItem::Acquire { waiter } => {
                self.store_failed(waiter, false, unheard, now);
            }
        }
    }

    /// Handles an attempt without an answer, which may have been granted if it was sent. `over`: the attempt
    /// cannot be repeated.
    fn store_failed(&mut self, id: WaiterId, over: bool, Unheard { why, sent }: &Unheard, now: Instant) {
        let Some(entry) = self.waiters.get_mut(&id) else { return };
        entry.store_error = Some(why.clone());
        if *sent {
            entry.unsure_until = Some(now.plus_ms(entry.waiter.claim.ttl_ms).plus_ms(ABANDON_MS));
        }
        let over = over || entry.deadline <= now;
        let keys = entry.waiter.claim.keys.clone();
        self.pause(&keys, now);
        if over {
            self.finish(id, Verdict::Unavailable { why: why.clone() });
        } else {
            self.stay_or_go(id, now);
        }
    }

    /// Asks for the keys again after [`STORE_RETRY_MS`].
    fn pause(&mut self, keys: &[Key], now: Instant) {
        let at = now.plus_ms(STORE_RETRY_MS);
        for key in keys {
            if let Some(queue) = self.queues.get_mut(key) {
                queue.ready = false;
                if queue.poll_at.is_none() {
                    queue.poll_at = Some(at);
                    self.timers.insert((at, Timer::Poll(key.clone())));
                }
            }
        }
    }
}

/// The new holder as waiters behind it see it.
fn held_by(claim: &Claim, token: Token, since: ServerTime, grant: &Grant) -> HeldBy {
    let until = since.plus_us(grant.left_us);
    let (owner, request) = (claim.owner.clone(), claim.request.clone());
    HeldBy { owner, request, mode: claim.mode, token, since, until }
}
