//! What the loop, the calls and the background tasks share.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize};
use std::time::Duration;

use tokio::sync::{broadcast, mpsc, oneshot};

use super::errors::AcquireError;
use super::gate::Gate;
use super::message::Msg;
use super::named::Named;
use super::peers::Peers;
use super::request::Request;
use super::rules::RulesGate;
use super::tag;
use super::views::Notice;
use crate::clock;
use crate::config::{Limits, Route};
use crate::lock::Instant;
use crate::lock::record::{Op, Outcome, Tag};
use crate::mutex::Mutex;
use crate::policy::{Generation, Policies};
use crate::recording::Recorder;
use crate::store::{Health, Store, StoreError};
use crate::telemetry::Metrics;

/// The interface for all fronts. Cheap to clone. Each file of this module adds the calls of its subject.
#[derive(Clone)]
pub struct Service {
    pub(super) shared: Arc<ServiceContext>,
}

/// The state behind a [`Service`].
pub(super) struct ServiceContext {
    pub store: Arc<dyn Store>,
    pub peers: Arc<dyn Peers>,
    /// [`Peers::name`].
    pub proxy: Arc<str>,
    pub policies: Policies,
    pub routes: Vec<Route>,
    pub routes_digest: String,
    pub limits: Limits,
    pub store_timeout_ms: u32,
    pub metrics: Metrics,
    pub recorder: Recorder,
    pub inbox: mpsc::UnboundedSender<Msg>,
    /// How many acquires are being planned, queued or answered; bounded by [`Limits::max_waiters_total`].
    pub waiting: AtomicUsize,
    /// The number of the next waiter.
    pub serial: AtomicU64,
    pub notices: broadcast::Sender<Arc<Notice>>,
    /// Closed until the leases from before the start have been examined, or are known to have their keys.
    pub gate: Gate,
    /// Closed while the rules of this proxy are not those of its store.
    pub rules: RulesGate,
    /// Whether all leases have the keys that the live generations name.
    pub named: Mutex<Named>,
}

impl ServiceContext {
    /// Sends a message to the loop.
    pub fn tell(&self, message: Msg) {
        // The loop ends only with the runtime.
        let _ = self.inbox.send(message);
    }

    /// Runs one operation that does not go through a queue.
    pub async fn ask(&self, op: Op) -> Result<Outcome, StoreError> {
        let (done, answer) = oneshot::channel();
        let tell = Box::new(move |result| drop(done.send(result)));
        self.store.submit(vec![op], self.store_deadline(), tell);
        let reply = answer.await.unwrap_or_else(|_| Err(StoreError::stopped()))?;
        match reply.outcomes.into_iter().next() {
            Some(Outcome::Unknown) => Err(StoreError::unknown()),
            outcome => outcome.ok_or_else(StoreError::stopped),
        }
    }

    pub fn store_deadline(&self) -> Instant {
        clock::now().plus_ms(self.store_timeout_ms)
    }

    /// The moment until which a holder may count on a lease that had `left_us` microseconds left after
    /// `asked_at`: less by a margin for clock drift.
    pub fn less_drift(&self, asked_at: Instant, left_us: u64) -> Instant {
        let margin = left_us / 1_000 * u64::from(self.limits.drift_per_mille);
        asked_at.plus_us(left_us - margin.min(left_us))
    }

    /// Waits until the leases that were in the store at the start have been examined; until then nothing is
    /// granted.
    pub async fn opened(&self) -> Result<(), AcquireError> {
        if self.gate.is_clear() {
            return Ok(());
        }
        let limit = Duration::from_millis(u64::from(self.store_timeout_ms));
        match tokio::time::timeout(limit, self.gate.opened()).await {
            Ok(()) => Ok(()),
            Err(_elapsed) => Err(match self.store.health() {
                Health::Unavailable { why } => StoreError::Unavailable { why }.into(),
                Health::Ready { .. } => AcquireError::NotJoined,
            }),
        }
    }

    /// What the generation grants by, together with the routes: proxies with the same text give the same keys to the same
    /// requests.
    pub fn rules_of(&self, generation: &Generation) -> Arc<str> {
        format!("{}+{}", generation.rules(), self.routes_digest).into()
    }

    /// Whether the policy of this generation decides about the lease. The leases beneath the delegation of another proxy
    /// are not known. They do no harm if that proxy has the same routes, and grants by this generation or another policy.
    pub fn concerns(&self, generation: &Generation, tag: &Tag) -> bool {
        if tag.delegated_to.is_none() {
            return self.policy_of_tag(tag) == generation.name();
        }
        let (rules, routes) = tag.policy.rsplit_once('+').unwrap_or_default();
        let name = rules.split_once('@').map_or("", |(name, _)| name);
        *routes != *self.routes_digest || (name == generation.name() && rules != generation.rules())
    }

    /// The policy that decides about a lease.
    pub fn policy_of_tag<'a>(&'a self, tag: &'a Tag) -> &'a str {
        tag::policy(tag).unwrap_or_else(|| self.policy_of(&tag.resource))
    }

    /// The policy that decides about a request.
    pub fn policy_for<'a>(&'a self, request: &'a Request) -> &'a str {
        request.principal.routed().map_or_else(|| self.policy_of(&request.resource), |routed| &routed.policy)
    }

    /// The policy that decides about a resource.
    pub fn policy_of(&self, resource: &str) -> &str {
        let route = self.routes.iter().find(|route| route.resource.matches(resource));
        route.map_or("default", |route| &route.policy)
    }
}
