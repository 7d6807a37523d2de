//! Presents the keys of a store in another key space. So one contract serves all spaces, and the lease table of
//! each server serves a quorum.

use std::sync::Arc;

use super::{Done, Health, Loss, Page, Reply, Store, StoreError, StoreFuture, Stored};
use crate::lock::record::{Claim, Commit, Denial, Op, Outcome, Release};
use crate::lock::{Instant, Key, LeaseRef, Space, Token};

/// Callers see keys of the space `outside`; the store gets keys of `inside`.
pub struct SpaceAdapter {
    /// The store that has the keys.
    pub store: Arc<dyn Store>,
    /// The space of the store's keys.
    pub inside: Space,
    /// The space that callers see.
    pub outside: Space,
}

impl SpaceAdapter {
    fn key(&self, key: Key) -> Key {
        key.within(self.inside)
    }

    fn keys(&self, keys: &[Key]) -> Arc<[Key]> {
        keys.iter().map(|key| self.key(key.clone())).collect()
    }

    fn lease(&self, lease: &LeaseRef) -> LeaseRef {
        LeaseRef { keys: self.keys(&lease.keys), ..lease.clone() }
    }

    fn there(&self, op: Op) -> Op {
        let claim = |claim: Claim| Claim { keys: self.keys(&claim.keys), ..claim };
        match op {
            Op::Acquire(asked) => Op::Acquire(claim(asked)),
            Op::Rejoin(asked) => Op::Rejoin(claim(asked)),
            Op::Renew { lease, ttl_ms } => Op::Renew { lease: self.lease(&lease), ttl_ms },
            Op::Raise { lease, tokens } => Op::Raise { lease: self.lease(&lease), tokens },
            Op::Release(release) => Op::Release(Release { lease: self.lease(&release.lease), ..release }),
            Op::Abandon { keys, attempt } => Op::Abandon { keys: self.keys(&keys), attempt },
            Op::Force { key } => Op::Force { key: self.key(key) },
            Op::GlobalQueue { key, change } => Op::GlobalQueue { key: self.key(key), change },
            Op::Read { key } => Op::Read { key: self.key(key) },
            Op::Commit(commit) => Op::Commit(Commit { key: self.key(commit.key), ..commit }),
            op @ (Op::Delegate(_) | Op::Extend(_) | Op::Restore(_)) => op,
        }
    }
}

fn back(reply: Reply, outside: Space) -> Reply {
    let outcomes = reply.outcomes.into_iter().map(|outcome| match outcome {
        Outcome::Held(denial) => Outcome::Held(Denial { key: denial.key.clone().within(outside), ..denial }),
        outcome => outcome,
    });
    Reply { outcomes: outcomes.collect(), ..reply }
}

fn home(stored: Stored, outside: Space) -> Stored {
    Stored { key: stored.key.within(outside), ..stored }
}

impl Store for SpaceAdapter {
    fn submit(&self, group: Vec<Op>, deadline: Instant, done: Done) {
        let (group, outside) = (group.into_iter().map(|op| self.there(op)).collect(), self.outside);
        let done = Box::new(move |result: Result<Reply, StoreError>| {
            done(result.map(|reply| back(reply, outside)));
        });
        self.store.submit(group, deadline, done);
    }

    fn submit_renewal(&self, op: Op, deadline: Instant, done: Done) {
        let outside = self.outside;
        let done = Box::new(move |result: Result<Reply, StoreError>| {
            done(result.map(|reply| back(reply, outside)));
        });
        self.store.submit_renewal(self.there(op), deadline, done);
    }

    fn list(
        &self,
        prefix: String,
        after: Option<Key>,
        limit: usize,
    ) -> StoreFuture<Result<Page, StoreError>> {
        let page = self.store.list(prefix, after.map(|key| self.key(key)), limit);
        let outside = self.outside;
        Box::pin(async move {
            let page = page.await?;
            let items = page.items.into_iter().map(|stored| home(stored, outside));
            Ok(Page { items: items.collect(), ..page })
        })
    }

    fn read(&self, key: Key) -> StoreFuture<Result<Option<Stored>, StoreError>> {
        let (stored, outside) = (self.store.read(self.key(key)), self.outside);
        Box::pin(async move { Ok(stored.await?.map(|stored| home(stored, outside))) })
    }

    fn health(&self) -> Health {
        self.store.health()
    }

    fn lacks(&self, _space: Space) -> Option<String> {
        self.store.lacks(self.inside)
    }

    fn on_loss(&self, tell: Loss) {
        self.store.on_loss(tell);
    }

    fn raise_tokens(&self, least: Option<Token>) -> StoreFuture<Result<Token, StoreError>> {
        self.store.raise_tokens(least)
    }

    fn outdated(&self, key: &Key) {
        self.store.outdated(&self.key(key.clone()));
    }

    fn forget(&self) {
        self.store.forget();
    }
}
