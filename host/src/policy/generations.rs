//! The live generation of each policy, and how another generation replaces it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use arc_swap::ArcSwap;
use serde_json::{Map, Value};

use super::canary::{Canary, CanaryTerms};
use super::check::{self, Checked};
use super::push_guard::Answered;
use super::{Digest, Engine, Generation, Manifest, PolicyStatus, Rejection, builtin, signature};
use crate::clock;
use crate::config::{Limits, PolicyConfig, PolicySigners, PolicySource, PushGuard};
use crate::lock::Instant;
use crate::mutex::Mutex;
use crate::telemetry::Metrics;

/// The live generation of each policy of config.toml. Cheap to clone.
///
/// A swap has two steps. [`Policies::prepare`] does every check and changes nothing. [`Policies::commit`] makes the
/// result live, immediately and irrevocably. Between the two, the service can ask the new generation for its plans of
/// the locks that are held.
#[derive(Clone)]
pub struct Policies(Arc<Inner>);

struct Inner {
    engine: Engine,
    limits: Limits,
    metrics: Metrics,
    policies: BTreeMap<String, Policy>,
}

struct Policy {
    active: ArcSwap<ActivePolicy>,
    next_number: AtomicU64,
    guard: PushGuard,
    signers: PolicySigners,
    history: Mutex<History>,
}

/// The generations that name keys: the live one and, during a change over several proxies, its successor.
#[derive(Clone, Debug)]
pub struct ActivePolicy {
    /// The generation that decides.
    pub live: Arc<Generation>,
    /// Claims take the keys of this generation too.
    pub candidate: Option<Arc<Generation>>,
    /// What is tried on a share of the keys.
    pub canary: Option<Arc<Canary>>,
}

impl ActivePolicy {
    /// Identifies this pair of generations.
    pub fn version(&self) -> (u64, Option<u64>) {
        (self.live.number(), self.candidate.as_ref().map(|candidate| candidate.number()))
    }
}

#[derive(Default)]
struct History {
    since_us: u64,
    last_error: Option<String>,
    /// What the live version has replaced. `None` if the live version is not watched.
    replaced: Option<Replaced>,
}

/// A generation that another one has replaced.
#[derive(Clone, Copy, Debug)]
struct Replaced {
    at: Instant,
    digest: Digest,
    /// What it had answered until then.
    answered: Answered,
}

/// A generation that passed every check but is not live yet.
#[derive(Clone, Debug)]
pub enum Prepared {
    /// The digest and the settings equal those of the live generation.
    Unchanged(Arc<Generation>),
    /// The digest or the settings differ from those of the live generation.
    Changed(Arc<Generation>),
}

impl Prepared {
    /// The generation itself.
    pub fn generation(&self) -> &Arc<Generation> {
        match self {
            Prepared::Unchanged(generation) | Prepared::Changed(generation) => generation,
        }
    }
}

impl Policies {
    /// Loads all policies of the configuration. Blocks while they are compiled: 0.1 s or more each.
    ///
    /// # Errors
    /// Every policy that cannot be loaded, by name.
    pub fn load(
        engine: &Engine,
        configs: &[PolicyConfig],
        limits: &Limits,
        metrics: &Metrics,
    ) -> Result<Policies, Vec<(String, Rejection)>> {
        let mut policies = BTreeMap::new();
        let mut rejections = Vec::new();
        for config in configs {
            let checked = read(&config.source, engine.limits().max_component_bytes).and_then(|component| {
                signature::verify(&config.name, &component, &config.signers)?;
                check::component_with_settings(engine, &component, &config.settings, limits)
            });
            match checked {
                Ok(checked) => {
                    log_notes(&config.name, &checked);
                    let (limits, metrics) = (limits.clone(), metrics.clone());
                    let first =
                        Generation::new(&config.name, 1, config.settings.clone(), checked, limits, metrics);
                    policies.insert(config.name.clone(), Policy::new(first, config));
                }
                Err(rejection) => rejections.push((config.name.clone(), rejection)),
            }
        }
        if !rejections.is_empty() {
            return Err(rejections);
        }
        let (engine, limits, metrics) = (engine.clone(), limits.clone(), metrics.clone());
        Ok(Policies(Arc::new(Inner { engine, limits, metrics, policies })))
    }

    /// The live generation. Takes no lock.
    pub fn get(&self, name: &str) -> Option<Arc<Generation>> {
        self.0.policies.get(name).map(|policy| policy.live())
    }

    /// The live generation and its successor. Takes no lock.
    pub fn active(&self, name: &str) -> Option<Arc<ActivePolicy>> {
        self.0.policies.get(name).map(|policy| policy.active.load_full())
    }

