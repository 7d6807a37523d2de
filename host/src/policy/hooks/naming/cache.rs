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
/// How many requests a shard knows by their hashes.
const SEEN: usize = 4 * MOST;

/// The last answers of one generation to requests that came more than once.
pub struct PlanCache {
    shards: [Mutex<Shard>; SHARDS],
}

struct Shard {
    answers: BoundedMap<Arc<PlanRequest>, Answer>,
    /// The hashes of requests that came once. A request that never comes again, as for a `once`, costs no more than this.
    seen: Box<[u32; SEEN]>,
}

impl PlanCache {
    pub fn new() -> PlanCache {
        let shard = || Shard { answers: BoundedMap::new(MOST), seen: Box::new([0; SEEN]) };
        PlanCache { shards: std::array::from_fn(|_| Mutex::new(shard())) }
    }

    /// The answer to the request, if it is there.
    pub fn get(&self, request: &PlanRequest) -> Option<Answer> {
        if asked_bytes(request) > MOST_BYTES {
            return None;
        }
        self.shards[place(hash(request))].lock().answers.get(request).cloned()
    }

    /// Keeps an answer if the request came before.
    pub fn insert(&self, request: PlanRequest, answer: &Answer) {
        if asked_bytes(&request) + answered_bytes(answer) > MOST_BYTES {
            return;
        }
        let hash = hash(&request);
        let mut shard = self.shards[place(hash)].lock();
        // Of 64 bits, the lowest choose the shard, the next ones the place in it, and the highest are kept.
        let kept = (hash >> 32) as u32;
        let seen = std::mem::replace(&mut shard.seen[(hash as usize / SHARDS) % SEEN], kept);
        if seen == kept {
            shard.answers.insert(Arc::new(request), answer.clone());
        }
    }

    /// Forgets all answers.
    pub fn clear(&self) {
        self.shards.iter().for_each(|shard| shard.lock().answers = BoundedMap::new(MOST));
    }
}

fn hash(request: &PlanRequest) -> u64 {
    BuildHasherDefault::<DefaultHasher>::default().hash_one(request)
}

fn place(hash: u64) -> usize {
    hash as usize % SHARDS
}

fn asked_bytes(request: &PlanRequest) -> usize {
    let pairs = |pairs: &[(String, String)]| {
        pairs.iter().map(|(name, value)| name.len() + value.len() + PAIR_BYTES).sum::<usize>()
    };
    let http = request.http.as_ref().map_or(0, |http| {
        let lists = pairs(&http.captures) + pairs(&http.query) + pairs(&http.headers);
        http.method.len() + http.path.len() + lists + http.body.len()
    });
    request.resource.len() + request.owner.len() + pairs(&request.labels) + http
}

fn answered_bytes(answer: &Answer) -> usize {
    let plan = match answer {
        Err(reason) => return reason.len(),
        Ok(plan) => plan,
    };
    let keys = plan.keys.iter().map(|key| key.as_str().len() + PAIR_BYTES).sum::<usize>();
    let labels = plan.labels.iter().map(|(name, value)| name.len() + value.len() + PAIR_BYTES);
    keys + plan.group.len() + labels.sum::<usize>()
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

    fn keep(cache: &PlanCache, resource: &str, reason: &str) {
        for _ in 0..2 {
            cache.insert(named(resource.to_owned()), &refused(reason));
        }
    }

    #[test]
    fn the_cache_is_bounded_by_entries_and_by_their_size() {
        let cache = PlanCache::new();
        for n in 0..100_000 {
            keep(&cache, &format!("resource {n}"), "no");
        }
        let kept: usize =
            (0..100_000).filter(|n| cache.get(&named(format!("resource {n}"))).is_some()).count();
        assert!((SHARDS * MOST / 2..=SHARDS * MOST).contains(&kept), "{kept}");
        assert_eq!(cache.get(&named("resource 99999".to_owned())), Some(refused("no")));
        for (name, reason) in [("x".repeat(2_000), "no".to_owned()), ("y".to_owned(), "n".repeat(2_000))] {
            keep(&cache, &name, &reason);
            assert_eq!(cache.get(&named(name)), None);
        }
    }

    #[test]
    fn an_answer_is_kept_when_its_request_comes_again() {
        let cache = PlanCache::new();
        for n in 0..10_000 {
            cache.insert(named(format!("resource {n}")), &refused("no"));
            assert_eq!(cache.get(&named(format!("resource {n}"))), None);
        }
        keep(&cache, "resource 9999", "no");
        assert_eq!(cache.get(&named("resource 9999".to_owned())), Some(refused("no")));
    }
}
