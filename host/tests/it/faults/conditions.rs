//! What is applied when, looked at in the store itself: a proxy would undo what came too late, and has
//! bounds of its own in front of the store's.

use std::time::Duration;

use lockkeeper::clock;
use lockkeeper::config::StoreConfig;
use lockkeeper::lock::record::{Claim, Op, Outcome, Release};
use lockkeeper::lock::{Key, LeaseRef};
use lockkeeper::mysql::MysqlStore;
use lockkeeper::store::{Health, Reply, Store, StoreError, contract};
use lockkeeper::telemetry::Metrics;
use mysql_async::Conn;
use mysql_async::prelude::Queryable;
use rustix::process::Signal;
use tokio::sync::oneshot;

use super::signal;
use crate::harness::{database, eventually, folder, own_server, sql};

pub(super) async fn open(url: &str) -> MysqlStore {
    opened(url, &StoreConfig { lanes: 1, ..StoreConfig::default() }).await
}

pub(super) async fn opened(url: &str, config: &StoreConfig) -> MysqlStore {
    let store = MysqlStore::open(config, url, 3_600_000, Metrics::default()).expect("the URL is good");
    store.ready(Duration::from_secs(30)).await;
    store
}

pub(super) fn ask(
    store: &MysqlStore,
    op: Op,
    within_ms: u32,
) -> oneshot::Receiver<Result<Reply, StoreError>> {
    let (tell, told) = oneshot::channel();
    store.submit(vec![op], clock::now().plus_ms(within_ms), Box::new(|result| drop(tell.send(result))));
    told
}

/// Acquires and releases, so that the store remembers the rows. The lease that was had.
pub(super) async fn warm(store: &MysqlStore, keys: &[&str]) -> LeaseRef {
    let lease = granted(store, contract::claim(keys, "warm")).await;
    release(store, lease.clone()).await;
    lease
}

pub(super) async fn granted(store: &MysqlStore, claim: Claim) -> LeaseRef {
    let reply = ask(store, Op::Acquire(claim.clone()), 10_000).await.unwrap().expect("it is applied");
    let Outcome::Granted(grant) = &reply.outcomes[0] else { panic!("{reply:?}") };
    LeaseRef { keys: claim.keys, nonce: grant.nonce, token: grant.tokens[0] }
}

pub(super) async fn release(store: &MysqlStore, lease: LeaseRef) {
    let release = Op::Release(Release { lease, attempt: contract::fresh(), outcome: None });
    ask(store, release, 10_000).await.unwrap().expect("it is applied");
}

fn once(key: &str) -> Claim {
    Claim { keep_ms: 60_000, ..contract::claim(&[key], "me") }
}

async fn holders(store: &MysqlStore, claim: &Claim) -> usize {
    let stored = store.read(claim.keys[0].clone()).await.expect("it reads");
    stored.map_or(0, |stored| stored.record.holders.len())
}

