//! The queues of one proxy: who asks the store for what, and when.
//!
//! [`Table`] is a state machine. [`Table::handle`] takes an [`Event`] and the time and appends the
//! [`Action`]s that follow; [`Table::handle_timeout`] does what time alone brings about, and
//! [`Table::poll_timeout`] says when that is. It never asks the clock and never waits.
//!
//! Each key has one queue in order of rank, then arrival, and at most one *flight* at a time: a group of
//! operations that the store has been sent and has not answered. A waiter asks the store only at the
//! head of its queues, so a held key costs one poll, however many wait. A release flies together
//! with the next waiter's acquire: the handoff is one step in the store.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use super::record::{Claim, Denial, Grant, HeldBy, Op, Outcome};
use super::{Instant, Key, LeaseRef, Mode, ServerTime, Token};

mod flights;
mod leases;
mod queue;

use flights::{Flight, Part};
use leases::Leases;
use queue::{Place, Queue};

/// Waiters of a key that a policy is shown.
pub const VIEW_WAITERS: usize = 64;
/// Waiters that one group of the store grants at most.
const RUN_MAX: usize = 64;
/// No key is asked for more often than this while it is held elsewhere.
const MIN_POLL_MS: u32 = 5;
/// A held key is asked for at least this often, in case a wake-up was missed.
const MAX_POLL_MS: u32 = 30_000;
/// How soon a waiter tries again after the store could not be reached.
const STORE_RETRY_MS: u32 = 250;
/// How long the undoing of a claim is tried while the store cannot be reached, beyond its lease.
const ABANDON_MS: u32 = 60_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WaiterId(pub u64);

/// Names a flight: an [`Action::Submit`] and the [`Event::Completed`] that answers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

/// Names a caller's release.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReleaseId(pub u64);

/// An acquire that wants a place in the queues of its keys.
#[derive(Clone, Debug)]
pub struct Waiter {
    pub id: WaiterId,
    pub claim: Claim,
    pub rank: i32,
    pub group: Box<str>,
    pub wait_ms: u32,
    pub max_waiters: u32,
    /// Whether its policy has a `fairness` hook.
    pub asks_choice: bool,
    /// Whether its policy has a `backoff` hook.
    pub asks_backoff: bool,
    /// Random bits for back-off.
    pub seed: u32,
}

#[derive(Clone, Debug)]
pub enum Event {
    Enqueue(Box<Waiter>),
    /// The waiter's client is gone. A grant that is under way is undone.
    Cancel(WaiterId),
    Release {
        id: ReleaseId,
        lease: LeaseRef,
        attempt: u64,
    },
    /// A store's answer to an [`Action::Submit`].
    Completed {
        ticket: Ticket,
        result: Result<Answered, String>,
    },
    /// The answer to an [`Action::Choose`]; `None` where the policy failed or made no sense.
    Chosen {
        key: Key,
        choice: u64,
        waiter: Option<WaiterId>,
    },
    /// The answer to an [`Action::Backoff`].
    Backoff {
        waiter: WaiterId,
        key: Key,
        decision: Next,
    },
    /// A lease was renewed past the queues, on this or on another proxy.
    Renewed {
        nonce: u64,
        until: Instant,
    },
    /// A lease is over without a release that came this way: it was found lost, or was taken away.
    Gone {
        nonce: u64,
    },
    /// A grant whose caller was gone before it could be told.
    Undelivered {
        nonce: u64,
        keys: Arc<[Key]>,
        attempt: u64,
        ttl_ms: u32,
    },
    /// An operator took the key from its holders.
    Taken(Key),
    /// Somebody else freed the key, as far as is known.
    Wake(Key),
    /// The waiter's keys have changed with its policy; it keeps its place in the order of arrival. The
    /// claim has an `attempt` of its own.
    Replan {
        waiter: WaiterId,
        claim: Box<Claim>,
    },
    /// Answers every waiter and takes no more.
    Shutdown,
}

/// What the store said, with the proxy's clock before it was asked.
#[derive(Clone, Debug)]
pub struct Answered {
    pub outcomes: Vec<Outcome>,
    pub asked_at: Instant,
    /// The store's clock when it decided.
    pub now: ServerTime,
}

/// What a waiter at the head does about a key that is held elsewhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    Poll { after_ms: u32 },
    WakeUp,
    GiveUp { reason: String },
}

