//! What the store has been sent, and what its answers bring about.

use std::sync::Arc;

use super::chores::Chore;
use super::leases::Lease;
use super::queue::Known;
use super::{
    ABANDON_MS, Action, Answered, Claim, Denial, Entry, GlobalQueueChange, Grant, HeldBy, Instant, Key,
    LeaseRef, Mode, Note, Outcome, Release, ReleaseId, STORE_RETRY_MS, StoredValue, SubmissionId, Table,
    Timer, Token, Unheard, Verdict, WaiterId,
};
use crate::lock::ServerTime;
use crate::lock::record::{MAX_GLOBAL_QUEUE, UNKNOWN};

/// A group of operations that the store has not answered.
#[derive(Debug)]
pub(super) struct InFlight {
    pub items: Vec<BatchItem>,
    /// The keys whose queues wait for it.
    pub keys: Vec<Key>,
}

/// When an answer was asked for on the proxy's clock, and given on the store's.
#[derive(Clone, Copy, Debug)]
struct Moment {
    asked_at: Instant,
    server: ServerTime,
}

/// One operation of a flight, and whom it is for.
#[derive(Debug)]
pub(super) enum BatchItem {
    Release { id: ReleaseId, release: Release },
    Acquire { waiter: WaiterId },
    Rejoin { waiter: WaiterId, over: bool },
    Abandon { keys: Arc<[Key]>, attempt: u64, until: Instant },
    GlobalQueue { key: Key, change: GlobalQueueChange },
    Look { lease: LeaseRef },
}

impl BatchItem {
    pub fn waiter(&self) -> Option<WaiterId> {
        match self {
            BatchItem::Acquire { waiter } | BatchItem::Rejoin { waiter, .. } => Some(*waiter),
            BatchItem::Release { .. }
            | BatchItem::Abandon { .. }
            | BatchItem::GlobalQueue { .. }
            | BatchItem::Look { .. } => None,
        }
    }
}

/// Attempts begin at random numbers; by adding an odd number a waiter comes to each of the others once.
const ATTEMPTS_APART: u64 = 0x9E37_79B9_7F4A_7C15;

