//! Chooses the next waiters of a key, and sends the batches that ask the store for them.

use super::Table;
use super::actions::{Action, Candidate, Contention};
use super::entry::Entry;
use super::events::{Next, ReleaseId, WaiterId};
use super::in_flight::BatchItem;
use super::limits::{MAX_POLL_MS, MIN_POLL_MS, RUN_MAX, STORE_RETRY_MS, VIEW_WAITERS};
use super::queue::{Choice, Queue};
use super::timer::Timer;
use crate::lock::maps::HashSet;
use crate::lock::record::{Claim, Release};
use crate::lock::{Instant, Key, Mode};

impl Table {
    pub(super) fn wake(&mut self, key: &Key, now: Instant) {
        if let Some(queue) = self.queues.get_mut(key) {
            queue.ready = true;
            queue.woken = queue.in_flight.is_some();
            if let Some(head) = queue.head().and_then(|id| self.waiters.get_mut(&id)) {
                head.again = head.in_global_queue && head.in_flight.is_some();
            }
        }
        self.advance(key, now);
    }

    pub(super) fn advance_all(&mut self, keys: &[Key], now: Instant) {
        for key in keys {
            self.advance(key, now);
        }
    }

    /// Lets the next waiters of a key ask the store, if there are any and the key may be free.
    pub(super) fn advance(&mut self, key: &Key, now: Instant) {
        self.remove_if_idle(key);
        let Some(queue) = self.queues.get(key) else { return };
        if queue.in_flight.is_some() || queue.choice.is_some() || queue.len() == 0 {
            return;
        }
        if !queue.ready {
            return self.arm(key, now);
        }
        if self.asks_choice(key) {
            return self.ask_choice(key, None, now);
        }
        let items = self.run(key, &HashSet::default());
        if !items.is_empty() {
            self.submit(items);
        }
    }

    /// The queue of a key.
    pub(super) fn queue_of(&mut self, key: &Key) -> &mut Queue {
        let lease = self.leases.last_on(key);
        let new = || lease.map(|lease| Queue::of_held(lease.known_on(key), &lease.group));
        self.queues.entry(key.clone()).or_insert_with(|| Box::new(new().unwrap_or_default()))
    }

    /// Removes the queue of a key if nothing is lost with it.
    pub(super) fn remove_if_idle(&mut self, key: &Key) {
        let is_held = || self.leases.last_on(key).is_some();
        if let Some(queue) = self.queues.get(key).filter(|queue| queue.is_idle(is_held())) {
            if let Some(at) = queue.poll_at {
                self.timers.remove(&(at, Timer::Poll(key.clone())));
            }
            self.queues.remove(key);
        }
    }

    pub(super) fn remove_all_idle(&mut self, keys: &[Key]) {
        keys.iter().for_each(|key| self.remove_if_idle(key));
    }

    /// The head of the queue and the waiters behind it that may be granted with it, if all their keys can be
    /// asked for. `freed`: keys that a release in the same batch frees.
    pub(super) fn run(&self, key: &Key, freed: &HashSet<Key>) -> Vec<BatchItem> {
        let Some(queue) = self.queues.get(key) else { return Vec::new() };
        let mut items = Vec::new();
        let mut last: Option<&Claim> = None;
        for id in queue.in_order().take(RUN_MAX) {
            let Some(entry) = self.waiters.get(id) else { break };
            let claim = &entry.waiter.claim;
            if last.is_some_and(|last| !joins(last, claim)) || !self.may_launch(*id, entry, freed) {
                break;
            }
            items.push(BatchItem::Acquire { waiter: *id });
            last = Some(claim);
        }
        items
    }

    /// Whether the waiter, or the run that it follows, is at the head of all its queues, and none of its keys
    /// has a batch in flight or is known to be held.
    pub(super) fn may_launch(&self, id: WaiterId, entry: &Entry, freed: &HashSet<Key>) -> bool {
        let claim = &entry.waiter.claim;
        let mut has_free_key = false;
        for key in &*claim.keys {
            match self.hindrance(id, claim, key, freed) {
                None => has_free_key = true,
                Some(Hindrance::Blocked) if claim.any => {}
                Some(_) => return false,
            }
        }
        entry.in_flight.is_none() && !entry.cancelled && has_free_key
    }