    /// The names of all policies, in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.policies.keys().map(String::as_str)
    }

    /// The names of all policies, with the numbers of their live generations.
    pub fn numbers(&self) -> impl Iterator<Item = (&str, u64)> {
        self.0.policies.iter().map(|(name, policy)| (name.as_str(), policy.live().number()))
    }

    /// Checks a component that is to replace the live component of `name`. Without `settings`, the settings of the
    /// live generation are kept. Changes nothing. Blocks while the component is compiled: 0.1 s or more.
    ///
    /// # Errors
    /// The reason for the refusal; pass it to [`Policies::reject`].
    pub fn prepare(
        &self,
        name: &str,
        component: &[u8],
        settings: Option<Map<String, Value>>,
    ) -> Result<Prepared, Rejection> {
        let policy = self.policy(name)?;
        signature::verify(name, component, &policy.signers)?;
        let live = policy.live();
        let settings = settings.unwrap_or_else(|| live.settings().clone());
        let inner = &self.0;
        let checked = if Digest::of(component) != live.digest() {
            check::component_with_settings(&inner.engine, component, &settings, &inner.limits)?
        } else if settings != *live.settings() {
            check::module_with_settings(Arc::clone(live.module()), &settings, &inner.limits)?
        } else {
            return Ok(Prepared::Unchanged(live));
        };
        log_notes(name, &checked);
        let (limits, metrics) = (inner.limits.clone(), inner.metrics.clone());
        let next = Generation::new(name, policy.next_number(), settings, checked, limits, metrics);
        Ok(Prepared::Changed(Arc::new(next)))
    }

    /// Loads a component to be asked beside the live generation of `name`, which is returned too. Both have the same settings.
    /// The faults of the component do not count for the policy. Changes nothing. Blocks while the component is compiled.
    ///
    /// # Errors
    /// The reason for the refusal.
    pub fn load_beside(
        &self,
        name: &str,
        component: &[u8],
    ) -> Result<(Arc<Generation>, Generation), Rejection> {
        let policy = self.policy(name)?;
        signature::verify(name, component, &policy.signers)?;
        let (live, inner) = (policy.live(), &self.0);
        let beside = check::load_file(name, component, live.settings(), &inner.engine, &inner.limits)?;
        Ok((live, beside))
    }

    /// Makes a prepared generation live.
    ///
    /// # Panics
    /// If the generation was prepared by another `Policies`.
    pub fn commit(&self, prepared: Prepared) -> Arc<Generation> {
        let Some(policy) = self.0.policies.get(prepared.generation().name()) else {
            panic!("a generation of an unknown policy")
        };
        let mut history = policy.history.lock();
        history.last_error = None;
        let Prepared::Changed(generation) = prepared else { return policy.live() };
        let next = ActivePolicy { live: Arc::clone(&generation), candidate: None, canary: None };
        let before = policy.live();
        before.retire();
        let (at, digest) = (clock::now(), before.digest());
        history.replaced = Some(Replaced { at, digest, answered: before.answers() });
        policy.active.store(Arc::new(next));
        history.since_us = clock::wall_us();
        drop(history);
        self.0.metrics.policies.load(generation.name(), "live");
        tracing::info!(policy = &**generation.id(), generation = generation.number(), "policy live");
        generation
    }

    /// Makes claims take the keys of both generations; with `None`, of the live generation only.
    pub fn name_with(&self, name: &str, candidate: Option<&Arc<Generation>>) {
        if let Some(policy) = self.0.policies.get(name) {
            policy.change(|active| ActivePolicy {
                candidate: candidate.cloned(),
                canary: None,
                ..active.clone()
            });
        }
    }

    /// Lets a version decide for a share of the keys; with `None`, the live generation decides for all.
    pub fn try_out(&self, name: &str, canary: Option<(Arc<Generation>, CanaryTerms)>) {
        let Some(policy) = self.0.policies.get(name) else { return };
        let canary = canary.map(|(generation, terms)| Arc::new(Canary::new(generation, terms)));
        let before = policy.change(|active| ActivePolicy { canary: canary.clone(), ..active.clone() });
        let ended = before.canary.as_ref().map(|before| &before.generation);
        let goes_on = canary.as_ref().map(|canary| canary.generation.number());
        ended.filter(|ended| goes_on != Some(ended.number())).into_iter().for_each(|ended| ended.retire());
    }

    /// How the live version has exceeded its guard, if it has, is still watched, and has replaced the version with the digest
    /// `previous` here. `known_us`: how long it has been live on all proxies.
    pub fn exceeded(&self, name: &str, previous: &str, known_us: u64) -> Option<String> {
        let policy = self.0.policies.get(name)?;
        let Replaced { at, digest, answered } = policy.history.lock().replaced?;
        let watch_us = u64::try_from(policy.guard.watch.as_micros()).unwrap_or(u64::MAX);
        if known_us.max(clock::now().us_since(at)) >= watch_us || digest.to_string() != previous {
            return None;
        }
        exceeded_by(&policy.live(), &answered, &policy.guard)
    }

    /// How the candidate of a change that waits has exceeded the policy's guard, if it has. Requests are planned by the live version
    /// and by the candidate meanwhile.
    pub fn candidate_exceeded(&self, name: &str) -> Option<String> {
        let policy = self.0.policies.get(name).filter(|policy| !policy.guard.watch.is_zero())?;
        let active = policy.active.load();
        exceeded_by(active.candidate.as_ref()?, &active.live.answers(), &policy.guard)
    }

    /// The live version is not watched any more.
    pub fn end_watch(&self, name: &str) {
        if let Some(policy) = self.0.policies.get(name) {
            policy.history.lock().replaced = None;
        }
    }

    /// Records a message about a policy for operators, as its last error.
    pub fn note(&self, name: &str, what: String) {
        if let Some(policy) = self.0.policies.get(name) {
            policy.history.lock().last_error = Some(what);
        }
    }

    /// Records a refused load, for [`Policies::status`], the log and the metrics.
    pub fn reject(&self, name: &str, rejection: &Rejection) {
        tracing::error!(policy = name, "policy not loaded, the old one stays live: {rejection}");
        if let Some(policy) = self.0.policies.get(name) {
            self.0.metrics.policies.load(name, "refused");
            policy.history.lock().last_error = Some(rejection.to_string());
        }
    }

    /// The status of all policies, by name.
    pub fn status(&self) -> Vec<PolicyStatus> {
        self.0.policies.iter().map(|(name, policy)| policy.status(name)).collect()
    }

    fn policy(&self, name: &str) -> Result<&Policy, Rejection> {
        self.0.policies.get(name).ok_or_else(|| Rejection::Unknown { name: name.to_owned() })
    }
}

