//! The calls of the fronts. The policies decide about the locks, and a store keeps them.
//!
//! Decisions about locks are made in [`crate::lock`]. This module carries events to them, and their actions to the
//! policies, the store, the timers and the callers. A call becomes a message, and one task, the event loop, takes the
//! messages.
//!
//! | file | content |
//! | --- | --- |
//! | `context` | [`Service`], and what its calls share |
//! | `request`, `lease`, `errors`, `views` | what the calls take and return; renewing and releasing a lease |
//! | `principal` | the sender of a request |
//! | `planning` | from a request to the plan of its policy |
//! | `acquire` | from a plan to a lease: `acquire` |
//! | `hold`, `resume` | leases that the proxy renews: `hold`, `resume` |
//! | `guarded` | the lock of a guarded request: `guard` |
//! | `once`, `versions` | the primitives that store a value with a key |
//! | `inspect` | inspecting the locks: `list`, `show`, `watch` |
//! | `why`, `holds` | why each waiter of a key waits, and about how long |
//! | `event_loop` | the loop: from messages to the lock table, and from its actions to the outside |
//! | `message` | the messages to the loop |
//! | `in_flight`, `history`, `recorded` | parts of the loop: claims in flight, the last decisions about each key, leases of recorded requests |
//! | `rollout` | replacing a policy while locks are held; `survey`, `found`: the leases in the store; `named`: whether all have their keys |
//! | `shadow`, `swap` | leases that hold the keys of an earlier policy, and the step in which the next one goes live |
//! | `tag` | the part of a request that is stored with its lease |
//! | `gate` | whether locks are granted |
//! | `peers` | how other proxies are notified |

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize};

use tokio::sync::{broadcast, mpsc, oneshot};

use crate::config::{Limits, Route};
use crate::lock::Key;
use crate::mutex::Mutex;
use crate::policy::{Digest, Policies};
use crate::recording::Recorder;
use crate::store::{Health, Store};
use crate::telemetry::Metrics;
use crate::vital;

mod acquire;
mod context;
mod errors;
mod event_loop;
mod found;
mod gate;
mod guarded;
mod history;
mod hold;
mod holds;
mod in_flight;
mod inspect;
mod lease;
mod message;
mod named;
mod once;
mod peers;
mod planning;
mod principal;
mod recorded;
mod request;
mod resume;
mod rollout;
mod rules;
mod shadow;
mod survey;
mod swap;
mod tag;
#[cfg(test)]
pub(crate) mod tests;
mod versions;
mod views;
mod why;

use context::ServiceContext;
use event_loop::EventLoop;
use gate::Gate;
use message::Msg;
use rules::RulesGate;

pub use context::Service;
pub use errors::{AcquireError, LeaseError, ListError};
pub use guarded::Guarded;
pub use hold::{Hold, HoldEvent, Keeping};
pub use lease::{Lease, Renewed};
pub use once::Begun;
pub use peers::{NoPeers, Peers};
pub use principal::{PRINCIPAL, Principal, RoutedRequest};
pub use request::Request;
pub use rules::RulesEnd;
pub use versions::{Committed, Versioned};
pub use views::{
    Decision, Estimate, HolderEntry, LockEntry, LockPage, LockView, NoEstimate, Notice, NoticeKind,
    PlanEntry, QueueEntry, Spread,
};

pub use crate::policy::{OnLoss, RefusalResponse};

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
    /// Where the requests are recorded.
    pub recorder: Recorder,
}

/// The life of a service, from its start to its drain.
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
            routes_digest: Digest::of(format!("{:?}", parts.routes).as_bytes()).short(),
            routes: parts.routes,
            limits: parts.limits,
            store_timeout_ms: parts.store_timeout_ms,
            metrics: parts.metrics,
            recorder: parts.recorder,
            inbox,
            waiting: AtomicUsize::new(0),
            serial: AtomicU64::new(1),
            notices,
            gate: Gate::default(),
            rules: RulesGate::new(),
            named: Mutex::default(),
        });
        let inbox = shared.inbox.clone();
        shared.store.on_loss(Arc::new(move |nonces| drop(inbox.send(Msg::Lost(nonces)))));
        let peers = shared.peers.clone();
        let notify = Box::new(move |proxy: &str, key: &Key| peers.notify(proxy, key, Box::new(|| ())));
        shared.store.connect(shared.proxy.clone(), notify);
        vital::spawn("the event loop", EventLoop::new(shared.clone()).run(messages));
        Service { shared }
    }

    /// Begins to grant locks, until [`Service::close`]. The leases that are already in the store must have been
    /// examined: see [`Service::look_again`].
    pub fn open(&self) {
        self.shared.gate.open();
    }

    /// Stops granting locks until [`Service::open`]. Claims that are in flight are not affected.
    pub fn close(&self) {
        self.shared.gate.close();
    }

    /// Whether locks are granted.
    pub fn is_open(&self) -> bool {
        self.shared.gate.is_open()
    }

    /// Grants clients no new lock from the given moment on; `None`: grants them again. Renewals, releases and reads go
    /// on, and so do the locks of guarded routes, to which the rules of who may do what do not apply.
    pub fn end_rules(&self, end: Option<RulesEnd>) {
        self.shared.rules.set(end);
    }

    /// A notification from another proxy: a key is free for a waiter of this one.
    pub fn wake(&self, key: Key) {
        self.shared.tell(Msg::Wake(key));
    }

    /// Whether the store can grant locks.
    pub fn store_health(&self) -> Health {
        self.shared.store.health()
    }

    /// Refuses new acquires, answers every waiter, sends the leases of this proxy's memory to the store, and waits until all
    /// batches are answered.
    pub async fn drain(&self) {
        self.shared.store.end_delegations();
        let (reply, drained) = oneshot::channel();
        self.shared.tell(Msg::Drain { reply });
        let _ = drained.await;
    }

    /// Waits until the store knows all leases of this proxy, and lets it decide about all keys until
    /// [`Service::resume_delegations`].
    pub async fn suspend_delegations(&self) {
        self.shared.store.suspend_delegations().await;
    }

    /// Lets this proxy grant keys from its memory again.
    pub fn resume_delegations(&self) {
        self.shared.store.resume_delegations();
    }

    /// Waits until no holder counts on a lease that would end with this proxy. Call this after the last call
    /// was answered.
    pub async fn rested(&self) {
        self.shared.store.rested().await;
    }
}
