//! The event loop of the proxy: it takes requests, asks the policies and the store, and returns leases.
//!
//! The fronts call [`Service`], which is cheap to clone. Decisions about locks are made in [`crate::lock`];
//! this module carries events to it, and its actions to the policies, the store, the timers and the callers.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize};

use tokio::sync::{broadcast, mpsc, oneshot};

use crate::clock;
use crate::config::{Limits, Route};
use crate::lock::record::{Left, Op, Outcome, Release, Tag};
use crate::lock::{Instant, Key, LeaseRef, Mode, Space, Token};
use crate::policy::{Generation, Policies, Prepared};
use crate::random;
use crate::store::{Health, Page, Store, StoreError};
use crate::telemetry::Metrics;
use crate::vital;

mod acquire;
mod core;
mod errors;
mod gate;
mod history;
mod hold;
mod resume;
mod rollout;
mod routed;
mod swap;
#[cfg(test)]
pub(crate) mod tests;
mod values;
mod views;

use self::acquire::Call;
use self::core::Msg;
use self::gate::Gate;
pub use errors::{AcquireError, LeaseError};
pub use hold::{Hold, Keeping};
pub use routed::{RESERVED, RoutedRequest};
pub use values::{Begun, Committed, Guarded, Versioned};
pub use views::{Decision, HolderEntry, LockEntry, LockPage, LockView, QueueEntry};

pub use crate::policy::{HttpView, OnLoss, RefusalResponse};

/// The parts of a [`Service`].
pub struct Parts {
    /// The store of all key spaces.
    pub store: Arc<dyn Store>,
    /// How other proxies are notified.
    pub peers: Arc<dyn Peers>,
    /// The live policies.
    pub policies: Policies,
    /// Which policy decides about which resource; the first match counts.
    pub routes: Vec<Route>,
    /// The bounds from the configuration.
    pub limits: Limits,
    /// How long a call may wait for the store, in milliseconds.
    pub store_timeout_ms: u32,
    /// Where the service counts its calls.
    pub metrics: Metrics,
}

/// How proxies notify each other's waiters. A lost notification costs time only, because waiters also poll.
pub trait Peers: Send + Sync + 'static {
    /// The name by which other proxies find this one. It is unique: neither another proxy nor an earlier run of
    /// this one has it.
    fn name(&self) -> &str;

    /// Tells a proxy that one of its waiters is next. `gone` is called if that proxy is known to have ended; it
    /// must not block.
    fn notify(&self, peer: &str, key: &Key, gone: Box<dyn FnOnce() + Send>);
}

/// For a proxy without peers.
pub struct NoPeers;

impl Peers for NoPeers {
    fn name(&self) -> &str {
        "alone"
    }

    fn notify(&self, _peer: &str, _key: &Key, gone: Box<dyn FnOnce() + Send>) {
        gone();
    }
}

/// A lock request of an application.
#[derive(Clone, Debug)]
pub struct Request {
    /// What to lock; its policy names the keys.
    pub resource: String,
    /// The future holder; the front makes up a name if the client gives none.
    pub owner: String,
    /// How to hold the lock. The `limit` of permits is 0 here, because the policy sets it.
    pub mode: Mode,
    /// The lease time that the client wants, in milliseconds.
    pub ttl_ms: Option<u32>,
    /// How long the client wants to wait, in milliseconds.
    pub wait_ms: Option<u32>,
    /// Identifies the request when the client repeats it.
    pub request_id: Option<String>,
    /// Names and values for the policy.
    pub labels: Vec<(String, String)>,
    /// Set for a guarded request.
    pub routed: Option<RoutedRequest>,
}

/// A grant, as reported to its client.
#[derive(Clone, Debug)]
pub struct Lease {
    /// Identifies the lease in the store.
    pub lease: LeaseRef,
    /// The resource of the request.
    pub resource: String,
    /// The owner that the client named.
    pub owner: String,
    /// How the keys are held.
    pub mode: Mode,
    /// One fencing token for each key of `lease.keys`.
    pub tokens: Vec<Token>,
    /// The lease time, in milliseconds.
    pub ttl_ms: u32,
    /// The holder may count on the lease until this moment, and not after.
    pub valid_until: Instant,
    /// How long the request waited, in milliseconds.
    pub waited_ms: u32,
    /// The policy generation that planned the lease: `name@sha256:` and 12 digits.
    pub policy: Arc<str>,
    /// The name of the primitive that guards the keys.
    pub primitive: &'static str,
    /// How many levels the owner holds; more than 1 only under a re-entrant policy.
    pub levels: u32,
}

