//! Leases that hold the keys of an earlier policy generation.
//!
//! If a new generation names keys differently, a holder of the old key and a holder of the new key must never exist
//! together. A lease that lacks its new keys casts a shadow on them: until the lease ends, claims for one of its new
//! keys also take its old keys.

use std::collections::hash_map::Entry;
use std::hash::Hash;
use std::sync::Arc;

use crate::coverage::{Branch, reached};
use crate::lock::Key;
use crate::lock::maps::{HashMap, HashSet};
use crate::lock::record::Claim;
use crate::policy::{Plan, PlanRequest};

/// A lease that holds only old keys: until it ends, its new keys are not free.
#[derive(Clone, Debug)]
pub(super) struct Shadow {
    pub nonce: u64,
    pub old: Arc<[Key]>,
    new: Arc<[Key]>,
    /// Set if the new keys are not known: this policy grants nothing until the lease ends.
    policy: Option<Box<str>>,
    /// The lease is a delegation: when it ends, the leases beneath it may live on.
    pub is_delegation: bool,
}

impl Shadow {
    /// `plan`: the new generation's plan for the lease's request; `None` if the plan does not tell its keys.
    pub fn new(nonce: u64, old: Arc<[Key]>, plan: Option<&NewPlan>, policy: &str) -> Shadow {
        let new = plan.map_or_else(Arc::default, |plan| plan.keys.clone());
        Shadow { nonce, old, new, policy: plan.is_none().then(|| policy.into()), is_delegation: false }
    }

    /// The shadow of a delegation, whose leases are not known.
    pub fn of_delegation(nonce: u64, old: Arc<[Key]>, policy: &str) -> Shadow {
        Shadow { is_delegation: true, ..Shadow::new(nonce, old, None, policy) }
    }
}

/// The shadows of all leases that hold only old keys.
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
    pub fn extend(&mut self, shadows: impl IntoIterator<Item = Shadow>) {
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
                    known.old = Key::union(&known.old, shadow.old.iter());
                    known.new = Key::union(&known.new, shadow.new.iter());
                    known.policy = shadow.policy.or(known.policy.take());
                }
            }
        }
    }

    /// Whether no lease casts a shadow.
    pub fn is_empty(&self) -> bool {
        self.by_nonce.is_empty()
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
        (!extra.is_empty()).then(|| Key::union(keys, extra.into_iter()))
    }

    /// Admits a new claim of the policy: adds the keys that the claim has to take as well. The error says, in a
    /// sentence, why the claim cannot be granted at the moment.
    pub fn admit(&self, policy: &str, claim: &mut Claim) -> Result<(), String> {
        if let Some(why) = self.block(policy) {
            return Err(why);
        }
        match self.widen(&claim.keys) {
            // A claim for any one of several keys cannot be combined with other keys.
            Some(_) if claim.any => {
                Err("leases of keys that its policy named earlier have not ended yet".to_owned())
            }
            Some(keys) => {
                claim.keys = keys;
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// All shadows.
    pub fn all(&self) -> Vec<Shadow> {
        self.by_nonce.values().cloned().collect()
    }
}

/// The keys of a plan, and how a claim waits for them.
#[derive(Clone, Debug)]
pub(super) struct NewPlan {
    pub keys: Arc<[Key]>,
    pub any: bool,
    /// The waiter's rank, if the plan wants a global queue.
    pub global_rank: Option<i32>,
    /// New claims are refused, but leases have these keys.
    pub is_refused: bool,
}

impl NewPlan {
    pub fn of(plan: &Plan, is_refused: bool) -> NewPlan {
        let global_rank = plan.global_order.then_some(plan.rank);
        NewPlan { keys: plan.keys.clone(), any: plan.any, global_rank, is_refused }
    }

    /// Whether a holder of these keys has what the plan asks for.
    pub fn is_held_by(&self, keys: &[Key]) -> bool {
        match self.any {
            true => keys.iter().all(|key| self.keys.contains(key)),
            false => self.keys.iter().all(|key| keys.contains(key)),
        }
    }
}

/// A generation's plans for requests. `None` if it does not tell the keys of a request: these keys may be
/// granted to others.
pub(super) type Plans = HashMap<PlanRequest, Option<NewPlan>>;

fn take_away<K: Clone + Eq + Hash>(casting: &mut HashMap<K, HashSet<u64>>, on: &K, nonce: u64) {
    if let Entry::Occupied(mut casting) = casting.entry(on.clone()) {
        casting.get_mut().remove(&nonce);
        if casting.get().is_empty() {
            casting.remove();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(names: &[&str]) -> Arc<[Key]> {
        names.iter().map(|name| Key::new(name).expect("it is a key")).collect()
    }

    fn shadow(nonce: u64, old: &str, new: &str) -> Shadow {
        Shadow { nonce, old: keys(&[old]), new: keys(&[new]), policy: None, is_delegation: false }
    }

    #[test]
    fn a_later_shadow_of_a_lease_adds_to_its_earlier_shadow() {
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
    fn an_ended_lease_has_no_shadow() {
        let mut shadows = Shadows::default();
        shadows.extend([shadow(1, "old", "new"), shadow(2, "other", "new")]);
        shadows.remove(1);
        assert_eq!(shadows.widen(&keys(&["new"])), Some(keys(&["new", "other"])));
        shadows.remove(2);
        assert_eq!(shadows.widen(&keys(&["new"])), None);
        assert!(shadows.on_key.is_empty());
    }

    #[test]
    fn a_lease_with_unknown_new_keys_blocks_its_policy() {
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
