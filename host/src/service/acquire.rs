//! From the plan of a request to a lease.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::oneshot;

use super::context::{Service, ServiceContext};
use super::errors::AcquireError;
use super::lease::Lease;
use super::message::{Msg, Pending, WaiterReply};
use super::planning::{Planned, no_policy, planned};
use super::request::Request;
use super::tag;
use crate::auth::Identity;
use crate::clock;
use crate::config::Verb;
use crate::lock::record::{Claim, Delegable, GlobalTicket};
use crate::lock::table::{Charge, Verdict, Waiter, WaiterId};
use crate::lock::{Call, Key, LeaseRef, Space};
use crate::policy::{Hook, Plan, PlanRequest};
use crate::random;
use crate::recording::Asking;
use crate::store::StoreError;

/// How often a request is planned again because its policy was replaced meanwhile.
const REPLANS: usize = 8;

impl Service {
    /// Waits for the lease, at most as long as the plan allows. Dropping the future leaves the queue; a grant
    /// that is then in flight is undone at once.
    ///
    /// # Errors
    /// [`AcquireError`]: why there is no lease.
    pub async fn acquire(&self, request: Request) -> Result<Lease, AcquireError> {
        acquire(&self.shared, &request, Call::Acquire).await.map(|(lease, _)| lease)
    }
}

/// As [`Service::acquire`], for each [`Call`]. Returns the lease together with its plan.
pub(super) async fn acquire(
    shared: &Arc<ServiceContext>,
    request: &Request,
    call: Call,
) -> Result<(Lease, Planned), AcquireError> {
    let policy = shared.policy_for(request);
    let begun = clock::now();
    let mut recorded = shared.recorder.asking(call);
    let result = attempt(shared, policy, request, call, &mut recorded).await;
    let waited = Duration::from_micros(clock::now().us_since(begun));
    let outcome = result.as_ref().map_or_else(AcquireError::slug, |_| "granted");
    shared.metrics.policies.acquire(policy, outcome, waited);
    if let Some(recorded) = &mut recorded {
        let lease = result.as_ref().ok().map(|(lease, _)| (&lease.lease.keys[0], lease.tokens[0]));
        recorded.answered(outcome, lease);
    }
    if let Ok((lease, _)) = &result {
        shared.metrics.leases.grant(lease.primitive.as_str());
    }
    result
}

