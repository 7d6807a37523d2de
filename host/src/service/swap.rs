//! Replaces a policy while locks are held.
//!
//! If the new generation names keys differently, a holder of the old key and a holder of the new key must never
//! exist together. So before a generation goes live, it is asked again about every held lease, here and in the
//! store, and about every waiter:
//!
//! - A lease that lacks its new keys becomes a [`Shadow`]: until it ends, claims for one of its new keys also
//!   take its old keys.
//! - If the new generation refuses the request of a lease, for example for a mode that its primitive lacks, the
//!   new keys are those of the same request in exclusive mode. If the generation refuses that request, too, the
//!   keys are not known: a change waits for the end of the lease ([`holds_up`]), and a proxy that starts grants
//!   nothing by the policy before that.
//! - A waiter waits for the old and the new keys, and keeps its position. If the new generation wants a global
//!   queue, the waiter joins it. A waiter that the new generation refuses is refused.
//!
//! The event loop makes the generation live in the same step in which it takes the shadows, so nothing can be
//! granted in between. Requests that were planned by the old generation are planned again.

use std::collections::BTreeSet;
use std::collections::hash_map::Entry;
use std::hash::Hash;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;

use super::core::Msg;
use super::{ServiceContext, routed};
use crate::clock;
use crate::coverage::{Branch, reached};
use crate::lock::maps::{HashMap, HashSet};
use crate::lock::record::{Claim, GlobalTicket, Holder, Tag};
use crate::lock::table::{Standing, WaiterId};
use crate::lock::{Instant, Key, Mode};
use crate::policy::{Again, Generation, Plan, PlanRequest, Prepared};
use crate::random;
use crate::store::StoreError;
use crate::vital;

/// How many records one page of a survey reads.
const PAGE: usize = 1_000;
/// How many rounds a swap makes: in each round, claims that have arrived since the last planning are planned.
/// Then the swap fails.
const ROUNDS: usize = 64;

/// A lease that holds only old keys: until it ends, its new keys are not free.
#[derive(Clone, Debug)]
pub(super) struct Shadow {
    nonce: u64,
    old: Arc<[Key]>,
    new: Arc<[Key]>,
    /// Set if the new keys are not known: this policy grants nothing until the lease ends.
    policy: Option<Box<str>>,
}

impl Shadow {
    /// `plan`: the new generation's plan for the lease's request; `None` if the plan does not tell its keys.
    fn new(nonce: u64, old: Arc<[Key]>, plan: Option<&NewPlan>, policy: &str) -> Shadow {
        let new = plan.map_or_else(Arc::default, |plan| plan.keys.clone());
        Shadow { nonce, old, new, policy: plan.is_none().then(|| policy.into()) }
    }
}

#[derive(Default)]
pub(super) struct Shadows {
    by_nonce: HashMap<u64, Shadow>,
    /// The nonces of the leases that cast a shadow on a key.
    on_key: HashMap<Key, HashSet<u64>>,
    /// The same for everything that a policy decides.
    on_policy: HashMap<Box<str>, HashSet<u64>>,
}

impl Shadows {
    /// Adds shadows. If a lease already casts one, it then casts both: the results of an earlier swap, or of
    /// the survey at the start, may arrive later than those of this swap.
    fn extend(&mut self, shadows: impl IntoIterator<Item = Shadow>) {
        for shadow in shadows {
            for key in &*shadow.new {
                self.on_key.entry(key.clone()).or_default().insert(shadow.nonce);
            }
            if let Some(policy) = &shadow.policy {
                self.on_policy.entry(policy.clone()).or_default().insert(shadow.nonce);
            }
            match self.by_nonce.entry(shadow.nonce) {
                Entry::Vacant(place) => drop(place.insert(shadow)),
                Entry::Occupied(mut known) => {
                    let known = known.get_mut();
                    known.old = union(&known.old, shadow.old.iter());
                    known.new = union(&known.new, shadow.new.iter());
                    known.policy = shadow.policy.or(known.policy.take());
                }
            }
        }
    }

