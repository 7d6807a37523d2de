//! The lock of a request that is under way.

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

/// Waits for a loss that somebody may want to hear of; where nobody does, for ever.
pub async fn lost(loss: Option<BoxFuture<'static, Arc<str>>>) -> Arc<str> {
    match loss {
        Some(loss) => loss.await,
        None => std::future::pending().await,
    }
}

/// What a request holds. Dropping it gives the request up, without an outcome: what was to be done once was not
/// done. The lock is free then, unless its loss was told: such a lease runs out, for the upstream may be at work
/// under it.
pub struct Locked {
    /// Until it is let go.
    keeping: Option<Keeping>,
    lost: latest::Receiver<Option<Arc<str>>>,
    on_loss: OnLoss,
    keys: Arc<[Key]>,
    tokens: Vec<Token>,
    resource: String,
    /// Set where it is done once.
    once: Option<Once>,
    metrics: Metrics,
    nonce: u64,
    /// Its place among the requests under way.
    entry: Entry,
}

impl Locked {
    /// `once` is asked where the primitive is one that keeps the answer.
    pub fn new(hold: Hold, once: impl FnOnce() -> Once, metrics: Metrics, entry: Entry) -> Locked {
        let lease = &hold.lease;
        let (keys, tokens) = (lease.lease.keys.clone(), lease.tokens.clone());
        let once = (lease.primitive == "once").then(once);
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

    /// Returns when the request may go to the application. False where it must start over, as the routes were replaced
    /// since its lock was asked for, or the lease was lost while it waited for that.
    pub async fn proceeds(&self, waited: &mut Waited) -> bool {
        self.entry.holds(self.nonce, waited).await && !self.is_lost()
    }

    /// Whether the request may go to the application now.
    pub fn is_certain(&self) -> bool {
        self.keeping.as_ref().is_some_and(Keeping::is_certain)
    }

    pub fn keys(&self) -> &[Key] {
        &self.keys
    }

    pub fn tokens(&self) -> &[Token] {
        &self.tokens
    }

    /// Whether the answer must say it if the lease is lost.
    pub fn marks(&self) -> bool {
        self.on_loss == OnLoss::Mark
    }

    /// Whether the answer is kept for duplicates.
    pub fn is_once(&self) -> bool {
        self.once.is_some()
    }

    pub fn is_lost(&self) -> bool {
        self.lost.borrow().is_some()
    }

    /// Tells when the lease is lost, and why.
    pub fn loss(&self) -> BoxFuture<'static, Arc<str>> {
        let mut lost = self.lost.clone();
        Box::pin(async move {
            match lost.wait_for(Option::is_some).await {
                Ok(()) => lost.borrow().clone().unwrap_or_default(),
                Err(_) => std::future::pending().await,
            }
        })
    }

    /// As [`Locked::loss`], where the policy wants the request to be broken off then.
    pub fn cut(&self) -> Option<BoxFuture<'static, Arc<str>>> {
        (self.on_loss == OnLoss::Cut).then(|| self.loss())
    }

    /// What writes the answer down, where it is kept.
    pub fn recording(&self, head: &hyper::http::response::Parts) -> Option<Recording> {
        let once = self.once.as_ref()?;
        Recording::new(head, once)
    }

    /// Keeps the outcome, and lets go. Whether it is kept; that it is not is logged and counted.
    pub async fn finish(mut self, outcome: Box<str>) -> bool {
        let Some(keeping) = self.keeping.take() else { return false };
        let finished = keeping.finish(outcome).await;
        if let Err(error) = &finished {
            self.metrics.guard_lost();
            let resource = &self.resource;
            tracing::warn!(resource, %error, "the outcome of a request could not be kept; it may be done again");
        }
        finished.is_ok()
    }

    /// The upstream is done: the lock is let go. What the client is to be told of it.
    pub fn end(mut self) -> Option<HeaderValue> {
        self.told();
        let said = (self.is_lost() && self.marks()).then_some(LOST);
        if let Some(keeping) = self.keeping.take() {
            keeping.release();
        }
        said
    }

    /// Lets the lease run out: the upstream may be at work under it.
    pub fn leave(mut self) {
        self.told();
        if let Some(keeping) = self.keeping.take() {
            keeping.leave();
        }
    }

    /// Counts and logs a loss.
    fn told(&self) {
        if let Some(why) = self.lost.borrow().as_ref() {
            self.metrics.guard_lost();
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