async fn attempt(
    shared: &Arc<ServiceContext>,
    policy: &str,
    request: &Request,
    call: Call,
    recorded: &mut Option<Asking>,
) -> Result<(Lease, Planned), AcquireError> {
    shared.opened().await?;
    shared.rules.check(&request.principal)?;
    let _place = WaiterSlot::take(shared, request)?;
    let began = clock::now();
    for _ in 0..REPLANS {
        let asked = request.for_policy();
        let planned = planned(shared, policy, request, &asked, call);
        if let Some(recorded) = recorded {
            record(shared, recorded, policy, asked, &planned);
        }
        let mut planned = planned?;
        // A request that is planned again waits for the rest of its time.
        planned.plan.wait_ms = planned.plan.wait_ms.saturating_sub(clock::now().ms_since(began));
        let charge = request.charge(&planned.plan)?;
        let is_recorded = recorded.as_ref().is_some_and(Asking::is_sampled);
        let Some(result) = enqueue(shared, request, &planned, charge, is_recorded).await else { continue };
        match (&result, &planned.place) {
            (Ok(_), Some(place)) => place.granted(Duration::from_micros(clock::now().us_since(began))),
            (Err(AcquireError::Contended { .. } | AcquireError::TooManyWaiters { .. }), Some(place)) => {
                place.ungranted();
            }
            _ => {}
        }
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

/// Records what the policy has answered. A request that is refused for another reason has no plan to try another policy on.
fn record(
    shared: &ServiceContext,
    recorded: &mut Asking,
    policy: &str,
    asked: PlanRequest,
    planned: &Result<Planned, AcquireError>,
) {
    // What a canary makes of requests is no recording of the live version.
    let is_tried = shared.policies.active(policy).is_some_and(|active| active.canary.is_some());
    match planned {
        Ok(planned) if !Arc::ptr_eq(&planned.generation, &planned.live) => {}
        Err(_) if is_tried => {}
        Ok(planned) => recorded.planned(asked, &planned.live, Ok(&planned.plan)),
        Err(AcquireError::Refused { reason } | AcquireError::PolicyFault { detail: reason, .. }) => {
            if let Some(live) = shared.policies.get(policy) {
                recorded.planned(asked, &live, Err(reason.clone()));
            }
        }
        Err(_) => {}
    }
}

/// Queues a planned request and waits for the answer. Returns `None` if the policy was replaced since the
/// request was planned. `is_recorded`: the end of the lease is recorded.
pub(super) async fn enqueue(
    shared: &Arc<ServiceContext>,
    request: &Request,
    planned: &Planned,
    charge: Charge,
    is_recorded: bool,
) -> Option<Result<Lease, AcquireError>> {
    let id = WaiterId(shared.serial.fetch_add(1, Ordering::Relaxed));
    let (reply, answer) = oneshot::channel();
    let waiter = waiter(shared, id, request, planned, charge);
    let labels = planned.plan.labels.clone().into();
    let pending = Pending {
        generation: planned.generation.clone(),
        version: planned.version,
        weight: planned.plan.weight,
        labels,
        is_recorded,
        reply,
    };
    shared.tell(Msg::Acquire { waiter: Box::new(waiter), pending });
    let mut leaving = Leaving { shared, id, answer: Some(answer), ttl_ms: planned.plan.ttl_ms };
    let answered = tokio::select! {
        biased;
        answered = leaving.wait() => answered,
        () = request.principal.until_withdrawn(|now| may_lock(now, request, planned)) => {
            return Some(Err(AcquireError::Forbidden { verb: Verb::Acquire, resource: request.resource.clone() }));
        }
        error = shared.rules.closed(&request.principal) => return Some(Err(error)),
    };
    match answered {
        Some(WaiterReply::Verdict(verdict)) => Some(settle(shared, request, planned, verdict)),
        Some(WaiterReply::NotYet { why }) => Some(Err(AcquireError::NotYet { why })),
        Some(WaiterReply::Replan) => None,
        None => Some(Err(AcquireError::ShuttingDown)),
    }
}

/// Whether the client may still lock the resource and the keys of its plan.
fn may_lock(client: &Identity, request: &Request, planned: &Planned) -> bool {
    let mut names = planned.plan.keys.iter().map(Key::as_str).chain([request.resource.as_str()]);
    names.all(|name| client.may(Verb::Acquire, name))
}

/// The waiter's ticket in the global queue.
fn global_ticket(request: &Request, plan: &Plan) -> GlobalTicket {
    let id = request.request_id.as_deref();
    GlobalTicket {
        number: id.map_or_else(random::number, |id| request.fingerprint(&[id])),
        rank: plan.rank,
        joined: None,
        returns: id.is_some(),
    }
}

fn waiter(
    shared: &ServiceContext,
    id: WaiterId,
    request: &Request,
    planned: &Planned,
    charge: Charge,
) -> Waiter {
    let plan = &planned.plan;
    let claim = Claim {
        keys: plan.keys.clone(),
        proxy: shared.proxy.clone(),
        // Other spaces have neither global queues nor notes of waiting proxies.
        waits: plan.wait_ms > 0 && plan.keys.iter().all(|key| key.space() == Space::Table),
        any: plan.any,
        attempt: random::within(1..u64::MAX),
        owner: request.owner.as_str().into(),
        request: request.scoped_id().map(Into::into),
        fingerprint: request.request_id.as_ref().map_or(0, |_| request.fingerprint(&[])),
        mode: plan.mode,
        ttl_ms: plan.ttl_ms,
        at_least_ms: plan.lock_at_least_ms,
        delay_ms: plan.lock_delay_ms,
        reentrant: plan.reentrant,
        keep_ms: plan.keep_ms,
        global: plan.global_order.then(|| global_ticket(request, plan)),
        delegable: plan.delegate.map(|when| Delegable { rules: shared.rules_of(&planned.live), when }),
        tag: tag::tag(request, planned.generation.id(), plan),
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
        charge,
    }
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
                lease: LeaseRef {
                    keys,
                    nonce: grant.nonce,
                    token: Some(token),
                    principal: request.principal.name(),
                },
                resource: resource(),
                owner: request.owner.clone(),
                mode: planned.plan.mode,
                tokens: grant.tokens,
                ttl_ms: planned.plan.ttl_ms,
                valid_until: shared.less_drift(asked_at, grant.left_us),
                waited_ms,
                policy: planned.generation.id().clone(),
                primitive: planned.plan.primitive,
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
    /// Gives back a grant whose caller is gone.
    pub(super) fn undelivered(&self, verdict: Verdict, ttl_ms: u32) {
        if let Verdict::Granted { grant, keys, attempt, .. } = verdict {
            self.tell(Msg::Undelivered { nonce: grant.nonce, keys, attempt, ttl_ms });
        }
    }
}
