//! The step of the event loop in which a policy generation goes live.
//!
//! The generation has been asked about every lease and every waiter before (see [`super::rollout`]). In one step, the
//! loop takes the shadows of the leases, gives the waiters their new claims, and makes the generation live, so nothing
//! can be granted in between.

use std::sync::Arc;

use super::context::ServiceContext;
use super::message::{Swap, SwapStep};
use super::shadow::{NewPlan, Shadow, Shadows};
use super::tag;
use crate::clock;
use crate::coverage::{Branch, reached};
use crate::lock::maps::HashSet;
use crate::lock::record::{Claim, GlobalTicket, Tag};
use crate::lock::table::{HeldLease, Table, WaiterId};
use crate::lock::{Instant, Key};
use crate::policy::{PlanRequest, Prepared};
use crate::random;

/// How many claims without a plan the loop reports in one step.
const MISSING: usize = 16_384;

/// The new claim of a waiter; `None` if its caller has to plan the request again.
pub(super) type Replan = (WaiterId, Option<Box<Claim>>);

/// Makes the generation live and returns the new claims of waiters, unless the generation was not asked about all
/// claims yet: then nothing changes.
pub(super) fn apply(
    swap: Swap,
    shared: &ServiceContext,
    table: &Table,
    shadows: &mut Shadows,
) -> Vec<Replan> {
    let missing = swap.missing(shared, table);
    if !missing.is_empty() {
        let _ = swap.reply.send(SwapStep::Missing(missing));
        return Vec::new();
    }
    let mut replans = Vec::new();
    for (nonce, lease) in table.leases().filter(|(nonce, lease)| swap.concerns(shared, *nonce, lease)) {
        shadows.extend(swap.shadow(nonce, lease));
    }
    for (id, claim) in table.claims() {
        replans.extend(swap.replan(shared, id, claim));
    }
    swap.commit(shared, shadows);
    // Waiters that join the global queue do so in the order of their arrival.
    replans.sort_unstable_by_key(|(waiter, _)| *waiter);
    let widened = widened(shared, table, shadows, &replans);
    replans.extend(widened);
    replans
}

impl Swap {
    /// The requests that the policy decides about, and that it has no plan for here yet.
    fn missing(&self, shared: &ServiceContext, table: &Table) -> Vec<PlanRequest> {
        let leases = table.leases().filter(|(nonce, lease)| self.concerns(shared, *nonce, lease));
        let held = leases.map(|(_, lease)| tag::request_of_lease(lease));
        let waiting = table.claims().filter(|(_, claim)| self.decides(shared, &claim.tag));
        let all = held.chain(waiting.map(|(_, claim)| tag::request_of(claim)));
        all.filter(|request| !self.plans.contains_key(request)).take(MISSING).collect()
    }

    fn decides(&self, shared: &ServiceContext, tag: &Tag) -> bool {
        shared.policy_of_tag(tag) == self.prepared.generation().name()
    }

    /// Whether the generation has to be asked about a lease that this proxy knows. The survey has found most leases,
    /// and has asked.
    fn concerns(&self, shared: &ServiceContext, nonce: u64, lease: &HeldLease) -> bool {
        let Some(survey) = &self.survey else { return false };
        // The loop learns of the end of a lease a little later than the store.
        let is_known = survey.found(nonce) || has_ended(lease.since, lease.until, survey.began, clock::now());
        !is_known && self.decides(shared, &lease.tag)
    }

    /// The shadow of the lease, if it lacks keys of the generation's plan for it.
    fn shadow(&self, nonce: u64, lease: &HeldLease) -> Option<Shadow> {
        let plan = self.plans.get(&tag::request_of_lease(lease))?.as_ref();
        let policy = self.prepared.generation().name();
        (!plan.is_some_and(|new| new.is_held_by(&lease.keys)))
            .then(|| Shadow::new(nonce, lease.keys.clone(), plan, policy))
    }