    /// Why the store is not asked for the waiter now, as far as this key of its claim is concerned.
    pub(super) fn hindrance(
        &self,
        id: WaiterId,
        claim: &Claim,
        key: &Key,
        freed: &HashSet<Key>,
    ) -> Option<Hindrance> {
        let Some(queue) = self.queues.get(key) else { return Some(Hindrance::Behind) };
        if claim.keys.len() > 1 && queue.head() != Some(id) {
            return Some(Hindrance::Behind);
        }
        if queue.in_flight.is_some() {
            return Some(Hindrance::InFlight);
        }
        (!queue.ready && !freed.contains(key)).then_some(Hindrance::Blocked)
    }

    pub(super) fn asks_choice(&self, key: &Key) -> bool {
        let Some(queue) = self.queues.get(key) else { return false };
        let head = queue.head().and_then(|id| self.waiters.get(&id));
        queue.len() > 1 && head.is_some_and(|entry| entry.waiter.asks_choice && entry.in_flight.is_none())
    }

    pub(super) fn ask_choice(&mut self, key: &Key, release: Option<(ReleaseId, Release)>, now: Instant) {
        self.choices += 1;
        let choice = self.choices;
        let Some(queue) = self.queues.get_mut(key) else { return };
        queue.choice = Some(Choice { id: choice, release });
        let waiters = &self.waiters;
        let candidate = |id: WaiterId| {
            let entry = waiters.get(&id)?;
            let eligible = entry.in_flight.is_none() && entry.waiter.claim.keys.len() == 1;
            let waited_ms = now.ms_since(entry.arrived);
            eligible.then_some(Candidate { waiter: id, rank: entry.waiter.rank, waited_ms })
        };
        let candidates = queue.first_of_each_group(VIEW_WAITERS).into_iter().filter_map(candidate).collect();
        let groups = queue.shares();
        self.actions.push_back(Action::Choose { key: key.clone(), choice, candidates, groups });
    }

    pub(super) fn chosen(&mut self, key: &Key, choice: u64, waiter: Option<WaiterId>, now: Instant) {
        let Some(queue) = self.queues.get_mut(key) else { return };
        if queue.choice.as_ref().is_none_or(|open| open.id != choice) {
            return;
        }
        let release = queue.choice.take().and_then(|open| open.release);
        let mut freed = HashSet::default();
        let (mut items, mut looks) = (Vec::new(), Vec::new());
        if let Some((id, release)) = release {
            freed.extend(release.lease.keys.iter().cloned());
            looks.extend(Table::looks(&release.lease.keys));
            items.push(BatchItem::Release { id, release });
        }
        let launchable = waiter.filter(|id| {
            let entry = self.waiters.get(id);
            entry.is_some_and(|e| e.waiter.claim.keys.contains(key) && self.may_launch(*id, e, &freed))
        });
        match launchable {
            Some(id) => items.extend(self.with_readers(id, key, &freed)),
            None => items.extend(self.run(key, &freed)),
        }
        items.append(&mut looks);
        if !items.is_empty() {
            self.submit(items);
        } else {
            self.remove_if_idle(key);
            self.arm(key, now);
        }
    }

    /// The chosen waiter. If it is a reader, the readers at the head of the queue come with it: the key is shared anyway.
    fn with_readers(&self, chosen: WaiterId, key: &Key, freed: &HashSet<Key>) -> Vec<BatchItem> {
        let mut items = vec![BatchItem::Acquire { waiter: chosen }];
        let mode = |id| self.waiters.get(&id).map(|entry| entry.waiter.claim.mode);
        if mode(chosen) == Some(Mode::Shared) {
            let is_reader = |id| id != chosen && mode(id) == Some(Mode::Shared);
            let readers = self.run(key, freed).into_iter();
            items.extend(readers.filter(|item| item.waiter().is_some_and(is_reader)));
        }
        items
    }

    pub(super) fn release(&mut self, id: ReleaseId, release: Release, now: Instant) {
        let lease = &release.lease;
        let freed: HashSet<Key> = lease.keys.iter().cloned().collect();
        if let [key] = &*lease.keys
            && self.queues.get(key).is_some_and(|queue| queue.in_flight.is_none() && queue.choice.is_none())
            && self.asks_choice(key)
        {
            let key = key.clone();
            return self.ask_choice(&key, Some((id, release)), now);
        }
        let mut items = vec![BatchItem::Release { id, release: release.clone() }];
        let mut taken = HashSet::default();
        for key in &*lease.keys {
            let free = |q: &Queue| q.in_flight.is_none() && q.choice.is_none();
            if self.queues.get(key).is_some_and(|queue| free(queue)) && !self.asks_choice(key) {
                let new = |item: &BatchItem| item.waiter().is_some_and(|waiter| taken.insert(waiter));
                items.extend(self.run(key, &freed).into_iter().filter(new));
            }
        }
        items.extend(Table::looks(&lease.keys));
        self.submit(items);
    }