#[derive(Clone, Debug)]
pub enum Action {
    /// Run the operations as one, and say how it went with [`Event::Completed`].
    Submit {
        ticket: Ticket,
        ops: Vec<Op>,
    },
    /// Ask the policy of `candidates[0]` which of them is next, and say so with [`Event::Chosen`].
    Choose {
        key: Key,
        choice: u64,
        candidates: Vec<Candidate>,
        groups: Vec<GroupShare>,
    },
    /// Ask the waiter's policy what to do about a held key, and say so with [`Event::Backoff`].
    Backoff {
        waiter: WaiterId,
        key: Key,
        contention: Contention,
    },
    /// The waiter has left its queues.
    Finish {
        waiter: WaiterId,
        verdict: Verdict,
    },
    Released {
        id: ReleaseId,
        result: Result<Outcome, String>,
    },
    /// Something that watchers and metrics want to know.
    Note(Note),
}

#[derive(Clone, Copy, Debug)]
pub struct Candidate {
    pub waiter: WaiterId,
    pub rank: i32,
    pub waited_ms: u32,
}

#[derive(Clone, Debug)]
pub struct GroupShare {
    pub group: Box<str>,
    pub waiting: u32,
    pub recent_grants: u32,
}

#[derive(Clone, Debug)]
pub struct Contention {
    pub attempt: u32,
    pub waited_ms: u32,
    pub wait_left_ms: u32,
    pub holder_left_ms: u32,
    pub holder: Box<str>,
    pub waiters: u32,
    pub last_sleep_ms: u32,
}

/// What a waiter is told.
#[derive(Clone, Debug)]
pub enum Verdict {
    Granted {
        grant: Grant,
        keys: Arc<[Key]>,
        /// The claim's, by which an undelivered grant is undone.
        attempt: u64,
        asked_at: Instant,
        waited_ms: u32,
    },
    Contended {
        holder: Option<HeldBy>,
        position: u32,
        retry_after_ms: u32,
        reason: Option<String>,
    },
    TooManyWaiters {
        limit: u32,
    },
    RequestReused {
        ended: bool,
    },
    /// The key has as many holders, or the owner as many levels, as a record can hold.
    Full,
    Unavailable {
        why: String,
    },
    ShuttingDown,
}

#[derive(Clone, Debug)]
pub enum Note {
    /// `from_release`: in the same step in which the lease before it was released.
    Granted {
        key: Key,
        owner: Box<str>,
        token: Token,
        from_release: bool,
    },
    Released {
        key: Key,
        owner: Box<str>,
        token: Token,
        held_ms: u32,
        handed_off: bool,
    },
    Expired {
        key: Key,
        owner: Box<str>,
        token: Token,
        held_ms: u32,
    },
}

/// Where a claim stands on this proxy.
#[derive(Clone, Copy, Debug)]
pub enum Standing {
    Waiter {
        id: WaiterId,
        /// Whether the store has been sent the claim, so that it may have been granted.
        asked: bool,
    },
    Lease {
        nonce: u64,
    },
}

/// One place in a queue, for those who look.
#[derive(Clone, Debug)]
pub struct Queued {
    pub waiter: WaiterId,
    pub owner: Box<str>,
    pub mode: Mode,
    pub rank: i32,
    pub group: Box<str>,
    pub waited_ms: u32,
}

/// The queues of one proxy. See the module's documentation.
#[derive(Debug, Default)]
pub struct Table {
    queues: HashMap<Key, Queue>,
    waiters: HashMap<WaiterId, Entry>,
    flights: HashMap<Ticket, Flight>,
    leases: Leases,
    timers: BTreeSet<(Instant, Timer)>,
    arrivals: u64,
    tickets: u64,
    choices: u64,
    /// Waiters whose time is up and whose last chance is a flight that is under way.
    late: Vec<WaiterId>,
    shutting_down: bool,
}