impl Policy {
    fn new(first: Generation, config: &PolicyConfig) -> Policy {
        Policy {
            guard: config.guard,
            signers: config.signers.clone(),
            next_number: AtomicU64::new(first.number() + 1),
            active: ArcSwap::from_pointee(ActivePolicy {
                live: Arc::new(first),
                candidate: None,
                canary: None,
            }),
            history: Mutex::new(History { since_us: clock::wall_us(), ..History::default() }),
        }
    }

    /// Returns what was active before.
    fn change(&self, change: impl Fn(&ActivePolicy) -> ActivePolicy) -> Arc<ActivePolicy> {
        self.active.rcu(|active| change(active))
    }

    fn live(&self) -> Arc<Generation> {
        self.active.load().live.clone()
    }

    fn next_number(&self) -> u64 {
        self.next_number.fetch_add(1, Relaxed)
    }

    fn status(&self, name: &str) -> PolicyStatus {
        // Both are read under the lock, so that they are consistent.
        let history = self.history.lock();
        let live = self.live();
        PolicyStatus {
            name: name.to_owned(),
            digest: live.digest().to_string(),
            generation: live.number(),
            settings: Value::Object(live.settings().clone()),
            hooks: live.hooks(),
            manifest: live.manifest().map(Manifest::without_settings),
            reads: live.reads(),
            since_us: history.since_us,
            previous: None,
            last_error: history
                .last_error
                .clone()
                .or_else(|| live.last_fault().map(|fault| fault.to_string())),
            faults: live.faults(),
            canary: self.active.load().canary.as_ref().map(|canary| canary.seen()),
        }
    }
}

fn exceeded_by(generation: &Generation, before: &Answered, guard: &PushGuard) -> Option<String> {
    let why = generation.answers().exceeds(before, guard)?;
    let last = generation.last_fault().map(|fault| format!(" (the last failure: {fault})"));
    Some(why + &last.unwrap_or_default())
}

fn read(source: &PolicySource, max: usize) -> Result<Vec<u8>, Rejection> {
    match source {
        PolicySource::Builtin(name) => {
            let component = builtin(name).ok_or_else(|| Rejection::NoBuiltin { name: name.clone() })?;
            Ok(component.to_vec())
        }
        PolicySource::File(path) => crate::watch::read(path, max).map_err(|error| Rejection::Unreadable {
            path: path.display().to_string(),
            detail: error.to_string(),
        }),
    }
}

fn log_notes(name: &str, checked: &Checked) {
    for note in &checked.notes {
        tracing::info!(policy = name, "{note}");
    }
}
