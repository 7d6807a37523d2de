//! Answers of `plan` that need not be asked for again: a policy has no state, so requests that are the same to it have the
//! same answer.

use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::sync::Arc;

use super::{Plan, PlanRequest};
use crate::lock::maps::BoundedMap;
use crate::mutex::Mutex;

/// The plan, or the reason of a refusal.
pub type Answer = Result<Plan, String>;

/// Requests are spread over these, so that cores seldom wait for each other.
const SHARDS: usize = 16;
/// How many answers a shard has at most.
const MOST: usize = 1_024;
/// An answer whose texts and those of its request are longer than this together is not kept.
const MOST_BYTES: usize = 1_024;
/// What a pair of texts takes without the texts.
const PAIR_BYTES: usize = 48;

/// The last answers of one generation.
pub struct PlanCache {
    shards: [Mutex<BoundedMap<Arc<PlanRequest>, Answer>>; SHARDS],
}

impl PlanCache {
    pub fn new() -> PlanCache {
        PlanCache { shards: std::array::from_fn(|_| Mutex::new(BoundedMap::new(MOST))) }
    }

    /// The answer to the request, if it is there.
    pub fn get(&self, request: &PlanRequest) -> Option<Answer> {
        self.shard(request).lock().get(request).cloned()
    }

    /// Keeps an answer.
    pub fn insert(&self, request: PlanRequest, answer: &Answer) {
        if bytes(&request, answer) <= MOST_BYTES {
            self.shard(&request).lock().insert(Arc::new(request), answer.clone());
        }
    }

    fn shard(&self, request: &PlanRequest) -> &Mutex<BoundedMap<Arc<PlanRequest>, Answer>> {
        let hash = BuildHasherDefault::<DefaultHasher>::default().hash_one(&request.resource);
        &self.shards[hash as usize % SHARDS]
    }
}

/// The bytes of the texts that an entry has.
fn bytes(request: &PlanRequest, answer: &Answer) -> usize {
    let pairs = |pairs: &[(String, String)]| {
        pairs.iter().map(|(name, value)| name.len() + value.len() + PAIR_BYTES).sum::<usize>()
    };
    let http = request.http.as_ref().map_or(0, |http| {
        let lists = pairs(&http.captures) + pairs(&http.query) + pairs(&http.headers);
        http.method.len() + http.path.len() + lists + http.body.len()
    });
    let asked = request.resource.len() + request.owner.len() + pairs(&request.labels) + http;
    asked
        + match answer {
            Err(reason) => reason.len(),
            Ok(plan) => {
                let keys = plan.keys.iter().map(|key| key.as_str().len() + PAIR_BYTES).sum::<usize>();
                let labels = plan.labels.iter().map(|(name, value)| name.len() + value.len() + PAIR_BYTES);
                keys + plan.group.len() + labels.sum::<usize>()
            }
        }
}

#[cfg(test)]
mod tests {
    use super::super::trial_requests;
    use super::*;

    fn named(resource: String) -> PlanRequest {
        let [(_, plain), ..] = trial_requests();
        PlanRequest { resource, ..plain }
    }

    fn refused(reason: &str) -> Answer {
        Err(reason.to_owned())
    }

    #[test]
    fn the_cache_is_bounded_by_entries_and_by_their_size() {
        let cache = PlanCache::new();
        for n in 0..100_000 {
            cache.insert(named(format!("resource {n}")), &refused("no"));
        }
        let kept: usize =
            (0..100_000).filter(|n| cache.get(&named(format!("resource {n}"))).is_some()).count();
        assert!((SHARDS * MOST / 2..=SHARDS * MOST).contains(&kept), "{kept}");
        assert_eq!(cache.get(&named("resource 99999".to_owned())), Some(refused("no")));
        for (name, reason) in [("x".repeat(2_000), "no".to_owned()), ("y".to_owned(), "n".repeat(2_000))] {
            cache.insert(named(name.clone()), &refused(&reason));
            assert_eq!(cache.get(&named(name)), None);
        }
    }
}