/// A waiter in its queues.
#[derive(Debug)]
struct Entry {
    waiter: Waiter,
    place: Place,
    arrived: Instant,
    deadline: Instant,
    /// The flight that asks the store for this waiter.
    flight: Option<Ticket>,
    cancelled: bool,
    attempts: u32,
    last_sleep_ms: u32,
    /// Why the last attempt failed.
    denial: Option<Denial>,
    store_error: Option<String>,
    /// An attempt had no answer: it may have been granted. Until when that grant could last.
    unsure_until: Option<Instant>,
    replan: Option<Box<Claim>>,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Timer {
    Deadline(WaiterId),
    Poll(Key),
    Lease(u64),
    /// Undo a claim that the store did not answer for: its keys, attempt, and until when to try.
    Abandon(Arc<[Key]>, u64, Instant),
}

impl Table {
    pub fn new() -> Table {
        Table::default()
    }

    /// Waiters in all queues.
    pub fn waiting(&self) -> usize {
        self.waiters.len()
    }

    /// Leases that this proxy granted or renewed and that have not ended.
    pub fn held(&self) -> usize {
        self.leases.len()
    }

    /// Whether the store still owes an answer.
    pub fn busy(&self) -> bool {
        !self.flights.is_empty() || !self.waiters.is_empty()
    }

    pub fn waiter(&self, id: WaiterId) -> Option<&Waiter> {
        self.waiters.get(&id).map(|entry| &entry.waiter)
    }

    /// The waiters of a key in the order of their places.
    pub fn queue(&self, key: &Key, now: Instant) -> Vec<Queued> {
        let Some(queue) = self.queues.get(key) else { return Vec::new() };
        let entry = |id: &WaiterId| self.waiters.get(id);
        queue.in_order().filter_map(entry).map(|entry| entry.queued(now)).collect()
    }

    /// Every waiter with its claim, and every lease that runs: what a new policy must be asked about.
    pub fn claims(&self) -> impl Iterator<Item = (Standing, &Claim)> {
        let waiting = self.waiters.iter().map(|(id, entry)| {
            let asked = entry.flight.is_some() || entry.unsure_until.is_some();
            (Standing::Waiter { id: *id, asked }, &entry.waiter.claim)
        });
        waiting.chain(self.leases.claims().map(|(nonce, claim)| (Standing::Lease { nonce }, claim)))
    }

    /// When [`Table::handle_timeout`] has something to do.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.timers.first().map(|(at, _)| *at)
    }

    pub fn handle(&mut self, event: Event, now: Instant, out: &mut Vec<Action>) {
        match event {
            Event::Enqueue(waiter) => self.enqueue(*waiter, now, out),
            Event::Cancel(id) => self.cancel(id, now, out),
            Event::Release { id, lease, attempt } => self.release(id, lease, attempt, now, out),
            Event::Completed { ticket, result } => self.completed(ticket, result, now, out),
            Event::Chosen { key, choice, waiter } => self.chosen(&key, choice, waiter, now, out),
            Event::Backoff { waiter, key, decision } => self.backed_off(waiter, &key, decision, now, out),
            Event::Renewed { nonce, until } => self.renewed(nonce, until),
            Event::Gone { nonce } => self.lease_over(nonce, now, out),
            Event::Undelivered { nonce, keys, attempt, ttl_ms } => {
                self.lease_ended(nonce);
                let until = now.plus_ms(ttl_ms).plus_ms(ABANDON_MS);
                self.fly(vec![Part::Abandon { keys, attempt, until }], out);
            }
            Event::Taken(key) => {
                for nonce in self.leases.of(&key) {
                    self.lease_over(nonce, now, out);
                }
                self.wake(&key, now, out);
            }
            Event::Wake(key) => self.wake(&key, now, out),
            Event::Replan { waiter, claim } => self.replan(waiter, claim, now, out),
            Event::Shutdown => self.shut_down(out),
        }
    }

    /// Does what is due at `now`.
    pub fn handle_timeout(&mut self, now: Instant, out: &mut Vec<Action>) {
        while self.timers.first().is_some_and(|(at, _)| *at <= now) {
            match self.timers.pop_first() {
                Some((_, Timer::Deadline(id))) => self.deadline(id, now, out),
                Some((at, Timer::Poll(key))) => {
                    if let Some(queue) = self.queues.get_mut(&key)
                        && queue.poll_at == Some(at)
                    {
                        queue.poll_at = None;
                        self.wake(&key, now, out);
                    }
                }
                Some((at, Timer::Lease(nonce))) => {
                    if self.leases.ends_at(nonce) == Some(at) {
                        self.lease_expired(nonce, now, out);
                    }
                }
                Some((_, Timer::Abandon(keys, attempt, until))) => {
                    self.fly(vec![Part::Abandon { keys, attempt, until }], out);
                }
                None => break,
            }
        }
    }
}

