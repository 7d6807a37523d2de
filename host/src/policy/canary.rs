//! A canary is a version of a policy that decides the requests for a share of the keys. All claims still take the keys of the
//! live version.
//!
//! Exclusion rests on the live version throughout: each claim takes the keys that it names. Where the canary decides, a
//! claim takes the keys of both, and the canary decides how long the lease lasts, who waits how long and who is next. So a
//! canary can begin, grow and end on one proxy after another, and nothing waits for it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::{Generation, Plan, PlanError, PlanRequest};
use crate::lock::Key;

/// What a canary decides, and what ends it.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct CanaryTerms {
    /// The share of the keys for which the canary decides, in percent.
    pub share: f64,
    /// The shares that follow. After the last one, the canary goes live.
    pub steps: Vec<f64>,
    /// How long each share lasts at least, in milliseconds; 0: no share follows by itself.
    pub every_ms: u64,
    /// When the canary ends by itself.
    pub guard: CanaryGuard,
}

/// The bounds of a canary. If one is exceeded, the canary ends by itself. Each proxy compares what it has seen at the present
/// share.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct CanaryGuard {
    /// The most calls of the canary that may fail.
    pub faults: u64,
    /// The most of the requests planned by the live version that the canary may refuse, in percent.
    pub refused: f64,
    /// By how many percentage points the share of the canary's requests that get no lock in time may exceed that of the others.
    pub ungranted: f64,
    /// The most times that the 99th percentile of the canary's waits may be that of the others.
    pub p99: f64,
}

impl Default for CanaryGuard {
    fn default() -> CanaryGuard {
        CanaryGuard { faults: 0, refused: 1.0, ungranted: 5.0, p99: 2.0 }
    }
}

/// How many requests each side must have before shares and waits are compared, and the canary before its share grows.
const ENOUGH: u64 = 200;
/// Shorter waits count as waits of this length.
const SHORT: Duration = Duration::from_millis(2);
/// A bucket of waits is longer by this factor than the one before.
const FACTOR: f64 = 1.25;
const BUCKETS: usize = 96;

impl CanaryTerms {
    /// Checks the bounds.
    ///
    /// # Errors
    /// The name of the field, and what is wrong.
    pub fn check(&self) -> Result<(), (&'static str, String)> {
        let is_share = |share: &f64| *share > 0.0 && *share <= 100.0;
        if !is_share(&self.share) {
            return Err(("share", "must be over 0 and at most 100 percent".to_owned()));
        }
        if self.steps.len() > 32 || !self.steps.iter().all(is_share) {
            return Err(("steps", "must be at most 32 shares, over 0 and at most 100 percent".to_owned()));
        }
        let mut all = std::iter::once(&self.share).chain(&self.steps);
        if !all.clone().zip(all.by_ref().skip(1)).all(|(one, next)| one < next) {
            return Err(("steps", "must rise, from the share on".to_owned()));
        }
        let may_stay = self.every_ms == 0 && self.steps.is_empty();
        if !may_stay && !(1_000..=604_800_000).contains(&self.every_ms) {
            return Err(("every_ms", "must be 1000 to 604800000, which is a week".to_owned()));
        }
        let CanaryGuard { refused, ungranted, p99, .. } = self.guard;
        if !(0.0..=100.0).contains(&ungranted) {
            return Err(("ungranted", "must be 0 to 100 percentage points".to_owned()));
        }
        if !(0.0..=100.0).contains(&refused) {
            return Err(("refused", "must be 0 to 100 percent".to_owned()));
        }
        if !(1.0..=1_000.0).contains(&p99) {
            return Err(("p99", "must be 1 to 1000 times".to_owned()));
        }
        Ok(())
    }

    /// The terms of the next step; `None` after the last one.
    pub fn next(&self) -> Option<CanaryTerms> {
        let (share, steps) = self.steps.split_first()?;
        Some(CanaryTerms { share: *share, steps: steps.to_vec(), ..self.clone() })
    }
}

/// A canary on this proxy.
#[derive(Debug)]
pub struct Canary {
    /// The version that is tried.
    pub generation: Arc<Generation>,
    /// What it decides, and what ends it.
    pub terms: CanaryTerms,
    seen: Arc<Seen>,
}

/// What a proxy has seen of a canary with one share.
#[derive(Debug, Default)]
struct Seen {
    canary: Side,
    others: Side,
    /// Plans that the canary failed to make, also while its hook is suspended.
    faults: AtomicU64,
}

