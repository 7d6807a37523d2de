//! Leases that the proxy renews for as long as a connection is open.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use tokio::sync::oneshot;

use super::acquire::acquire;
use super::context::Service;
use super::errors::{AcquireError, LeaseError};
use super::history::What;
use super::lease::{Lease, Releasing, Renewed, new_release};
use super::message::Msg;
use super::planning::Planned;
use super::request::Request;
use crate::clock;
use crate::latest;
use crate::lock::record::{Left, Origin, Release};
use crate::lock::{Call, Instant, LeaseRef};
use crate::policy::{Expiring, Generation, OnLoss, Renewal};
use crate::store::StoreError;
use crate::vital;

/// How long to wait before repeating a renewal or a finish that the store did not answer, while the lease
/// lasts.
const RETRY_MS: u32 = 200;

/// The reason for the loss if the store or an operator has ended the lease.
const TAKEN: &str = "the lease was taken away, or its session is gone";

/// An event for a client with a held connection.
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

/// A lease that the proxy renews. Dropping the `Hold` releases the lease, unless [`Hold::leave`] was called.
pub struct Hold {
    /// The lease as it was granted or resumed.
    pub lease: Lease,
    service: Service,
    terms: Terms,
    since: Instant,
    renewals: u32,
    valid_until: Instant,
    gone: oneshot::Receiver<()>,
    /// The lease is not renewed any more.
    over: bool,
    /// Dropping the `Hold` releases nothing: the release was sent, the lease is gone, or it is left to expire.
    ended: bool,
}

/// The policy's terms for a lease that is renewed.
pub(super) struct Terms {
    /// Decides about each renewal; `None` if the policy is gone.
    pub generation: Option<Arc<Generation>>,
    pub ttl_ms: u32,
    pub max_hold_ms: u32,
    pub on_loss: OnLoss,
    pub labels: Vec<(Box<str>, Box<str>)>,
}

/// A lease that a separate task renews.
///
/// Dropping it means that the work was given up: the lease is released, and the release is sent before any
/// later request. But if a loss was reported, the lease is left to expire, because its holder may not know of
/// the loss yet.
pub struct Keeping {
    lease: LeaseRef,
    service: Service,
    /// Tells the task how to end the lease.
    ending: Option<oneshot::Sender<Ending>>,
    lost: latest::Receiver<Option<Arc<str>>>,
    /// The last moment at which a renewal is tried, in microseconds of [`clock::now`].
    last_call: Arc<AtomicU64>,
}

/// How a renewed lease ends. The release was already sent.
enum Ending {
    Release(Releasing),
    Finish { release: Release, answer: Releasing, told: oneshot::Sender<Result<(), LeaseError>> },
}

impl From<Planned> for Terms {
    fn from(planned: Planned) -> Terms {
        let Planned { generation, plan, .. } = planned;
        Terms {
            generation: Some(generation),
            ttl_ms: plan.ttl_ms,
            max_hold_ms: plan.max_hold_ms,
            on_loss: plan.on_loss,
            labels: plan.labels,
        }
    }
}

impl Service {
    /// As [`Service::acquire`], but the lease is renewed until the [`Hold`] is dropped.
    ///
    /// # Errors
    /// [`AcquireError`]: why there is no lease.
    pub async fn hold(&self, request: Request) -> Result<Hold, AcquireError> {
        let (lease, planned) = acquire(&self.shared, &request, Call::Acquire).await?;
        Ok(Hold::new(self.clone(), lease, planned.into(), None))
    }
}

impl Hold {
    /// `held_ms`: how long the lease has already been held; `None` if this proxy has just granted it.
    pub(super) fn new(service: Service, lease: Lease, terms: Terms, held_ms: Option<u32>) -> Hold {
        let valid_until = lease.valid_until;
        let (over, gone) = oneshot::channel();
        let granted_here = held_ms.is_none();
        service.shared.tell(Msg::Held { nonce: lease.lease.nonce, granted_here, over });
        let held_ms = held_ms.unwrap_or(0);
        Hold {
            lease,
            service,
            terms,
            since: Instant(clock::now().0.saturating_sub(u64::from(held_ms) * 1_000)),
            renewals: 0,
            valid_until,
            gone,
            over: false,
            ended: false,
        }
    }

    /// What the policy wants if a guarded request loses its lease.
    pub fn on_loss(&self) -> OnLoss {
        self.terms.on_loss
    }