    pub fn remove(&mut self, nonce: u64) {
        let Some(shadow) = self.by_nonce.remove(&nonce) else { return };
        shadow.new.iter().for_each(|key| take_away(&mut self.on_key, key, nonce));
        shadow.policy.iter().for_each(|policy| take_away(&mut self.on_policy, policy, nonce));
    }

    /// Why the policy grants nothing, if there is a lease whose new keys are not known.
    pub fn block(&self, policy: &str) -> Option<String> {
        let leases = self.on_policy.get(policy)?.len();
        reached(Branch::PolicyBlocks);
        Some(format!(
            "the policy `{policy}` refuses the resources of {leases} leases that have not ended yet"
        ))
    }

    /// The keys of a claim, together with the old keys of every lease that casts a shadow on them.
    pub fn widen(&self, keys: &Arc<[Key]>) -> Option<Arc<[Key]>> {
        let casting = keys.iter().filter_map(|key| self.on_key.get(key));
        let old = casting
            .flatten()
            .filter_map(|nonce| self.by_nonce.get(nonce))
            .flat_map(|shadow| shadow.old.iter());
        let extra: Vec<&Key> = old.filter(|key| !keys.contains(key)).collect();
        (!extra.is_empty()).then(|| union(keys, extra.into_iter()))
    }

    /// The new claim of a waiter that has not been widened yet.
    pub fn widened(&self, waiter: WaiterId, claim: &Claim) -> Option<(WaiterId, Option<Box<Claim>>)> {
        let keys = self.widen(&claim.keys)?;
        reached(Branch::ShadowBlocks);
        Some((waiter, (!claim.any).then(|| asks_again(claim, keys, claim.global.clone()))))
    }
}

/// The new claim of a waiter.
fn asks_again(claim: &Claim, keys: Arc<[Key]>, global: Option<GlobalTicket>) -> Box<Claim> {
    let attempt = random::within(1..u64::MAX);
    Box::new(Claim { keys, global, attempt, ..claim.clone() })
}

fn take_away<K: Clone + Eq + Hash>(casting: &mut HashMap<K, HashSet<u64>>, on: &K, nonce: u64) {
    if let Entry::Occupied(mut casting) = casting.entry(on.clone()) {
        casting.get_mut().remove(&nonce);
        if casting.get().is_empty() {
            casting.remove();
        }
    }
}

pub(super) fn union<'a>(keys: &'a [Key], more: impl Iterator<Item = &'a Key>) -> Arc<[Key]> {
    let mut all: Vec<Key> = keys.iter().chain(more).cloned().collect();
    all.sort_unstable();
    all.dedup();
    all.into()
}

/// The part of a claim's request that decides its keys, as far as it is stored with a lease.
pub(super) fn request_of(claim: &Claim) -> PlanRequest {
    request(&claim.tag, &claim.owner, claim.mode)
}

/// The request of a lease, as far as it is stored with the lease.
pub(super) fn request(tag: &Tag, owner: &str, mode: Mode) -> PlanRequest {
    let mode = match routed::mode(tag).unwrap_or(mode) {
        Mode::Permits { count, .. } => Mode::Permits { count, limit: 0 },
        mode => mode,
    };
    let (labels, http) = routed::split(tag);
    PlanRequest {
        resource: tag.resource.to_string(),
        owner: owner.to_owned(),
        mode,
        ttl_ms: None,
        wait_ms: None,
        labels,
        http,
        seed: 0,
    }
}

/// The keys of a plan, and how a claim waits for them.
#[derive(Clone, Debug)]
pub(super) struct NewPlan {
    keys: Arc<[Key]>,
    any: bool,
    /// The waiter's rank, if the plan wants a global queue.
    global_rank: Option<i32>,
    /// New claims are refused, but leases have these keys.
    is_refused: bool,
}

