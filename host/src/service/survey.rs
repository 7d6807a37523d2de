//! The survey of the store: the leases in it, with the part of their requests that decides their keys.

use std::collections::BTreeSet;

use super::context::{Service, ServiceContext};
use super::message::Plans;
use super::shadow::{NewPlan, Shadow, union};
use super::tag;
use crate::lock::Key;
use crate::lock::maps::{HashMap, HashSet};
use crate::lock::record::{Holder, Tag};
use crate::policy::PlanRequest;
use crate::store::StoreError;

/// How many records one page of a survey reads.
const PAGE: usize = 1_000;

impl Service {
    /// The leases in the store that were granted to guarded requests, with their resources, by nonce. They
    /// include leases of requests and proxies that have ended. Of the locks that a session holds, only those of
    /// this proxy are included.
    ///
    /// # Errors
    /// If not all of them can be read.
    pub async fn guarded_leases(&self) -> Result<HashMap<u64, String>, StoreError> {
        let may_be_guarded = |tag: &Tag| tag.delegated_to.is_some() || tag::policy(tag).is_some();
        let held = complete(held(&self.shared, may_be_guarded).await?)?;
        Ok(held.into_iter().map(|lease| (lease.nonce, lease.request.resource)).collect())
    }
}

/// A lease as the store knows it.
pub(super) struct Held {
    pub nonce: u64,
    pub keys: HashSet<Key>,
    pub request: PlanRequest,
    /// Another proxy decides about the key, and grants it to requests that are not known here.
    pub is_delegation: bool,
}

/// The requests of the leases that are known.
pub(super) fn requests(held: &[Held]) -> impl Iterator<Item = PlanRequest> {
    held.iter().filter(|lease| !lease.is_delegation).map(|lease| lease.request.clone())
}

impl Held {
    /// The shadow that the lease casts if it lacks the keys of its plan.
    pub fn shadow(&self, plans: &Plans, policy: &str) -> Option<Shadow> {
        let old = union(&[], self.keys.iter());
        if self.is_delegation {
            return Some(Shadow::of_delegation(self.nonce, old, policy));
        }
        let plan = plans.get(&self.request)?.as_ref();
        let is_held =
            |new: &NewPlan| new.is_held_with(|key| self.keys.contains(key), self.keys.iter().cloned());
        (!plan.is_some_and(is_held)).then(|| Shadow::new(self.nonce, old, plan, policy))
    }
}

/// Every lease in the store whose tag is wanted, and the stores whose leases may be missing. The policy that
/// decides about a tag may differ from the policy that planned the lease, because routes can change, too.
pub(super) async fn held(
    shared: &ServiceContext,
    is_wanted: impl Fn(&Tag) -> bool,
) -> Result<(Vec<Held>, Vec<String>), StoreError> {
    let mut leases: HashMap<u64, Held> = HashMap::default();
    let mut unheard = BTreeSet::new();
    let mut after = None;
    loop {
        let page = shared.store.list(String::new(), after.take(), PAGE).await?;
        unheard.extend(page.unheard);
        for stored in &page.items {
            let live = |holder: &&Holder| !stored.has_ended(holder) && is_wanted(&holder.tag);
            for holder in stored.record.holders.iter().filter(live) {
                let lease = leases.entry(holder.nonce).or_insert_with(|| Held {
                    nonce: holder.nonce,
                    keys: HashSet::default(),
                    request: tag::request(&holder.tag, &holder.owner, holder.mode),
                    is_delegation: holder.tag.delegated_to.is_some(),
                });
                lease.keys.insert(stored.key.clone());
            }
        }
        match page.items.last().filter(|_| page.more) {
            Some(last) => after = Some(last.key.clone()),
            None => return Ok((leases.into_values().collect(), unheard.into_iter().collect())),
        }
    }
}

/// The leases, if all stores were heard.
pub(super) fn complete((held, unheard): (Vec<Held>, Vec<String>)) -> Result<Vec<Held>, StoreError> {
    match unheard.is_empty() {
        true => Ok(held),
        false => Err(StoreError::Unavailable { why: unheard.join("; ") }),
    }
}