on_both! {
    /// The server is stopped before it is asked, and finds the statement when it goes on.
    async fn a_paused_server_applies_nothing_late(kind: Kind) {
        let dir = folder();
        let server = own_server(kind, dir.path()).await;
        let store = open(server.url()).await;
        for keys in [&["one"][..], &["two", "three"]] {
            warm(&store, keys).await;
            signal(&server, Signal::STOP);
            let claim = contract::claim(keys, "late");
            let told = ask(&store, Op::Acquire(claim.clone()), 1_500).await.unwrap();
            signal(&server, Signal::CONT);
            assert!(told.is_err(), "{told:?}");
            store.ready(Duration::from_secs(30)).await;
            tokio::time::sleep(Duration::from_millis(300)).await;
            assert_eq!(holders(&store, &claim).await, 0, "{keys:?}");
        }
        server.stop().await;
    }

    /// Two callers share a transaction, and one gives up while it is under way: what that one was
    /// denied is not applied, and the other one is granted.
    async fn a_slow_transaction_applies_nothing_late(kind: Kind) {
        let url = database(kind).await;
        let store = open(&url).await;
        warm(&store, &["c"]).await;
        warm(&store, &["a", "b"]).await;
        let slow = "CREATE TRIGGER slow BEFORE INSERT ON lockkeeper_lease FOR EACH ROW DO SLEEP(0.8)";
        sql(&url, slow).await;
        // Rows that are remembered, and rows that are not.
        for (keys, other) in [(["a", "b"], "c"), (["new-a", "new-b"], "new-c")] {
            let hasty = contract::claim(&keys, "hasty");
            // While the lane does this the other two meet in its queue.
            let first = ask(&store, Op::Force { key: Key::new("nobody's").unwrap() }, 10_000);
            let late = ask(&store, Op::Acquire(hasty.clone()), 1_400);
            let in_time = ask(&store, Op::Acquire(contract::claim(&[other], "patient")), 20_000);
            first.await.unwrap().expect("it is applied");
            assert!(late.await.unwrap().is_err());
            let reply = in_time.await.unwrap().expect("it is applied");
            assert!(matches!(reply.outcomes[0], Outcome::Granted(_)), "{reply:?}");
            assert_eq!(holders(&store, &hasty).await, 0, "{keys:?}");
        }
    }

    /// Rows that the store remembers are deleted behind its back: it does not make them again from memory.
    async fn a_row_that_is_gone_is_looked_for(kind: Kind) {
        let url = database(kind).await;
        let store = open(&url).await;
        for keys in [&["one"][..], &["two", "three"]] {
            let before = warm(&store, keys).await;
            let floor = before.token.0 + 1_000;
            sql(&url, &format!("UPDATE lockkeeper_meta SET floor={floor}; DELETE FROM lockkeeper_lease")).await;
            let after = warm(&store, keys).await;
            assert!(after.token.0 > floor, "{after:?}");
        }
    }

    /// Two stores remember a row. Clean-up deletes it, and it is made again: what the second store remembers of the
    /// row that was is not taken for the row that is, though as many writes have been made to both.
    async fn a_row_that_was_made_again_is_not_the_remembered_one(kind: Kind) {
        let url = database(kind).await;
        let (one, other) = (open(&url).await, open(&url).await);
        warm(&one, &["k"]).await;
        let lease = granted(&other, contract::claim(&["k"], "other")).await;
        let key = lease.keys[0].clone();
        let renew = Op::Renew { lease: lease.clone(), ttl_ms: None };
        ask(&other, renew, 10_000).await.unwrap().expect("it is renewed");
        release(&other, lease).await;
        sql(&url, "UPDATE lockkeeper_lease SET until_us=1").await;
        let config = StoreConfig { lanes: 1, clean_after: Duration::from_secs(3_600), ..StoreConfig::default() };
        let cleaner = opened(&url, &config).await;
        eventually("the row is deleted", async || {
            cleaner.read(key.clone()).await.expect("it reads").is_none()
        })
        .await;
        // Both have looked at the floor since.
        warm(&one, &["another"]).await;
        warm(&other, &["yet another"]).await;
        warm(&one, &["k"]).await;
        let held = granted(&one, contract::claim(&["k"], "one")).await;
        let asked = ask(&other, Op::Acquire(contract::claim(&["k"], "other")), 10_000).await.unwrap();
        let reply = asked.expect("it is answered");
        assert!(matches!(reply.outcomes[0], Outcome::Held(_)), "{reply:?}");
        let renewed = ask(&one, Op::Renew { lease: held, ttl_ms: None }, 10_000).await.unwrap();
        let renewed = renewed.expect("it is answered");
        assert!(matches!(renewed.outcomes[0], Outcome::Renewed { .. }), "{renewed:?}");
    }

    /// A row that the store has never seen may be deleted, and the floor raised, until the row is inserted: not after
    /// the store has looked at the floor.
    async fn clean_up_cannot_come_between_the_floor_and_a_new_row(kind: Kind) {
        let url = database(kind).await;
        let store = open(&url).await;
        warm(&store, &["warm"]).await;
        let mut cleaner = Conn::from_url(&url).await.unwrap();
        cleaner.query_drop("BEGIN; SELECT floor FROM lockkeeper_meta WHERE id=1 FOR UPDATE").await.unwrap();
        let begun = ask(&store, Op::Acquire(once("never-seen")), 20_000);
        tokio::time::sleep(Duration::from_millis(200)).await;
        cleaner.query_drop("UPDATE lockkeeper_meta SET floor=1000; COMMIT").await.unwrap();
        let reply = begun.await.unwrap().expect("it is applied");
        let Outcome::Granted(grant) = &reply.outcomes[0] else { panic!("{reply:?}") };
        assert!(grant.tokens[0].0 > 1_000, "{grant:?}");
        cleaner.disconnect().await.unwrap();
    }

    /// Rows that were never seen are all inserted in time, or none is.
    async fn slow_inserts_apply_nothing_late(kind: Kind) {
        let url = database(kind).await;
        let store = open(&url).await;
        warm(&store, &["warm"]).await;
        sql(&url, "CREATE TRIGGER slow BEFORE INSERT ON lockkeeper_lease FOR EACH ROW DO SLEEP(0.8)").await;
        // While the lane does this the others meet in its queue.
        let first = ask(&store, Op::Acquire(contract::claim(&["first"], "patient")), 20_000);
        tokio::time::sleep(Duration::from_millis(100)).await;
        let names = ["a", "b", "c"];
        let begun = names.map(|name| ask(&store, Op::Acquire(once(name)), 2_600));
        first.await.unwrap().expect("it is applied");
        for begun in begun {
            assert!(begun.await.unwrap().is_err());
        }
        tokio::time::sleep(Duration::from_millis(1_500)).await;
        for name in names {
            assert_eq!(holders(&store, &once(name)).await, 0, "{name}");
        }
    }

    /// A row's lock is had only after the caller has given up.
    async fn a_lock_that_is_waited_for_applies_nothing_late(kind: Kind) {
        let url = database(kind).await;
        let store = open(&url).await;
        let mut stranger = Conn::from_url(&url).await.unwrap();
        for key in ["one", "two", "three"] {
            warm(&store, &[key]).await;
            let lock = format!("BEGIN; SELECT * FROM lockkeeper_lease WHERE k='{key}' FOR UPDATE");
            stranger.query_drop(lock).await.unwrap();
            let claim = contract::claim(&[key], "late");
            let told = ask(&store, Op::Acquire(claim.clone()), 500);
            tokio::time::sleep(Duration::from_millis(700)).await;
            stranger.query_drop("ROLLBACK").await.unwrap();
            assert!(told.await.unwrap().is_err());
            tokio::time::sleep(Duration::from_millis(300)).await;
            assert_eq!(holders(&store, &claim).await, 0, "{key}");
        }
        stranger.disconnect().await.unwrap();
    }

    /// More rows than a prepared statement has, all remembered, in one batch.
    async fn wide_batches_are_written_as_a_whole(kind: Kind) {
        let url = database(kind).await;
        let store = open(&url).await;
        let names: Vec<String> = (0..200).map(|n| format!("it's\\{n}?")).collect();
        let keys: Vec<&str> = names.iter().map(String::as_str).collect();
        for _ in 0..3 {
            let lease = warm(&store, &keys).await;
            let of_lease = format!("SELECT k FROM lockkeeper_lease WHERE token={}", lease.token.0);
            assert_eq!(sql(&url, &of_lease).await.len(), keys.len(), "{lease:?}");
        }
    }

    /// A row that somebody locks past the proxy holds up its own key, and no other of its lane.
    async fn a_locked_row_is_its_own_trouble(kind: Kind) {
        let url = database(kind).await;
        let store = open(&url).await;
        warm(&store, &["locked"]).await;
        let mut stranger = Conn::from_url(&url).await.unwrap();
        stranger.query_drop("BEGIN; SELECT * FROM lockkeeper_lease WHERE k='locked' FOR UPDATE").await.unwrap();
        let acquire = |key: &str| ask(&store, Op::Acquire(contract::claim(&[key], "me")), 20_000);
        let locked = acquire("locked");
        let others: Vec<_> = (0..8).map(|n| acquire(&format!("other-{n}"))).collect();
        for other in others {
            let reply = other.await.unwrap().expect("it is applied");
            assert!(matches!(reply.outcomes[0], Outcome::Granted(_)), "{reply:?}");
        }
        stranger.query_drop("ROLLBACK").await.unwrap();
        let reply = locked.await.unwrap().expect("it is applied in the end");
        assert!(matches!(reply.outcomes[0], Outcome::Granted(_)), "{reply:?}");
        stranger.disconnect().await.unwrap();
    }

    /// A caller that gave up while its group waited for the lane is told that nothing was sent, so that nothing has to
    /// be undone; one whose transaction was under way is not told so.
    async fn what_waited_for_the_lane_was_not_sent(kind: Kind) {
        let url = database(kind).await;
        let store = open(&url).await;
        let slow = "CREATE TRIGGER slow BEFORE INSERT ON lockkeeper_lease FOR EACH ROW DO SLEEP(1)";
        sql(&url, slow).await;
        let under_way = ask(&store, Op::Acquire(contract::claim(&["one"], "me")), 600);
        tokio::time::sleep(Duration::from_millis(100)).await;
        let waits = ask(&store, Op::Acquire(contract::claim(&["other"], "me")), 200);
        let error = waits.await.unwrap().expect_err("the lane is busy for longer");
        assert!(!error.was_sent(), "{error:?}");
        let error = under_way.await.unwrap().expect_err("its transaction takes longer");
        assert!(error.was_sent(), "{error:?}");
    }

    /// More than the bound is refused at once, and the rest is served.
    async fn the_bound_on_waiting_work_holds(kind: Kind) {
        let config = StoreConfig { max_queued: 100, ..StoreConfig::default() };
        let store = opened(&database(kind).await, &config).await;
        let held = contract::claim(&["held"], "me");
        let reply = ask(&store, Op::Acquire(held.clone()), 20_000).await.unwrap().expect("it is applied");
        let Outcome::Granted(grant) = &reply.outcomes[0] else { panic!("{reply:?}") };
        let lease = LeaseRef { keys: held.keys, nonce: grant.nonce, token: grant.tokens[0] };
        let acquire = |n: usize| ask(&store, Op::Acquire(contract::claim(&[&format!("{n}")], "me")), 20_000);
        let (mut served, mut refused) = (0, 0);
        let flood = (0..2_000).map(acquire).collect::<Vec<_>>();
        let (tell, renewed) = oneshot::channel();
        let done = Box::new(|result| drop(tell.send(result)));
        store.submit_renewal(Op::Renew { lease, ttl_ms: None }, clock::now().plus_ms(20_000), done);
        renewed.await.unwrap().expect("renewals have places of their own");
        for told in flood {
            match told.await.unwrap() {
                Ok(_) => served += 1,
                Err(error @ StoreError::Overloaded { .. }) => {
                    assert!(!error.was_sent());
                    refused += 1;
                }
                Err(other) => panic!("{other}"),
            }
        }
        assert!(served >= 100 && refused > 0, "{served} served, {refused} refused");
        acquire(2_000).await.unwrap().expect("the places are free again");
    }

    /// As on a node of a Galera cluster while a proxy uses another node: nothing is granted before the leases of that one
    /// have ended.
    async fn a_record_that_names_another_server_ends_the_use_of_this_one(kind: Kind) {
        let url = database(kind).await;
        let store = open(&url).await;
        let before = warm(&store, &["k"]).await;
        sql(&url, "UPDATE lockkeeper_meta SET identity='another',floor=floor+1 WHERE id=1").await;
        eventually("this server is taken into use again", async || {
            let asked = ask(&store, Op::Acquire(contract::claim(&["k"], "me")), 5_000).await.unwrap();
            let outcome = asked.as_ref().map(|reply| &reply.outcomes[0]);
            assert!(!matches!(outcome, Ok(Outcome::Granted(_))), "{asked:?}");
            matches!(outcome, Ok(Outcome::Held(_)))
        })
        .await;
        let record = sql(&url, "SELECT epoch,floor FROM lockkeeper_meta WHERE id=1 AND identity<>'another'").await;
        let (epoch, floor): (u64, u64) = mysql_async::from_row(record.into_iter().next().expect("a record"));
        assert!(epoch == 1 && floor > before.token.0, "{epoch} {floor}");
    }

    async fn tables_of_a_later_version_are_left_alone(kind: Kind) {
        let url = database(kind).await;
        warm(&open(&url).await, &["a"]).await;
        sql(&url, "UPDATE lockkeeper_meta SET version=99").await;
        let later = MysqlStore::open(&StoreConfig::default(), &url, 3_600_000, Metrics::default()).unwrap();
        let health = later.ready(Duration::from_millis(800)).await;
        assert!(matches!(&health, Health::Unavailable { why } if why.contains("upgrade")), "{health:?}");
        sql(&url, "UPDATE lockkeeper_meta SET version=1").await;
        later.ready(Duration::from_secs(30)).await;
        warm(&later, &["a"]).await;
    }
}