/// A renewal that the store has made.
#[derive(Clone, Copy, Debug)]
pub struct Renewed {
    /// The holder may count on the lease until this moment, and not after.
    pub valid_until: Instant,
    /// How long the lease lasted at the renewal, in milliseconds.
    pub ttl_ms: u32,
}

/// An event that a client with a held connection is told.
#[derive(Clone, Debug)]
pub enum HoldEvent {
    /// The lease was renewed.
    Renewed(Renewed),
    /// The proxy stops. The lease stays valid until `valid_until`, and its holder can continue with it through
    /// any proxy. No event follows.
    Draining {
        /// The holder may count on the lease until this moment, and not after.
        valid_until: Instant,
    },
    /// The lease is not renewed any more, and no event follows. Its holder may count on the lease until
    /// `valid_until`, which may be now.
    Lost {
        /// Why the lease is not renewed any more.
        reason: String,
        /// The holder may count on the lease until this moment, and not after.
        valid_until: Instant,
    },
}

/// A change of a key, for watchers.
#[derive(Clone, Debug)]
pub struct Notice {
    /// The key that has changed.
    pub key: Key,
    /// What happened to the key.
    pub kind: NoticeKind,
    /// The owner of the lease; empty for [`NoticeKind::Forced`].
    pub owner: Box<str>,
    /// The fencing token of the lease; 0 for [`NoticeKind::Forced`].
    pub token: Token,
    /// Microseconds since 1970, this machine's clock.
    pub at_us: u64,
}

/// The kind of a [`Notice`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoticeKind {
    /// The key was granted.
    Granted,
    /// The holder released its lease, and no waiter got the key in the same step.
    Released,
    /// The lease reached its end without a release.
    Expired,
    /// Released and granted to the next holder in one step; `owner` and `token` are the new holder's.
    HandedOff,
    /// Taken away by an operator.
    Forced,
    /// The holder found the lease lost, or the session that held it is gone.
    Lost,
}

/// The interface for all fronts. Cheap to clone.
#[derive(Clone)]
pub struct Service {
    shared: Arc<ServiceContext>,
}

/// The answer to a release that was sent.
type Releasing = oneshot::Receiver<Result<Outcome, String>>;

/// The state that the loop, the callers and the background tasks share.
struct ServiceContext {
    store: Arc<dyn Store>,
    peers: Arc<dyn Peers>,
    /// [`Peers::name`].
    proxy: Arc<str>,
    policies: Policies,
    routes: Vec<Route>,
    limits: Limits,
    store_timeout_ms: u32,
    metrics: Metrics,
    inbox: mpsc::UnboundedSender<Msg>,
    /// How many acquires are being planned, queued or answered; bounded by [`Limits::max_waiters_total`].
    waiting: AtomicUsize,
    serial: AtomicU64,
    notices: broadcast::Sender<Notice>,
    /// Closed until the leases from before the start have been examined.
    gate: Gate,
}

impl Service {
    /// Starts the loop on the current runtime. No acquire is granted before the leases that are already in the
    /// store have been examined.
    pub fn start(parts: Parts) -> Service {
        let service = Service::start_closed(parts);
        let opening = service.clone();
        vital::spawn("the look at the leases of before the start", async move {
            opening.look_at_all().await;
            opening.open();
        });
        service
    }

    /// As [`Service::start`], but no acquire is granted before [`Service::open`].
    pub fn start_closed(parts: Parts) -> Service {
        let (inbox, messages) = mpsc::unbounded_channel();
        let (notices, _) = broadcast::channel(parts.limits.watch_buffer);
        let shared = Arc::new(ServiceContext {
            store: parts.store,
            proxy: parts.peers.name().into(),
            peers: parts.peers,
            policies: parts.policies,
            routes: parts.routes,
            limits: parts.limits,
            store_timeout_ms: parts.store_timeout_ms,
            metrics: parts.metrics,
            inbox,
            waiting: AtomicUsize::new(0),
            serial: AtomicU64::new(1),
            notices,
            gate: Gate::default(),
        });
        let inbox = shared.inbox.clone();
        shared.store.on_loss(Arc::new(move |nonces| drop(inbox.send(Msg::Lost(nonces)))));
        vital::spawn("the event loop", core::Core::new(shared.clone()).run(messages));
        Service { shared }
    }

    /// Waits for the lease, at most as long as the plan allows. Dropping the future leaves the queue; a grant
    /// that is then in flight is undone at once.
    ///
    /// # Errors
    /// [`AcquireError`]: why there is no lease.
    pub async fn acquire(&self, request: Request) -> Result<Lease, AcquireError> {
        acquire::acquire(&self.shared, &request, Call::Acquire).await.map(|(lease, _)| lease)
    }

