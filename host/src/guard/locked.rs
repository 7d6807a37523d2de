//! The lock of a request that is under way.

use std::sync::Arc;

use futures_util::future::BoxFuture;
use tokio::sync::watch;

use super::replay::{Once, Recording};
use crate::lock::{Key, Token};
use crate::service::{Hold, Keeping, LeaseError, OnLoss};
use crate::telemetry::Metrics;

/// What a request holds. Dropping it lets go, without an outcome: what was to be done once was not done.
pub struct Locked {
    keeping: Keeping,
    lost: watch::Receiver<Option<Arc<str>>>,
    on_loss: OnLoss,
    keys: Arc<[Key]>,
    tokens: Vec<Token>,
    resource: String,
    /// Set where it is done once.
    once: Option<Once>,
    metrics: Metrics,
}

impl Locked {
    /// `once` is asked where the primitive is one that keeps the answer.
    pub fn new(hold: Hold, once: impl FnOnce() -> Once, metrics: Metrics) -> Locked {
        let lease = &hold.lease;
        let (keys, tokens) = (lease.lease.keys.clone(), lease.tokens.clone());
        let once = (lease.primitive == "once").then(once);
        let (resource, on_loss) = (lease.resource.clone(), hold.on_loss());
        let keeping = hold.keep();
        Locked { lost: keeping.watch(), keeping, on_loss, keys, tokens, resource, once, metrics }
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

    pub fn is_lost(&self) -> bool {
        self.keeping.is_lost().is_some()
    }

    /// Tells when the request must be broken off, and why, where the policy asks for that.
    pub fn cut(&self) -> Option<BoxFuture<'static, Arc<str>>> {
        if self.on_loss != OnLoss::Cut {
            return None;
        }
        let mut lost = self.lost.clone();
        Some(Box::pin(async move {
            let why = lost.wait_for(Option::is_some).await.map(|why| why.clone().unwrap_or_default());
            match why {
                Ok(why) => why,
                Err(_) => std::future::pending().await,
            }
        }))
    }

    /// What writes the answer down, where it is kept.
    pub fn recording(&self, head: &hyper::http::response::Parts) -> Option<Recording> {
        let once = self.once.as_ref()?;
        Recording::new(head, once.fingerprint.to_string(), once.max_bytes, once.max_value_bytes)
    }

    /// Keeps the outcome, and lets go.
    pub async fn finish(self, outcome: Box<str>) -> Result<(), LeaseError> {
        let Locked { keeping, resource, metrics, .. } = self;
        let finished = keeping.finish(outcome).await;
        if let Err(error) = &finished {
            metrics.guard_lost();
            tracing::warn!(resource, %error, "the outcome of a request could not be kept; it may be done again");
        }
        finished
    }

    /// The upstream is done. Whether the lease lasted as long; a loss is logged and counted.
    pub fn end(self) -> bool {
        let Some(why) = self.keeping.is_lost() else { return true };
        self.metrics.guard_lost();
        tracing::warn!(resource = self.resource, %why, "a lease was lost while the upstream worked");
        false
    }
}
