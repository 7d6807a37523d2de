//! The queue of one key.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use super::actions::GroupShare;
use super::events::{ReleaseId, SubmissionId, WaiterId};
use super::limits::VIEW_WAITERS;
use crate::lock::record::{Cause, Denial, HeldBy, NextWaiter, Release};
use crate::lock::{Instant, Token};

/// How many recent grants of a key are remembered with their groups.
const RECENT_GRANTS: usize = 64;

/// A waiter's position in a queue: lower ranks first, then earlier arrivals.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct QueuePosition {
    pub rank: i32,
    pub arrival: u64,
}

/// The waiters of one key, and what this proxy knows of the key.
#[derive(Debug)]
pub(super) struct Queue {
    order: BTreeMap<QueuePosition, WaiterId>,
    groups: BTreeMap<Box<str>, BTreeSet<QueuePosition>>,
    recent: VecDeque<Box<str>>,
    /// The batch that asks the store for this key.
    pub in_flight: Option<SubmissionId>,
    /// A question to the policy, which is the next waiter, that is not answered yet.
    pub choice: Option<Choice>,
    /// The policy was asked what to do while the key is held, and has not answered.
    pub asked_backoff: bool,
    /// Whether it makes sense to ask the store: the key is not known to be held.
    pub ready: bool,
    /// The key was freed while a batch was in flight that may not have seen the change.
    pub woken: bool,
    /// When the store is asked for the key next, without another event.
    pub poll_at: Option<Instant>,
    /// Waiters that join the global queue together, a moment after the first of them arrived.
    pub joining: Vec<WaiterId>,
    /// When the places in the global queue are extended next.
    pub keep_at: Option<Instant>,
    /// This proxy, if the store may have a note that it waits.
    pub marked: Option<Arc<str>>,
    /// The holder or the delay that blocks the key, if it is known.
    pub holder: Option<Known>,
    /// The running leases of this key, other than exclusive ones, that this proxy knows.
    pub leases: usize,
    /// The leases of this key that have ended by this proxy's clock, and whose end the store has not confirmed.
    pub due: Vec<u64>,
}

/// An open question to a policy, and the release that goes to the store together with the chosen waiter.
#[derive(Debug)]
pub(super) struct Choice {
    pub id: u64,
    pub release: Option<(ReleaseId, Release)>,
}

/// What is known of the holder or the delay that blocks the key.
#[derive(Debug)]
pub(super) struct Known {
    /// By which rule it blocks the key.
    pub cause: Cause,
    pub held_by: Option<HeldBy>,
    pub until: Instant,
    /// The waiter for which the free key is reserved, if that is what blocks it.
    pub next_waiter: Option<NextWaiter>,
    /// Whether this proxy granted the lease.
    pub own: bool,
}

impl Known {
    /// A lease that this proxy granted.
    pub fn own(held_by: HeldBy, until: Instant) -> Known {
        Known { cause: Cause::Held, held_by: Some(held_by), until, next_waiter: None, own: true }
    }

    fn token(&self) -> Option<Token> {
        self.held_by.as_ref().map(|by| by.token)
    }
}

impl Default for Queue {
    fn default() -> Queue {
        Queue {
            order: BTreeMap::new(),
            groups: BTreeMap::new(),
            recent: VecDeque::new(),
            in_flight: None,
            choice: None,
            asked_backoff: false,
            ready: true,
            woken: false,
            poll_at: None,
            joining: Vec::new(),
            keep_at: None,
            marked: None,
            holder: None,
            leases: 0,
            due: Vec::new(),
        }
    }
}

impl Queue {
    /// The store has denied the key, as it says until `until`.
    pub fn held_up(&mut self, denial: &Denial, until: Instant) {
        self.ready = false;
        let Denial { cause, holder, next_waiter, .. } = denial;
        let (held_by, next_waiter) = (holder.clone(), next_waiter.clone());
        let mut known = Known { cause: *cause, held_by, until, next_waiter, own: false };
        known.own = self.holder.as_ref().is_some_and(|before| before.own && before.token() == known.token());
        self.holder = Some(known);
    }

    pub fn len(&self) -> usize {
        self.order.len()
    }

    /// A queue in which nobody waits. The key is held by a lease of this proxy, which was granted to this group.
    pub fn of_held(holder: Option<Known>, group: &str) -> Queue {
        let mut queue = Queue { holder, ..Queue::default() };
        queue.granted(group);
        queue
    }

    /// Whether the queue can be removed: nobody waits in it, and nothing is going on. `is_held`: an exclusive lease of the
    /// key runs, from which [`Queue::of_held`] makes a queue for the next waiter, with its group but no earlier ones. What
    /// the store said of other proxies' holders is lost; the next waiter asks the store anyway.
    pub fn is_idle(&self, is_held: bool) -> bool {
        let is_quiet = self.order.is_empty() && self.in_flight.is_none() && self.choice.is_none();
        is_quiet && self.leases == 0 && self.due.is_empty() && !(is_held && self.recent.len() > 1)
    }

    pub fn head(&self) -> Option<WaiterId> {
        self.order.first_key_value().map(|(_, id)| *id)
    }

    pub fn in_order(&self) -> impl Iterator<Item = &WaiterId> {
        self.order.values()
    }

    pub fn ahead_of(&self, place: QueuePosition) -> impl DoubleEndedIterator<Item = WaiterId> {
        self.order.range(..place).map(|(_, id)| *id)
    }

    pub fn join(&mut self, place: QueuePosition, id: WaiterId, group: &str) {
        self.order.insert(place, id);
        match self.groups.get_mut(group) {
            Some(places) => {
                places.insert(place);
            }
            None => {
                self.groups.insert(group.into(), BTreeSet::from([place]));
            }
        }
    }

    pub fn leave(&mut self, place: QueuePosition, group: &str) {
        self.order.remove(&place);
        if let Some(places) = self.groups.get_mut(group) {
            places.remove(&place);
            if places.is_empty() {
                self.groups.remove(group);
            }
        }
    }

    pub fn granted(&mut self, group: &str) {
        if self.recent.len() >= RECENT_GRANTS {
            self.recent.pop_front();
        }
        self.recent.push_back(group.into());
    }

    /// At most `most` waiters: the first waiters of each group, in the order of their positions.
    pub fn first_of_each_group(&self, most: usize) -> Vec<WaiterId> {
        let each = most.div_ceil(self.groups.len().max(1));
        let firsts = self.groups.values().flat_map(|places| places.iter().take(each));
        let mut places: Vec<QueuePosition> = firsts.copied().collect();
        places.sort_unstable();
        places.truncate(most);
        places.iter().filter_map(|place| self.order.get(place).copied()).collect()
    }

    /// The groups of the waiters, for a policy: at most [`VIEW_WAITERS`].
    pub fn shares(&self) -> Vec<GroupShare> {
        let recent = |group: &str| self.recent.iter().filter(|recent| &***recent == group).count() as u32;
        let groups = self.groups.iter().take(VIEW_WAITERS);
        let shares = groups.map(|(group, places)| GroupShare {
            group: group.clone(),
            waiting: places.len() as u32,
            recent_grants: recent(group),
        });
        shares.collect()
    }
}