    /// Renews the lease in a separate task.
    pub fn keep(mut self) -> Keeping {
        let (ending, mut ended) = oneshot::channel::<Ending>();
        let tell = latest::Sender::new(None);
        let last_call = Arc::new(AtomicU64::new(self.last_call().0));
        let keeping = Keeping {
            last_call: last_call.clone(),
            lease: self.lease.lease.clone(),
            service: self.service.clone(),
            ending: Some(ending),
            lost: tell.subscribe(),
        };
        vital::spawn("the renewal of a lease", async move {
            let ending = loop {
                tokio::select! {
                    biased;
                    ending = &mut ended => break ending,
                    event = self.next() => match event {
                        HoldEvent::Renewed(_) => last_call.store(self.last_call().0, Relaxed),
                        HoldEvent::Lost { reason, .. } => drop(tell.send_replace(Some(reason.into()))),
                        HoldEvent::Draining { .. } => {}
                    },
                }
            };
            self.ended = true;
            match ending {
                Ok(Ending::Release(answer)) => {
                    if let Err(error) = self.service.released(answer).await {
                        tracing::debug!(%error, "a lease could not be released; it will expire");
                    }
                }
                Ok(Ending::Finish { release, answer, told }) => {
                    let _ = told.send(self.finish(release, answer).await);
                }
                Err(_) => {}
            }
        });
        keeping
    }

    /// Waits for the next event for the client. No event follows [`HoldEvent::Lost`].
    ///
    /// The policy's `renewal` hook is asked when a third of the remaining lease has passed. A lease that cannot
    /// be renewed is reported lost before its end: by a tenth of the lease time, but at most a second.
    pub async fn next(&mut self) -> HoldEvent {
        if self.over {
            return std::future::pending().await;
        }
        let now = clock::now();
        let due = now.plus_us(self.valid_until.us_since(now) / 3);
        tokio::select! {
            biased;
            Ok(()) = &mut self.gone, if !self.gone.is_terminated() => return self.gone(TAKEN),
            () = clock::sleep_until(due) => {}
        }
        let ttl_ms = match self.decide().await {
            Renewal::Extend { ttl_ms } => ttl_ms,
            Renewal::Lapse => return self.lost("the policy let the lease lapse"),
        };
        loop {
            // The client must not wait past the end of its lease if the store hangs.
            let last_call = self.last_call();
            let deadline = self.service.shared.store_deadline().min(last_call);
            let renewal = self.service.renew_before(self.lease.lease.clone(), Some(ttl_ms), deadline);
            let renewed = tokio::select! {
                biased;
                Ok(()) = &mut self.gone, if !self.gone.is_terminated() => return self.gone(TAKEN),
                renewed = renewal => renewed,
                // The store gives up a call that hangs some time after its deadline.
                () = clock::sleep_until(last_call) => {
                    return self.lost("the store did not answer a renewal in time");
                }
            };
            let error = match renewed {
                Ok(renewed) if renewed.valid_until > clock::now() => return self.renewed(renewed),
                // The lease exists, but its session does not answer, or this proxy is not a member of its
                // fleet.
                Ok(_) => "the store cannot guarantee the lease for any time".to_owned(),
                Err(LeaseError::Store(error)) => error.to_string(),
                Err(error) => return self.gone(&error.to_string()),
            };
            let again = clock::now().plus_ms(RETRY_MS);
            if again >= self.last_call() {
                return self.lost(&error);
            }
            tracing::debug!(resource = %self.lease.resource, %error, "a renewal is retried");
            clock::sleep_until(again).await;
        }
    }

    /// Waits for the answer to `release`, and repeats it, with the same attempt, until the store has answered
    /// or the lease has ended. A call that is in flight at the end of the lease may have been applied before,
    /// so its answer is awaited up to the store's time-out. The lease is renewed meanwhile.
    async fn finish(&mut self, release: Release, mut answer: Releasing) -> Result<(), LeaseError> {
        let service = self.service.clone();
        loop {
            match self.alive_during(service.released(answer)).await {
                Err(LeaseError::Store(error)) if clock::now() < self.valid_until => {
                    tracing::debug!(%error, "the release of a `once` is retried");
                }
                told => return told,
            }
            self.alive_during(clock::sleep_until(clock::now().plus_ms(RETRY_MS))).await;
            answer = service.begin_release(release.clone());
        }
    }

    /// Renews the lease while `work` runs.
    async fn alive_during<T>(&mut self, work: impl Future<Output = T>) -> T {
        let mut work = std::pin::pin!(work);
        loop {
            tokio::select! {
                biased;
                done = &mut work => return done,
                // A lease that is found lost may have been ended by its own release, whose answer was lost.
                _renewed_or_lost = self.next() => {}
            }
        }
    }

    /// The proxy stops and does not renew the lease any more. A lease that any proxy can renew is left to run,
    /// so that its holder can continue with it on another proxy. A lock that a session of this proxy holds is
    /// lost, and ends with this [`Hold`].
    pub fn drain(&mut self) -> HoldEvent {
        if self.lease.lease.keys.iter().any(|key| key.space().rests_on_session()) {
            return self.lost("the proxy is shutting down, and the lock cannot outlive the proxy's session");
        }
        self.leave();
        HoldEvent::Draining { valid_until: self.valid_until }
    }

    /// Ends the renewal of the lease for this reason. No event follows.
    pub fn give_up(&mut self, reason: &str) -> HoldEvent {
        self.lost(reason)
    }

    /// Leaves the lease to expire or to continue on another proxy; it is not released.
    pub fn leave(&mut self) {
        self.over = true;
        self.ended = true;
    }