/// Entering and leaving the queues.
impl Table {
    fn enqueue(&mut self, waiter: Waiter, now: Instant, out: &mut Vec<Action>) {
        let id = waiter.id;
        if self.shutting_down {
            out.push(Action::Finish { waiter: id, verdict: Verdict::ShuttingDown });
            return;
        }
        let full =
            |key: &Key| self.queues.get(key).is_some_and(|q| q.len() >= waiter.max_waiters.max(1) as usize);
        let may_rejoin = waiter.claim.reentrant || waiter.claim.request.is_some();
        if waiter.claim.keys.iter().any(full) && !may_rejoin {
            let verdict = Verdict::TooManyWaiters { limit: waiter.max_waiters };
            out.push(Action::Finish { waiter: id, verdict });
            return;
        }
        let over = waiter.claim.keys.iter().any(full);
        let keys = waiter.claim.keys.clone();
        let deadline = now.plus_ms(waiter.wait_ms);
        self.arrivals += 1;
        let place = Place { rank: waiter.rank, arrival: self.arrivals };
        let entry = Entry {
            place,
            arrived: now,
            deadline,
            flight: None,
            cancelled: false,
            attempts: 0,
            last_sleep_ms: 0,
            denial: None,
            store_error: None,
            unsure_until: None,
            replan: None,
            waiter,
        };
        self.timers.insert((deadline, Timer::Deadline(id)));
        self.reopen(&entry.waiter.claim);
        self.join_queues(id, &entry);
        self.waiters.insert(id, entry);
        self.advance_all(&keys, now, out);
        let waits = self.waiters.get(&id).is_some_and(|entry| entry.flight.is_none());
        if waits && may_rejoin {
            self.probe(id, over, out);
        } else if waits && deadline <= now {
            self.deadline(id, now, out);
        }
    }

    /// A key that was found held by some who share it is asked for again by the next who would share
    /// it, too, if nobody waits: who was denied may have wanted more of it.
    fn reopen(&mut self, claim: &Claim) {
        if claim.mode == Mode::Exclusive {
            return;
        }
        for key in &*claim.keys {
            let Some(queue) = self.queues.get_mut(key).filter(|queue| queue.len() == 0) else { continue };
            let holder = queue.holder.as_ref().and_then(|known| known.held_by.as_ref());
            queue.ready |= holder.is_none_or(|holder| holder.mode != Mode::Exclusive);
        }
    }

    fn join_queues(&mut self, id: WaiterId, entry: &Entry) {
        for key in &*entry.waiter.claim.keys {
            let queue = self.queues.entry(key.clone()).or_default();
            queue.join(entry.place, id, &entry.waiter.group);
        }
    }

    /// Asks, past the queue, whether the waiter has its grant already. `over`: the queue has no
    /// place for it otherwise.
    fn probe(&mut self, id: WaiterId, over: bool, out: &mut Vec<Action>) {
        self.fly(vec![Part::Rejoin { waiter: id, over }], out);
    }

    fn cancel(&mut self, id: WaiterId, now: Instant, out: &mut Vec<Action>) {
        let Some(entry) = self.waiters.get_mut(&id) else { return };
        if entry.flight.is_some() {
            entry.cancelled = true;
        } else {
            self.leave(id, now, out);
        }
    }

    /// Takes the waiter out of its queues and lets the next one move up.
    fn leave(&mut self, id: WaiterId, now: Instant, out: &mut Vec<Action>) -> Option<Entry> {
        let entry = self.drop_out(id)?;
        let keys = entry.waiter.claim.keys.clone();
        self.advance_all(&keys, now, out);
        Some(entry)
    }

    /// Takes a waiter without a grant out of its queues; what it may have been granted is undone.
    fn drop_out(&mut self, id: WaiterId) -> Option<Entry> {
        let entry = self.remove(id)?;
        self.undo_unsure(&entry);
        Some(entry)
    }

    fn undo_unsure(&mut self, entry: &Entry) {
        if let Some(until) = entry.unsure_until {
            let claim = &entry.waiter.claim;
            self.timers.insert((Instant(0), Timer::Abandon(claim.keys.clone(), claim.attempt, until)));
        }
    }

