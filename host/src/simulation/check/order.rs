//! Checks whether waiters are granted a resource in the order of their requests.

use std::collections::BTreeMap;

use super::{Checks, Granted, Violation, is_of};
use crate::clock;
use crate::lock::{Instant, Mode};
use crate::simulation::faults::ORDERED;
use crate::simulation::options::Options;

/// A client that waits for an exclusive lock.
#[derive(Debug)]
pub(super) struct Waiting {
    id: u64,
    owner: String,
    /// The index of the proxy, and its `life`.
    proxy: (usize, u64),
    asked_at: Instant,
    until: Instant,
    /// A client that asked later and was granted the lock while this one waited, and when.
    passed_by: Option<(String, Instant)>,
}

/// When the waiters of all proxies came into one global queue, for [`ORDERED`].
#[derive(Debug, Default)]
pub(super) struct OrderOfAll {
    /// Whether a global queue that begins during the run is checked. If so, nothing else happens then.
    may_begin: bool,
    since: Option<Instant>,
    /// The number of changes of the policy that have begun, followed by the number that have not ended.
    begun: u64,
    under_way: u64,
}

impl OrderOfAll {
    /// The state at the start of a run.
    pub fn of(options: &Options) -> OrderOfAll {
        let since = options.in_order.then_some(Instant(0));
        OrderOfAll { may_begin: options.may_come_into_order(), since, ..OrderOfAll::default() }
    }

    /// Since when the global queue is in use.
    pub fn since(&self) -> Option<Instant> {
        self.since
    }
}

/// The longest time for a waiter to join the global queue in the store, if nothing goes wrong.
const JOINS_MS: u32 = 100;

impl Checks {
    /// A client waits for an exclusive lock, until `until` at the latest. Returns the id of the wait.
    pub fn waits(&mut self, resource: &str, owner: &str, proxy: (usize, u64), until: Instant) -> u64 {
        self.last_id += 1;
        let (owner, asked_at) = (owner.to_owned(), clock::now());
        let waiting = Waiting { id: self.last_id, owner, proxy, asked_at, until, passed_by: None };
        self.waiting.entry(resource.to_owned()).or_default().push(waiting);
        self.last_id
    }

    /// The policy's keys are renamed. From now on the order of its waiters is not checked, because some waiters wait
    /// for more keys than others.
    pub fn is_renamed(&mut self, policy: &'static str) {
        self.renamed.insert(policy);
        self.waiting.retain(|resource, _| !is_of(resource, policy));
    }

    /// A change of the policy begins. Returns its number, for [`Checks::change_ends`]. `in_order`: the policy may get
    /// a global queue. Its waiters are then granted in the order in which they join that queue. If packets are lost,
    /// this is not the order of the requests.
    pub fn change_begins(&mut self, policy: &'static str, in_order: bool) -> u64 {
        if in_order {
            self.in_global_queue.insert(policy);
        }
        let order = &mut self.order_of_all;
        if policy == ORDERED {
            order.since = None;
            order.begun += 1;
            order.under_way += 1;
        }
        order.begun
    }

    /// The change has ended. `in_order`: it is live on all proxies, and the policy has a global queue. Returns
    /// whether that queue's order is checked.
    pub fn change_ends(&mut self, policy: &str, begun: u64, in_order: bool) -> bool {
        let order = &mut self.order_of_all;
        if policy != ORDERED {
            return false;
        }
        order.under_way -= 1;
        let was_alone = order.under_way == 0 && order.begun == begun;
        order.since = (was_alone && in_order && order.may_begin).then(clock::now);
        order.since.is_some()
    }

    /// Whether waiters for the resource at one proxy are granted it in the order of their requests.
    pub(super) fn keeps_order(&self, resource: &str) -> bool {
        let is_in_line = self.in_global_queue.iter().any(|policy| is_of(resource, policy));
        self.keeps_names(resource) && (self.joins_in_order || !is_in_line)
    }

    /// Whether the keys of the resource have kept their names so far.
    pub fn keeps_names(&self, resource: &str) -> bool {
        !self.renamed.iter().any(|policy| is_of(resource, policy))
    }

    /// The wait has ended, with or without an answer.
    pub fn waits_no_more(&mut self, resource: &str, id: u64) -> Result<(), Violation> {
        let Some(waiting) = self.waiting.get_mut(resource) else { return Ok(()) };
        let Some(at) = waiting.iter().position(|waiting| waiting.id == id) else { return Ok(()) };
        let ended = waiting.swap_remove(at);
        match ended.passed_by {
            // Events at the same moment have no order.
            Some((other, at)) if at < clock::now() => Err(Violation(format!(
                "out of order: {other} was granted {resource}, which {} had asked for before, and waited for",
                ended.owner
            ))),
            _ => Ok(()),
        }
    }
}

/// Marks the waiters that asked the same proxy before this request and still wait. `ordered_since`: since when the
/// policy has a global queue. From then on, waiters of other proxies are marked as well, including those that already
/// waited then.
pub(super) fn pass(
    waiting: &mut BTreeMap<String, Vec<Waiting>>,
    granted: &Granted<'_>,
    ordered_since: Option<Instant>,
) {
    let Granted { resource, owner, mode, asked_at, now, proxy, life, .. } = *granted;
    let is_passed = |waiting: &&mut Waiting| {
        let came_before = match waiting.proxy == (proxy, life) {
            true => waiting.asked_at < asked_at,
            false => ordered_since.is_some_and(|since| {
                is_of(resource, ORDERED) && waiting.asked_at.max(since).plus_ms(JOINS_MS) < asked_at
            }),
        };
        came_before && now < waiting.until
    };
    if mode == Mode::Exclusive {
        for waiting in waiting.get_mut(resource).into_iter().flatten().filter(is_passed) {
            waiting.passed_by.get_or_insert_with(|| (owner.to_owned(), now));
        }
    }
}
