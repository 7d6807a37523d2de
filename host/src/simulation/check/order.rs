//! Whether waiters are granted a resource in the order in which they asked.

use std::collections::BTreeMap;

use super::{Checks, Granted, Violation, is_of};
use crate::clock;
use crate::lock::{Instant, Mode};
use crate::simulation::faults::ORDERED;

/// A client that waits for an exclusive lock.
#[derive(Debug)]
pub(super) struct Waiting {
    id: u64,
    owner: String,
    /// The proxy, and which of its lives.
    proxy: (usize, u64),
    asked_at: Instant,
    until: Instant,
    /// A client that asked later and was granted the lock while this one waited, and when.
    passed_by: Option<(String, Instant)>,
}

/// How long a waiter takes at most to come into line in the store, where nothing goes wrong.
const JOINS_MS: u32 = 100;

impl Checks {
    /// A client waits for an exclusive lock, until `until` at the latest. Returns the number of the wait.
    pub fn waits(&mut self, resource: &str, owner: &str, proxy: (usize, u64), until: Instant) -> u64 {
        self.last_id += 1;
        let (owner, asked_at) = (owner.to_owned(), clock::now());
        let waiting = Waiting { id: self.last_id, owner, proxy, asked_at, until, passed_by: None };
        self.waiting.entry(resource.to_owned()).or_default().push(waiting);
        self.last_id
    }

    /// The keys of the policy get other names: from now on the order of its waiters is not checked, as some wait for more
    /// keys than others.
    pub fn is_renamed(&mut self, policy: &'static str) {
        self.renamed.insert(policy);
        self.waiting.retain(|resource, _| !is_of(resource, policy));
    }

    /// The policy may get an order over all proxies: that in which its waiters come into line, and where packets are lost
    /// that is not the order in which they ask.
    pub fn gets_in_line(&mut self, policy: &'static str) {
        self.in_line.insert(policy);
    }

    /// Whether waiters for the resource at one proxy are granted it in the order in which they ask.
    pub(super) fn keeps_order(&self, resource: &str) -> bool {
        let is_in_line = self.in_line.iter().any(|policy| is_of(resource, policy));
        self.keeps_names(resource) && (self.joins_in_order || !is_in_line)
    }

    /// Whether the keys of the resource have had the same names so far.
    pub fn keeps_names(&self, resource: &str) -> bool {
        !self.renamed.iter().any(|policy| is_of(resource, policy))
    }

    /// The wait has ended, with an answer or without.
    pub fn waits_no_more(&mut self, resource: &str, id: u64) -> Result<(), Violation> {
        let Some(waiting) = self.waiting.get_mut(resource) else { return Ok(()) };
        let Some(at) = waiting.iter().position(|waiting| waiting.id == id) else { return Ok(()) };
        let ended = waiting.swap_remove(at);
        match ended.passed_by {
            // What happens at one moment has no order.
            Some((other, at)) if at < clock::now() => Err(Violation(format!(
                "out of order: {other} was granted {resource} at the proxy that {} had asked before, and waited at",
                ended.owner
            ))),
            _ => Ok(()),
        }
    }
}

/// Notes those who asked the same proxy before this one, and wait still.
/// With `all`, also those who asked another proxy, where the policy has one order for all.
pub(super) fn pass(waiting: &mut BTreeMap<String, Vec<Waiting>>, granted: &Granted<'_>, all: bool) {
    let Granted { resource, owner, mode, asked_at, now, proxy, life, .. } = *granted;
    let is_passed = |waiting: &&mut Waiting| {
        let came_before = match waiting.proxy == (proxy, life) {
            true => waiting.asked_at < asked_at,
            false => all && is_of(resource, ORDERED) && waiting.asked_at.plus_ms(JOINS_MS) < asked_at,
        };
        came_before && now < waiting.until
    };
    if mode == Mode::Exclusive {
        for waiting in waiting.get_mut(resource).into_iter().flatten().filter(is_passed) {
            waiting.passed_by.get_or_insert_with(|| (owner.to_owned(), now));
        }
    }
}