    fn remove(&mut self, id: WaiterId) -> Option<Entry> {
        let entry = self.waiters.remove(&id)?;
        self.timers.remove(&(entry.deadline, Timer::Deadline(id)));
        for key in &*entry.waiter.claim.keys {
            if let Some(queue) = self.queues.get_mut(key) {
                queue.leave(entry.place, &entry.waiter.group);
            }
        }
        Some(entry)
    }

    /// The waiter's time is up. A flight that is under way decides it; so does one that it is next after.
    fn deadline(&mut self, id: WaiterId, now: Instant, out: &mut Vec<Action>) {
        let Some(entry) = self.waiters.get(&id) else { return };
        if entry.flight.is_some() {
            return;
        }
        if self.is_next_after_flight(entry) {
            self.late.push(id);
            return;
        }
        self.give_up(id, None, now, out);
    }

    /// Whether only a flight that may leave room stands between the waiter and its own attempt.
    fn is_next_after_flight(&self, entry: &Entry) -> bool {
        let exclusive = entry.waiter.claim.mode == Mode::Exclusive;
        let mut waits_for_flight = false;
        for key in &*entry.waiter.claim.keys {
            let Some(queue) = self.queues.get(key) else { continue };
            let clear = queue.ahead_of(entry.place).all(|id| {
                self.waiters.get(&id).is_some_and(|ahead| {
                    let leaves_room = !exclusive && ahead.waiter.claim.mode != Mode::Exclusive;
                    ahead.cancelled || (ahead.flight.is_some() && leaves_room)
                })
            });
            if !clear || (queue.flight.is_none() && !queue.ready) {
                return false;
            }
            waits_for_flight |= queue.flight.is_some();
        }
        waits_for_flight
    }

    fn give_up(&mut self, id: WaiterId, reason: Option<String>, now: Instant, out: &mut Vec<Action>) {
        let Some(entry) = self.waiters.get(&id) else { return };
        let position = self.position(entry);
        let Some(mut entry) = self.drop_out(id) else { return };
        let verdict = match entry.store_error.take() {
            Some(why) => Verdict::Unavailable { why },
            None => self.contended(&entry, position, reason, now),
        };
        let keys = entry.waiter.claim.keys.clone();
        out.push(Action::Finish { waiter: id, verdict });
        self.advance_all(&keys, now, out);
    }

    fn contended(&self, entry: &Entry, position: u32, reason: Option<String>, now: Instant) -> Verdict {
        let known = entry.waiter.claim.keys.iter().find_map(|key| self.queues.get(key)?.holder.as_ref());
        let (holder, left_ms) = match (known, &entry.denial) {
            (Some(known), _) => (known.held_by.clone(), known.until.ms_since(now)),
            (None, Some(denial)) => (denial.holder.clone(), ms_of(denial.free_in_us)),
            (None, None) => (None, 0),
        };
        let retry_after_ms = left_ms.clamp(1, MAX_POLL_MS);
        Verdict::Contended { holder, position, retry_after_ms, reason }
    }

    /// The waiter's worst place in a queue, 1 for the next.
    fn position(&self, entry: &Entry) -> u32 {
        let places = entry.waiter.claim.keys.iter().filter_map(|key| self.queues.get(key));
        places.map(|queue| queue.ahead_of(entry.place).count() as u32 + 1).max().unwrap_or(1)
    }

    fn replan(&mut self, id: WaiterId, claim: Box<Claim>, now: Instant, out: &mut Vec<Action>) {
        let Some(entry) = self.waiters.get_mut(&id) else { return };
        if entry.flight.is_some() {
            entry.replan = Some(claim);
            return;
        }
        let Some(mut entry) = self.remove(id) else { return };
        self.undo_unsure(&entry);
        entry.unsure_until = None;
        let old = entry.waiter.claim.keys.clone();
        entry.waiter.claim = *claim;
        let new = entry.waiter.claim.keys.clone();
        self.timers.insert((entry.deadline, Timer::Deadline(id)));
        self.join_queues(id, &entry);
        self.waiters.insert(id, entry);
        self.advance_all(&old, now, out);
        self.advance_all(&new, now, out);
    }