    /// As [`Service::acquire`], but the lease is renewed until the [`Hold`] is dropped.
    ///
    /// # Errors
    /// [`AcquireError`]: why there is no lease.
    pub async fn hold(&self, request: Request) -> Result<Hold, AcquireError> {
        let (lease, planned) = acquire::acquire(&self.shared, &request, Call::Acquire).await?;
        Ok(Hold::new(self.clone(), lease, planned.into(), None))
    }

    /// As [`Service::hold`], for a lease that any proxy has granted. Its longest hold counts from the grant.
    ///
    /// # Errors
    /// [`LeaseError`]: the lease is lost, or the store did not answer.
    pub async fn resume(&self, lease: LeaseRef) -> Result<Hold, LeaseError> {
        resume::resume(self, lease).await
    }

    /// Extends a lease that any proxy has granted, by `ttl_ms` milliseconds or, with `None`, by the lease time
    /// of the grant.
    ///
    /// # Errors
    /// [`LeaseError`]: the lease is lost, or the store did not answer.
    pub async fn renew(&self, lease: LeaseRef, ttl_ms: Option<u32>) -> Result<Renewed, LeaseError> {
        self.renew_before(lease, ttl_ms, self.shared.store_deadline()).await
    }

    /// As [`Service::renew`], for a caller that needs the answer by `deadline`.
    async fn renew_before(
        &self,
        lease: LeaseRef,
        ttl_ms: Option<u32>,
        deadline: Instant,
    ) -> Result<Renewed, LeaseError> {
        let result = self.ask_renewal(&lease, ttl_ms, deadline).await;
        let outcome = match &result {
            Ok(_) => "renewed",
            Err(LeaseError::Lost) => "lost",
            Err(_) => "store_unavailable",
        };
        self.shared.metrics.renewal(outcome);
        result
    }

    async fn ask_renewal(
        &self,
        lease: &LeaseRef,
        ttl_ms: Option<u32>,
        deadline: Instant,
    ) -> Result<Renewed, LeaseError> {
        let (done, answer) = oneshot::channel();
        let op = Op::Renew { lease: lease.clone(), ttl_ms };
        let tell = Box::new(move |result| drop(done.send(result)));
        self.shared.store.submit_renewal(op, deadline, tell);
        let reply = answer.await.unwrap_or_else(|_| Err(StoreError::stopped()))?;
        match reply.outcomes.first() {
            Some(Outcome::Renewed { left_us }) => {
                let until = reply.asked_at.plus_us(*left_us);
                self.shared.tell(Msg::Renewed { nonce: lease.nonce, until });
                let ttl_ms = u32::try_from(left_us / 1_000).unwrap_or(u32::MAX);
                Ok(Renewed { valid_until: self.shared.less_drift(reply.asked_at, *left_us), ttl_ms })
            }
            Some(Outcome::Unknown) => Err(LeaseError::Store(StoreError::unknown())),
            _ => {
                self.shared.tell(Msg::Lost(vec![lease.nonce]));
                Err(LeaseError::Lost)
            }
        }
    }

    /// Gives up one level of a lease that any proxy has granted.
    ///
    /// # Errors
    /// [`LeaseError`]: the lease is lost, or the store did not answer.
    pub async fn release(&self, lease: LeaseRef) -> Result<(), LeaseError> {
        self.released(self.begin_release(new_release(lease, None))).await
    }

    /// Sends a release. The release is sent when this returns, so a drain waits for it.
    fn begin_release(&self, release: Release) -> Releasing {
        let (reply, answer) = oneshot::channel();
        self.shared.tell(Msg::Release { release, reply });
        answer
    }

    async fn released(&self, answer: Releasing) -> Result<(), LeaseError> {
        let result = match answer.await {
            Ok(Ok(Outcome::Released { .. })) => Ok(()),
            Ok(Ok(_)) => Err(LeaseError::Lost),
            Ok(Err(why)) => Err(LeaseError::Store(StoreError::Unavailable { why })),
            Err(_) => Err(LeaseError::Store(StoreError::stopped())),
        };
        self.shared.metrics.release(match &result {
            Ok(()) => "released",
            Err(LeaseError::Lost) => "lost",
            Err(_) => "store_unavailable",
        });
        result
    }

