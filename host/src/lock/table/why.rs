//! Says why each waiter of a key waits, by the functions that decide when the store is asked for it.

use super::Table;
use super::entry::Entry;
use super::queue::Queue;
use super::turns::{Hindrance, joins};
use super::views::{Order, Queued, Reason, Rule, Why};
use crate::lock::maps::HashSet;
use crate::lock::{Instant, Key};

impl Table {
    /// The waiters of a key in the order of their positions, and why each of them waits.
    pub fn queue(&self, key: &Key, now: Instant) -> Vec<Queued> {
        let Some(queue) = self.queues.get(key) else { return Vec::new() };
        // The waiter before, and the last waiter of the turn before.
        let (mut last, mut ahead): (Option<&Entry>, Option<&Entry>) = (None, None);
        let mut turns_ahead = 0;
        let is_chosen = self.asks_choice(key) || queue.choice.is_some();
        let mut queued = Vec::with_capacity(queue.len());
        for entry in queue.in_order().filter_map(|id| self.waiters.get(id)) {
            if let Some(last) = last.filter(|last| !joins(&last.waiter.claim, &entry.waiter.claim)) {
                ahead = Some(last);
                turns_ahead += 1;
            }
            queued.push(Queued {
                waiter: entry.waiter.id,
                waited_ms: now.ms_since(entry.arrived),
                wait_left_ms: entry.deadline.ms_since(now),
                turns_ahead,
                rule: match (&entry.waiter.claim.global, is_chosen) {
                    (Some(_), _) => Rule::GlobalQueue,
                    (None, true) => Rule::Fairness,
                    (None, false) => Rule::RankThenArrival,
                },
                why: self.why((key, queue), entry, ahead, is_chosen, now),
            });
            last = Some(entry);
        }
        queued
    }

    /// `ahead`: the nearest waiter for the key that has to be granted it before this one. `is_chosen`: the policy chooses
    /// the next waiter.
    fn why(
        &self,
        (key, queue): (&Key, &Queue),
        entry: &Entry,
        ahead: Option<&Entry>,
        is_chosen: bool,
        now: Instant,
    ) -> Why {
        let here = |reason| Why { key: key.clone(), reason };
        let id = entry.waiter.id;
        let is_head = queue.head() == Some(id);
        if !is_head && is_chosen {
            return here(Reason::Fairness { waiting: queue.len() as u32 });
        }
        if let Some(ahead) = ahead {
            return here(behind(entry, ahead));
        }
        if queue.choice.is_some() {
            return here(Reason::Choosing);
        }
        let claim = &entry.waiter.claim;
        let others = claim.keys.iter().filter(|other| *other != key);
        let hindered: Vec<_> = std::iter::once(key)
            .chain(others)
            .filter_map(|key| Some((key, self.hindrance(id, claim, key, &HashSet::default())?)))
            .collect();
        // While the store is asked for several keys, the key that it last denied tells more than the others.
        let says_more = |(key, hindrance): &&(&Key, Hindrance)| {
            *hindrance != Hindrance::InFlight || self.known_holder(key).is_some()
        };
        match hindered.iter().find(says_more).or(hindered.first()).copied() {
            Some((key, hindrance)) => {
                Why { key: key.clone(), reason: self.hindered(key, hindrance, entry, now) }
            }
            None if entry.in_flight.is_some() => here(Reason::Asked),
            None => here(Reason::Free),
        }
    }

    fn hindered(&self, key: &Key, hindrance: Hindrance, entry: &Entry, now: Instant) -> Reason {
        let queue = self.queues.get(key);
        if hindrance == Hindrance::Behind {
            let ahead = queue.and_then(|queue| queue.ahead_of(entry.place).next_back());
            return match ahead.and_then(|id| self.waiters.get(&id)) {
                Some(ahead) => behind(entry, ahead),
                None => Reason::Free,
            };
        }
        // While the store is asked again, what it said last is the best that is known.
        match (queue.and_then(|queue| queue.holder.as_ref()), &entry.store_error) {
            (Some(known), _) => Reason::Blocked {
                cause: known.cause,
                holder: known.held_by.clone(),
                free_in_ms: known.until.ms_since(now),
                next_waiter: known.next_waiter.clone(),
            },
            (None, Some(why)) => Reason::Unanswered { why: why.clone() },
            (None, None) if hindrance == Hindrance::InFlight => Reason::Asked,
            (None, None) => Reason::Free,
        }
    }
}

fn behind(entry: &Entry, ahead: &Entry) -> Reason {
    let by = match (&entry.waiter.claim.global, &ahead.waiter.claim.global) {
        (Some(_), Some(_)) => Order::GlobalQueue,
        _ if ahead.place.rank < entry.place.rank => Order::Rank,
        _ => Order::Arrival,
    };
    let claim = &ahead.waiter.claim;
    Reason::Behind { ahead: ahead.waiter.id, owner: claim.owner.clone(), mode: claim.mode, by }
}
