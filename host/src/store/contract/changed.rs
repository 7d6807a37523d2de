//! A store whose claims are changed on their way to it, so that the contract is tested with other claims.

use super::*;
use crate::store::{Done, Health, Loss, Page, StoreFuture, Stored};

/// Passes each operation on to `store`, and each claim after `change`.
pub struct Changed<F> {
    /// What is tested.
    pub store: Arc<dyn Store>,
    /// Turns a claim of the contract into the claim that the store gets.
    pub change: F,
}

impl<F: Fn(Claim) -> Claim + Send + Sync + 'static> Store for Changed<F> {
    fn submit(&self, group: Vec<Op>, deadline: crate::lock::Instant, done: Done) {
        let group = group.into_iter().map(|op| match op {
            Op::Acquire(claim) => Op::Acquire((self.change)(claim)),
            Op::Rejoin(claim) => Op::Rejoin((self.change)(claim)),
            op => op,
        });
        self.store.submit(group.collect(), deadline, done);
    }

    fn submit_renewal(&self, op: Op, deadline: crate::lock::Instant, done: Done) {
        self.store.submit_renewal(op, deadline, done);
    }

    fn list(
        &self,
        prefix: String,
        after: Option<Key>,
        limit: usize,
    ) -> StoreFuture<Result<Page, StoreError>> {
        self.store.list(prefix, after, limit)
    }

    fn read(&self, key: Key) -> StoreFuture<Result<Option<Stored>, StoreError>> {
        self.store.read(key)
    }

    fn health(&self) -> Health {
        self.store.health()
    }

    fn lacks(&self, space: Space) -> Option<String> {
        self.store.lacks(space)
    }

    fn on_loss(&self, tell: Loss) {
        self.store.on_loss(tell);
    }

    fn forget(&self) {
        self.store.forget();
    }
}