    /// Takes a key away from its holders, whose next call finds the lease lost, and returns how many holders
    /// there were.
    ///
    /// # Errors
    /// If a key space does not answer and no holder was found in another one.
    pub async fn force_release(&self, key: Key) -> Result<u32, StoreError> {
        let (mut holders, mut failed) = (0, None);
        for space in Space::ALL {
            match self.force_release_in(key.clone().within(space)).await {
                Ok(here) => holders += here,
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        match failed {
            Some(error) if holders == 0 => Err(error),
            _ => Ok(holders),
        }
    }

    async fn force_release_in(&self, key: Key) -> Result<u32, StoreError> {
        if key.space() != Space::Table && self.shared.store.read(key.clone()).await?.is_none() {
            return Ok(0);
        }
        let outcome = self.shared.ask(Op::Force { key: key.clone() }).await?;
        self.shared.tell(Msg::Taken(key));
        match outcome {
            Outcome::Forced { holders } => Ok(holders),
            _ => Ok(0),
        }
    }

    /// A page of at most `limit` held keys with this prefix, in byte order, that come after `after`.
    ///
    /// # Errors
    /// If the store cannot be read.
    pub async fn list(
        &self,
        prefix: String,
        after: Option<Key>,
        limit: usize,
    ) -> Result<LockPage, StoreError> {
        let Page { items, more, unheard } = self.shared.store.list(prefix, after, limit).await?;
        Ok(LockPage { locks: items.iter().map(views::entry).collect(), more, unheard })
    }

    /// Shows a key, or a key that the policy of a resource names; `None` if nothing is known of it.
    ///
    /// # Errors
    /// If the store cannot be read.
    pub async fn show(&self, name: &str) -> Result<Option<LockView>, StoreError> {
        views::show(&self.shared, name).await
    }

    /// A notification from another proxy: a key is free for a waiter of this one.
    pub fn wake(&self, key: Key) {
        self.shared.tell(Msg::Wake(key));
    }

    /// Notices of all changes from now on. A reader that falls behind by more than `limits.watch_buffer`
    /// notices misses the oldest ones and is told how many.
    pub fn watch(&self) -> broadcast::Receiver<Notice> {
        self.shared.notices.subscribe()
    }

    /// Makes a checked policy generation live. Holders and waiters of the previous generation keep their locks,
    /// even if the new one names keys differently (see [`swap`]).
    ///
    /// # Errors
    /// If the store cannot be read, or requests arrive faster than the new policy can be asked about them.
    pub async fn go_live(&self, prepared: Prepared) -> Result<Arc<Generation>, StoreError> {
        swap::go_live(&self.shared, prepared).await
    }

    /// Whether the store can grant locks.
    pub fn store_health(&self) -> Health {
        self.shared.store.health()
    }

    /// Refuses new acquires, answers every waiter, and waits until all batches are answered.
    pub async fn drain(&self) {
        let (reply, drained) = oneshot::channel();
        self.shared.tell(Msg::Drain { reply });
        let _ = drained.await;
    }

    /// Waits until no holder counts on a lease that would end with this proxy. Call this after the last call
    /// was answered.
    pub async fn rested(&self) {
        self.shared.store.rested().await;
    }
}

/// A new release.
fn new_release(lease: LeaseRef, outcome: Option<Left>) -> Release {
    Release { lease, attempt: random::within(1..u64::MAX), outcome }
}

impl ServiceContext {
    fn tell(&self, message: Msg) {
        // The loop ends only with the runtime.
        let _ = self.inbox.send(message);
    }

    /// Runs one operation that does not go through a queue.
    async fn ask(&self, op: Op) -> Result<Outcome, StoreError> {
        let (done, answer) = oneshot::channel();
        let tell = Box::new(move |result| drop(done.send(result)));
        self.store.submit(vec![op], self.store_deadline(), tell);
        let reply = answer.await.unwrap_or_else(|_| Err(StoreError::stopped()))?;
        match reply.outcomes.into_iter().next() {
            Some(Outcome::Unknown) => Err(StoreError::unknown()),
            outcome => outcome.ok_or_else(StoreError::stopped),
        }
    }

    fn store_deadline(&self) -> Instant {
        clock::now().plus_ms(self.store_timeout_ms)
    }

    /// The moment until which a holder may count on a lease that had `left_us` microseconds left after
    /// `asked_at`: less by a margin for clock drift.
    fn less_drift(&self, asked_at: Instant, left_us: u64) -> Instant {
        let margin = left_us / 1_000 * u64::from(self.limits.drift_per_mille);
        asked_at.plus_us(left_us - margin.min(left_us))
    }

    /// The policy that decides about a lease.
    fn policy_of_tag<'a>(&'a self, tag: &'a Tag) -> &'a str {
        routed::policy(tag).unwrap_or_else(|| self.policy_of(&tag.resource))
    }

    /// The policy that decides about a request.
    fn policy_for<'a>(&'a self, request: &'a Request) -> &'a str {
        request.routed.as_ref().map_or_else(|| self.policy_of(&request.resource), |routed| &routed.policy)
    }

    /// The policy that decides about a resource.
    fn policy_of(&self, resource: &str) -> &str {
        let route = self.routes.iter().find(|route| route.matches(resource));
        route.map_or("default", |route| &route.policy)
    }
}