    /// The first waiter whose client is still there.
    fn first_present(&self, key: &Key) -> Option<WaiterId> {
        let mut waiters = self.queues.get(key)?.in_order();
        waiters.find(|id| self.waiters.get(id).is_some_and(|entry| !entry.cancelled)).copied()
    }

    /// Schedules the next poll of a held key: at the time that the policy of the first waiter says, and at the
    /// latest when the holder's lease ends. A waiter whose client has gone leaves with the answer to its batch;
    /// the policy of the next waiter is asked then.
    pub(super) fn arm(&mut self, key: &Key, now: Instant) {
        let first = self.first_present(key);
        let Some(queue) = self.queues.get_mut(key) else { return };
        if queue.poll_at.is_some() || queue.in_flight.is_some() || queue.asked_backoff {
            return;
        }
        let waiters = queue.len() as u32;
        let Some(head) = first.and_then(|id| self.waiters.get(&id)) else { return };
        let (holder, free_at) = match &queue.holder {
            Some(known) => {
                (known.held_by.as_ref().map_or_else(|| "".into(), |by| by.owner.clone()), known.until)
            }
            None => ("".into(), now.plus_ms(STORE_RETRY_MS)),
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
            self.actions.push_back(Action::Backoff { waiter: head.waiter.id, key: key.clone(), contention });
        } else {
            let next = built_in_backoff(contention.attempt, head.waiter.seed);
            self.sleep(key, &next, now);
        }
    }

    pub(super) fn backed_off(&mut self, id: WaiterId, key: &Key, next: Next, now: Instant) {
        if let Some(queue) = self.queues.get_mut(key) {
            queue.asked_backoff = false;
        }
        let at_head = self.first_present(key) == Some(id);
        match next {
            Next::GiveUp { reason } if self.waiters.get(&id).is_some_and(|e| e.in_flight.is_none()) => {
                if !self.looks_again(id, now) {
                    self.give_up(id, Some(reason), now);
                }
            }
            next if at_head && self.queues.get(key).is_some_and(|q| !q.ready && q.poll_at.is_none()) => {
                self.sleep(key, &next, now);
            }
            _ => self.advance(key, now),
        }
    }

    pub(super) fn sleep(&mut self, key: &Key, next: &Next, now: Instant) {
        let first = self.first_present(key);
        let Some(queue) = self.queues.get_mut(key) else { return };
        let after_ms = match next {
            Next::Poll { after_ms } => (*after_ms).clamp(MIN_POLL_MS, MAX_POLL_MS),
            _ => MAX_POLL_MS,
        };
        // Without a known holder, no notification can be expected.
        let free_at = queue.holder.as_ref().map_or(now.plus_ms(STORE_RETRY_MS), |known| known.until);
        let at = now.plus_ms(after_ms).min(free_at.max(now.plus_ms(MIN_POLL_MS)));
        queue.poll_at = Some(at);
        if let Some(head) = first.and_then(|id| self.waiters.get_mut(&id)) {
            head.last_sleep_ms = at.ms_since(now);
        }
        self.timers.insert((at, Timer::Poll(key.clone())));
    }
}

/// Why the store is not asked for a waiter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hindrance {
    /// Another waiter for the key is ahead.
    Behind,
    /// A batch for the key is in flight.
    InFlight,
    /// The key is known to be held, or the store did not answer a moment ago.
    Blocked,
}

/// Whether a claim may be in one batch right behind `last`: it is granted only if that claim is.
pub(super) fn joins(last: &Claim, next: &Claim) -> bool {
    last.keys.len() == 1 && next.keys.len() == 1 && follows(last.mode, next.mode)
}

fn follows(last: Mode, next: Mode) -> bool {
    match (last, next) {
        (Mode::Shared, Mode::Shared) => true,
        (Mode::Permits { count: a, limit: x }, Mode::Permits { count: b, limit: y }) => b >= a && y <= x,
        _ => false,
    }
}

/// The next pause without a `backoff` hook: exponential with full jitter, with a bound that grows from 50 ms to
/// 2 s. It is only a safety net, because a release on this proxy wakes the head at once.
pub fn built_in_backoff(attempt: u32, seed: u32) -> Next {
    let bound = 50u32.saturating_mul(1 << attempt.saturating_sub(1).min(6)).min(2_000);
    let mixed = (seed ^ attempt.wrapping_mul(0x9E37_79B9)).wrapping_mul(0x85EB_CA6B);
    Next::Poll { after_ms: 10 + (mixed >> 8) % bound }
}
