//! The metrics of each policy: the hot path of the metrics.
//!
//! Looking up a metric by its labels would allocate for every acquire, so the metrics of a policy are looked up once,
//! by its name, and kept.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use super::metric::{Outcome, long, register, register_seconds};

/// The metrics of all policies.
pub struct Policies {
    known: ArcSwap<HashMap<Box<str>, Arc<OnePolicy>>>,
    acquires: Family<Acquire, Counter>,
    waits: Family<Policy, Histogram>,
    calls: Family<Call, Histogram>,
    cached: Family<Policy, Counter>,
    faults: Family<Failure, Counter>,
    loads: Family<Acquire, Counter>,
    shadowed: Family<Shadowed, Counter>,
    not_shadowed: Family<Policy, Counter>,
    compilations: Family<Outcome, Counter>,
    compile_times: Histogram,
}

struct OnePolicy {
    name: Box<str>,
    outcomes: [Counter; OUTCOMES.len()],
    wait: Histogram,
}

/// The times of the calls of one hook of a policy.
#[derive(Clone)]
pub struct CallTimes(Histogram);

/// The plans of a policy that came from the cache.
#[derive(Clone)]
pub struct CachedPlans(Counter);

/// The outcomes of an acquire; the last stands for all others.
const OUTCOMES: [&str; 15] = [
    "granted",
    "contended",
    "done",
    "refused",
    "policy_fault",
    "too_many_waiters",
    "too_many_holders",
    "over_limit",
    "invalid",
    "request_id_reused",
    "store_unavailable",
    "not_yet",
    "rules_differ",
    "shutting_down",
    "other",
];
/// The maximum number of separate names; further names share one. Configurations have a handful.
const MAX_POLICIES: usize = 256;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Policy {
    policy: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Acquire {
    policy: String,
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Shadowed {
    policy: String,
    hook: &'static str,
    result: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Call {
    policy: String,
    hook: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Failure {
    policy: String,
    hook: &'static str,
    reason: &'static str,
}

impl CachedPlans {
    /// Counts a plan.
    pub fn count(&self) {
        self.0.inc();
    }
}

impl CallTimes {
    /// Measures a call.
    pub fn took(&self, took: Duration) {
        self.0.observe(took.as_secs_f64());
    }
}

impl Policies {
    pub(super) fn register(registry: &mut Registry) -> Policies {
        let (waits, calls) = (long as fn() -> Histogram, short as fn() -> Histogram);
        let (waits, calls) = (Family::new_with_constructor(waits), Family::new_with_constructor(calls));
        let acquire = "Acquires that were answered, by outcome";
        let wait = "From the arrival of an acquire to its grant";
        Policies {
            known: ArcSwap::default(),
            acquires: register(registry, "acquire", acquire, Family::default()),
            waits: register_seconds(registry, "wait", wait, waits),
            calls: register_seconds(registry, "policy_call", "Calls of policy hooks", calls),
            cached: register(
                registry,
                "policy_plans_cached",
                "Plans and refusals of a policy that came from the cache",
                Family::default(),
            ),
            faults: register(registry, "policy_faults", "Policy calls that failed", Family::default()),
            loads: register(registry, "policy_loads", "Policies made live or refused", Family::default()),
            shadowed: register(
                registry,
                "shadow_calls",
                "Calls of the live version that a shadow compared, by result",
                Family::default(),
            ),
            not_shadowed: register(
                registry,
                "shadow_dropped",
                "Calls of the live version that a shadow had no time for",
                Family::default(),
            ),
            compilations: register(
                registry,
                "policy_compilations",
                "Components compiled in a process of their own, or refused by it, by outcome",
                Family::default(),
            ),
            compile_times: register_seconds(
                registry,
                "policy_compile",
                "Time of the processes that compile components",
                long(),
            ),
        }
    }

    /// Counts an answered acquire, and measures its wait if it was granted. `outcome` is `granted` or the problem's
    /// slug.
    pub fn acquire(&self, policy: &str, outcome: &'static str, waited: Duration) {
        self.with(policy, |policy| {
            let at = OUTCOMES.iter().position(|known| *known == outcome).unwrap_or(OUTCOMES.len() - 1);
            policy.outcomes[at].inc();
            if at == 0 {
                policy.wait.observe(waited.as_secs_f64());
            }
        });
    }

    /// The times of the answered calls of a hook.
    pub fn calls(&self, policy: &str, hook: &'static str) -> CallTimes {
        let labels = Call { policy: self.label(policy), hook };
        CallTimes(self.calls.get_or_create_owned(&labels))
    }

    /// Counts the plans that were answered from the cache.
    pub fn cached(&self, policy: &str) -> CachedPlans {
        CachedPlans(self.cached.get_or_create_owned(&Policy { policy: self.label(policy) }))
    }

    /// Counts a failed call of a hook. The request was refused, or the built-in answer was used.
    pub fn fault(&self, policy: &str, hook: &'static str, reason: &'static str) {
        let policy = self.label(policy);
        let labels = Failure { policy, hook, reason };
        self.faults.get_or_create(&labels).inc();
    }

    /// Counts a load or push that went live (`live`) or was refused (`refused`).
    pub fn load(&self, policy: &str, outcome: &'static str) {
        self.loads.get_or_create(&Acquire { policy: self.label(policy), outcome }).inc();
    }

    /// Counts a call that a shadow compared, by its result.
    pub fn shadowed(&self, policy: &str, hook: &'static str, result: &'static str) {
        let policy = self.label(policy);
        self.shadowed.get_or_create(&Shadowed { policy, hook, result }).inc();
    }

    /// Counts a call that a shadow had no time for.
    pub fn not_shadowed(&self, policy: &str) {
        self.not_shadowed.get_or_create(&Policy { policy: self.label(policy) }).inc();
    }

    /// Counts a compilation in a process of its own. `outcome` is `compiled` or the slug of the rejection.
    pub fn compilation(&self, outcome: &'static str) {
        self.compilations.get_or_create(&Outcome { outcome }).inc();
    }

    /// Measures a compilation in a process of its own.
    pub fn compiled_in(&self, took: Duration) {
        self.compile_times.observe(took.as_secs_f64());
    }

    fn label(&self, policy: &str) -> String {
        self.with(policy, |policy| policy.name.to_string())
    }

    fn with<T>(&self, name: &str, count: impl FnOnce(&OnePolicy) -> T) -> T {
        if let Some(policy) = self.known.load().get(name) {
            return count(policy);
        }
        count(&self.meet(name))
    }

    /// Adds the metrics of a policy that was not seen before.
    fn meet(&self, name: &str) -> Arc<OnePolicy> {
        let known = self.known.load();
        let name = if known.len() < MAX_POLICIES { name } else { "other" };
        if let Some(policy) = known.get(name) {
            return Arc::clone(policy);
        }
        let policy = Arc::new(self.resolve(name));
        self.known.rcu(|known| {
            let mut known = HashMap::clone(known);
            known.insert(name.into(), Arc::clone(&policy));
            known
        });
        policy
    }

    fn resolve(&self, name: &str) -> OnePolicy {
        let counter =
            |outcome| self.acquires.get_or_create_owned(&Acquire { policy: name.to_owned(), outcome });
        OnePolicy {
            name: name.into(),
            outcomes: OUTCOMES.map(counter),
            wait: self.waits.get_or_create_owned(&Policy { policy: name.to_owned() }),
        }
    }
}

/// Buckets for policy calls: from a microsecond to the longest that is allowed.
fn short() -> Histogram {
    Histogram::new([2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 1e-1])
}

#[cfg(test)]
mod tests {
    use super::super::{Metrics, assert_has};
    use super::*;

    #[test]
    fn every_metric_has_its_documented_name() {
        let metrics = Metrics::default();
        metrics.policies.acquire("default", "granted", Duration::from_millis(3));
        metrics.policies.acquire("default", "contended", Duration::from_millis(3));
        metrics.policies.acquire("default", "something-new", Duration::ZERO);
        metrics.policies.fault("default", "plan", "trap");
        metrics.policies.calls("default", "choose").took(Duration::from_micros(9));
        metrics.policies.cached("default").count();
        metrics.policies.load("default", "live");
        metrics.policies.shadowed("default", "plan", "different");
        metrics.policies.not_shadowed("default");
        metrics.policies.compilation("compile_time");
        metrics.policies.compiled_in(Duration::from_millis(3));
        let lines = [
            "lockkeeper_acquire_total{policy=\"default\",outcome=\"granted\"} 1",
            "lockkeeper_acquire_total{policy=\"default\",outcome=\"contended\"} 1",
            "lockkeeper_acquire_total{policy=\"default\",outcome=\"other\"} 1",
            "lockkeeper_wait_seconds_count{policy=\"default\"} 1",
            "lockkeeper_policy_faults_total{policy=\"default\",hook=\"plan\",reason=\"trap\"} 1",
            "lockkeeper_policy_call_seconds_count{policy=\"default\",hook=\"choose\"} 1",
            "lockkeeper_policy_plans_cached_total{policy=\"default\"} 1",
            "lockkeeper_policy_loads_total{policy=\"default\",outcome=\"live\"} 1",
            "lockkeeper_shadow_calls_total{policy=\"default\",hook=\"plan\",result=\"different\"} 1",
            "lockkeeper_shadow_dropped_total{policy=\"default\"} 1",
            "lockkeeper_policy_compilations_total{outcome=\"compile_time\"} 1",
            "lockkeeper_policy_compile_seconds_count 1",
        ];
        assert_has(&metrics, &lines);
    }

    #[test]
    fn policy_names_are_bounded() {
        let metrics = Metrics::default();
        for n in 0..2_000 {
            metrics.policies.acquire(&format!("p{n}"), "granted", Duration::ZERO);
        }
        let text = metrics.encode();
        assert!(text.contains("policy=\"other\""));
        assert!(text.matches("lockkeeper_wait_seconds_count").count() < 300);
    }
}
