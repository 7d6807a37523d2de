//! The one loop: requests in, policy and store asked, leases out.
//!
//! Fronts call [`Service`]; it is cheap to clone. What is decided about locks is decided in
//! [`crate::lock`]; this module carries events to it and its actions to the policies, the store,
//! the timers and the callers.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize};

use tokio::sync::{broadcast, mpsc, oneshot};

use crate::clock;
use crate::config::{Limits, Route};
use crate::lock::record::{HeldBy, Left, Op, Outcome, Release, StoredValue, Tag, Version};
use crate::lock::{Instant, Key, LeaseRef, Mode, Space, Token};
use crate::policy::{Generation, Policies, Prepared};
use crate::random;
use crate::store::{Health, Page, Store, StoreError};
use crate::telemetry::Metrics;
use crate::vital;

mod acquire;
mod core;
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
pub use hold::{Hold, Keeping};
pub use routed::{RESERVED, RoutedRequest};
pub use values::{Begun, Committed, Guarded, Versioned};

pub use crate::policy::{HttpView, OnLoss, RefusalResponse};

/// What a [`Service`] is made of.
pub struct Parts {
    pub store: Arc<dyn Store>,
    pub peers: Arc<dyn Peers>,
    pub policies: Policies,
    pub routes: Vec<Route>,
    pub limits: Limits,
    /// How long a call may wait for the store.
    pub store_timeout_ms: u32,
    pub metrics: Metrics,
}

/// How proxies wake each other's waiters. What it loses costs time only: everybody polls, too.
pub trait Peers: Send + Sync + 'static {
    /// By which the others find this proxy. No other, and no earlier run of this one, has it.
    fn name(&self) -> &str;

    /// Tells a proxy that one of its waiters is next. `gone` is called where it is known to have ended; it
    /// must not block.
    fn notify(&self, peer: &str, key: &Key, gone: Box<dyn FnOnce() + Send>);
}

/// The bell of a proxy that no other knows.
pub struct NoPeers;

impl Peers for NoPeers {
    fn name(&self) -> &str {
        "alone"
    }

    fn notify(&self, _peer: &str, _key: &Key, gone: Box<dyn FnOnce() + Send>) {
        gone();
    }
}

/// What an application asks for.
#[derive(Clone, Debug)]
pub struct Request {
    pub resource: String,
    /// Who will hold the lock; the front makes one up where the client gives none.
    pub owner: String,
    /// `limit` of permits is 0: the policy sets it.
    pub mode: Mode,
    pub ttl_ms: Option<u32>,
    pub wait_ms: Option<u32>,
    pub request_id: Option<String>,
    pub labels: Vec<(String, String)>,
    /// Set for a guarded request.
    pub routed: Option<RoutedRequest>,
}

/// A grant, as its client is told of it.
#[derive(Clone, Debug)]
pub struct Lease {
    pub lease: LeaseRef,
    pub resource: String,
    pub owner: String,
    pub mode: Mode,
    /// One for each key of `lease.keys`.
    pub tokens: Vec<Token>,
    pub ttl_ms: u32,
    /// The holder may be certain of the lease until this moment, and not after.
    pub valid_until: Instant,
    pub waited_ms: u32,
    /// `name@sha256:` and 12 digits.
    pub policy: Arc<str>,
    pub primitive: &'static str,
    /// How often the owner holds it; over 1 only under a re-entrant policy.
    pub levels: u32,
}