/// The requests of one side.
#[derive(Debug)]
struct Side {
    asked: AtomicU64,
    refused: AtomicU64,
    granted: AtomicU64,
    ungranted: AtomicU64,
    waits: [AtomicU64; BUCKETS],
}

impl Default for Side {
    fn default() -> Side {
        let zero = || AtomicU64::new(0);
        Side {
            asked: zero(),
            refused: zero(),
            granted: zero(),
            ungranted: zero(),
            waits: std::array::from_fn(|_| zero()),
        }
    }
}

/// What a proxy has seen of a canary, for operators.
#[derive(Clone, Debug, Serialize)]
pub struct CanarySeen {
    /// The requests for which the canary decided.
    pub canary: SideSeen,
    /// The other requests for the policy.
    pub others: SideSeen,
    /// The failed calls of the canary.
    pub faults: u64,
}

/// The requests of one side, for operators.
#[derive(Clone, Debug, Serialize)]
pub struct SideSeen {
    /// How many requests were planned.
    pub asked: u64,
    /// How many of these the canary refused.
    pub refused: u64,
    /// How many were granted.
    pub granted: u64,
    /// How many got no lock in time, or found the queue full.
    pub ungranted: u64,
    /// The 99th percentile of the waits of these, in milliseconds.
    pub p99_ms: f64,
}

/// On which side a request is.
#[derive(Clone, Debug)]
pub struct Place {
    seen: Arc<Seen>,
    is_canary: bool,
}

/// What a canary makes of a request.
#[derive(Debug)]
pub enum Overlay {
    /// It decides: the terms are the canary's, and so are the keys beside those of the live version.
    Decides(Plan),
    /// It refuses the request.
    Refuses(String),
    /// It does not decide about this key, or has failed.
    Leaves,
}

impl Canary {
    /// A canary that has decided nothing yet.
    pub fn new(generation: Arc<Generation>, terms: CanaryTerms) -> Canary {
        Canary { generation, terms, seen: Arc::default() }
    }

    /// Whether the canary decides about requests whose first key is this one. With a greater share, it decides about these
    /// keys and more.
    fn takes(&self, first: &Key) -> bool {
        let hash = Sha256::new_with_prefix(self.generation.rules()).chain_update(first.as_str()).finalize();
        let drawn = u32::from_le_bytes([hash[0], hash[1], hash[2], hash[3]]);
        f64::from(drawn) < self.terms.share / 100.0 * f64::from(u32::MAX) + 0.5
    }

    /// What becomes of a request that the live version plans in this way. `fits`: whether the proxy can grant by a plan as it
    /// is.
    pub fn overlay(
        &self,
        request: &PlanRequest,
        live: &Plan,
        fits: impl FnOnce(&Plan) -> bool,
    ) -> (Overlay, Place) {
        let is_canary = self.takes(&live.keys[0]);
        let place = Place { seen: self.seen.clone(), is_canary };
        place.side().asked.fetch_add(1, Relaxed);
        if !is_canary {
            return (Overlay::Leaves, place);
        }
        let overlay = match self.generation.plan(request) {
            // Once it is live, such requests are refused.
            Ok(plan) if !fits(&plan) => {
                place.refused();
                Overlay::Leaves
            }
            Ok(plan) => Overlay::Decides(with_terms_of(live, &plan, self.generation.limits.max_keys)),
            Err(PlanError::Refused { reason }) => {
                place.refused();
                Overlay::Refuses(reason)
            }
            Err(PlanError::Fault(_)) => {
                self.seen.faults.fetch_add(1, Relaxed);
                Overlay::Leaves
            }
        };
        (overlay, place)
    }

