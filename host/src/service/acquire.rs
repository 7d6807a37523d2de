//! From a request to its plan, and from the plan to a lease.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use sha2::{Digest, Sha256};
use tokio::sync::oneshot;

use super::core::{Msg, Pending, WaiterReply};
use super::{AcquireError, Lease, Request, ServiceContext, rollout, routed};
use crate::clock;
use crate::lock::record::{Claim, GlobalTicket, Tag};
use crate::lock::table::{Verdict, Waiter, WaiterId};
use crate::lock::{Instant, LeaseRef, Mode, Space};
use crate::policy::{Generation, Hook, Plan, PlanError, PlanRequest, Primitive};
use crate::random;
use crate::store::{Health, StoreError};

/// How often a request is planned again because its policy was replaced meanwhile.
const REPLANS: usize = 8;

/// What a client called. The call must match the primitive that the policy chose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Call {
    Acquire,
    Once,
    Version,
    /// A guarded request, which accepts any primitive except `version`.
    Guard,
}

impl Call {
    fn of(primitive: Primitive) -> Call {
        match primitive {
            Primitive::Once => Call::Once,
            Primitive::Version => Call::Version,
            Primitive::Lease | Primitive::Row | Primitive::Advisory | Primitive::Quorum => Call::Acquire,
        }
    }

    fn check(self, policy: &str, primitive: Primitive) -> Result<(), AcquireError> {
        let right = Call::of(primitive);
        if right == self || (self == Call::Guard && right != Call::Version) {
            return Ok(());
        }
        let calls = match right {
            Call::Acquire | Call::Guard => "/v1/acquire or /v1/hold (`lockkeeper acquire`, `hold` or `run`)",
            Call::Once => "/v1/once/begin (`lockkeeper once`)",
            Call::Version => "/v1/versions/read and /v1/versions/commit (`lockkeeper version`)",
        };
        let primitive = primitive.as_str();
        let detail = format!("its policy `{policy}` guards it with `{primitive}`: call {calls}");
        Err(AcquireError::Invalid { field: "resource", detail })
    }
}

/// The plan of a granted request.
pub(super) struct Planned {
    pub generation: Arc<Generation>,
    pub plan: Plan,
    /// The version of the generations that named the keys.
    pub version: (u64, Option<u64>),
}

impl Planned {
    /// Whether the same generations still name keys.
    pub fn is_current(&self, shared: &ServiceContext) -> bool {
        let active = shared.policies.active(self.generation.name());
        active.is_none_or(|active| active.version() == self.version)
    }
}

pub(super) async fn acquire(
    shared: &Arc<ServiceContext>,
    request: &Request,
    call: Call,
) -> Result<(Lease, Planned), AcquireError> {
    let policy = shared.policy_for(request);
    let begun = clock::now();
    let result = attempt(shared, policy, request, call).await;
    let waited = Duration::from_micros(clock::now().us_since(begun));
    let outcome = result.as_ref().map_or_else(AcquireError::slug, |_| "granted");
    shared.metrics.acquire(policy, outcome, waited);
    if let Ok((lease, _)) = &result {
        shared.metrics.grant(lease.primitive);
    }
    result
}

async fn attempt(
    shared: &Arc<ServiceContext>,
    policy: &str,
    request: &Request,
    call: Call,
) -> Result<(Lease, Planned), AcquireError> {
    opened(shared).await?;
    let _place = WaiterSlot::take(shared, request)?;
    for _ in 0..REPLANS {
        let planned = planned(shared, policy, request, call)?;
        let Some(result) = enqueue(shared, request, &planned).await else { continue };
        return match result {
            // The store is too busy, or the proxy is not a fleet member at the moment. Other proxies may hold
            // the keys.
            Err(AcquireError::Store(error))
                if call == Call::Guard && !shared.store.is_gone(planned.plan.primitive.space()) =>
            {
                Err(AcquireError::NotYet { why: error.why() })
            }
            result => result.map(|lease| (lease, planned)),
        };
    }
    Err(no_policy(policy))
}

