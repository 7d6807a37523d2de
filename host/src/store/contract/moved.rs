//! A store of one space, as if it had the keys of the lease table: so one suite serves all.

use std::sync::Arc;

use crate::lock::record::{Claim, Commit, Denial, Op, Outcome, Release};
use crate::lock::{Instant, Key, LeaseRef, Space};
use crate::store::{Answer, Done, Health, Page, Reply, Store, StoreError, Stored};

pub struct Moved {
    pub store: Arc<dyn Store>,
    pub space: Space,
}

impl Moved {
    fn key(&self, key: Key) -> Key {
        key.within(self.space)
    }

    fn keys(&self, keys: &[Key]) -> Arc<[Key]> {
        keys.iter().map(|key| self.key(key.clone())).collect()
    }

    fn lease(&self, lease: LeaseRef) -> LeaseRef {
        LeaseRef { keys: self.keys(&lease.keys), ..lease }
    }

    fn there(&self, op: Op) -> Op {
        let claim = |claim: Claim| Claim { keys: self.keys(&claim.keys), ..claim };
        match op {
            Op::Acquire(asked) => Op::Acquire(claim(asked)),
            Op::Rejoin(asked) => Op::Rejoin(claim(asked)),
            Op::Renew { lease, ttl_ms } => Op::Renew { lease: self.lease(lease), ttl_ms },
            Op::Release(release) => Op::Release(Release { lease: self.lease(release.lease), ..release }),
            Op::Abandon { keys, attempt } => Op::Abandon { keys: self.keys(&keys), attempt },
            Op::Force { key } => Op::Force { key: self.key(key) },
            Op::Read { key } => Op::Read { key: self.key(key) },
            Op::Commit(commit) => Op::Commit(Commit { key: self.key(commit.key), ..commit }),
        }
    }
}

fn back(reply: Reply) -> Reply {
    let outcomes = reply.outcomes.into_iter().map(|outcome| match outcome {
        Outcome::Held(denial) => {
            Outcome::Held(Denial { key: denial.key.clone().within(Space::Table), ..denial })
        }
        outcome => outcome,
    });
    Reply { outcomes: outcomes.collect(), ..reply }
}

fn home(stored: Stored) -> Stored {
    Stored { key: stored.key.within(Space::Table), ..stored }
}

impl Store for Moved {
    fn submit(&self, group: Vec<Op>, deadline: Instant, done: Done) {
        let group = group.into_iter().map(|op| self.there(op)).collect();
        self.store.submit(group, deadline, Box::new(move |result| done(result.map(back))));
    }

    fn submit_renewal(&self, op: Op, deadline: Instant, done: Done) {
        let done = Box::new(move |result: Result<Reply, StoreError>| done(result.map(back)));
        self.store.submit_renewal(self.there(op), deadline, done);
    }

    fn list(&self, prefix: String, after: Option<Key>, limit: usize) -> Answer<Result<Page, StoreError>> {
        let page = self.store.list(prefix, after.map(|key| self.key(key)), limit);
        Box::pin(async move {
            let page = page.await?;
            Ok(Page { items: page.items.into_iter().map(home).collect(), ..page })
        })
    }

    fn read(&self, key: Key) -> Answer<Result<Option<Stored>, StoreError>> {
        let stored = self.store.read(self.key(key));
        Box::pin(async move { Ok(stored.await?.map(home)) })
    }

    fn health(&self) -> Health {
        self.store.health()
    }

    fn lacks(&self, _space: Space) -> Option<String> {
        self.store.lacks(self.space)
    }
}