/// Why an acquire got no lease.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AcquireError {
    #[error("`{resource}` is {}", match holder {
        Some(_) => "held",
        None => "waited for by others, or kept back for a while, as after a change of the store's server",
    })]
    Contended {
        resource: String,
        key: Key,
        holder: Option<Box<HeldBy>>,
        /// Place in the queue when the wait ended, or where it would have begun; 1 for the next.
        position: u32,
        retry_after_ms: u32,
        /// Set where the policy gave up before the wait was over.
        reason: Option<String>,
    },
    #[error("the policy refused: {reason}")]
    Refused { reason: String },
    /// The policy failed at naming, which fails closed. `reason` is a stable slug.
    #[error("the policy `{policy}` could not decide: {detail}")]
    PolicyFault { policy: String, reason: &'static str, detail: String },
    #[error("{resource} has {limit} waiters, which is the policy's limit")]
    TooManyWaiters { resource: String, limit: u32 },
    #[error("{resource} has as many holders, or its owner as many levels, as one key can have")]
    TooManyHolders { resource: String },
    /// `detail` names the field and its bound.
    #[error("{field}: {detail}")]
    Invalid { field: &'static str, detail: String },
    /// The store lacks what the policy guards the keys with, and the policy names no second choice.
    #[error("the policy `{policy}` asks for the primitive `{primitive}`, which cannot be had: {why}")]
    NoPrimitive { policy: String, primitive: &'static str, why: String },
    /// A `once` that was done before: no lease, but its outcome. Only [`Service::begin`] meets it.
    #[error("it was done before")]
    Done(StoredValue),
    /// The version is not the one that was read. Only [`Service::commit`] meets it.
    #[error("the version is {version} by now", version = .0.version)]
    Conflict(Version),
    #[error("the request id was used before, {}", if *ended { "and its lease has ended" } else { "with another body" })]
    RequestReused { ended: bool },
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The store is there, and others may hold the key, but this proxy cannot grant it for now.
    #[error("no lock is granted yet: {why}")]
    NotYet { why: String },
    #[error("the proxy is shutting down")]
    ShuttingDown,
}

/// Why a renewal or release did nothing.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LeaseError {
    #[error("the lease is unknown, has expired, or was taken away")]
    Lost,
    #[error("{field}: {detail}")]
    Invalid { field: &'static str, detail: String },
    #[error(transparent)]
    Store(#[from] StoreError),
}

#[derive(Clone, Copy, Debug)]
pub struct Renewed {
    pub valid_until: Instant,
    pub ttl_ms: u32,
}

/// What a held connection is told.
#[derive(Clone, Debug)]
pub enum HoldEvent {
    Renewed(Renewed),
    /// The proxy stops. The lease runs on until then, for its holder to go on with through any proxy; nothing
    /// follows.
    Draining {
        valid_until: Instant,
    },
    /// The lease is renewed no more, and nothing follows. Its holder may count on it until `valid_until`, which
    /// may be now.
    Lost {
        reason: String,
        valid_until: Instant,
    },
}

/// Some of the locks.
#[derive(Clone, Debug)]
pub struct LockPage {
    pub locks: Vec<LockEntry>,
    /// Whether more follow after the last one.
    pub more: bool,
    /// Where locks may be lacking here, and why.
    pub unheard: Vec<String>,
}

/// A key that is held or keeps a value, as `GET /v1/locks` shows it. Times are microseconds since 1970
/// on the store's clock.
#[derive(Clone, Debug)]
pub struct LockEntry {
    pub key: Key,
    pub token: Token,
    pub holders: Vec<HolderEntry>,
    /// What a `once` or a commit has left with the key.
    pub kept: Option<StoredValue>,
}

#[derive(Clone, Debug)]
pub struct HolderEntry {
    pub resource: String,
    pub owner: String,
    pub mode: Mode,
    pub token: Token,
    pub since_us: u64,
    pub until_us: u64,
    pub left_ms: u32,
    pub levels: u32,
    pub policy: String,
}

/// One key with its queue on this proxy and the last decisions about it.
#[derive(Clone, Debug)]
pub struct LockView {
    pub entry: LockEntry,
    /// In the order of their places.
    pub queue: Vec<QueueEntry>,
    /// Newest last.
    pub decisions: Vec<Decision>,
}

#[derive(Clone, Debug)]
pub struct QueueEntry {
    pub position: u32,
    pub owner: String,
    pub mode: Mode,
    pub rank: i32,
    pub group: String,
    pub waited_ms: u32,
}

/// What was decided about a key, and by whom.
#[derive(Clone, Debug)]
pub struct Decision {
    /// Microseconds since 1970, this machine's clock.
    pub at_us: u64,
    pub hook: &'static str,
    /// The policy generation, or `built-in`.
    pub by: Arc<str>,
    pub what: String,
}

/// What happened to a key, for those who watch.
#[derive(Clone, Debug)]
pub struct Notice {
    pub key: Key,
    pub kind: NoticeKind,
    pub owner: Box<str>,
    pub token: Token,
    /// Microseconds since 1970, this machine's clock.
    pub at_us: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoticeKind {
    Granted,
    Released,
    Expired,
    /// Released by one and granted to the next in one step; `owner` and `token` are the new holder's.
    HandedOff,
    /// Taken away by an operator.
    Forced,
    /// Its holder found it lost, or the session that it rested on is gone.
    Lost,
}

/// Everything that a front can ask. Cheap to clone.
#[derive(Clone)]
pub struct Service {
    shared: Arc<ServiceContext>,
}

/// The answer to a release that is under way.
type Releasing = oneshot::Receiver<Result<Outcome, String>>;

/// What the loop, the callers and the background tasks share.
struct ServiceContext {
    store: Arc<dyn Store>,
    peers: Arc<dyn Peers>,
    /// The bell's name.
    proxy: Arc<str>,
    policies: Policies,
    routes: Vec<Route>,
    limits: Limits,
    store_timeout_ms: u32,
    metrics: Metrics,
    inbox: mpsc::UnboundedSender<Msg>,
    /// Acquires that are planned, queued or under way: [`Limits::max_waiters_total`] bounds them.
    waiting: AtomicUsize,
    serial: AtomicU64,
    notices: broadcast::Sender<Notice>,
    /// Whether leases of before the start have been looked at.
    gate: Gate,
}

impl Service {
    /// Starts the loop on the current runtime. No acquire is granted before the leases have been looked at that
    /// are in the store already.
    pub fn start(parts: Parts) -> Service {
        let service = Service::start_closed(parts);
        let opening = service.clone();
        vital::spawn("the look at the leases of before the start", async move {
            opening.look_at_all().await;
            opening.open();
        });
        service
    }

    /// As [`Service::start`]; no acquire is granted before [`Service::open`].
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
        vital::spawn("the loop", core::Core::new(shared.clone()).run(messages));
        Service { shared }
    }

    /// Waits for the lease, at most as long as the plan allows. Dropping the future leaves the
    /// queue; a grant that was under way then is undone at once.
    pub async fn acquire(&self, request: Request) -> Result<Lease, AcquireError> {
        acquire::acquire(&self.shared, &request, Call::Acquire).await.map(|(lease, _)| lease)
    }

    /// As [`Service::acquire`]; the lease is then renewed until the [`Hold`] is dropped.
    pub async fn hold(&self, request: Request) -> Result<Hold, AcquireError> {
        let (lease, planned) = acquire::acquire(&self.shared, &request, Call::Acquire).await?;
        Ok(Hold::new(self.clone(), lease, planned.into(), None))
    }

    /// As [`Service::hold`], with a lease that any proxy has granted. Its longest hold counts from its grant.
    pub async fn resume(&self, lease: LeaseRef) -> Result<Hold, LeaseError> {
        resume::resume(self, lease).await
    }

    /// Extends a lease of any proxy, by the time it was granted for where `ttl_ms` is `None`.
    pub async fn renew(&self, lease: LeaseRef, ttl_ms: Option<u32>) -> Result<Renewed, LeaseError> {
        self.renew_before(lease, ttl_ms, self.shared.store_deadline()).await
    }

    /// As [`Service::renew`], for a caller that must know by `deadline`.
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

    /// Gives up one level of a lease of any proxy.
    pub async fn release(&self, lease: LeaseRef) -> Result<(), LeaseError> {
        self.released(self.begin_release(new_release(lease, None))).await
    }

    /// The release is on its way when this returns: a drain waits for it.
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

    /// Takes a key from its holders: their next call finds it lost. How many there were. A space that does
    /// not answer is no trouble where the key was found in another one.
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

    /// Held keys with this prefix, in byte order.
    pub async fn list(
        &self,
        prefix: String,
        after: Option<Key>,
        limit: usize,
    ) -> Result<LockPage, StoreError> {
        let Page { items, more, unheard } = self.shared.store.list(prefix, after, limit).await?;
        Ok(LockPage { locks: items.iter().map(views::entry).collect(), more, unheard })
    }

    /// A key, or the keys that a resource's policy makes of it; `None` where nothing is known of it.
    pub async fn show(&self, name: &str) -> Result<Option<LockView>, StoreError> {
        views::show(&self.shared, name).await
    }

    /// Another proxy says that a key is free for a waiter of this one.
    pub fn wake(&self, key: Key) {
        self.shared.tell(Msg::Wake(key));
    }

    /// What happens from now on. A reader that falls behind by more than `limits.watch_buffer`
    /// notices misses the oldest and is told how many.
    pub fn watch(&self) -> broadcast::Receiver<Notice> {
        self.shared.notices.subscribe()
    }

    /// Makes a checked policy live; holders and waiters of the one before keep their locks, also
    /// where the new one names keys differently (see [`swap`]).
    pub async fn go_live(&self, prepared: Prepared) -> Result<Arc<Generation>, StoreError> {
        swap::go_live(&self.shared, prepared).await
    }

    pub fn store_health(&self) -> Health {
        self.shared.store.health()
    }

    /// Refuses new acquires, answers every waiter, and waits until nothing is under way.
    pub async fn drain(&self) {
        let (reply, drained) = oneshot::channel();
        self.shared.tell(Msg::Drain { reply });
        let _ = drained.await;
    }

    /// Waits until nobody is certain of a lease that would end with this proxy. To be asked after the last call
    /// was answered.
    pub async fn rested(&self) {
        self.shared.store.rested().await;
    }
}

/// A release that no other call has made.
fn new_release(lease: LeaseRef, outcome: Option<Left>) -> Release {
    Release { lease, attempt: random::within(1..u64::MAX), outcome }
}

impl ServiceContext {
    fn tell(&self, message: Msg) {
        // The loop ends only with the runtime.
        let _ = self.inbox.send(message);
    }

    /// One operation that no queue waits for.
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

    /// The moment up to which a holder may be certain, for a lease that had `left_us` left after
    /// `asked_at`.
    fn less_drift(&self, asked_at: Instant, left_us: u64) -> Instant {
        let margin = left_us / 1_000 * u64::from(self.limits.drift_per_mille);
        asked_at.plus_us(left_us - margin.min(left_us))
    }

    /// The policy that decides about what a lease was granted for.
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