/// The plan by the current generations of the policy.
pub(super) fn planned(
    shared: &ServiceContext,
    policy: &str,
    request: &Request,
    call: Call,
) -> Result<Planned, AcquireError> {
    let active = shared.policies.active(policy).ok_or_else(|| no_policy(policy))?;
    let mut planned = shared.within_reach(policy, plan(&active.live, policy, request)?)?;
    call.check(policy, planned.primitive)?;
    if let Some(candidate) = &active.candidate {
        // A request that either generation refuses is refused: other proxies may already apply the candidate
        // alone.
        let next = shared.within_reach(policy, plan(candidate, policy, request)?)?;
        rollout::name(&mut planned, &next, call)?;
    }
    Ok(Planned { generation: active.live.clone(), plan: planned, version: active.version() })
}

fn no_policy(policy: &str) -> AcquireError {
    let detail = "no generation of the policy is live".to_owned();
    AcquireError::PolicyFault { policy: policy.to_owned(), reason: "not_live", detail }
}

/// Waits until the leases that were in the store at the start have been examined; until then nothing is
/// granted.
pub(super) async fn opened(shared: &ServiceContext) -> Result<(), AcquireError> {
    if shared.gate.is_open() {
        return Ok(());
    }
    let limit = Duration::from_millis(u64::from(shared.store_timeout_ms));
    match tokio::time::timeout(limit, shared.gate.opened()).await {
        Ok(()) => Ok(()),
        Err(_elapsed) => Err(match shared.store.health() {
            Health::Unavailable { why } => StoreError::Unavailable { why }.into(),
            Health::Ready { .. } => {
                let why = "the proxy is not in the fleet yet; its /ready says why".to_owned();
                AcquireError::NotYet { why }
            }
        }),
    }
}

pub(super) fn plan(generation: &Generation, policy: &str, request: &Request) -> Result<Plan, AcquireError> {
    generation.plan(&asked(request)).map_err(|error| match error {
        PlanError::Refused { reason } => AcquireError::Refused { reason },
        PlanError::Fault(fault) => AcquireError::PolicyFault {
            policy: policy.to_owned(),
            reason: fault.kind.as_str(),
            detail: fault.detail,
        },
    })
}

/// A request in the form that its policy gets.
pub(super) fn asked(request: &Request) -> PlanRequest {
    PlanRequest {
        resource: request.resource.clone(),
        owner: request.owner.clone(),
        mode: request.mode,
        ttl_ms: request.ttl_ms,
        wait_ms: request.wait_ms,
        labels: request.labels.clone(),
        http: request.routed.as_ref().map(|routed| routed.http.clone()),
        seed: random::number(),
    }
}

/// Queues a planned request and waits for the answer. Returns `None` if the policy was replaced since the
/// request was planned.
pub(super) async fn enqueue(
    shared: &Arc<ServiceContext>,
    request: &Request,
    planned: &Planned,
) -> Option<Result<Lease, AcquireError>> {
    let id = WaiterId(shared.serial.fetch_add(1, Ordering::Relaxed));
    let (reply, answer) = oneshot::channel();
    let waiter = waiter(shared, id, request, planned);
    let labels = planned.plan.labels.clone().into();
    let pending = Pending {
        generation: planned.generation.clone(),
        version: planned.version,
        weight: planned.plan.weight,
        labels,
        reply,
    };
    shared.tell(Msg::Acquire { waiter: Box::new(waiter), pending });
    let mut leaving = Leaving { shared, id, answer: Some(answer), ttl_ms: planned.plan.ttl_ms };
    let answered = leaving.wait().await;
    match answered {
        Some(WaiterReply::Verdict(verdict)) => Some(settle(shared, request, planned, verdict)),
        Some(WaiterReply::NotYet { why }) => Some(Err(AcquireError::NotYet { why })),
        Some(WaiterReply::Replan) => None,
        None => Some(Err(AcquireError::ShuttingDown)),
    }
}

/// The waiter's ticket in the global queue.
fn global_ticket(request: &Request, plan: &Plan) -> GlobalTicket {
    let id = request.request_id.as_deref();
    GlobalTicket {
        number: id.map_or_else(random::number, |id| fingerprint(request, &[id])),
        rank: plan.rank,
        joined: None,
        returns: id.is_some(),
    }
}