    /// The consequence for one waiter, if there is any. A waiter whose claim cannot be widened, because it is for any
    /// one of several keys, is planned anew. A waiter that is to wait in the global queue joins it now; otherwise
    /// later waiters would be granted first.
    fn replan(&self, shared: &ServiceContext, id: WaiterId, claim: &Claim) -> Option<Replan> {
        if !self.decides(shared, &claim.tag) {
            return None;
        }
        // Its earlier claim is settled: a member acknowledges a record only after that.
        // A refused waiter gets the answer of a new request. If it were granted later, its lease would not exclude
        // clients of proxies that apply the next generation alone.
        let plan = self.plans.get(&tag::request_of(claim))?.as_ref();
        let Some(new) = plan.filter(|new| !new.is_refused) else {
            return Some((id, None));
        };
        let waits_for_any = claim.any && new.any && claim.keys == new.keys;
        let holds = new.is_held_by(&claim.keys);
        let global = self.joins_global_queue(claim, new);
        if !waits_for_any && (claim.any || !holds) {
            reached(Branch::WaiterMoves);
            let global = global.or_else(|| claim.global.clone());
            let wider = || asks_again(claim, Key::union(&claim.keys, new.keys.iter()), global);
            // An authenticated client asks again itself: it may have no right to the new keys.
            let moves = !claim.any && !new.any && claim.tag.principal.is_none();
            return Some((id, moves.then(wider)));
        }
        global.map(|global| (id, Some(asks_again(claim, claim.keys.clone(), Some(global)))))
    }

    /// The ticket of a waiter that has none yet. Its client cannot find the place again on another proxy,
    /// because the complete request is not stored.
    fn joins_global_queue(&self, claim: &Claim, new: &NewPlan) -> Option<GlobalTicket> {
        let rank = new.global_rank.filter(|_| claim.global.is_none() && !self.beside)?;
        Some(GlobalTicket { number: random::number(), rank, joined: None, returns: false })
    }

    /// Makes the generation live and adds the shadows of leases that only the store knows.
    fn commit(self, shared: &ServiceContext, shadows: &mut Shadows) {
        // Even if the lease already casts a shadow: by another change it has other new keys.
        shadows.extend(self.survey.iter().flat_map(|survey| survey.shadows()));
        shared.store.forget();
        let generation = if self.beside {
            let candidate = self.prepared.generation().clone();
            shared.policies.name_with(candidate.name(), Some(&candidate));
            candidate
        } else {
            match self.prepared {
                Prepared::Unchanged(live) => live,
                changed => shared.policies.commit(changed),
            }
        };
        if self.survey.is_some() {
            let mut named = shared.named.lock();
            named.surveyed(generation.name(), generation.number(), !shadows.is_empty());
        }
        let _ = self.reply.send(SwapStep::Live { generation, shadows: shadows.all() });
    }
}

/// The new claims of waiters that are not in `replans` but whose keys the shadows have changed.
fn widened(shared: &ServiceContext, table: &Table, shadows: &Shadows, replans: &[Replan]) -> Vec<Replan> {
    let replanned: HashSet<WaiterId> = replans.iter().map(|(waiter, _)| *waiter).collect();
    let widened = table.claims().filter(|(id, _)| !replanned.contains(id)).filter_map(|(id, claim)| {
        if shadows.block(shared.policy_of_tag(&claim.tag)).is_some() {
            return Some((id, None));
        }
        let keys = shadows.widen(&claim.keys)?;
        reached(Branch::ShadowBlocks);
        Some((id, (!claim.any).then(|| asks_again(claim, keys, claim.global.clone()))))
    });
    widened.collect()
}

/// The new claim of a waiter.
fn asks_again(claim: &Claim, keys: Arc<[Key]>, global: Option<GlobalTicket>) -> Box<Claim> {
    let attempt = random::within(1..u64::MAX);
    Box::new(Claim { keys, global, attempt, ..claim.clone() })
}

/// Whether a lease that this proxy has known since `since` has ended, as far as the lock table knows. If the survey
/// of the store began too early to find the lease, it counts as running: another proxy may have extended it.
fn has_ended(since: Instant, until: Instant, survey_began: Instant, now: Instant) -> bool {
    until <= now && since < survey_began
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_counts_as_ended_when_a_read_after_its_grant_did_not_find_it() {
        let at = Instant;
        let (since, until, now) = (at(1_000), at(5_000), at(6_000));
        assert!(has_ended(since, until, at(1_001), now));
        assert!(!has_ended(since, until, at(1_000), now), "the survey may have been too early for it");
        assert!(!has_ended(since, until, at(1_001), at(4_999)), "it runs");
    }
}
