//! The state machine: its state, and what goes in and out.

use std::collections::{BTreeSet, VecDeque};

use super::actions::Action;
use super::charge::Charge;
use super::chores::{Abandon, Chore, Chores};
use super::entry::Entry;
use super::events::{Event, SubmissionId, Waiter, WaiterId};
use super::in_flight::{BatchItem, InFlight};
use super::leases::{HeldLease, Leases};
use super::limits::ABANDON_MS;
use super::queue::Queue;
use super::timer::Timer;
use crate::lock::maps::HashMap;
use crate::lock::record::{Claim, GlobalQueueChange};
use crate::lock::{Instant, Key, LeaseRef};

/// The queues of one proxy. See the documentation of [the module](super).
#[derive(Debug, Default)]
pub struct Table {
    pub(super) queues: HashMap<Key, Box<Queue>>,
    pub(super) waiters: HashMap<WaiterId, Entry>,
    pub(super) in_flight: HashMap<SubmissionId, InFlight>,
    pub(super) leases: Leases,
    pub(super) chores: Chores,
    pub(super) timers: BTreeSet<(Instant, Timer)>,
    /// What the caller must do next, the first action first.
    pub(super) actions: VecDeque<Action>,
    /// The numbers of waiters, batches and choices so far: each one gets the next number.
    pub(super) arrivals: u64,
    pub(super) tickets: u64,
    pub(super) choices: u64,
    /// Waiters whose deadline has passed and which an in-flight batch may still grant their key.
    pub(super) late: Vec<WaiterId>,
    pub(super) shutting_down: bool,
    /// The keys whose next waiter the batch finds whose answer is being processed.
    pub(super) looking: Vec<Key>,
}

impl Table {
    /// A table without waiters and leases.
    pub fn new() -> Table {
        Table::default()
    }

    /// How many waiters all queues have.
    pub fn waiting(&self) -> usize {
        self.waiters.len()
    }

    /// How many leases this proxy has granted or renewed that have not ended.
    pub fn held(&self) -> usize {
        self.leases.len()
    }

    /// Whether there are waiters, unanswered batches, or chores that are due.
    pub fn busy(&self) -> bool {
        !self.in_flight.is_empty() || !self.waiters.is_empty() || self.chores.are_due()
    }

    /// Whether the lease is running, as far as this proxy knows.
    pub fn knows(&self, nonce: u64) -> bool {
        self.leases.get(nonce).is_some()
    }

    /// Whether what becomes of the reference says something about the lease with its nonce, as this proxy knows it: not if
    /// another client refers to the lease, maybe by an altered id.
    pub fn knows_as(&self, lease: &LeaseRef) -> bool {
        let known = self.leases.get(lease.nonce);
        known.is_some_and(|known| lease.is_allowed(&known.tag.principal))
    }

    /// The waiter with this id, if it is in a queue.
    pub fn waiter(&self, id: WaiterId) -> Option<&Waiter> {
        self.waiters.get(&id).map(|entry| &entry.waiter)
    }

    /// How many waiters a key has.
    pub fn queue_len(&self, key: &Key) -> usize {
        self.queues.get(key).map_or(0, |queue| queue.len())
    }

    /// The claim of each waiter.
    pub fn claims(&self) -> impl Iterator<Item = (WaiterId, &Claim)> {
        self.waiters.iter().map(|(id, entry)| (*id, &entry.waiter.claim))
    }

    /// Each running lease that this proxy has granted or renewed, with its nonce.
    pub fn leases(&self) -> impl Iterator<Item = (u64, &HeldLease)> {
        self.leases.iter()
    }

    /// When [`Table::handle_timeout`] next has work to do; `None` if no timer is set.
    pub fn poll_timeout(&self) -> Option<Instant> {
        let timer = self.timers.first().map(|(at, _)| *at);
        timer.into_iter().chain(self.leases.next_end()).min()
    }

    /// The next thing that the caller must do; `None` if nothing is left. The actions come in the order in which
    /// the table decided on them, and that is the order in which the caller must begin them.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// Processes an event that happened at `now`. Call [`Table::poll_action`] afterwards.
    pub fn handle_event(&mut self, event: Event, now: Instant) {
        match event {
            Event::Enqueue(waiter) => self.enqueue(*waiter, now),
            Event::Cancel(id) => self.cancel(id, now),
            Event::Release { id, release } => self.release(id, release, now),
            Event::Completed { ticket, result } => self.completed(ticket, result, now),
            Event::Chosen { key, choice, waiter } => self.chosen(&key, choice, waiter, now),
            Event::Backoff { waiter, key, decision } => self.backed_off(waiter, &key, decision, now),
            Event::Renewed { nonce, until } => self.renewed(nonce, until),
            Event::Lost { nonce } => self.lease_lost(nonce, now),
            Event::Undelivered { nonce, keys, attempt, ttl_ms } => {
                let lease = self.lease_ended(nonce).and_then(|lease| lease.charge);
                self.remove_all_idle(&keys);
                let until = now.plus_ms(ttl_ms).plus_ms(ABANDON_MS);
                self.chore(Chore::Abandon(Abandon {
                    keys,
                    attempt,
                    until,
                    _charge: Charge { request: None, lease },
                }));
            }
            Event::Taken(key) => {
                for nonce in self.leases.of(&key) {
                    self.lease_over(nonce, now);
                }
                self.wake(&key, now);
                let looks: Vec<BatchItem> = Table::looks(std::slice::from_ref(&key)).collect();
                if !looks.is_empty() {
                    self.submit(looks);
                }
            }
            Event::Wake(key) => self.wake(&key, now),
            Event::Orphan { key, next_waiter } => self.orphan(key, next_waiter, now),
            Event::PeerGone { peer, key } => {
                self.change_global_queue(key, GlobalQueueChange::Evict { proxy: peer });
            }
            Event::Replan { waiter, claim } => self.replan(waiter, claim, now),
            Event::Shutdown => self.shut_down(),
        }
    }

    /// Does all work that is due at `now`. Call [`Table::poll_action`] afterwards.
    pub fn handle_timeout(&mut self, now: Instant) {
        while let Some(at) = self.poll_timeout().filter(|at| *at <= now) {
            if self.timers.first().is_none_or(|(first, _)| *first > at) {
                if let Some(nonce) = self.leases.pop_end() {
                    self.lease_due(nonce, now);
                }
                continue;
            }
            match self.timers.pop_first() {
                Some((_, Timer::Deadline(id))) => self.deadline(id, now),
                Some((at, Timer::Poll(key))) => {
                    if let Some(queue) = self.queues.get_mut(&key)
                        && queue.poll_at == Some(at)
                    {
                        queue.poll_at = None;
                        self.wake(&key, now);
                    }
                }
                Some((_, Timer::Look(nonce))) => {
                    if self.leases.ends_at(nonce).is_some_and(|end| end <= now) {
                        self.chore(Chore::Look { nonce });
                    }
                }
                Some((at, Timer::Chores)) => self.chores_go_on(at.max(now)),
                Some((_, Timer::Leave(key, proxy, ticket))) => {
                    self.change_global_queue(key, GlobalQueueChange::Leave { proxy, ticket });
                }
                Some((_, Timer::Join(key))) => self.join(&key, now),
                Some((at, Timer::Keep(key))) => self.keep_places(&key, at, now),
                None => break,
            }
        }
    }
}
