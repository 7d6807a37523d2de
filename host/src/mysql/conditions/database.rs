//! What the conditions need of a database, and the steps that many of them take.

use std::future::Future;
use std::num::NonZero;
use std::time::Duration;

use tokio::sync::oneshot;

use crate::clock;
use crate::config::StoreConfig;
use crate::lock::LeaseRef;
use crate::lock::record::{Claim, Op, Outcome, Release};
use crate::mysql::session::wire::{Target, Wire};
use crate::mysql::{MysqlStore, store};
use crate::store::{Reply, Store, StoreError, contract};

/// A database of its own, with control over its server.
pub trait Database {
    /// A store that is not ready yet.
    fn open(&self, config: &StoreConfig) -> MysqlStore;

    /// A session that belongs to no proxy.
    fn stranger(&self) -> impl Future<Output = Stranger> + Send;

    /// Pauses the server. Statements wait until it continues.
    fn pause(&self);

    /// Continues a paused server.
    fn go_on(&self);

    /// From now on each insertion into the lease table takes this long, even if the row exists.
    fn slow_down(&self, each: Duration) -> impl Future<Output = ()> + Send;
}

/// A session that belongs to no proxy.
pub struct Stranger(Wire);

impl Stranger {
    /// Connects to the server.
    ///
    /// # Panics
    /// If the URL cannot be parsed, or the server does not answer.
    pub async fn at(url: &str) -> Stranger {
        let endpoint = store::read_url(url, None).expect("the URL is good");
        Stranger::to(&endpoint.target).await
    }

    /// Connects to a simulated server.
    #[cfg(any(test, feature = "simulation"))]
    pub async fn simulated(route: std::sync::Arc<dyn crate::mysql::session::wire::Connect>) -> Stranger {
        Stranger::to(&Target::Simulated(route)).await
    }

    async fn to(target: &Target) -> Stranger {
        Stranger(Wire::connect(target).await.expect("the server answers"))
    }

    /// Runs statements. Returns the rows of the last one that returns rows.
    pub async fn says(&mut self, statements: &str) -> Vec<mysql_async::Row> {
        let sets = self.0.exchange(statements.to_owned()).await.expect(statements);
        sets.into_iter().next_back().unwrap_or_default()
    }
}

/// Every call is answered, even if its store is gone.
pub(super) const ANSWERED: &str = "it is answered";

/// A store that is ready.
pub async fn open(database: &impl Database) -> MysqlStore {
    opened(database, &StoreConfig { lanes: 1, ..StoreConfig::default() }).await
}

pub(super) async fn opened(database: &impl Database, config: &StoreConfig) -> MysqlStore {
    let store = database.open(config);
    store.ready(Duration::from_secs(30)).await;
    store
}

pub(super) async fn says(database: &impl Database, statements: &str) -> Vec<mysql_async::Row> {
    database.stranger().await.says(statements).await
}

pub(super) async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    for _ in 0..1_000 {
        if holds().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("it does not come to that: {what}");
}

/// Submits one operation with a deadline.
pub fn ask(store: &dyn Store, op: Op, within_ms: u32) -> oneshot::Receiver<Result<Reply, StoreError>> {
    let (tell, told) = oneshot::channel();
    store.submit(vec![op], clock::now().plus_ms(within_ms), Box::new(|result| drop(tell.send(result))));
    told
}

/// Acquires and releases the keys, so that the store remembers the rows. Returns the lease.
pub(super) async fn warm(store: &MysqlStore, keys: &[&str]) -> LeaseRef {
    let lease = granted(store, contract::claim(keys, "warm")).await;
    release(store, lease.clone()).await;
    lease
}

/// Acquires the claim, which must be granted.
pub async fn granted(store: &MysqlStore, claim: Claim) -> LeaseRef {
    let reply = ask(store, Op::Acquire(claim.clone()), 10_000).await.expect(ANSWERED).expect("it is applied");
    lease(&claim, &reply).unwrap_or_else(|| panic!("{reply:?}"))
}

/// Like [`granted`], but retries. For `advisory` and `row` the server counts tokens only a second after its
/// start.
pub(super) async fn granted_in_time(store: &dyn Store, claim: Claim) -> LeaseRef {
    let mut asked = Err(StoreError::stopped());
    for _ in 0..200 {
        asked = ask(store, Op::Acquire(claim.clone()), 5_000).await.expect(ANSWERED);
        if let Some(lease) = asked.as_ref().ok().and_then(|reply| lease(&claim, reply)) {
            return lease;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("{claim:?} is not granted: {asked:?}")
}

/// The lease that the claim was granted, if any.
pub(super) fn lease(claim: &Claim, reply: &Reply) -> Option<LeaseRef> {
    let Outcome::Granted(grant) = &reply.outcomes[0] else { return None };
    Some(LeaseRef {
        keys: claim.keys.clone(),
        nonce: grant.nonce,
        token: Some(grant.tokens[0]),
        principal: None,
    })
}

/// The token of a lease that was granted.
pub(super) fn token(lease: &LeaseRef) -> u64 {
    lease.token.expect("a grant has a token").0
}

pub(super) async fn release(store: &MysqlStore, lease: LeaseRef) {
    let release = Op::Release(Release { lease, attempt: contract::fresh(), outcome: None });
    ask(store, release, 10_000).await.expect(ANSWERED).expect("it is applied");
}

pub(super) fn once(key: &str) -> Claim {
    Claim { keep_ms: NonZero::new(60_000), ..contract::claim(&[key], "me") }
}

pub(super) async fn holders(store: &MysqlStore, claim: &Claim) -> usize {
    let stored = store.read(claim.keys[0].clone()).await.expect("it reads");
    stored.map_or(0, |stored| stored.record.holders.len())
}
