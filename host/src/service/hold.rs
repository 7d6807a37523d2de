//! Leases that the proxy keeps alive for as long as a connection lives.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{oneshot, watch};

use super::acquire::Planned;
use super::core::Msg;
use super::history::What;
use super::{HoldEvent, Lease, LeaseError, Releasing, Renewed, Service, new_release};
use crate::clock;
use crate::lock::record::{Left, Origin, Release};
use crate::lock::{Instant, LeaseRef};
use crate::policy::{Expiring, OnLoss, Renewal, fallback};
use crate::store::StoreError;

/// A renewal or a finish that the store did not answer is tried again after this long, while the lease lasts.
const RETRY_MS: u32 = 200;

/// A lease that the proxy keeps alive. Dropping it releases the lease.
pub struct Hold {
    pub lease: Lease,
    service: Service,
    planned: Planned,
    since: Instant,
    renewals: u32,
    valid_until: Instant,
    gone: oneshot::Receiver<()>,
    over: bool,
    /// The release is on its way, or is somebody else's.
    ended: bool,
}

/// A lease that a task of its own keeps alive. Dropping it releases the lease: the release is on its way
/// before anything that is asked later.
pub struct Keeping {
    lease: LeaseRef,
    service: Service,
    /// Tells the task how the lease ends.
    ending: Option<oneshot::Sender<Ending>>,
    lost: watch::Receiver<Option<Arc<str>>>,
}

/// How a lease that a task keeps alive ends. The release is on its way already.
enum Ending {
    Release(Releasing),
    Finish { release: Release, answer: Releasing, told: oneshot::Sender<Result<(), LeaseError>> },
}

impl Hold {
    pub(super) fn new(service: Service, lease: Lease, planned: Planned) -> Hold {
        let valid_until = lease.valid_until;
        let (over, gone) = oneshot::channel();
        service.shared.tell(Msg::Held { nonce: lease.lease.nonce, over });
        Hold {
            lease,
            service,
            planned,
            since: clock::now(),
            renewals: 0,
            valid_until,
            gone,
            over: false,
            ended: false,
        }
    }

    /// What the policy wants for a guarded request that loses its lease.
    pub fn on_loss(&self) -> OnLoss {
        self.planned.plan.on_loss
    }