    fn shut_down(&mut self, out: &mut Vec<Action>) {
        self.shutting_down = true;
        let queued: BTreeSet<_> =
            self.waiters.iter().filter(|(_, entry)| entry.flight.is_none()).map(|(id, _)| *id).collect();
        for id in queued {
            self.drop_out(id);
            out.push(Action::Finish { waiter: id, verdict: Verdict::ShuttingDown });
        }
    }
}

/// Who is next, and the flights that ask the store.
impl Table {
    fn wake(&mut self, key: &Key, now: Instant, out: &mut Vec<Action>) {
        if let Some(queue) = self.queues.get_mut(key) {
            queue.ready = true;
        }
        self.advance(key, now, out);
    }

    fn advance_all(&mut self, keys: &[Key], now: Instant, out: &mut Vec<Action>) {
        for key in keys {
            self.advance(key, now, out);
        }
    }

    /// Lets the next waiters of a key ask the store, if there is one and it makes sense to ask.
    fn advance(&mut self, key: &Key, now: Instant, out: &mut Vec<Action>) {
        let Some(queue) = self.queues.get(key) else { return };
        if queue.is_idle() {
            if let Some(at) = queue.poll_at {
                self.timers.remove(&(at, Timer::Poll(key.clone())));
            }
            self.queues.remove(key);
            return;
        }
        if queue.flight.is_some() || queue.choice.is_some() || queue.len() == 0 {
            return;
        }
        if !queue.ready {
            return self.arm(key, now, out);
        }
        if self.asks_choice(key) {
            return self.ask_choice(key, None, now, out);
        }
        let parts = self.run(key, &HashSet::new());
        if !parts.is_empty() {
            self.fly(parts, out);
        }
    }

    /// The head and those behind it that may be granted with it, if all their keys are free to ask.
    /// `freed`: keys that a release of the same flight frees.
    fn run(&self, key: &Key, freed: &HashSet<Key>) -> Vec<Part> {
        let Some(queue) = self.queues.get(key) else { return Vec::new() };
        let mut parts = Vec::new();
        let mut last: Option<Mode> = None;
        for id in queue.in_order().take(RUN_MAX) {
            let Some(entry) = self.waiters.get(id) else { break };
            let mode = entry.waiter.claim.mode;
            if last.is_some_and(|last| !follows(last, mode) || entry.waiter.claim.keys.len() > 1) {
                break;
            }
            if !self.may_launch(*id, entry, freed) {
                break;
            }
            parts.push(Part::Acquire { waiter: *id });
            if mode == Mode::Exclusive || entry.waiter.claim.keys.len() > 1 {
                break;
            }
            last = Some(mode);
        }
        parts
    }

    /// Whether the waiter is next, or follows those who are, in all its queues, and none of them is
    /// busy or known to be held.
    fn may_launch(&self, id: WaiterId, entry: &Entry, freed: &HashSet<Key>) -> bool {
        let single = entry.waiter.claim.keys.len() == 1;
        let free = |key: &Key| {
            self.queues.get(key).is_some_and(|queue| {
                (single || queue.head() == Some(id))
                    && queue.flight.is_none()
                    && (queue.ready || freed.contains(key))
            })
        };
        entry.flight.is_none() && !entry.cancelled && entry.waiter.claim.keys.iter().all(free)
    }

    fn asks_choice(&self, key: &Key) -> bool {
        let Some(queue) = self.queues.get(key) else { return false };
        let head = queue.head().and_then(|id| self.waiters.get(&id));
        queue.len() > 1 && head.is_some_and(|entry| entry.waiter.asks_choice && entry.flight.is_none())
    }

    fn ask_choice(
        &mut self,
        key: &Key,
        release: Option<(ReleaseId, LeaseRef, u64)>,
        now: Instant,
        out: &mut Vec<Action>,
    ) {
        self.choices += 1;
        let choice = self.choices;
        let Some(queue) = self.queues.get_mut(key) else { return };
        queue.choice = Some(queue::Choice { id: choice, release });
        let waiters = &self.waiters;
        let candidate = |id: WaiterId| {
            let entry = waiters.get(&id)?;
            let eligible = entry.flight.is_none() && entry.waiter.claim.keys.len() == 1;
            let waited_ms = now.ms_since(entry.arrived);
            eligible.then_some(Candidate { waiter: id, rank: entry.waiter.rank, waited_ms })
        };
        let candidates = queue.first_of_each_group(VIEW_WAITERS).into_iter().filter_map(candidate).collect();
        let groups = queue.shares();
        out.push(Action::Choose { key: key.clone(), choice, candidates, groups });
    }

