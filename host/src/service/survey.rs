//! The survey of the store: the leases in it, with the part of their requests that decides their keys.
//!
//! A store may have a million leases. A survey reads them in pages, and keeps only what it was made for.

use std::collections::BTreeSet;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::time::Duration;

use super::context::{Service, ServiceContext};
use super::message::Plans;
use super::shadow::{NewPlan, Shadow, union};
use super::tag;
use crate::clock;
use crate::lock::{Instant, Key};
use crate::lock::maps::{HashMap, HashSet};
use crate::lock::record::{Holder, Tag};
use crate::policy::{Again, Generation, PlanRequest};
use crate::store::StoreError;
use crate::vital;

/// How many records one page of a survey reads.
const PAGE: usize = 1_000;
/// The longest pause after a page.
const LONGEST_PAUSE: Duration = Duration::from_millis(100);

impl Service {
    /// The leases in the store that were granted to guarded requests, with their resources, by nonce. They
    /// include leases of requests and proxies that have ended. Of the locks that a session holds, only those of
    /// this proxy are included.
    ///
    /// # Errors
    /// If not all of them can be read.
    pub async fn guarded_leases(&self) -> Result<HashMap<u64, String>, StoreError> {
        let may_be_guarded = |tag: &Tag| tag.delegated_to.is_some() || tag::policy(tag).is_some();
        let mut pages = Pages::new(&self.shared);
        let mut found = HashMap::default();
        while let Some(page) = pages.next(may_be_guarded).await? {
            found.extend(page.into_values().map(|lease| (lease.nonce, lease.request.resource)));
        }
        pages.complete()?;
        Ok(found)
    }
}

/// A lease as the store knows it, with those of its keys that were read.
pub(super) struct Held {
    pub nonce: u64,
    pub keys: HashSet<Key>,
    pub request: PlanRequest,
    /// Another proxy decides about the key, and grants it to requests that are not known here.
    pub is_delegation: bool,
}

/// The pages of a survey.
pub(super) struct Pages<'a> {
    shared: &'a ServiceContext,
    after: Option<Key>,
    is_over: bool,
    /// The stores whose leases may be missing.
    unheard: BTreeSet<String>,
}

impl<'a> Pages<'a> {
    pub fn new(shared: &'a ServiceContext) -> Pages<'a> {
        Pages { shared, after: None, is_over: false, unheard: BTreeSet::new() }
    }

    /// The leases of the next page whose tag is wanted, by nonce. A lease of several keys may be on several pages. The
    /// policy that decides about a tag may differ from the policy that planned the lease, because routes can change, too.
    pub async fn next(
        &mut self,
        is_wanted: impl Fn(&Tag) -> bool,
    ) -> Result<Option<HashMap<u64, Held>>, StoreError> {
        if self.is_over {
            return Ok(None);
        }
        let page = self.shared.store.list(String::new(), self.after.take(), PAGE).await?;
        self.unheard.extend(page.unheard);
        let mut leases: HashMap<u64, Held> = HashMap::default();
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
        self.after = page.items.last().filter(|_| page.more).map(|last| last.key.clone());
        self.is_over = self.after.is_none();
        Ok(Some(leases))
    }

    /// # Errors
    /// The leases of a store may be missing.
    pub fn complete(&self) -> Result<(), StoreError> {
        match self.unheard.is_empty() {
            true => Ok(()),
            false => Err(StoreError::Unavailable { why: Vec::from_iter(self.unheard.clone()).join("; ") }),
        }
    }
}

/// A lease that lacks keys of its plan.
pub(super) struct Lacking {
    pub lease: Held,
    /// The plan by the generation that was asked; `None` if it does not tell the keys, or the request is not known.
    pub plan: Option<NewPlan>,
}

impl Lacking {
    fn is_held(&self) -> bool {
        let keys = &self.lease.keys;
        self.plan.as_ref().is_some_and(|new| new.is_held_with(|key| keys.contains(key), keys.iter().cloned()))
    }

    /// The shadow that the lease casts.
    pub fn shadow(&self, policy: &str) -> Shadow {
        let old = union(&[], self.lease.keys.iter());
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
    /// The leases that lack keys of the generation's plan for them.
    pub lacking: HashMap<u64, Lacking>,
    /// The leases that have all of these keys. Their other keys may be on later pages.
    held: HashSet<u64>,
}

impl Survey {
    /// Asks the generation about every lease in the store that its policy decides about. While locks are granted, the
    /// survey pauses after each page for as long as the page took, so that requests have the other half of the time.
    ///
    /// # Errors
    /// If the table of the store cannot be read, or with `completely` if any store cannot.
    pub async fn of(
        shared: &Arc<ServiceContext>,
        generation: &Arc<Generation>,
        completely: bool,
    ) -> Result<Survey, StoreError> {
        let (lacking, held) = <_>::default();
        let mut survey = Survey { began: clock::now(), policy: generation.name().into(), lacking, held };
        let mut pages = Pages::new(shared);
        loop {
            let began = clock::now();
            let Some(page) = pages.next(|tag| shared.concerns(generation, tag)).await? else { break };
            let asked = page.values().filter(|lease| !lease.is_delegation && !survey.found(lease.nonce));
            let asked = asked.map(|lease| lease.request.clone()).collect();
            let plans = plans_for(shared, generation.clone(), HashMap::default(), asked).await?;
            survey.add(page, &plans);
            if shared.gate.is_open() {
                let took = Duration::from_micros(clock::now().us_since(began));
                tokio::time::sleep(took.min(LONGEST_PAUSE)).await;
            }
        }
        if completely {
            pages.complete()?;
        }
        let Survey { lacking, held, .. } = &mut survey;
        held.extend(lacking.extract_if(|_, lease| lease.is_held()).map(|(nonce, _)| nonce));
        Ok(survey)
    }

    /// Whether the lease was in the store.
    pub fn found(&self, nonce: u64) -> bool {
        self.held.contains(&nonce) || self.lacking.contains_key(&nonce)
    }

    /// The shadows of the leases that lack keys.
    pub fn shadows(&self) -> impl Iterator<Item = Shadow> {
        self.lacking.values().map(|lacking| lacking.shadow(&self.policy))
    }

    fn add(&mut self, page: HashMap<u64, Held>, plans: &Plans) {
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
}

/// Asks the new generation about claims, outside the runtime's workers, because there may be thousands.
pub(super) async fn plans_for(
    shared: &Arc<ServiceContext>,
    generation: Arc<Generation>,
    mut plans: Plans,
    asked: Vec<PlanRequest>,
) -> Result<Plans, StoreError> {
    let shared = shared.clone();
    let work = move || {
        for request in asked {
            if let Entry::Vacant(place) = plans.entry(request) {
                let named = generation.plan_again(place.key()).map(|Again { plan, is_refused }| match shared
                    .within_reach("", plan.clone())
                {
                    Ok(plan) => NewPlan::of(&plan, is_refused),
                    Err(_) => NewPlan::of(&plan, true),
                });
                place.insert(named);
            }
        }
        plans
    };
    // A lease without a plan would cast no shadow.
    let work = vital::blocking(|| vital::run("the planning of a swap", work)).await;
    work.map_err(|_| StoreError::stopped())
}