impl NewPlan {
    fn of(plan: &Plan, is_refused: bool) -> NewPlan {
        let global_rank = plan.global_order.then_some(plan.rank);
        NewPlan { keys: plan.keys.clone(), any: plan.any, global_rank, is_refused }
    }

    /// Whether a holder of these keys has what the plan asks for.
    fn is_held_with(&self, held: impl Fn(&Key) -> bool, mut all: impl Iterator<Item = Key>) -> bool {
        match self.any {
            true => all.all(|key| self.keys.contains(&key)),
            false => self.keys.iter().all(held),
        }
    }
}

/// A generation's plans for requests. `None` if it does not tell the keys of a request: these keys may be
/// granted to others.
type Plans = HashMap<PlanRequest, Option<NewPlan>>;

/// A generation that is to go live, with its plans for all leases and waiters.
pub(super) struct Swap {
    prepared: Prepared,
    /// Whether the live generation stays live and names keys together with this one.
    beside: bool,
    plans: Plans,
    stored: Vec<Shadow>,
    /// When the survey of the store that found `stored` began, if there was one.
    looked_at: Option<Instant>,
    reply: oneshot::Sender<SwapStep>,
}

/// The event loop's answer to a [`Swap`].
pub(super) enum SwapStep {
    /// Claims that have arrived since the plans were made.
    Missing(Vec<PlanRequest>),
    Live {
        generation: Arc<Generation>,
        shadows: Vec<Shadow>,
    },
}

impl Swap {
    /// Whether the policy decides about the claim's resource but has no plan for it here yet.
    pub fn lacks(&self, shared: &ServiceContext, claim: &Claim) -> bool {
        self.decides(shared, claim) && !self.plans.contains_key(&request_of(claim))
    }

    fn decides(&self, shared: &ServiceContext, claim: &Claim) -> bool {
        shared.policy_of_tag(&claim.tag) == self.prepared.generation().name()
    }

    pub fn reply(self, step: SwapStep) {
        let _ = self.reply.send(step);
    }

    /// Notes the consequence for one claim. A waiter whose claim cannot be widened, because it is for any one
    /// of several keys, is planned anew. A waiter that is to wait in the global queue joins it now; otherwise
    /// later waiters would be granted first.
    pub fn collect(
        &self,
        shared: &ServiceContext,
        standing: Standing,
        claim: &Claim,
        shadows: &mut Shadows,
        replans: &mut Vec<(WaiterId, Option<Box<Claim>>)>,
    ) {
        if !self.decides(shared, claim) {
            return;
        }
        let Some(plan) = self.plans.get(&request_of(claim)) else { return };
        let has_keys = plan.as_ref().is_some_and(|new| {
            let waits_for_any = claim.any && new.any && claim.keys == new.keys;
            let holds = new.is_held_with(|key| claim.keys.contains(key), claim.keys.iter().cloned());
            waits_for_any || (holds && !claim.any)
        });
        // While the live generation also names keys, a lease without new keys does no harm.
        let lacks_keys = if plan.is_none() { !self.beside } else { !has_keys };
        match standing {
            // The loop learns of the end of a lease a little later than the store.
            Standing::Lease { since, until, .. } if has_ended(since, until, self.looked_at, clock::now()) => {
            }
            Standing::Lease { nonce, .. } if lacks_keys => {
                let policy = self.prepared.generation().name();
                shadows.extend([Shadow::new(nonce, claim.keys.clone(), plan.as_ref(), policy)]);
            }
            Standing::Lease { .. } => {}
            // Its earlier claim is settled: a member acknowledges a record only after that.
            Standing::Waiter { id } => {
                // A refused waiter gets the answer of a new request. If it were granted later, its lease would
                // not exclude clients of proxies that apply the next generation alone.
                let Some(new) = plan.as_ref().filter(|new| !new.is_refused) else {
                    return replans.push((id, None));
                };
                let global = self.joins_global_queue(claim, new);
                if !has_keys {
                    reached(Branch::WaiterMoves);
                    let global = global.or_else(|| claim.global.clone());
                    let wider = || asks_again(claim, union(&claim.keys, new.keys.iter()), global);
                    replans.push((id, (!claim.any && !new.any).then(wider)));
                } else if global.is_some() {
                    replans.push((id, Some(asks_again(claim, claim.keys.clone(), global))));
                }
            }
        }
    }

