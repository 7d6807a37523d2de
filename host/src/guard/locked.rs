//! The lock of a request in progress.

use std::sync::Arc;

use futures_util::future::BoxFuture;
use hyper::header::HeaderValue;

use super::headers::LOST;
use super::replay::{Once, Recording};
use super::underway::{Entry, Waited};
use crate::latest;
use crate::lock::{Key, Token};
use crate::service::{Hold, Keeping, OnLoss};
use crate::telemetry::Metrics;

/// Waits for a loss; without a `loss` to watch, waits for ever.
pub async fn lost(loss: Option<BoxFuture<'static, Arc<str>>>) -> Arc<str> {
    match loss {
        Some(loss) => loss.await,
        None => std::future::pending().await,
    }
}

/// The lock of a request. Dropping it abandons the request without an outcome, so a `once` counts as not done. The
/// drop releases the lock, unless the lease's loss was reported: such a lease runs out, because the upstream may
/// still work under it.
pub struct Locked {
    /// `None` once the lock is released.
    keeping: Option<Keeping>,
    lost: latest::Receiver<Option<Arc<str>>>,
    on_loss: OnLoss,
    keys: Arc<[Key]>,
    tokens: Vec<Token>,
    resource: String,
    /// Set if the primitive is `once`.
    once: Option<Once>,
    metrics: Metrics,
    nonce: u64,
    /// The entry among the requests in progress.
    entry: Entry,
}

impl Locked {
    /// Takes a granted lock. `once` is called only if the primitive stores the answer.
    pub fn new(hold: Hold, once: impl FnOnce() -> Once, metrics: Metrics, entry: Entry) -> Locked {
        let lease = &hold.lease;
        let (keys, tokens) = (lease.lease.keys.clone(), lease.tokens.clone());
        let once = lease.primitive.keeps_outcome().then(once);
        let (resource, on_loss) = (lease.resource.clone(), hold.on_loss());
        let nonce = lease.lease.nonce;
        let keeping = hold.keep();
        Locked {
            lost: keeping.watch(),
            keeping: Some(keeping),
            on_loss,
            keys,
            tokens,
            resource,
            once,
            metrics,
            nonce,
            entry,
        }
    }

    /// Returns when the request may go to the application. False if the request must start over: the routes were
    /// replaced after it asked for its lock, or it lost the lease while it waited.
    pub async fn proceeds(&self, waited: &mut Waited) -> bool {
        self.entry.holds(self.nonce, waited).await && !self.is_lost()
    }

    /// Whether the lease is certain to be valid, so that the request may go to the application now.
    pub fn is_certain(&self) -> bool {
        self.keeping.as_ref().is_some_and(Keeping::is_certain)
    }

    /// The keys that are held.
    pub fn keys(&self) -> &[Key] {
        &self.keys
    }

    /// The fencing tokens, in the order of the keys.
    pub fn tokens(&self) -> &[Token] {
        &self.tokens
    }

    /// Whether the answer must report a lost lease.
    pub fn marks(&self) -> bool {
        self.on_loss == OnLoss::Mark
    }

    /// Whether the answer is stored for duplicates.
    pub fn is_once(&self) -> bool {
        self.once.is_some()
    }

    /// Whether the lease is lost.
    pub fn is_lost(&self) -> bool {
        self.lost.borrow().is_some()
    }

    /// Resolves with the reason when the lease is lost.
    pub fn loss(&self) -> BoxFuture<'static, Arc<str>> {
        let mut lost = self.lost.clone();
        Box::pin(async move {
            match lost.wait_for(Option::is_some).await {
                Ok(()) => lost.borrow().clone().unwrap_or_default(),
                Err(_) => std::future::pending().await,
            }
        })
    }

    /// Like [`Locked::loss`], but only if the policy cuts the request off when its lease is lost.
    pub fn cut(&self) -> Option<BoxFuture<'static, Arc<str>>> {
        (self.on_loss == OnLoss::Cut).then(|| self.loss())
    }

    /// The recording of the answer, if the answer is stored.
    pub fn recording(&self, head: &hyper::http::response::Parts) -> Option<Recording> {
        let once = self.once.as_ref()?;
        Recording::new(head, once)
    }

    /// Stores the outcome and releases the lock. Returns whether the outcome was stored; a failure is logged and
    /// counted.
    pub async fn finish(mut self, outcome: Box<str>) -> bool {
        let Some(keeping) = self.keeping.take() else { return false };
        let finished = keeping.finish(outcome).await;
        if let Err(error) = &finished {
            self.metrics.guard.lost();
            let resource = &self.resource;
            tracing::warn!(resource, %error, "the outcome of a request could not be stored; a duplicate may be executed again");
        }
        finished.is_ok()
    }

    /// Releases the lock after the upstream has finished. Returns the lock status to report to the client, if any.
    pub fn end(mut self) -> Option<HeaderValue> {
        self.told();
        let said = (self.is_lost() && self.marks()).then_some(LOST);
        if let Some(keeping) = self.keeping.take() {
            keeping.release();
        }
        said
    }

    /// Lets the lease run out, because the upstream may still work under it.
    pub fn leave(mut self) {
        self.told();
        if let Some(keeping) = self.keeping.take() {
            keeping.leave();
        }
    }

    /// Counts and logs a loss.
    fn told(&self) {
        if let Some(why) = self.lost.borrow().as_ref() {
            self.metrics.guard.lost();
            tracing::warn!(resource = self.resource, %why, "a lease was lost while the upstream worked");
        }
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        if self.keeping.is_some() {
            self.told();
        }
    }
}