    /// Why the canary must end, by what this proxy has seen.
    pub fn verdict(&self) -> Option<String> {
        let CanarySeen { canary, others, faults } = self.seen();
        let guard = self.terms.guard;
        if faults > guard.faults {
            let last = self.generation.last_fault().map(|fault| format!(": {fault}")).unwrap_or_default();
            return Some(format!("it failed {faults} times, and {} are allowed{last}", guard.faults));
        }
        let refused = canary.refused as f64 * 100.0 / canary.asked.max(1) as f64;
        if canary.asked >= ENOUGH && refused > guard.refused {
            return Some(format!(
                "it refuses {refused:.1} % of the requests that the live version plans, and {} % are allowed",
                guard.refused
            ));
        }
        let share =
            |side: &SideSeen| side.ungranted as f64 * 100.0 / (side.granted + side.ungranted).max(1) as f64;
        let (its, theirs) = (share(&canary), share(&others));
        if canary.granted + canary.ungranted >= ENOUGH && its > theirs + guard.ungranted {
            return Some(format!(
                "{its:.1} % of its requests get no lock in time, and {theirs:.1} % of the others; {} percentage points more \
                 are allowed",
                guard.ungranted
            ));
        }
        if canary.granted >= ENOUGH && others.granted >= ENOUGH {
            let short = SHORT.as_secs_f64() * 1_000.0;
            let (its, theirs) = (canary.p99_ms, others.p99_ms.max(short));
            if its > theirs * guard.p99 {
                return Some(format!(
                    "the 99th percentile of its waits is {its:.1} ms, and {theirs:.1} ms for the others; {} times is allowed",
                    guard.p99
                ));
            }
        }
        None
    }

    /// Whether this proxy has seen enough of the canary for its share to grow.
    pub fn is_tried(&self) -> bool {
        self.seen.canary.asked.load(Relaxed) >= ENOUGH
    }

    /// What this proxy has seen.
    pub fn seen(&self) -> CanarySeen {
        // The generation counts the faults of all hooks, but not while one is suspended.
        let faults = self.seen.faults.load(Relaxed).max(self.generation.faults());
        CanarySeen { canary: self.seen.canary.seen(), others: self.seen.others.seen(), faults }
    }
}

impl Place {
    fn side(&self) -> &Side {
        if self.is_canary { &self.seen.canary } else { &self.seen.others }
    }

    /// Counts a request that is refused for what the canary names.
    pub fn refused(&self) {
        self.side().refused.fetch_add(1, Relaxed);
    }

    /// Counts a request that got no lock in time, or found the queue full.
    pub fn ungranted(&self) {
        self.side().ungranted.fetch_add(1, Relaxed);
    }

    /// Counts a grant.
    pub fn granted(&self, waited: Duration) {
        let side = self.side();
        side.granted.fetch_add(1, Relaxed);
        let bucket = (waited.max(SHORT).as_secs_f64() / SHORT.as_secs_f64()).ln() / FACTOR.ln();
        side.waits[(bucket as usize).min(BUCKETS - 1)].fetch_add(1, Relaxed);
    }
}

impl Side {
    fn seen(&self) -> SideSeen {
        let counts: Vec<u64> = self.waits.iter().map(|count| count.load(Relaxed)).collect();
        let wanted = (counts.iter().sum::<u64>() as f64 * 0.99).ceil() as u64;
        let mut sum = 0;
        let bucket = counts.iter().position(|count| {
            sum += count;
            sum >= wanted
        });
        let p99 = SHORT.as_secs_f64() * 1_000.0 * FACTOR.powi(bucket.unwrap_or_default() as i32);
        SideSeen {
            asked: self.asked.load(Relaxed),
            refused: self.refused.load(Relaxed),
            granted: self.granted.load(Relaxed),
            ungranted: self.ungranted.load(Relaxed),
            p99_ms: if wanted == 0 { 0.0 } else { p99 },
        }
    }
}

/// The live plan with the terms of the canary's plan: for how long, how long the request waits, and who is next. What
/// decides how a key is held, what protects it after a lease is lost, and the order over all proxies stay those of the live
/// plan. A plan with more than `max_keys` keys has those of the live plan.
fn with_terms_of(live: &Plan, canary: &Plan, max_keys: usize) -> Plan {
    let Plan { ttl_ms, wait_ms, rank, group, weight, max_waiters, max_hold_ms, labels, .. } = canary;
    // One of several keys is enough for `any`, an outcome belongs to its keys, and a lease is re-entered with all of them.
    let is_alone = live.any || canary.any || live.primitive.keeps_outcome() || live.reentrant;
    let both = match is_alone || live.primitive.space() != canary.primitive.space() {
        true => live.keys.clone(),
        false => Key::union(&live.keys, canary.keys.iter()),
    };
    Plan {
        keys: if both.len() > max_keys { live.keys.clone() } else { both },
        ttl_ms: *ttl_ms,
        wait_ms: *wait_ms,
        rank: *rank,
        group: group.clone(),
        weight: *weight,
        max_waiters: *max_waiters,
        max_hold_ms: *max_hold_ms,
        labels: labels.clone(),
        ..live.clone()
    }
}