impl Table {
    pub(super) fn completed(
        &mut self,
        ticket: SubmissionId,
        result: Result<Answered, Unheard>,
        now: Instant,
        out: &mut Vec<Action>,
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
            Ok(answer) => self.answered(in_flight, answer, &mut touched, now, out),
            Err(unheard) => {
                for item in in_flight.items {
                    self.lands(&item);
                    self.unanswered(item, &unheard, now, out);
                }
            }
        }
        if let Some(why) = &unheard {
            self.give_up_behind(&in_flight_keys, why, &mut touched, out);
        }
        touched.sort_unstable();
        touched.dedup();
        for key in &in_flight_keys {
            if let Some(queue) = self.queues.get_mut(key) {
                queue.ready |= std::mem::take(&mut queue.woken);
            }
        }
        self.advance_all(&touched, now, out);
        for id in std::mem::take(&mut self.late) {
            self.deadline(id, now, out);
        }
    }

    /// The waiters whose time is up and which stood behind a flight that failed: they have waited for as long as the
    /// store's time-out allows, and do not do so again. Comes before the keys are asked for again, as a waiter that
    /// is asked for may not leave before its answer.
    fn give_up_behind(&mut self, keys: &[Key], why: &str, touched: &mut Vec<Key>, out: &mut Vec<Action>) {
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
                self.finish(id, Verdict::Unavailable { why: why.to_owned() }, out);
            }
        }
    }

    /// The answer to this part is processed now. Until then its waiter counts as under way: what an earlier part of the
    /// same flight sets off must not ask for it again.
    fn lands(&mut self, item: &BatchItem) {
        if let Some(entry) = item.waiter().and_then(|id| self.waiters.get_mut(&id)) {
            entry.in_flight = None;
        }
    }

    fn answered(
        &mut self,
        in_flight: InFlight,
        answer: Answered,
        touched: &mut Vec<Key>,
        now: Instant,
        out: &mut Vec<Action>,
    ) {
        let granted = answer.outcomes.iter().any(|o| matches!(o, Outcome::Granted(g) if !g.repeated));
        let at = Moment { asked_at: answer.asked_at, server: answer.now };
        let mut from_release = false;
        self.looking = in_flight.items.iter().any(|item| matches!(item, BatchItem::GlobalQueue { .. }));
        for (item, outcome) in in_flight.items.into_iter().zip(answer.outcomes) {
            self.lands(&item);
            match item {
                BatchItem::Release { id, release: Release { lease, .. } } => {
                    touched.extend(lease.keys.iter().cloned());
                    from_release |= matches!(outcome, Outcome::Released { levels_left: 0 });
                    self.released(id, &lease, outcome, granted, now, out);
                }
                BatchItem::Abandon { keys, .. } => {
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
                        self.notify_next_waiter(&key, next_waiter, out);
                    }
                }
                BatchItem::Look { lease } => {
                    self.chore_done();
                    match outcome {
                        Outcome::Renewed { left_us } => {
                            self.renewed(lease.nonce, answer.asked_at.plus_us(left_us));
                        }
                        _ => self.lease_expired(lease.nonce, now, out),
                    }
                }
                BatchItem::Acquire { waiter } => {
                    self.attempted(waiter, outcome, at, from_release, now, out);
                }
                BatchItem::Rejoin { waiter, over } => {
                    self.rejoined(waiter, over, outcome, at, now, out);
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
        out: &mut Vec<Action>,
    ) {
        if outcome == Outcome::Unknown {
            // A lease that is over is noticed at its end.
            out.push(Action::Released { id, result: Err(UNKNOWN.to_owned()) });
            return;
        }
        let over = !matches!(outcome, Outcome::Released { levels_left: 1.. });
        if over && let Some(known) = self.lease_ended(lease.nonce) {
            let held_ms = now.ms_since(known.since);
            for (key, token) in known.keyed_tokens() {
                let owner = known.claim.owner.clone();
                out.push(Action::Note(Note::Released { key, owner, token, held_ms, handed_off }));
            }
        } else if over {
            for key in &*lease.keys {
                if let Some(queue) = self.queues.get_mut(key) {
                    queue.ready = true;
                }
            }
        }
        out.push(Action::Released { id, result: Ok(outcome) });
    }

    fn attempted(
        &mut self,
        id: WaiterId,
        outcome: Outcome,
        at: Moment,
        from_release: bool,
        now: Instant,
        out: &mut Vec<Action>,
    ) {
        match outcome {
            Outcome::Granted(grant) => self.granted(id, grant, at, from_release, now, out),
            Outcome::Held(denial) => self.denied(id, denial, now, out),
            Outcome::Done(kept) => self.done(id, &kept, out),
            Outcome::RequestReused { ended } => self.finish(id, Verdict::RequestReused { ended }, out),
            Outcome::Crowded => {
                self.finish(id, Verdict::TooManyWaiters { limit: MAX_GLOBAL_QUEUE as u32 }, out);
            }
            _ => self.finish(id, Verdict::Full, out),
        }
    }

    fn granted(
        &mut self,
        id: WaiterId,
        grant: Grant,
        at: Moment,
        from_release: bool,
        now: Instant,
        out: &mut Vec<Action>,
    ) {
        let contended = !grant.repeated && self.was_marked(id, &grant);
        let Some(entry) = self.remove(id) else { return };
        let claim = entry.waiter.claim;
        if entry.cancelled {
            let until = now.plus_ms(claim.ttl_ms).plus_ms(ABANDON_MS);
            self.chore(Chore::Abandon { keys: claim.keys.clone(), attempt: claim.attempt, until }, out);
            return;
        }
        let until = at.asked_at.plus_us(grant.left_us);
        let claim = match &grant.chosen {
            Some(key) => claim.of(key),
            None => claim,
        };
        let keys = claim.keys.clone();
        let freed = self.leases_followed(&claim, grant.nonce, now, out);
        let (tokens, since) = (grant.tokens.clone(), now);
        let lease = Lease { claim: claim.clone(), tokens, since, until, contended };
        let new = self.lease_granted(grant.nonce, lease) && !grant.repeated;
        for (key, token) in keys.iter().zip(&grant.tokens) {
            let Some(queue) = self.queues.get_mut(key) else { continue };
            queue.ready = claim.mode != Mode::Exclusive;
            queue.woken &= queue.ready;
            let held_by = Some(held_by(&claim, *token, at.server, &grant));
            queue.holder = Some(Known { held_by, until, own: true });
            if new {
                queue.granted(&entry.waiter.group);
                let owner = claim.owner.clone();
                out.push(Action::Note(Note::Granted {
                    key: key.clone(),
                    owner,
                    token: *token,
                    from_release,
                }));
            }
        }
        let waited_ms = now.ms_since(entry.arrived);
        out.push(Action::Finish {
            waiter: id,
            verdict: Verdict::Granted {
                grant,
                keys,
                attempt: claim.attempt,
                asked_at: at.asked_at,
                waited_ms,
            },
        });
        self.advance_all(&freed, now, out);
    }

    /// Whoever waits for the same keys' outcome hears it, too, without asking.
    fn done(&mut self, id: WaiterId, kept: &StoredValue, out: &mut Vec<Action>) {
        let Some(entry) = self.waiters.get(&id) else { return };
        let keys = &entry.waiter.claim.keys;
        let same = |other: &Entry| {
            let claim = &other.waiter.claim;
            claim.keep_ms > 0 && claim.keys == *keys && other.in_flight.is_none()
        };
        let waiting = self.queues.get(&keys[0]).into_iter().flat_map(|queue| queue.in_order()).copied();
        let told: Vec<WaiterId> = waiting.filter(|other| self.waiters.get(other).is_some_and(same)).collect();
        for id in told {
            self.finish(id, Verdict::Done(kept.clone()), out);
        }
    }

    fn denied(&mut self, id: WaiterId, denial: Denial, now: Instant, out: &mut Vec<Action>) {
        self.has_no_lease(id);
        // None of several is free.
        let any = self.waiters.get(&id).filter(|entry| entry.waiter.claim.any);
        let keys = any.map_or_else(|| [denial.key.clone()].into(), |entry| entry.waiter.claim.keys.clone());
        for key in &*keys {
            if let Some(queue) = self.queues.get_mut(key) {
                let until = now.plus_us(denial.free_in_us.min(u64::from(u32::MAX) * 1_000));
                queue.held_up(denial.holder.clone(), until);
            }
        }
        // One ring is enough: a second one would come when the key is taken.
        if let Some(next_waiter) = denial.next_waiter.as_ref().filter(|_| !self.looking) {
            self.notify_next_waiter(&denial.key, next_waiter.clone(), out);
        }
        self.keep_places_later(id, now);
        self.marked(id, &denial);
        // Members of a quorum that took no part in the refusal may have granted an earlier round.
        self.undo_unsure(id);
        if let Some(entry) = self.waiters.get_mut(&id) {
            if let Some(own) = &mut entry.waiter.claim.global {
                own.joined = denial.joined.or(own.joined);
            }
            // Stores that ask several servers may be taking back what some of them have granted.
            entry.waiter.claim.attempt = entry.waiter.claim.attempt.wrapping_add(ATTEMPTS_APART).max(1);
            entry.denial = Some(denial);
            entry.store_error = None;
        }
        self.stay_or_go(id, now, out);
    }

    fn rejoined(
        &mut self,
        id: WaiterId,
        over: bool,
        outcome: Outcome,
        at: Moment,
        now: Instant,
        out: &mut Vec<Action>,
    ) {
        if outcome == Outcome::Absent {
            self.has_no_lease(id);
        }
        match outcome {
            Outcome::Absent if over => match self.waiters.get(&id) {
                Some(entry) if entry.deadline <= now && !entry.cancelled => self.give_up(id, None, now, out),
                Some(entry) => {
                    let verdict = self.turned_away(&entry.waiter, now);
                    self.finish(id, verdict, out);
                }
                None => {}
            },
            Outcome::Absent => self.stay_or_go(id, now, out),
            outcome => self.attempted(id, outcome, at, false, now, out),
        }
    }

    /// A waiter whose attempt came to nothing: it keeps its place, unless its time is up.
    fn stay_or_go(&mut self, id: WaiterId, now: Instant, out: &mut Vec<Action>) {
        let Some(entry) = self.waiters.get_mut(&id) else { return };
        if entry.cancelled {
            self.drop_out(id);
        } else if self.shutting_down {
            self.finish(id, Verdict::ShuttingDown, out);
        } else if entry.replan.is_some() && entry.denial.is_some() && entry.deadline <= now {
            // Its time is up and it was refused: it does not stand behind the flights of its new keys as well.
            self.give_up(id, None, now, out);
        } else if let Some(claim) = entry.replan.take() {
            self.replan(id, claim, now, out);
        } else if entry.deadline <= now {
            self.deadline(id, now, out);
        } else if std::mem::take(&mut entry.again) {
            self.submit(vec![BatchItem::Rejoin { waiter: id, over: false }], out);
        }
    }

    fn finish(&mut self, id: WaiterId, verdict: Verdict, out: &mut Vec<Action>) {
        if self.drop_out(id).is_some_and(|entry| !entry.cancelled) {
            out.push(Action::Finish { waiter: id, verdict });
        }
    }

    /// The store was not heard of: what the part asked for may have happened, if it was sent.
    fn unanswered(&mut self, item: BatchItem, unheard: &Unheard, now: Instant, out: &mut Vec<Action>) {
        match item {
            BatchItem::Release { id, .. } => {
                out.push(Action::Released { id, result: Err(unheard.why.clone()) });
            }
            BatchItem::Abandon { keys, attempt, until } => {
                let again = (now < until).then_some(Chore::Abandon { keys, attempt, until });
                self.chore_failed(again, now);
            }
            BatchItem::Look { lease: LeaseRef { nonce, .. } } => {
                let end = self.leases.ends_at(nonce);
                let again = end.is_some_and(|end| now < end.plus_ms(ABANDON_MS));
                if !again {
                    // Nobody is told what nobody knows.
                    self.lease_over(nonce, now, out);
                }
                self.chore_failed(again.then_some(Chore::Look { nonce }), now);
            }
            // A place that nobody keeps ends by itself.
            BatchItem::GlobalQueue { .. } => {}
            BatchItem::Rejoin { waiter, over } => {
                self.store_failed(waiter, over, unheard, now, out);
            }
            BatchItem::Acquire { waiter } => {
                self.store_failed(waiter, false, unheard, now, out);
            }
        }
    }

    /// An attempt that was sent may have been granted. `over`: it cannot be tried again.
    fn store_failed(
        &mut self,
        id: WaiterId,
        over: bool,
        Unheard { why, sent }: &Unheard,
        now: Instant,
        out: &mut Vec<Action>,
    ) {
        let Some(entry) = self.waiters.get_mut(&id) else { return };
        entry.store_error = Some(why.clone());
        if *sent {
            entry.unsure_until = Some(now.plus_ms(entry.waiter.claim.ttl_ms).plus_ms(ABANDON_MS));
        }
        let over = over || entry.deadline <= now;
        let keys = entry.waiter.claim.keys.clone();
        self.pause(&keys, now);
        if over {
            self.finish(id, Verdict::Unavailable { why: why.clone() }, out);
        } else {
            self.stay_or_go(id, now, out);
        }
    }

    /// Asks for the keys again a little later.
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

/// The holder as those behind it see it.
fn held_by(claim: &Claim, token: Token, since: ServerTime, grant: &Grant) -> HeldBy {
    let until = since.plus_us(grant.left_us);
    let (owner, request) = (claim.owner.clone(), claim.request.clone());
    HeldBy { owner, request, mode: claim.mode, token, since, until }
}