    /// Keeps the lease alive in a task of its own.
    pub fn keep(mut self) -> Keeping {
        let (ending, mut ended) = oneshot::channel::<Ending>();
        let (tell, lost) = watch::channel(None);
        let keeping = Keeping {
            lease: self.lease.lease.clone(),
            service: self.service.clone(),
            ending: Some(ending),
            lost,
        };
        tokio::spawn(async move {
            let ending = loop {
                tokio::select! {
                    biased;
                    ending = &mut ended => break ending,
                    event = self.next() => if let HoldEvent::Lost { reason } = event {
                        tell.send_replace(Some(reason.into()));
                    },
                }
            };
            self.ended = true;
            match ending {
                Ok(Ending::Release(answer)) => {
                    if let Err(error) = self.service.released(answer).await {
                        tracing::debug!(%error, "a lease could not be released; it ends by itself");
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

    /// The next thing that the client should be told. After [`HoldEvent::Lost`] nothing follows.
    ///
    /// A third of the lease after its last renewal the policy's `renewal` hook is asked. A lease that
    /// cannot be renewed is told lost before it ends, with a tenth of it, at most a second, to spare.
    pub async fn next(&mut self) -> HoldEvent {
        if self.over {
            return std::future::pending().await;
        }
        let third = self.valid_until.us_since(clock::now()) / 3;
        tokio::select! {
            () = tokio::time::sleep(Duration::from_micros(third)) => {}
            Ok(()) = &mut self.gone => return self.lost("the lease was taken away, or its session is gone"),
        }
        let ttl_ms = match self.decide().await {
            Renewal::Extend { ttl_ms } => ttl_ms,
            Renewal::Lapse => return self.lost("the policy let the lease lapse"),
        };
        loop {
            // A store that hangs must not keep the client waiting past the end of its lease.
            let deadline = self.service.shared.store_deadline().min(self.last_call());
            match self.service.renew_before(self.lease.lease.clone(), Some(ttl_ms), deadline).await {
                Ok(renewed) => return self.renewed(renewed),
                Err(LeaseError::Store(error)) if clock::now() < self.last_call() => {
                    tracing::debug!(resource = %self.lease.resource, %error, "a renewal is tried again");
                    clock::sleep_until(clock::now().plus_ms(RETRY_MS).min(self.last_call())).await;
                }
                Err(error) => return self.lost(&error.to_string()),
            }
        }
    }

    /// Waits for the answer to `release`, and repeats it, with the same attempt, until the store has answered or
    /// the lease has ended. The lease is renewed meanwhile.
    async fn finish(&mut self, release: Release, mut answer: Releasing) -> Result<(), LeaseError> {
        let service = self.service.clone();
        let answered = async {
            loop {
                match service.released(answer).await {
                    Err(LeaseError::Store(error)) => {
                        tracing::debug!(%error, "the end of a `once` is sent to the store again");
                    }
                    certain => return certain,
                }
                tokio::time::sleep(Duration::from_millis(RETRY_MS.into())).await;
                answer = service.begin_release(release.clone());
            }
        };
        let mut answered = std::pin::pin!(answered);
        loop {
            let end = self.valid_until;
            tokio::select! {
                biased;
                certain = &mut answered => return certain,
                // A lease that is found lost may have been ended by this very release, whose answer was lost.
                _renewed_or_lost = self.next() => {}
                () = clock::sleep_until(end) => {
                    let why = "it did not answer before the lease had ended".to_owned();
                    return Err(StoreError::Unavailable { why }.into());
                }
            }
        }
    }

    async fn decide(&self) -> Renewal {
        let key = self.lease.lease.keys[0].clone();
        let (reply, waiters) = oneshot::channel();
        self.service.shared.tell(Msg::Waiting { key: key.clone(), reply });
        let expiring = Expiring {
            key: key.clone(),
            owner: self.lease.owner.clone(),
            ttl_ms: self.planned.plan.ttl_ms,
            renewals: self.renewals,
            held_ms: clock::now().ms_since(self.since),
            max_hold_ms: self.planned.plan.max_hold_ms,
            waiters: waiters.await.unwrap_or(0),
            client_alive: true,
            labels: self.planned.plan.labels.clone().into(),
        };
        let generation = &self.planned.generation;
        let (decision, by) = match generation.renewal(&expiring) {
            Some(Ok(decision)) => (decision, generation.id().clone()),
            _ => (fallback::renewal(&expiring), "built-in".into()),
        };
        // The maximum hold is the host's promise: no policy extends past it.
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

    /// The last moment at which a renewal is tried: what is left is for telling the client.
    fn last_call(&self) -> Instant {
        let spare_ms = (self.planned.plan.ttl_ms / 10).min(1_000);
        Instant(self.valid_until.0.saturating_sub(u64::from(spare_ms) * 1_000))
    }

    fn renewed(&mut self, renewed: Renewed) -> HoldEvent {
        self.renewals += 1;
        self.valid_until = renewed.valid_until;
        HoldEvent::Renewed(renewed)
    }

    fn lost(&mut self, reason: &str) -> HoldEvent {
        self.over = true;
        HoldEvent::Lost { reason: reason.to_owned() }
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
                    tracing::debug!(%error, "a held lease could not be released; it ends by itself");
                }
            });
        }
    }
}

impl Keeping {
    /// Tells when the lease cannot be relied on any more, and why.
    pub fn watch(&self) -> watch::Receiver<Option<Arc<str>>> {
        self.lost.clone()
    }

    /// Ends a guarded `once`, and keeps `outcome`, which is JSON text. Goes on until the store has answered or the lease
    /// has ended, also where the caller stops waiting.
    ///
    /// # Errors
    /// Where the lease is lost, or the store did not answer before its end; what was done may be done again then.
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
        if let Some(ending) = self.ending.take() {
            let release = new_release(self.lease.clone(), None);
            let _ = ending.send(Ending::Release(self.service.begin_release(release)));
        }
    }
}