    /// The ticket of a waiter that has none yet. Its client cannot find the place again on another proxy,
    /// because the complete request is not stored.
    fn joins_global_queue(&self, claim: &Claim, new: &NewPlan) -> Option<GlobalTicket> {
        let rank = new.global_rank.filter(|_| claim.global.is_none() && !self.beside)?;
        Some(GlobalTicket { number: random::number(), rank, joined: None, returns: false })
    }

    /// Makes the generation live and adds the shadows of leases that only the store knows.
    pub fn commit(self, shared: &Arc<ServiceContext>, shadows: &mut Shadows) {
        // Even if the lease already casts a shadow: by another change it has other new keys.
        shadows.extend(self.stored);
        shared.store.forget();
        let generation = if self.beside {
            let candidate = self.prepared.generation().clone();
            shared.policies.name_with(candidate.name(), Some(candidate.clone()));
            candidate
        } else {
            match self.prepared {
                Prepared::Unchanged(live) => live,
                changed => shared.policies.commit(changed),
            }
        };
        let shadows = shadows.by_nonce.values().cloned().collect();
        let _ = self.reply.send(SwapStep::Live { generation, shadows });
    }
}

/// Makes a checked generation live. See the documentation of this module.
///
/// A closed service makes it live at once: it grants nothing, and has to examine the leases before it is
/// opened.
pub(super) async fn go_live(
    shared: &Arc<ServiceContext>,
    prepared: Prepared,
) -> Result<Arc<Generation>, StoreError> {
    let open = shared.gate.is_open();
    if open { look(shared, prepared).await } else { swap(shared, prepared, None, false).await }
}

/// Makes a checked generation live, or leaves the live one in place, and examines all leases.
pub(super) async fn look(
    shared: &Arc<ServiceContext>,
    prepared: Prepared,
) -> Result<Arc<Generation>, StoreError> {
    let (name, looked_at) = (prepared.generation().name(), clock::now());
    let held = complete(held(shared, |tag| shared.policy_of_tag(tag) == name).await?)?;
    swap(shared, prepared, Some((looked_at, held)), false).await
}

/// The leases of guarded requests of all proxies, including proxies that have ended: their nonces and
/// resources.
pub(super) async fn guarded_leases(shared: &Arc<ServiceContext>) -> Result<HashMap<u64, String>, StoreError> {
    let held = complete(held(shared, |tag| routed::policy(tag).is_some()).await?)?;
    Ok(held.into_iter().map(|lease| (lease.nonce, lease.request.resource)).collect())
}

fn complete((held, unheard): (Vec<Held>, Vec<String>)) -> Result<Vec<Held>, StoreError> {
    match unheard.is_empty() {
        true => Ok(held),
        false => Err(StoreError::Unavailable { why: unheard.join("; ") }),
    }
}

/// Whether a lease that this proxy has known since `since` has ended, as far as the lock table knows. If the
/// survey of the store began too early to find the lease, it counts as running: another proxy may have extended
/// it.
fn has_ended(since: Instant, until: Instant, looked_at: Option<Instant>, now: Instant) -> bool {
    until <= now && looked_at.is_some_and(|looked_at| since < looked_at)
}

/// Lets a checked generation name keys together with the live one. Leases that lack its keys do no harm yet:
/// each new grant takes the keys of the live generation as well.
pub(super) async fn name_with(shared: &Arc<ServiceContext>, candidate: Prepared) -> Result<(), StoreError> {
    swap(shared, candidate, None, true).await.map(drop)
}

