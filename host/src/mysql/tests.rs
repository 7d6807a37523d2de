//! The store on a server that is there already: `LOCKKEEPER_TEST_URL`, e.g.
//! `mysql://root@localhost/?socket=/tmp/mysql.sock`. Run with `--ignored`.

use std::sync::Arc;
use std::time::Duration;

use super::MysqlStore;
use super::link::Link;
use crate::clock;
use crate::config::StoreConfig;
use crate::lock::record::{Claim, Op, Outcome, Release};
use crate::lock::{Instant, LeaseRef};
use crate::store::{Health, Reply, Store, StoreError, contract};
use crate::telemetry::Metrics;

mod figures;
mod harm;

fn url(database: &str) -> String {
    let url = std::env::var("LOCKKEEPER_TEST_URL").expect("LOCKKEEPER_TEST_URL names a server");
    url.replace("/?", &format!("/{database}?"))
}

async fn open(database: &str, config: &StoreConfig) -> MysqlStore {
    let store =
        MysqlStore::open(config, &url(database), 60_000, Metrics::default()).expect("the URL is valid");
    let health = store.ready(Duration::from_secs(10)).await;
    assert!(matches!(health, Health::Ready { .. }), "{health:?}");
    store
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a server"]
async fn it_keeps_the_contract() {
    contract::run_all(|kind| async move {
        let (database, clean_after) = match kind {
            contract::Kind::Lasting => ("lk_contract", Duration::from_secs(3600)),
            contract::Kind::Forgetful => ("lk_forgetful", contract::FORGETS_AFTER),
        };
        let config = StoreConfig { clean_after, ..StoreConfig::default() };
        Arc::new(open(database, &config).await) as Arc<dyn Store>
    })
    .await;
}

/// The tables say that another server used them last: tokens move up, and nothing is granted while
/// that server's leases may run.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a server"]
async fn another_server_raises_the_epoch() {
    let config = StoreConfig::default();
    let store = open("lk_epoch", &config).await;
    let mut link = Link::open(&store.shared).await.expect("it opens");
    link.exchange("UPDATE lockkeeper_meta SET identity='another',epoch=epoch+3,grants_from=0")
        .await
        .expect("it is written");
    let before = store.shared.identity().expect("it is connected").epoch;
    store.close().await;
    let store = MysqlStore::open(&config, &url("lk_epoch"), 1_000, Metrics::default()).expect("it is valid");
    store.ready(Duration::from_secs(10)).await;
    let key = format!("epoch-{:x}", contract::fresh());
    let Err(Some(Outcome::Held(denial))) = acquire(&store, &key, "me", 500).await else {
        panic!("nothing is granted at first")
    };
    assert!(denial.free_in_us > 500_000 && denial.free_in_us < 2_100_000, "{denial:?}");
    tokio::time::sleep(Duration::from_micros(denial.free_in_us + 10_000)).await;
    let (lease, _) = acquire(&store, &key, "me", 500).await.expect("it is granted");
    assert!(lease.token > crate::lock::Token::floor_of_epoch(before + 4), "{lease:?}");
    let epoch = link.exchange("SELECT epoch FROM lockkeeper_meta").await.expect("it reads");
    assert_eq!(epoch[0][0].get::<u64, _>(0), Some(before + 4), "all lanes took notice once");
}

/// A row that somebody has locked by hand holds up its own key only.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a server"]
async fn a_locked_row_is_its_own_trouble() {
    let store = Arc::new(open("lk_locked", &StoreConfig { lanes: 1, ..StoreConfig::default() }).await);
    let names: Vec<String> = (0..9).map(|n| format!("row-{n}-{:x}", contract::fresh())).collect();
    let (lease, _) = acquire(&*store, &names[0], "me", 5_000).await.expect("it is granted");
    release(&*store, lease).await.expect("it is released");
    let mut link = Link::open(&store.shared).await.expect("it opens");
    let lock = format!("BEGIN;SELECT * FROM lockkeeper_lease WHERE k='{}' FOR UPDATE", names[0]);
    link.exchange(lock).await.expect("it is locked");
    let waiting = names.iter().map(|name| {
        let (store, name) = (store.clone(), name.clone());
        tokio::spawn(async move { acquire_within(&*store, &name, "me", 60_000, 9_000).await })
    });
    let mut waiting = waiting.collect::<Vec<_>>();
    let locked = waiting.remove(0);
    for other in waiting {
        let answer = tokio::time::timeout(Duration::from_secs(5), other).await;
        answer.expect("it is answered soon").expect("it ran").expect("it is granted");
    }
    assert!(!locked.is_finished());
    link.rollback().await.expect("it is free");
    locked.await.expect("it ran").expect("it is granted in the end");
}

/// What an operator reads when the server cannot be used, and that it passes by itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a server to itself"]
async fn an_operator_is_told_why() {
    let config = StoreConfig::default();
    let store = open("lk_told", &config).await;
    let mut link = Link::open(&store.shared).await.expect("it opens");
    link.exchange("SET GLOBAL read_only=1").await.expect("it is set");
    let told = acquire_within(&store, "told", "me", 1_000, 1_000).await;
    let why = format!("{:?}", store.health());
    let other = MysqlStore::open(&config, &url("lk_told"), 1_000, Metrics::default()).expect("it is valid");
    other.ready(Duration::from_millis(500)).await;
    let why_at_start = format!("{:?}", other.health());
    link.exchange("SET GLOBAL read_only=0").await.expect("it is set");
    assert!(told.is_err() && why.contains("read-only") && why_at_start.contains("read-only"), "{why}");
    for store in [&store, &other] {
        assert!(matches!(store.ready(Duration::from_secs(5)).await, Health::Ready { .. }));
    }
    let (lease, _) = acquire(&store, "told", "me", 1_000).await.expect("it is granted");
    release(&store, lease).await.expect("it is released");

    link.exchange("UPDATE lockkeeper_meta SET version=99").await.expect("it is written");
    let newer = MysqlStore::open(&config, &url("lk_told"), 1_000, Metrics::default()).expect("it is valid");
    let health = format!("{:?}", newer.ready(Duration::from_millis(500)).await);
    link.exchange("UPDATE lockkeeper_meta SET version=1").await.expect("it is written");
    assert!(health.contains("upgrade Lockkeeper"), "{health}");

    link.exchange("CREATE USER IF NOT EXISTS lk_weak@localhost IDENTIFIED BY 'x'").await.expect("it is made");
    link.exchange("GRANT SELECT ON lk_told.* TO lk_weak@localhost").await.expect("it may read");
    let weak = url("lk_told").replace("root@", "lk_weak:x@");
    let weak = MysqlStore::open(&config, &weak, 1_000, Metrics::default()).expect("it is valid");
    let health = format!("{:?}", weak.ready(Duration::from_millis(800)).await);
    assert!(health.contains("lacks a privilege"), "{health}");
    let wrong = url("lk_told").replace("root@", "lk_weak:wrong@");
    let wrong = MysqlStore::open(&config, &wrong, 1_000, Metrics::default()).expect("it is valid");
    let health = format!("{:?}", wrong.ready(Duration::from_millis(800)).await);
    assert!(health.contains("check user and password"), "{health}");
}

/// More than the bound is refused at once, and the rest is served.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a server"]
async fn the_bound_on_waiting_work_holds() {
    let config = StoreConfig { max_queued: 100, ..StoreConfig::default() };
    let store = Arc::new(open("lk_bound", &config).await);
    let asked = (0..2_000).map(|n| {
        let (tell, told) = tokio::sync::oneshot::channel();
        let claim = contract::claim(&[&format!("bound-{n}-{:x}", contract::fresh())], "me");
        let done = Box::new(move |result: Result<Reply, StoreError>| drop(tell.send(result)));
        store.submit(vec![Op::Acquire(claim)], clock::now().plus_ms(5_000), done);
        told
    });
    let (mut served, mut refused) = (0, 0);
    for told in asked.collect::<Vec<_>>() {
        match told.await.expect("it is answered") {
            Ok(_) => served += 1,
            Err(StoreError::Overloaded { .. }) => refused += 1,
            Err(other) => panic!("{other}"),
        }
    }
    println!("{served} served, {refused} refused");
    assert!(served >= 100 && refused > 0);
    let after = acquire(&*store, &format!("bound-{:x}", contract::fresh()), "me", 1_000).await;
    assert!(after.is_ok(), "the places are free again");
}

async fn acquire(
    store: &dyn Store,
    key: &str,
    owner: &str,
    ttl_ms: u32,
) -> Result<(LeaseRef, Instant), Option<Outcome>> {
    acquire_within(store, key, owner, ttl_ms, 3_000).await
}

async fn acquire_within(
    store: &dyn Store,
    key: &str,
    owner: &str,
    ttl_ms: u32,
    within_ms: u32,
) -> Result<(LeaseRef, Instant), Option<Outcome>> {
    let claim = Claim { ttl_ms, ..contract::claim(&[key], owner) };
    let keys = claim.keys.clone();
    let (tell, told) = tokio::sync::oneshot::channel();
    let done = Box::new(move |result| drop(tell.send(result)));
    store.submit(vec![Op::Acquire(claim)], clock::now().plus_ms(within_ms), done);
    let reply: Result<Reply, StoreError> = told.await.expect("it is answered");
    let Ok(mut reply) = reply else { return Err(None) };
    match reply.outcomes.pop() {
        Some(Outcome::Granted(grant)) => {
            let lease = LeaseRef { keys, nonce: grant.nonce, token: grant.tokens[0] };
            Ok((lease, reply.asked_at.plus_us(grant.left_us)))
        }
        other => Err(other),
    }
}

async fn release(store: &dyn Store, lease: LeaseRef) -> Result<Outcome, StoreError> {
    let (tell, told) = tokio::sync::oneshot::channel();
    let done = Box::new(move |result| drop(tell.send(result)));
    let op = Op::Release(Release { lease, attempt: contract::fresh(), outcome: None });
    store.submit(vec![op], clock::now().plus_ms(3_000), done);
    let mut reply: Reply = told.await.expect("it is answered")?;
    Ok(reply.outcomes.pop().expect("it has an outcome"))
}
