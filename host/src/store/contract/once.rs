//! A `once` is also a lease: the properties of leases, tested with claims of a `once`.

use std::num::NonZero;

use super::*;
use crate::store::{Done, Health, Loss, Page, StoreFuture, Stored};

pub async fn all(one: Arc<dyn Store>, other: Arc<dyn Store>) {
    let (one, other): (Arc<dyn Store>, Arc<dyn Store>) =
        (Arc::new(AsOnce { store: one }), Arc::new(AsOnce { store: other }));
    grants::of_one_exclusive_key(&*one).await;
    leases::all(&*one).await;
    listing::all(&*one).await;
    races::of_one_key(&one, &other).await;
    races::each_store_knows_the_leases_of_the_other_store(&*one, &*other).await;
}

/// A store that turns exclusive claims of one key into claims of a `once`.
struct AsOnce {
    store: Arc<dyn Store>,
}

impl AsOnce {
    fn once(claim: Claim) -> Claim {
        let is_once = claim.mode == Mode::Exclusive && claim.keys.len() == 1;
        Claim { keep_ms: NonZero::new(60_000).filter(|_| is_once), ..claim }
    }
}

impl Store for AsOnce {
    fn submit(&self, group: Vec<Op>, deadline: crate::lock::Instant, done: Done) {
        let group = group.into_iter().map(|op| match op {
            Op::Acquire(claim) => Op::Acquire(AsOnce::once(claim)),
            Op::Rejoin(claim) => Op::Rejoin(AsOnce::once(claim)),
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
