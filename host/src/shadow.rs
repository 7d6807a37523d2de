//! Shadows: a component is asked what the live version of a policy is asked, while no client waits for it.
//!
//! A shadow decides nothing. The live version tells it each call for a share of the keys, and a thread asks the component the
//! same and compares the answers. No request waits for the thread: what it has no time for is dropped and counted, and it uses
//! at most a small part of a core. A shadow runs on one proxy, and ends by itself.
//!
//! | file | content |
//! | --- | --- |
//! | `comparison` | the answers of the two versions |

mod comparison;

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread;
use std::time::Duration;

use serde::Serialize;

pub use comparison::HookDiff;
use comparison::{Comparison, Kept};

use crate::clock;
use crate::lock::Instant;
use crate::mutex::Mutex;
use crate::policy::{Generation, Observed, Observer, Policies};
use crate::recording::Share;
use crate::replay::PlanDiff;
use crate::telemetry::Metrics;

/// How many calls wait for the thread at most. A call may hold the body of a request.
const WAITING: usize = 512;
/// For each microsecond of processor time, the thread rests for this many: it uses a twentieth of a core.
const REST: u64 = 19;
/// The thread rests when it has used this much processor time, in microseconds.
const TURN_US: u64 = 1_000;
/// How often the thread looks whether it is over.
const LOOK: Duration = Duration::from_millis(100);
/// The bounds of the length of a shadow, in milliseconds: a second and a day.
const LENGTHS_MS: std::ops::RangeInclusive<u64> = 1_000..=86_400_000;

/// How much a shadow sees.
#[derive(Clone, Copy, Debug)]
pub struct ShadowTerms {
    /// The share of the keys, in percent.
    pub share: f64,
    /// How long it lasts, in milliseconds.
    pub for_ms: u64,
}

impl ShadowTerms {
    /// Checks the bounds.
    ///
    /// # Errors
    /// The name of the field, and what is wrong.
    pub fn check(&self) -> Result<(), (&'static str, &'static str)> {
        if !(self.share > 0.0 && self.share <= 100.0) {
            return Err(("share", "must be over 0 and at most 100 percent"));
        }
        if !LENGTHS_MS.contains(&self.for_ms) {
            return Err(("for_ms", "must be 1000 to 86400000, which is a day"));
        }
        Ok(())
    }
}

/// Why no shadow begins.
#[derive(Debug, thiserror::Error)]
pub enum ShadowError {
    /// The policy has one.
    #[error("a shadow of this policy is running; end it first")]
    Busy,
    /// No thread could be started.
    #[error("its thread cannot be started: {0}")]
    Thread(#[from] io::Error),
}

/// The shadows of a proxy: one for each policy at most. Cheap to clone.
#[derive(Clone)]
pub struct Shadows(Arc<Inner>);

struct Inner {
    policies: Policies,
    metrics: Metrics,
    /// The shadow of each policy that runs, or has run last.
    all: Mutex<BTreeMap<String, Arc<Shared>>>,
}

/// What the thread, the live version and the operators share.
struct Shared {
    live: Arc<Generation>,
    candidate: Generation,
    terms: ShadowTerms,
    began: Instant,
    comparison: Mutex<Comparison>,
    dropped: AtomicU64,
    end: Mutex<Option<(State, Instant)>>,
    metrics: Metrics,
}

/// Whether a shadow still sees calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// It sees calls.
    Running,
    /// Its time has passed.
    Over,
    /// An operator has ended it.
    Stopped,
    /// Another version of the policy went live.
    Replaced,
    /// Its thread has failed, which is a bug.
    Failed,
}

/// What a shadow has seen.
#[derive(Clone, Debug, Serialize)]
pub struct ShadowReport {
    /// The policy.
    pub policy: String,
    /// The live version: the policy and the beginning of its digest.
    pub live: String,
    /// The version that is compared with it.
    pub candidate: String,
    /// Whether it still sees calls.
    pub state: State,
    /// The share of the keys, in percent.
    pub share: f64,
    /// For how long it has run, in milliseconds.
    pub ran_ms: u64,
    /// For how long it lasts, in milliseconds.
    pub for_ms: u64,
    /// The calls, by hook.
    pub hooks: Vec<HookDiff>,
    /// Hooks that one version lacks. Their calls are not compared.
    pub not_compared: Vec<String>,
    /// Calls that were not compared, because the thread had no time for them.
    pub dropped: u64,
    /// How the plans for different requests differ; absent if that is not asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub plans: Option<PlanDiff>,
    /// Whether there were more different requests than are kept for `plans`.
    pub is_partial: bool,
    /// The first failed call of the candidate, in words.
    pub fault: Option<String>,
}

impl Shadows {
    /// No shadows yet.
    pub fn new(policies: Policies, metrics: Metrics) -> Shadows {
        Shadows(Arc::new(Inner { policies, metrics, all: Mutex::default() }))
    }