    fn chosen(
        &mut self,
        key: &Key,
        choice: u64,
        waiter: Option<WaiterId>,
        now: Instant,
        out: &mut Vec<Action>,
    ) {
        let Some(queue) = self.queues.get_mut(key) else { return };
        if queue.choice.as_ref().is_none_or(|open| open.id != choice) {
            return;
        }
        let release = queue.choice.take().and_then(|open| open.release);
        let mut freed = HashSet::new();
        let mut parts = Vec::new();
        if let Some((id, lease, attempt)) = release {
            freed.extend(lease.keys.iter().cloned());
            parts.push(Part::Release { id, lease, attempt });
        }
        let launchable = waiter.filter(|id| {
            let entry = self.waiters.get(id);
            entry.is_some_and(|e| e.waiter.claim.keys.contains(key) && self.may_launch(*id, e, &freed))
        });
        match launchable {
            Some(id) => parts.push(Part::Acquire { waiter: id }),
            None => parts.extend(self.run(key, &freed)),
        }
        if !parts.is_empty() {
            self.fly(parts, out);
        } else if self.queues.get(key).is_some_and(Queue::is_idle) {
            self.advance(key, now, out);
        } else {
            self.arm(key, now, out);
        }
    }

    /// Sends a group to the store and marks its waiters and their keys as under way.
    fn fly(&mut self, parts: Vec<Part>, out: &mut Vec<Action>) {
        self.tickets += 1;
        let ticket = Ticket(self.tickets);
        let mut ops = Vec::with_capacity(parts.len());
        let mut keys = Vec::new();
        for part in &parts {
            match part {
                Part::Release { lease, attempt, .. } => {
                    ops.push(Op::Release { lease: lease.clone(), attempt: *attempt });
                }
                Part::Abandon { keys, attempt, .. } => {
                    ops.push(Op::Abandon { keys: keys.clone(), attempt: *attempt });
                }
                Part::Rejoin { waiter, .. } | Part::Acquire { waiter } => {
                    let Some(entry) = self.waiters.get_mut(waiter) else { continue };
                    entry.flight = Some(ticket);
                    let claim = entry.waiter.claim.clone();
                    if matches!(part, Part::Rejoin { .. }) {
                        ops.push(Op::Rejoin(claim));
                        continue;
                    }
                    entry.attempts += 1;
                    keys.extend(claim.keys.iter().cloned());
                    ops.push(Op::Acquire(claim));
                }
            }
        }
        for key in &keys {
            if let Some(queue) = self.queues.get_mut(key) {
                queue.flight = Some(ticket);
                if let Some(at) = queue.poll_at.take() {
                    self.timers.remove(&(at, Timer::Poll(key.clone())));
                }
            }
        }
        self.flights.insert(ticket, Flight { parts, keys });
        out.push(Action::Submit { ticket, ops });
    }

    fn release(&mut self, id: ReleaseId, lease: LeaseRef, attempt: u64, now: Instant, out: &mut Vec<Action>) {
        let freed: HashSet<Key> = lease.keys.iter().cloned().collect();
        if let [key] = &*lease.keys
            && self.queues.get(key).is_some_and(|queue| queue.flight.is_none() && queue.choice.is_none())
            && self.asks_choice(key)
        {
            let key = key.clone();
            return self.ask_choice(&key, Some((id, lease, attempt)), now, out);
        }
        let mut parts = vec![Part::Release { id, lease: lease.clone(), attempt }];
        let mut taken = HashSet::new();
        for key in &*lease.keys {
            let free = |q: &Queue| q.flight.is_none() && q.choice.is_none();
            if self.queues.get(key).is_some_and(free) && !self.asks_choice(key) {
                let new = |part: &Part| part.waiter().is_some_and(|waiter| taken.insert(waiter));
                parts.extend(self.run(key, &freed).into_iter().filter(new));
            }
        }
        self.fly(parts, out);
    }