/// Why the candidate cannot name keys alone yet, as a sentence. It waits for two kinds of leases to end:
///
/// - leases that a session of this proxy holds and that lack the candidate's keys. Other proxies do not see
///   them, and cannot take their old keys for as long as the leases last;
/// - leases whose resource the candidate refuses, so that their new keys are not known.
pub(super) async fn holds_up(
    shared: &Arc<ServiceContext>,
    candidate: Arc<Generation>,
) -> Result<Option<String>, StoreError> {
    // Sessions can always be read. If a store cannot be read, its leases are waited for when the candidate goes
    // live.
    let (held, _) = held(shared, |tag| shared.policy_of_tag(tag) == candidate.name()).await?;
    let asked = held.iter().map(|lease| lease.request.clone()).collect();
    let plans = replan(shared, candidate, HashMap::default(), asked).await?;
    let has_no_keys = |lease: &&Held| plans.get(&lease.request).is_none_or(Option::is_none);
    let rests = |lease: &&Held| lease.keys.iter().any(|key| key.space().rests_on_session());
    let unknown: Vec<&Held> = held.iter().filter(has_no_keys).collect();
    if let Some(first) = unknown.first() {
        let (count, first) = (unknown.len(), &first.request.resource);
        return Ok(Some(format!(
            "it refuses the resources of {count} leases that have not ended, such as that of {first}"
        )));
    }
    let lacking: Vec<&Held> =
        held.iter().filter(rests).filter(|lease| lease.shadow(&plans, "").is_some()).collect();
    Ok(lacking.first().map(|first| {
        let (count, first) = (lacking.len(), &first.request.resource);
        format!("{count} of its leases rest on sessions and lack the new keys, such as that of {first}")
    }))
}

async fn swap(
    shared: &Arc<ServiceContext>,
    prepared: Prepared,
    look: Option<(Instant, Vec<Held>)>,
    beside: bool,
) -> Result<Arc<Generation>, StoreError> {
    let candidate = prepared.generation().clone();
    let (looked_at, held) = look.map_or((None, Vec::new()), |(at, held)| (Some(at), held));
    let mut plans = HashMap::default();
    let mut asked: Vec<PlanRequest> = held.iter().map(|lease| lease.request.clone()).collect();
    for _ in 0..ROUNDS {
        plans = replan(shared, candidate.clone(), plans, asked).await?;
        let stored = held.iter().filter_map(|lease| lease.shadow(&plans, candidate.name())).collect();
        let (reply, step) = oneshot::channel();
        let swap =
            Swap { prepared: prepared.clone(), beside, plans: plans.clone(), stored, looked_at, reply };
        shared.tell(Msg::Swap(swap));
        match step.await.map_err(|_| StoreError::stopped())? {
            SwapStep::Missing(more) => asked = more,
            SwapStep::Live { generation, shadows } => {
                watch_shadows(shared, shadows);
                return Ok(generation);
            }
        }
    }
    let why = "requests arrive faster than the new policy can be asked about them".to_owned();
    Err(StoreError::Unavailable { why })
}

