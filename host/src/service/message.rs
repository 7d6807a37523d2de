//! The messages to the event loop, with what each carries. The loop answers on the channel that the message brings.

use std::sync::Arc;

use tokio::sync::oneshot;

use super::found::Survey;
use super::history::What;
use super::shadow::{Plans, Shadow};
use super::why::KeyView;
use crate::lock::record::{Outcome, Release};
use crate::lock::table::{Next, SubmissionId, Verdict, Waiter, WaiterId};
use crate::lock::{Instant, Key, LeaseRef};
use crate::policy::{Generation, PlanRequest, Prepared};
use crate::store::{Reply, StoreError};

/// A message to the loop.
pub(super) enum Msg {
    Acquire {
        waiter: Box<Waiter>,
        pending: Pending,
    },
    Cancel(WaiterId),
    Undelivered {
        nonce: u64,
        keys: Arc<[Key]>,
        attempt: u64,
        ttl_ms: u32,
    },
    Release {
        release: Release,
        reply: oneshot::Sender<Result<Outcome, String>>,
    },
    Completed {
        ticket: SubmissionId,
        result: Result<Reply, StoreError>,
    },
    Chosen {
        key: Key,
        choice: u64,
        waiter: Option<WaiterId>,
        by: Arc<str>,
    },
    Backoff {
        waiter: WaiterId,
        key: Key,
        decision: Next,
        by: Arc<str>,
    },
    Renewed {
        nonce: u64,
        until: Instant,
    },
    /// A client's renewal found no such lease.
    NotFound(LeaseRef),
    /// These leases were found lost, or the sessions that held them are gone.
    Lost(Vec<u64>),
    /// A task keeps the lease alive; `over` tells it when to stop.
    Held {
        nonce: u64,
        /// This run of this proxy granted the lease, so the table knows it as long as it runs.
        granted_here: bool,
        over: oneshot::Sender<()>,
    },
    /// A task no longer keeps the lease alive; the other end of its `over` is gone.
    Left {
        nonce: u64,
    },
    Taken(Key),
    Wake(Key),
    PeerGone {
        peer: Arc<str>,
        key: Key,
    },
    /// A decision about a key that was made outside the loop.
    Decided {
        key: Key,
        by: Arc<str>,
        what: What,
    },
    View {
        key: Key,
        reply: oneshot::Sender<KeyView>,
    },
    /// Asks for the length of the queue, for the renewal hook.
    Waiting {
        key: Key,
        reply: oneshot::Sender<u32>,
    },
    Swap(Swap),
    /// Answered when no claim that is in flight now can be granted any more.
    Settle(oneshot::Sender<Instant>),
    ShadowOver {
        nonce: u64,
    },
    Drain {
        reply: oneshot::Sender<()>,
    },
}

/// A caller that waits, with the plan of its policy.
pub(super) struct Pending {
    pub generation: Arc<Generation>,
    /// The version of the generations that named the keys.
    pub version: (u64, Option<u64>),
    pub weight: u32,
    pub labels: Arc<[(Box<str>, Box<str>)]>,
    /// The end of the lease is recorded.
    pub is_recorded: bool,
    pub reply: oneshot::Sender<WaiterReply>,
}

/// The answer to a [`Pending`] caller.
pub(super) enum WaiterReply {
    Verdict(Verdict),
    /// The policy was replaced since the request was planned.
    Replan,
    /// The store is reachable, but the proxy cannot grant the claim at the moment.
    NotYet {
        why: String,
    },
}

/// A generation that is to go live, with its plans for all leases and waiters.
pub(super) struct Swap {
    pub prepared: Prepared,
    /// Whether the live generation stays live and names keys together with this one.
    pub beside: bool,
    pub plans: Plans,
    /// What a survey found of the leases. Without one, the generation is not asked about leases: either it names keys
    /// beside the live one, or nothing is granted before a survey.
    pub survey: Option<Arc<Survey>>,
    pub reply: oneshot::Sender<SwapStep>,
}

/// The answer to a [`Swap`].
pub(super) enum SwapStep {
    /// Claims that have arrived since the plans were made.
    Missing(Vec<PlanRequest>),
    Live {
        generation: Arc<Generation>,
        shadows: Vec<Shadow>,
    },
}
