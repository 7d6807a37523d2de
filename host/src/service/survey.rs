//! The survey of the store: the leases in it, with the part of their requests that decides their keys.
//!
//! A store may have a million leases. A survey reads them in pages, and keeps only what it was made for.

use std::collections::BTreeSet;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::time::Duration;

use super::context::{Service, ServiceContext};
use super::found::{Held, Survey};
use super::shadow::{NewPlan, Plans};
use super::tag;
use crate::clock;
use crate::lock::Key;
use crate::lock::maps::HashMap;
use crate::lock::record::{Holder, Tag};
use crate::policy::{Again, Generation, PlanRequest};
use crate::store::StoreError;
use crate::vital;

/// How many records one page of a survey reads: few, so that requests do not wait for the processor for long.
const PAGE: usize = 250;
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

/// The pages of a survey.
struct Pages<'a> {
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
                    keys: Vec::new(),
                    request: tag::request(&holder.tag, &holder.owner, holder.mode),
                    is_delegation: holder.tag.delegated_to.is_some(),
                });
                lease.keys.push(stored.key.clone());
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

/// Asks the generation about every lease in the store that its policy decides about. While locks are granted, the
/// survey pauses after each page for as long as the page took, so that requests have the other half of the time.
///
/// # Errors
/// If the table of the store cannot be read, or with `completely` if any store cannot.
pub(super) async fn survey(
    shared: &Arc<ServiceContext>,
    generation: &Arc<Generation>,
    completely: bool,
) -> Result<Survey, StoreError> {
    let mut survey = Survey::begin(clock::now(), generation.name());
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
    survey.end();
    Ok(survey)
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
