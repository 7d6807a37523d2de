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

use std::collections::BTreeSet;
use std::sync::Arc;

use super::record::{
    Claim, Denial, GlobalQueueChange, Grant, HeldBy, Outcome, Release, StoredValue, UNNOTICED_US,
};
use super::{Instant, Key, LeaseRef, Mode, Token};

mod chores;
mod events;
mod global_queue;
mod in_flight;
mod leases;
mod queue;
mod turns;
mod waiters;

pub use events::*;
pub use turns::built_in_backoff;

use chores::{Chore, Chores};
use in_flight::InFlight;
use leases::Leases;
use queue::{Queue, QueuePosition};

use crate::lock::maps::HashMap;

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
/// How long a waiter behind others of this proxy may wait for more to take their places in line with it. What
/// a place costs, a write of the row, whoever is next waits for.
const JOIN_MS: u32 = 10;
/// How often the places that this proxy's waiters have in line are kept.
const KEEP_PLACES_MS: u32 = 1_500;
/// While the store cannot be reached, a claim is undone again and again, until so long after its lease would end by this
/// proxy's clock. If the server's clock is set back meanwhile, the lease may outlast the tries.
pub const ABANDON_MS: u32 = 5_000;
/// How long after its time a waiter may still come to stand behind a flight.
const OVERDUE_MS: u32 = 1_000;
/// After a lease has ended as far as this proxy knows, the store is asked whether it has. By then others may have
/// the key.
const LOOK_MS: u32 = (UNNOTICED_US / 1_000) as u32;
/// The queues of one proxy. See the module's documentation.
#[derive(Debug, Default)]
pub struct Table {
    queues: HashMap<Key, Queue>,
    waiters: HashMap<WaiterId, Entry>,
    in_flight: HashMap<SubmissionId, InFlight>,
    leases: Leases,
    chores: Chores,
    timers: BTreeSet<(Instant, Timer)>,
    arrivals: u64,
    tickets: u64,
    choices: u64,
    /// Waiters whose time is up and whose last chance is a flight that is under way.
    late: Vec<WaiterId>,
    shutting_down: bool,
    /// The flight whose answer is being taken in looks whose turn it is.
    looking: bool,
}

/// A waiter in its queues.
#[derive(Debug)]
struct Entry {
    waiter: Waiter,
    place: QueuePosition,
    arrived: Instant,
    deadline: Instant,
    /// The flight that asks the store for this waiter.
    in_flight: Option<SubmissionId>,
    cancelled: bool,
    attempts: u32,
    last_sleep_ms: u32,
    /// Why the last attempt failed.
    denial: Option<Denial>,
    store_error: Option<String>,
    /// An attempt had no answer: it may have been granted. Until when that grant could last.
    unsure_until: Option<Instant>,
    replan: Option<Box<Claim>>,
    /// The store may have a place in line for it.
    in_global_queue: bool,
    /// The flight that asks for it leaves this proxy's mark where it is denied.
    marks: bool,
    /// It became its turn while a flight was under way that may not have seen it.
    again: bool,
    /// Its time is up, and the store has been asked whether the lease in its way is its own: the token of that lease.
    looked_for: Option<Token>,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Timer {
    Deadline(WaiterId),
    Poll(Key),
    Lease(u64),
    /// Ask the store whether a lease has ended.
    Look(u64),
    /// Go on with what nobody waits for.
    Chores,
    /// Give up a place in line, or, without a ticket, this proxy's mark.
    Leave(Key, Arc<str>, Option<u64>),
    /// Take the places in line of those who have come of late.
    Join(Key),
    /// Keep the places of this proxy's waiters.
    Keep(Key),
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
        !self.in_flight.is_empty() || !self.waiters.is_empty() || self.chores.are_due()
    }

    /// Whether the lease runs, as far as this proxy knows.
    pub fn knows(&self, nonce: u64) -> bool {
        self.leases.claim(nonce).is_some()
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
        let waiting =
            self.waiters.iter().map(|(id, entry)| (Standing::Waiter { id: *id }, &entry.waiter.claim));
        waiting.chain(self.leases.standing())
    }

    /// When [`Table::handle_timeout`] has something to do.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.timers.first().map(|(at, _)| *at)
    }

    pub fn handle(&mut self, event: Event, now: Instant, out: &mut Vec<Action>) {
        match event {
            Event::Enqueue(waiter) => self.enqueue(*waiter, now, out),
            Event::Cancel(id) => self.cancel(id, now, out),
            Event::Release { id, release } => self.release(id, release, now, out),
            Event::Completed { ticket, result } => self.completed(ticket, result, now, out),
            Event::Chosen { key, choice, waiter } => self.chosen(&key, choice, waiter, now, out),
            Event::Backoff { waiter, key, decision } => self.backed_off(waiter, &key, decision, now, out),
            Event::Renewed { nonce, until } => self.renewed(nonce, until),
            Event::Lost { nonce } => self.lease_lost(nonce, now, out),
            Event::Undelivered { nonce, keys, attempt, ttl_ms } => {
                self.lease_ended(nonce);
                let until = now.plus_ms(ttl_ms).plus_ms(ABANDON_MS);
                self.chore(Chore::Abandon { keys, attempt, until }, out);
            }
            Event::Taken(key) => {
                for nonce in self.leases.of(&key) {
                    self.lease_over(nonce, now, out);
                }
                self.wake(&key, now, out);
            }
            Event::Wake(key) => self.wake(&key, now, out),
            Event::Orphan { key, next_waiter } => self.orphan(key, next_waiter, now, out),
            Event::PeerGone { peer, key } => {
                self.change_global_queue(key, GlobalQueueChange::Evict { proxy: peer }, out);
            }
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
                        self.lease_due(nonce, now, out);
                    }
                }
                Some((_, Timer::Look(nonce))) => {
                    if self.leases.ends_at(nonce).is_some_and(|end| end <= now) {
                        self.chore(Chore::Look { nonce }, out);
                    }
                }
                Some((at, Timer::Chores)) => self.chores_go_on(at.max(now), out),
                Some((_, Timer::Leave(key, proxy, ticket))) => {
                    self.change_global_queue(key, GlobalQueueChange::Leave { proxy, ticket }, out);
                }
                Some((_, Timer::Join(key))) => self.join(&key, now, out),
                Some((_, Timer::Keep(key))) => self.keep_places(&key, now, out),
                None => break,
            }
        }
    }
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

#[cfg(any(test, feature = "simulation"))]
pub mod simulation;
#[cfg(test)]
mod tests;
