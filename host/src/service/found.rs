//! What a survey of the store found: see [`super::survey`].

use std::collections::hash_map::Entry;

use super::shadow::{NewPlan, Plans, Shadow};
use crate::lock::maps::{HashMap, HashSet};
use crate::lock::{Instant, Key};
use crate::policy::PlanRequest;

/// A lease as the store knows it, with those of its keys that were read.
pub(super) struct Held {
    pub nonce: u64,
    pub keys: Vec<Key>,
    pub request: PlanRequest,
    /// Another proxy decides about the key, and grants it to requests that are not known here.
    pub is_delegation: bool,
}

/// A lease that lacks keys of its plan.
pub(super) struct Lacking {
    pub lease: Held,
    /// The plan by the generation that was asked; `None` if it does not tell the keys, or the request is not known.
    pub plan: Option<NewPlan>,
}

impl Lacking {
    fn is_held(&self) -> bool {
        self.plan.as_ref().is_some_and(|new| new.is_held_by(&self.lease.keys))
    }

    /// The shadow that the lease casts.
    pub fn shadow(&self, policy: &str) -> Shadow {
        let old = Key::union(&[], self.lease.keys.iter());
        match self.lease.is_delegation {
            true => Shadow::of_delegation(self.lease.nonce, old, policy),
            false => Shadow::new(self.lease.nonce, old, self.plan.as_ref(), policy),
        }
    }
}

/// What a survey found of the leases that a generation's policy decides about.
pub(super) struct Survey {
    /// When the survey began.
    pub began: Instant,
    policy: Box<str>,
    /// The leases that do not have all keys of the generation's plan for them.
    pub lacking: HashMap<u64, Lacking>,
    /// The leases that have all of these keys. Their other keys may be on later pages.
    held: HashSet<u64>,
}

impl Survey {
    /// A survey that begins now and has found nothing yet.
    pub fn begin(began: Instant, policy: &str) -> Survey {
        Survey { began, policy: policy.into(), lacking: HashMap::default(), held: HashSet::default() }
    }

    /// Whether the lease was in the store.
    pub fn found(&self, nonce: u64) -> bool {
        self.held.contains(&nonce) || self.lacking.contains_key(&nonce)
    }

    /// The shadows of the leases that lack keys.
    pub fn shadows(&self) -> impl Iterator<Item = Shadow> {
        self.lacking.values().map(|lacking| lacking.shadow(&self.policy))
    }

    /// Adds the leases of a page, with the generation's plans for those of them that were not found before.
    pub fn add(&mut self, page: HashMap<u64, Held>, plans: &Plans) {
        for (nonce, lease) in page {
            if self.held.contains(&nonce) {
                continue;
            }
            match self.lacking.entry(nonce) {
                Entry::Occupied(mut known) => known.get_mut().lease.keys.extend(lease.keys),
                Entry::Vacant(place) => {
                    let plan = plans.get(&lease.request).cloned().flatten().filter(|_| !lease.is_delegation);
                    place.insert(Lacking { lease, plan });
                }
            }
            // Whether a lease has one of several keys is known once all of its keys are.
            let has_all = self.lacking.get(&nonce).filter(|lease| lease.is_held());
            if has_all.and_then(|lease| lease.plan.as_ref()).is_some_and(|plan| !plan.any) {
                self.lacking.remove(&nonce);
                self.held.insert(nonce);
            }
        }
    }

    /// Ends the survey: the keys of all leases are known.
    pub fn end(&mut self) {
        let held = self.lacking.extract_if(|_, lease| lease.is_held());
        self.held.extend(held.map(|(nonce, _)| nonce));
    }
}