    async fn decide(&self) -> Renewal {
        let key = self.lease.lease.keys[0].clone();
        let (reply, waiters) = oneshot::channel();
        self.service.shared.tell(Msg::Waiting { key: key.clone(), reply });
        let expiring = Expiring {
            key: key.clone(),
            owner: self.lease.owner.clone(),
            ttl_ms: self.terms.ttl_ms,
            renewals: self.renewals,
            held_ms: clock::now().ms_since(self.since),
            max_hold_ms: self.terms.max_hold_ms,
            waiters: waiters.await.unwrap_or(0),
            client_alive: true,
            labels: self.terms.labels.clone().into(),
        };
        let asked = self.terms.generation.as_ref();
        let decided = asked.and_then(|generation| Some((generation.renewal(&expiring)?.ok()?, generation)));
        let (decision, by) = match decided {
            Some((decision, generation)) => (decision, generation.id().clone()),
            None => (expiring.fallback(), "built-in".into()),
        };
        // The host guarantees the maximum hold: no policy extends a lease beyond it.
        let decision = match decision {
            Renewal::Extend { .. } if expiring.held_ms >= expiring.max_hold_ms => Renewal::Lapse,
            other => other,
        };
        let what = match decision {
            Renewal::Extend { ttl_ms } => What::Renewed { ttl_ms },
            Renewal::Lapse => What::Lapsed,
        };
        self.service.shared.tell(Msg::Decided { key, by, what });
        decision
    }

    /// The last moment at which a renewal is tried; the rest of the lease is for telling the client.
    fn last_call(&self) -> Instant {
        let spare_ms = (self.terms.ttl_ms / 10).min(1_000);
        Instant(self.valid_until.0.saturating_sub(u64::from(spare_ms) * 1_000))
    }

    /// The client may count on the latest end that it was told. If the store did not extend the lease, this
    /// answer has an earlier end than the last one, because it counts from before the question.
    fn renewed(&mut self, renewed: Renewed) -> HoldEvent {
        self.renewals += 1;
        self.valid_until = self.valid_until.max(renewed.valid_until);
        HoldEvent::Renewed(Renewed { valid_until: self.valid_until, ..renewed })
    }

    /// The lease is not renewed any more; its holder may count on it until the end that it was told.
    fn lost(&mut self, reason: &str) -> HoldEvent {
        self.over = true;
        HoldEvent::Lost { reason: reason.to_owned(), valid_until: self.valid_until }
    }

    /// The store no longer knows the lease.
    fn gone(&mut self, reason: &str) -> HoldEvent {
        self.leave();
        HoldEvent::Lost { reason: reason.to_owned(), valid_until: clock::now() }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        let service = self.service.clone();
        self.gone.close();
        service.shared.tell(Msg::Left { nonce: self.lease.lease.nonce });
        if self.ended {
            return;
        }
        let answer = service.begin_release(new_release(self.lease.lease.clone(), None));
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move {
                if let Err(error) = service.released(answer).await {
                    tracing::debug!(%error, "a held lease could not be released; it will expire");
                }
            });
        }
    }
}

impl Keeping {
    /// Whether work may begin under the lease. It may not if the grant came late or this process has been
    /// paused since, even before a loss is reported, or if too little time is left to renew the lease.
    pub fn is_certain(&self) -> bool {
        self.lost.borrow().is_none() && clock::now() < Instant(self.last_call.load(Relaxed))
    }

    /// Reports when the holder can no longer count on the lease, and why.
    pub fn watch(&self) -> latest::Receiver<Option<Arc<str>>> {
        self.lost.clone()
    }

    /// Ends the work and releases the lease, even if its loss was reported.
    pub fn release(mut self) {
        self.begin_release();
    }

    /// Leaves the lease to expire: the worker under it may not know yet that it is not renewed any more.
    pub fn leave(mut self) {
        self.ending = None;
    }

    fn begin_release(&mut self) {
        if let Some(ending) = self.ending.take() {
            let release = new_release(self.lease.clone(), None);
            let _ = ending.send(Ending::Release(self.service.begin_release(release)));
        }
    }

    /// Ends a guarded `once` and stores `outcome`, which is JSON text. Continues until the store has answered
    /// or the lease has ended, even if the caller stops waiting.
    ///
    /// # Errors
    /// If the lease is lost, or the store did not answer before its end. The work may then be done again.
    pub async fn finish(mut self, outcome: Box<str>) -> Result<(), LeaseError> {
        let outcome = Left { value: outcome, origin: Origin::Route };
        let release = new_release(self.lease.clone(), Some(outcome));
        let answer = self.service.begin_release(release.clone());
        let (told, finished) = oneshot::channel();
        if let Some(ending) = self.ending.take() {
            let _ = ending.send(Ending::Finish { release, answer, told });
        }
        finished.await.unwrap_or_else(|_| Err(StoreError::stopped().into()))
    }
}

impl Drop for Keeping {
    fn drop(&mut self) {
        if self.lost.borrow().is_none() {
            self.begin_release();
        }
    }
}