fn waiter(shared: &ServiceContext, id: WaiterId, request: &Request, planned: &Planned) -> Waiter {
    let plan = &planned.plan;
    let label = |(name, value): &(String, String)| (name.as_str().into(), value.as_str().into());
    let mut labels: Vec<_> = request.labels.iter().map(label).collect();
    labels.extend(routed::labels(request, plan.mode));
    let claim = Claim {
        keys: plan.keys.clone(),
        proxy: shared.proxy.clone(),
        // Other spaces have neither global queues nor notes of waiting proxies.
        waits: plan.wait_ms > 0 && plan.keys.iter().all(|key| key.space() == Space::Table),
        any: plan.any,
        // 0 means "none".
        attempt: random::within(1..u64::MAX),
        owner: request.owner.as_str().into(),
        request: request.request_id.as_deref().map(Into::into),
        fingerprint: request.request_id.as_ref().map_or(0, |_| fingerprint(request, &[])),
        mode: plan.mode,
        ttl_ms: plan.ttl_ms,
        at_least_ms: plan.lock_at_least_ms,
        delay_ms: plan.lock_delay_ms,
        reentrant: plan.reentrant,
        keep_ms: plan.keep_ms,
        global: plan.global_order.then(|| global_ticket(request, plan)),
        tag: Tag {
            resource: request.resource.as_str().into(),
            policy: (&**planned.generation.id()).into(),
            labels,
        },
    };
    Waiter {
        id,
        claim,
        rank: plan.rank,
        group: plan.group.clone(),
        wait_ms: plan.wait_ms,
        max_waiters: plan.max_waiters,
        asks_choice: planned.generation.has(Hook::Choose) && !plan.global_order,
        asks_backoff: planned.generation.has(Hook::Backoff),
        seed: random::number(),
    }
}

/// A hash of everything that must be equal in two requests with one id: all of the request but the wait, and
/// `more`.
pub(super) fn fingerprint(request: &Request, more: &[&str]) -> u64 {
    let mut hash = Sha256::new();
    let mode = match request.mode {
        Mode::Exclusive => 0,
        Mode::Shared => 1,
        Mode::Permits { count, .. } => u64::from(count) + 2,
    };
    let ttl = request.ttl_ms.map_or(u64::MAX, u64::from);
    hash.update(mode.to_le_bytes());
    hash.update(ttl.to_le_bytes());
    let labels = request.labels.iter().flat_map(|(name, value)| [name, value]);
    let texts = [&request.resource, &request.owner].into_iter().chain(labels).map(String::as_str);
    for text in texts.chain(more.iter().copied()) {
        hash.update((text.len() as u64).to_le_bytes());
        hash.update(text.as_bytes());
    }
    let digest: [u8; 32] = hash.finalize().into();
    u64::from_le_bytes([
        digest[0], digest[1], digest[2], digest[3], digest[4], digest[5], digest[6], digest[7],
    ])
}

fn settle(
    shared: &ServiceContext,
    request: &Request,
    planned: &Planned,
    verdict: Verdict,
) -> Result<Lease, AcquireError> {
    let resource = || request.resource.clone();
    match verdict {
        Verdict::Granted { grant, keys, asked_at, waited_ms, .. } => {
            let token = grant.tokens[0];
            Ok(Lease {
                lease: LeaseRef { keys, nonce: grant.nonce, token },
                resource: resource(),
                owner: request.owner.clone(),
                mode: planned.plan.mode,
                tokens: grant.tokens,
                ttl_ms: planned.plan.ttl_ms,
                valid_until: shared.less_drift(asked_at, grant.left_us),
                waited_ms,
                policy: planned.generation.id().clone(),
                primitive: planned.plan.primitive.as_str(),
                levels: grant.levels,
            })
        }
        Verdict::Contended { holder, position, retry_after_ms, reason } => {
            let key = planned.plan.keys[0].clone();
            Err(AcquireError::Contended {
                resource: resource(),
                key,
                holder: holder.map(Box::new),
                position,
                retry_after_ms,
                reason,
            })
        }
        Verdict::Done(kept) => Err(AcquireError::Done(kept)),
        Verdict::TooManyWaiters { limit } => {
            Err(AcquireError::TooManyWaiters { resource: resource(), limit })
        }
        Verdict::Full => Err(AcquireError::TooManyHolders { resource: resource() }),
        Verdict::RequestReused { ended } => Err(AcquireError::RequestReused { ended }),
        Verdict::Unavailable { why } => Err(StoreError::Unavailable { why }.into()),
        Verdict::ShuttingDown => Err(AcquireError::ShuttingDown),
    }
}