    /// Begins to ask `candidate` what `live` is asked.
    ///
    /// # Errors
    /// [`ShadowError`]: why there is no shadow.
    pub fn begin(
        &self,
        live: &Arc<Generation>,
        candidate: Generation,
        terms: ShadowTerms,
    ) -> Result<(), ShadowError> {
        let mut all = self.0.all.lock();
        let name = live.name().to_owned();
        if all.get(&name).is_some_and(|known| known.state() == State::Running) {
            return Err(ShadowError::Busy);
        }
        let (calls, received) = sync_channel(WAITING);
        let shared = Arc::new(Shared {
            live: live.clone(),
            candidate,
            terms,
            began: clock::now(),
            comparison: Mutex::default(),
            dropped: AtomicU64::new(0),
            end: Mutex::new(None),
            metrics: self.0.metrics.clone(),
        });
        // The live version is observed before the thread starts, because the thread may end at once.
        let tap = Tap { share: Share::of(terms.share / 100.0), calls, shared: shared.clone() };
        live.observe(Some(Box::new(tap)));
        let (theirs, policies) = (shared.clone(), self.0.policies.clone());
        let thread = thread::Builder::new().name("shadow".to_owned());
        let spawned = thread.spawn(move || {
            let ending = Ending(&theirs);
            theirs.run(&received, &policies);
            drop(ending);
        });
        spawned.inspect_err(|_| live.observe(None))?;
        let (share, candidate) = (terms.share, &**shared.candidate.id());
        tracing::info!(policy = &**live.id(), candidate, share, for_ms = terms.for_ms, "a shadow begins");
        all.insert(name, shared);
        Ok(())
    }

    /// What the shadow of a policy has seen, also after its end; `None` if there was none. With plans, it takes a moment: they are
    /// compared in pairs.
    pub fn report(&self, name: &str, with_plans: bool) -> Option<ShadowReport> {
        let shadow = self.0.all.lock().get(name)?.clone();
        Some(shadow.report(with_plans))
    }

    /// Ends the shadow of a policy.
    pub fn end(&self, name: &str) {
        if let Some(shadow) = self.0.all.lock().get(name) {
            shadow.ends(State::Stopped);
        }
    }
}

impl Shared {
    /// The thread.
    fn run(&self, calls: &Receiver<Observed>, policies: &Policies) {
        let until = self.began.plus_us(self.terms.for_ms.saturating_mul(1_000));
        let name = self.live.name();
        let mut used_us = 0;
        loop {
            let call = match calls.recv_timeout(LOOK) {
                Ok(call) => Some(call),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => return self.ends(State::Stopped),
            };
            if self.state() != State::Running {
                return;
            }
            if policies.get(name).is_none_or(|now| now.number() != self.live.number()) {
                return self.ends(State::Replaced);
            }
            if clock::now() >= until {
                return self.ends(State::Over);
            }
            let Some(call) = call else { continue };
            let began_us = clock::thread_us();
            let (hook, result) = self.comparison.lock().compare(&self.live, &self.candidate, call);
            if let Some(result) = result.as_str() {
                self.metrics.policies.shadowed(name, hook.as_str(), result);
            }
            used_us += clock::thread_us().saturating_sub(began_us);
            if used_us >= TURN_US {
                thread::sleep(Duration::from_micros(used_us * REST));
                used_us = 0;
            }
        }
    }

    /// The first end counts.
    fn ends(&self, state: State) {
        let mut end = self.end.lock();
        if end.is_none() {
            *end = Some((state, clock::now()));
            self.live.observe(None);
            tracing::info!(policy = &**self.live.id(), ?state, "a shadow ends");
        }
    }

    fn state(&self) -> State {
        self.end.lock().map_or(State::Running, |(state, _)| state)
    }

    fn report(&self, with_plans: bool) -> ShadowReport {
        let until = self.end.lock().map_or_else(clock::now, |(_, at)| at);
        // The thread goes on while the plans are compared.
        let (hooks, is_partial, fault, kept) = {
            let comparison = self.comparison.lock();
            let kept = with_plans.then(|| comparison.kept());
            (comparison.hooks(), comparison.is_full(), comparison.fault(), kept)
        };
        let only = |one: &Generation, other: &Generation| {
            let others = other.hooks();
            one.hooks().into_iter().filter(|hook| !others.contains(hook)).collect::<Vec<_>>()
        };
        let mut not_compared = only(&self.live, &self.candidate);
        not_compared.extend(only(&self.candidate, &self.live));
        // These are asked when a component is loaded, and never for a request.
        not_compared.retain(|hook| !["configure", "reads"].contains(hook));
        ShadowReport {
            policy: self.live.name().to_owned(),
            live: self.live.id().to_string(),
            candidate: self.candidate.id().to_string(),
            state: self.state(),
            share: self.terms.share,
            ran_ms: until.us_since(self.began) / 1_000,
            for_ms: self.terms.for_ms,
            hooks,
            not_compared: not_compared.into_iter().map(str::to_owned).collect(),
            dropped: self.dropped.load(Relaxed),
            plans: kept.map(Kept::diff),
            is_partial,
            fault,
        }
    }
}

/// Ends the shadow with its thread, even if the thread panics.
struct Ending<'a>(&'a Shared);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.ends(State::Failed);
    }
}

/// What the live version tells its calls.
struct Tap {
    share: Share,
    calls: SyncSender<Observed>,
    shared: Arc<Shared>,
}

impl Observer for Tap {
    fn wants(&self, name: &str) -> bool {
        self.share.has(name)
    }

    fn tell(&self, call: Observed) {
        if self.calls.try_send(call).is_err() {
            self.shared.dropped.fetch_add(1, Relaxed);
            self.shared.metrics.policies.not_shadowed(self.shared.live.name());
        }
    }
}