    /// Sees to it that a key that is held is asked for again: at the time that the head's policy
    /// says, at the latest when the holder's lease ends.
    fn arm(&mut self, key: &Key, now: Instant, out: &mut Vec<Action>) {
        let Some(queue) = self.queues.get_mut(key) else { return };
        if queue.poll_at.is_some() || queue.flight.is_some() || queue.asked_backoff {
            return;
        }
        let waiters = queue.len() as u32;
        let Some(head) = queue.head().and_then(|id| self.waiters.get_mut(&id)) else { return };
        let (holder, free_at) = match &queue.holder {
            Some(known) => {
                (known.held_by.as_ref().map_or_else(|| "".into(), |by| by.owner.clone()), known.until)
            }
            None => ("".into(), now.plus_ms(MAX_POLL_MS)),
        };
        let contention = Contention {
            attempt: head.attempts.max(1),
            waited_ms: now.ms_since(head.arrived),
            wait_left_ms: head.deadline.ms_since(now),
            holder_left_ms: free_at.ms_since(now),
            holder,
            waiters,
            last_sleep_ms: head.last_sleep_ms,
        };
        if head.waiter.asks_backoff {
            queue.asked_backoff = true;
            out.push(Action::Backoff { waiter: head.waiter.id, key: key.clone(), contention });
        } else {
            let next = built_in_backoff(contention.attempt, head.waiter.seed);
            self.sleep(key, next, now);
        }
    }

    fn backed_off(&mut self, id: WaiterId, key: &Key, next: Next, now: Instant, out: &mut Vec<Action>) {
        if let Some(queue) = self.queues.get_mut(key) {
            queue.asked_backoff = false;
        }
        let at_head = self.queues.get(key).is_some_and(|queue| queue.head() == Some(id));
        match next {
            Next::GiveUp { reason } if self.waiters.get(&id).is_some_and(|e| e.flight.is_none()) => {
                self.give_up(id, Some(reason), now, out);
            }
            next if at_head && self.queues.get(key).is_some_and(|q| !q.ready && q.poll_at.is_none()) => {
                self.sleep(key, next, now);
            }
            _ => self.advance(key, now, out),
        }
    }

    fn sleep(&mut self, key: &Key, next: Next, now: Instant) {
        let Some(queue) = self.queues.get_mut(key) else { return };
        let after_ms = match next {
            Next::Poll { after_ms } => after_ms.clamp(MIN_POLL_MS, MAX_POLL_MS),
            _ => MAX_POLL_MS,
        };
        let free_at = queue.holder.as_ref().map_or(Instant(u64::MAX), |known| known.until);
        let at = now.plus_ms(after_ms).min(free_at.max(now.plus_ms(MIN_POLL_MS)));
        queue.poll_at = Some(at);
        if let Some(head) = queue.head().and_then(|id| self.waiters.get_mut(&id)) {
            head.last_sleep_ms = at.ms_since(now);
        }
        self.timers.insert((at, Timer::Poll(key.clone())));
    }
}

/// Whether a claim may fly behind one of mode `last`: it is granted only if that one is.
fn follows(last: Mode, next: Mode) -> bool {
    match (last, next) {
        (Mode::Shared, Mode::Shared) => true,
        (Mode::Permits { count: a, limit: x }, Mode::Permits { count: b, limit: y }) => b >= a && y <= x,
        _ => false,
    }
}

/// Exponential with full jitter, from 50 ms to 2 s: a safety net, since a release on this proxy wakes
/// the head at once.
pub fn built_in_backoff(attempt: u32, seed: u32) -> Next {
    let bound = 50u32.saturating_mul(1 << attempt.saturating_sub(1).min(6)).min(2_000);
    let mixed = (seed ^ attempt.wrapping_mul(0x9E37_79B9)).wrapping_mul(0x85EB_CA6B);
    Next::Poll { after_ms: 10 + (mixed >> 8) % bound }
}

fn ms_of(us: u64) -> u32 {
    u32::try_from(us / 1_000).unwrap_or(u32::MAX)
}

impl Entry {
    fn queued(&self, now: Instant) -> Queued {
        Queued {
            waiter: self.waiter.id,
            owner: self.waiter.claim.owner.clone(),
            mode: self.waiter.claim.mode,
            rank: self.waiter.rank,
            group: self.waiter.group.clone(),
            waited_ms: now.ms_since(self.arrived),
        }
    }
}

#[cfg(test)]
mod tests;