/// One of the `limits.max_waiters_total` slots.
struct WaiterSlot<'a>(&'a ServiceContext);

impl WaiterSlot<'_> {
    fn take<'a>(shared: &'a ServiceContext, request: &Request) -> Result<WaiterSlot<'a>, AcquireError> {
        let limit = shared.limits.max_waiters_total;
        if shared.waiting.fetch_add(1, Ordering::Relaxed) >= limit {
            shared.waiting.fetch_sub(1, Ordering::Relaxed);
            let limit = u32::try_from(limit).unwrap_or(u32::MAX);
            return Err(AcquireError::TooManyWaiters { resource: request.resource.clone(), limit });
        }
        Ok(WaiterSlot(shared))
    }
}

impl Drop for WaiterSlot<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

/// When dropped before the caller was answered, leaves the queue or gives the grant back.
struct Leaving<'a> {
    shared: &'a ServiceContext,
    id: WaiterId,
    answer: Option<oneshot::Receiver<WaiterReply>>,
    ttl_ms: u32,
}

impl Leaving<'_> {
    async fn wait(&mut self) -> Option<WaiterReply> {
        let answer = self.answer.as_mut()?.await.ok();
        self.answer = None;
        answer
    }
}

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        let Some(mut answer) = self.answer.take() else { return };
        answer.close();
        match answer.try_recv() {
            Ok(WaiterReply::Verdict(verdict)) => self.shared.undelivered(verdict, self.ttl_ms),
            Ok(WaiterReply::Replan | WaiterReply::NotYet { .. }) => {}
            Err(_) => self.shared.tell(Msg::Cancel(self.id)),
        }
    }
}

impl ServiceContext {
    /// The plan, with its second choice of primitive if the store lacks the first one.
    pub(super) fn within_reach(&self, policy: &str, plan: Plan) -> Result<Plan, AcquireError> {
        let Some(why) = self.store.lacks(plan.primitive.space()) else { return Ok(plan) };
        match plan.second {
            Some(second) if self.store.lacks(second.space()).is_none() => Ok(plan.with_primitive(second)),
            _ => {
                let (policy, primitive) = (policy.to_owned(), plan.primitive.as_str());
                Err(AcquireError::NoPrimitive { policy, primitive, why })
            }
        }
    }

    /// Gives back a grant whose caller is gone.
    pub(super) fn undelivered(&self, verdict: Verdict, ttl_ms: u32) {
        if let Verdict::Granted { grant, keys, attempt, .. } = verdict {
            self.tell(Msg::Undelivered { nonce: grant.nonce, keys, attempt, ttl_ms });
        }
    }
}

impl AcquireError {
    /// A stable name for metrics.
    pub fn slug(&self) -> &'static str {
        match self {
            AcquireError::Contended { .. } => "contended",
            AcquireError::Refused { .. } => "refused",
            AcquireError::PolicyFault { .. } => "policy_fault",
            AcquireError::TooManyWaiters { .. } => "too_many_waiters",
            AcquireError::TooManyHolders { .. } => "too_many_holders",
            AcquireError::Invalid { .. } => "invalid",
            AcquireError::RequestReused { .. } => "request_id_reused",
            AcquireError::Conflict(_) => "conflict",
            AcquireError::NoPrimitive { .. } => "no_primitive",
            AcquireError::Done(_) => "done",
            AcquireError::Store(_) => "store_unavailable",
            AcquireError::NotYet { .. } => "not_yet",
            AcquireError::ShuttingDown => "shutting_down",
        }
    }
}

/// The lease by the proxy's own clock.
impl Lease {
    /// For how many whole milliseconds the holder may still count on the lease.
    pub fn left_ms(&self, now: Instant) -> u32 {
        self.valid_until.ms_since(now)
    }
}