/// Asks the new generation about claims, outside the runtime's workers, because there may be thousands.
async fn replan(
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

/// A lease as the store knows it.
struct Held {
    nonce: u64,
    keys: HashSet<Key>,
    request: PlanRequest,
}

impl Held {
    fn shadow(&self, plans: &Plans, policy: &str) -> Option<Shadow> {
        let plan = plans.get(&self.request)?.as_ref();
        let is_held =
            |new: &NewPlan| new.is_held_with(|key| self.keys.contains(key), self.keys.iter().cloned());
        let old = union(&[], self.keys.iter());
        (!plan.is_some_and(is_held)).then(|| Shadow::new(self.nonce, old, plan, policy))
    }
}

/// Every lease in the store whose tag is wanted, and the stores whose leases may be missing. The policy that
/// decides about a tag may differ from the policy that planned the lease, because routes can change, too.
async fn held(
    shared: &Arc<ServiceContext>,
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
                    request: request(&holder.tag, &holder.owner, holder.mode),
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

/// Removes shadows whose lease is over.
fn watch_shadows(shared: &Arc<ServiceContext>, shadows: Vec<Shadow>) {
    if shadows.is_empty() {
        return;
    }
    tracing::info!(leases = shadows.len(), "leases of old keys have not ended yet");
    let shared = shared.clone();
    vital::spawn("the watch over leases of old keys", async move {
        let mut left = shadows;
        while !left.is_empty() {
            let mut still = Vec::new();
            for shadow in left {
                match is_over(&shared, &shadow).await {
                    true => shared.tell(Msg::ShadowOver { nonce: shadow.nonce }),
                    false => still.push(shadow),
                }
            }
            left = still;
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
        reached(Branch::ShadowOver);
        tracing::info!("the last lease of old keys is over");
    });
}

async fn is_over(shared: &ServiceContext, shadow: &Shadow) -> bool {
    let Ok(stored) = shared.store.read(shadow.old[0].clone()).await else { return false };
    let casts = |holder: &&Holder| holder.nonce == shadow.nonce;
    stored.is_none_or(|stored| {
        stored.record.holders.iter().filter(casts).all(|holder| stored.has_ended(holder))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(names: &[&str]) -> Arc<[Key]> {
        names.iter().map(|name| Key::new(name).expect("it is a key")).collect()
    }

    fn shadow(nonce: u64, old: &str, new: &str) -> Shadow {
        Shadow { nonce, old: keys(&[old]), new: keys(&[new]), policy: None }
    }

    #[test]
    fn what_is_found_out_later_adds_to_what_was_known() {
        let mut shadows = Shadows::default();
        shadows.extend([shadow(1, "old", "new"), shadow(2, "other", "new")]);
        shadows.extend([shadow(1, "older", "newer")]);
        assert_eq!(shadows.widen(&keys(&["new"])), Some(keys(&["new", "old", "older", "other"])));
        assert_eq!(shadows.widen(&keys(&["newer"])), Some(keys(&["newer", "old", "older"])));
        assert_eq!(shadows.widen(&keys(&["old"])), None, "the old key needs nothing more");
        shadows.remove(1);
        assert_eq!(shadows.on_key.keys().collect::<Vec<_>>(), [&keys(&["new"])[0]]);
    }

    #[test]
    fn a_lease_has_ended_that_a_later_look_would_have_found() {
        let at = Instant;
        let (since, until, now) = (at(1_000), at(5_000), at(6_000));
        assert!(has_ended(since, until, Some(at(1_001)), now));
        assert!(!has_ended(since, until, Some(at(1_000)), now), "the look may have been too early for it");
        assert!(!has_ended(since, until, Some(at(1_001)), at(4_999)), "it runs");
        assert!(!has_ended(since, until, None, now), "nothing was looked at");
    }

    #[test]
    fn a_lease_that_is_over_casts_nothing() {
        let mut shadows = Shadows::default();
        shadows.extend([shadow(1, "old", "new"), shadow(2, "other", "new")]);
        shadows.remove(1);
        assert_eq!(shadows.widen(&keys(&["new"])), Some(keys(&["new", "other"])));
        shadows.remove(2);
        assert_eq!(shadows.widen(&keys(&["new"])), None);
        assert!(shadows.on_key.is_empty());
    }

    #[test]
    fn a_lease_whose_new_keys_are_not_known_blocks_its_policy() {
        let mut shadows = Shadows::default();
        let unknown =
            |nonce| Shadow { new: Arc::default(), policy: Some("p".into()), ..shadow(nonce, "old", "new") };
        shadows.extend([unknown(1), unknown(2)]);
        assert!(shadows.block("p").is_some() && shadows.block("another").is_none());
        assert_eq!(shadows.widen(&keys(&["new"])), None);
        shadows.extend([shadow(1, "old", "new")]);
        assert_eq!(shadows.widen(&keys(&["new"])), Some(keys(&["new", "old"])));
        shadows.remove(1);
        assert!(shadows.block("p").is_some() && shadows.on_key.is_empty());
        shadows.remove(2);
        assert!(shadows.on_policy.is_empty());
    }
}
