//! Conditions for batches of operations, and for the server that they are written to.

use std::time::Duration;

use tokio::sync::oneshot;

use crate::clock;
use crate::config::StoreConfig;
use crate::lock::record::{Claim, Commit, Op, Outcome};
use crate::lock::{Key, LeaseRef, ServerTime, Token};
use crate::mysql::sql::NOW_US;
use crate::store::registry::Registry;
use crate::store::{Health, Store, StoreError, contract};

use super::database::{
    ANSWERED, Database, ask, granted, holders, once, open, opened, release, says, token, until, warm,
};

/// The server is paused before the statement is sent, and receives it when it continues.
pub async fn a_paused_server_applies_nothing_late(database: &impl Database) {
    let store = open(database).await;
    for keys in [&["one"][..], &["two", "three"]] {
        warm(&store, keys).await;
        database.pause();
        let claim = contract::claim(keys, "late");
        let told = ask(&store, Op::Acquire(claim.clone()), 1_500).await.expect(ANSWERED);
        database.go_on();
        assert!(told.is_err(), "{told:?}");
        store.ready(Duration::from_secs(30)).await;
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert_eq!(holders(&store, &claim).await, 0, "{keys:?}");
    }
}

/// Two callers share a transaction, and one gives up while it runs. The claim of that caller is not applied,
/// and the other is granted.
pub async fn a_slow_transaction_applies_nothing_late(database: &impl Database) {
    let store = open(database).await;
    warm(&store, &["c"]).await;
    warm(&store, &["a", "b"]).await;
    database.slow_down(Duration::from_millis(800)).await;
    // Remembered rows, and unknown rows.
    for (keys, other) in [(["a", "b"], "c"), (["new-a", "new-b"], "new-c")] {
        let hasty = contract::claim(&keys, "hasty");
        // Meanwhile the other two meet in the lane's queue.
        let first = ask(&store, Op::Force { key: Key::new("nobody's").expect("a key") }, 10_000);
        let late = ask(&store, Op::Acquire(hasty.clone()), 1_400);
        let in_time = ask(&store, Op::Acquire(contract::claim(&[other], "patient")), 20_000);
        first.await.expect(ANSWERED).expect("it is applied");
        assert!(late.await.expect(ANSWERED).is_err());
        let reply = in_time.await.expect(ANSWERED).expect("it is applied");
        assert!(matches!(reply.outcomes[0], Outcome::Granted(_)), "{reply:?}");
        assert_eq!(holders(&store, &hasty).await, 0, "{keys:?}");
    }
}

/// Rows that the store remembers are deleted by another session. The store does not create them again from
/// memory.
pub async fn a_cached_row_that_was_deleted_is_read_again(database: &impl Database) {
    let store = open(database).await;
    for keys in [&["one"][..], &["two", "three"]] {
        let before = warm(&store, keys).await;
        let floor = token(&before) + 1_000;
        says(database, &format!("UPDATE lockkeeper_meta SET floor={floor}; DELETE FROM lockkeeper_lease"))
            .await;
        let after = warm(&store, keys).await;
        assert!(token(&after) > floor, "{after:?}");
    }
}

/// Two stores remember a row. Clean-up deletes it, and it is created again. The second store does not take
/// its remembered row for the new one, although both had the same number of writes.
pub async fn a_row_that_was_deleted_and_recreated_does_not_match_its_cached_copy(database: &impl Database) {
    let (one, other) = (open(database).await, open(database).await);
    warm(&one, &["k"]).await;
    let lease = granted(&other, contract::claim(&["k"], "other")).await;
    let key = lease.keys[0].clone();
    let renew = Op::Renew { lease: lease.clone(), ttl_ms: None };
    ask(&other, renew, 10_000).await.expect(ANSWERED).expect("it is renewed");
    release(&other, lease).await;
    says(database, "UPDATE lockkeeper_lease SET until_us=1").await;
    let config = StoreConfig { lanes: 1, clean_after: Duration::from_secs(3_600), ..StoreConfig::default() };
    let cleaner = opened(database, &config).await;
    until("the row is deleted", async || cleaner.read(key.clone()).await.expect("it reads").is_none()).await;
    // Both have read the floor since.
    warm(&one, &["another"]).await;
    warm(&other, &["yet another"]).await;
    warm(&one, &["k"]).await;
    let held = granted(&one, contract::claim(&["k"], "one")).await;
    let asked = ask(&other, Op::Acquire(contract::claim(&["k"], "other")), 10_000).await.expect(ANSWERED);
    let reply = asked.expect("it is answered");
    assert!(matches!(reply.outcomes[0], Outcome::Held(_)), "{reply:?}");
    let renewed = ask(&one, Op::Renew { lease: held, ttl_ms: None }, 10_000).await.expect(ANSWERED);
    let renewed = renewed.expect("it is answered");
    assert!(matches!(renewed.outcomes[0], Outcome::Renewed { .. }), "{renewed:?}");
}

/// A row that the store has never seen may be deleted, and the floor raised, only until the store has read
/// the floor.
pub async fn clean_up_cannot_run_between_the_read_of_the_floor_and_a_new_row(database: &impl Database) {
    let store = open(database).await;
    warm(&store, &["warm"]).await;
    let mut cleaner = database.stranger().await;
    cleaner.says("BEGIN; SELECT floor FROM lockkeeper_meta WHERE id=1 FOR UPDATE").await;
    let begun = ask(&store, Op::Acquire(once("never-seen")), 20_000);
    tokio::time::sleep(Duration::from_millis(200)).await;
    cleaner.says("UPDATE lockkeeper_meta SET floor=1000; COMMIT").await;
    let reply = begun.await.expect(ANSWERED).expect("it is applied");
    let Outcome::Granted(grant) = &reply.outcomes[0] else { panic!("{reply:?}") };
    assert!(grant.tokens[0].0 > 1_000, "{grant:?}");
}

/// Of several new rows, all are inserted in time, or none is.
pub async fn slow_inserts_apply_nothing_late(database: &impl Database) {
    let store = open(database).await;
    warm(&store, &["warm"]).await;
    database.slow_down(Duration::from_millis(800)).await;
    // Meanwhile the others meet in the lane's queue.
    let first = ask(&store, Op::Acquire(contract::claim(&["first"], "patient")), 20_000);
    tokio::time::sleep(Duration::from_millis(100)).await;
    let names = ["a", "b", "c"];
    let begun = names.map(|name| ask(&store, Op::Acquire(once(name)), 2_600));
    first.await.expect(ANSWERED).expect("it is applied");
    for begun in begun {
        assert!(begun.await.expect(ANSWERED).is_err());
    }
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    for name in names {
        assert_eq!(holders(&store, &once(name)).await, 0, "{name}");
    }
}

/// The row lock is granted only after the caller has given up.
pub async fn a_claim_that_waits_for_a_row_lock_is_not_applied_late(database: &impl Database) {
    let store = open(database).await;
    let mut stranger = database.stranger().await;
    for key in ["one", "two", "three"] {
        warm(&store, &[key]).await;
        let lock = format!("BEGIN; SELECT k FROM lockkeeper_lease WHERE k='{key}' FOR UPDATE");
        stranger.says(&lock).await;
        let claim = contract::claim(&[key], "late");
        let told = ask(&store, Op::Acquire(claim.clone()), 500);
        tokio::time::sleep(Duration::from_millis(700)).await;
        stranger.says("ROLLBACK").await;
        assert!(told.await.expect(ANSWERED).is_err());
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert_eq!(holders(&store, &claim).await, 0, "{key}");
    }
}

/// A batch has more cached rows than one prepared statement can take.
pub async fn a_batch_wider_than_a_prepared_statement_is_written_whole(database: &impl Database) {
    let store = open(database).await;
    let names: Vec<String> = (0..200).map(|n| format!("it's\\{n}?")).collect();
    let keys: Vec<&str> = names.iter().map(String::as_str).collect();
    for _ in 0..3 {
        let lease = warm(&store, &keys).await;
        let of_lease = format!("SELECT k FROM lockkeeper_lease WHERE token={}", token(&lease));
        assert_eq!(says(database, &of_lease).await.len(), keys.len(), "{lease:?}");
    }
}

/// A row that another session locks delays its own key, but no other key of its lane.
pub async fn a_locked_row_delays_only_its_own_key(database: &impl Database) {
    let store = open(database).await;
    warm(&store, &["locked"]).await;
    let mut stranger = database.stranger().await;
    stranger.says("BEGIN; SELECT k FROM lockkeeper_lease WHERE k='locked' FOR UPDATE").await;
    let acquire = |key: &str| ask(&store, Op::Acquire(contract::claim(&[key], "me")), 20_000);
    let locked = acquire("locked");
    let others: Vec<_> = (0..8).map(|n| acquire(&format!("other-{n}"))).collect();
    for other in others {
        let reply = other.await.expect(ANSWERED).expect("it is applied");
        assert!(matches!(reply.outcomes[0], Outcome::Granted(_)), "{reply:?}");
    }
    stranger.says("ROLLBACK").await;
    let reply = locked.await.expect(ANSWERED).expect("it is applied in the end");
    assert!(matches!(reply.outcomes[0], Outcome::Granted(_)), "{reply:?}");
}

/// A caller that gave up while its group waited for the lane is told that nothing was sent, so there is
/// nothing to undo. A caller whose transaction was running is not told so.
pub async fn a_group_that_timed_out_in_the_queue_of_its_lane_was_not_sent(database: &impl Database) {
    let store = open(database).await;
    database.slow_down(Duration::from_secs(1)).await;
    let under_way = ask(&store, Op::Acquire(contract::claim(&["one"], "me")), 600);
    tokio::time::sleep(Duration::from_millis(100)).await;
    let waits = ask(&store, Op::Acquire(contract::claim(&["other"], "me")), 200);
    let error = waits.await.expect(ANSWERED).expect_err("the lane is busy for longer");
    assert!(!error.was_sent(), "{error:?}");
    let error = under_way.await.expect(ANSWERED).expect_err("its transaction takes longer");
    assert!(error.was_sent(), "{error:?}");
}

/// Operations over the bound are refused at once, and the others are served.
pub async fn the_number_of_queued_operations_is_bounded(database: &impl Database) {
    let config = StoreConfig { max_queued: 100, ..StoreConfig::default() };
    let store = opened(database, &config).await;
    let held = contract::claim(&["held"], "me");
    let reply = ask(&store, Op::Acquire(held.clone()), 20_000).await.expect(ANSWERED).expect("it is applied");
    let Outcome::Granted(grant) = &reply.outcomes[0] else { panic!("{reply:?}") };
    let lease =
        LeaseRef { keys: held.keys, nonce: grant.nonce, token: Some(grant.tokens[0]), principal: None };
    let acquire = |n: usize| ask(&store, Op::Acquire(contract::claim(&[&format!("{n}")], "me")), 20_000);
    let (mut served, mut refused) = (0, 0);
    let flood = (0..2_000).map(acquire).collect::<Vec<_>>();
    let (tell, renewed) = oneshot::channel();
    let done = Box::new(|result| drop(tell.send(result)));
    store.submit_renewal(Op::Renew { lease, ttl_ms: None }, clock::now().plus_ms(20_000), done);
    renewed.await.expect(ANSWERED).expect("renewals have places of their own");
    for told in flood {
        match told.await.expect(ANSWERED) {
            Ok(_) => served += 1,
            Err(error @ StoreError::Overloaded { .. }) => {
                assert!(!error.was_sent());
                refused += 1;
            }
            Err(other) => panic!("{other}"),
        }
    }
    assert!(served >= 100 && refused > 0, "{served} served, {refused} refused");
    acquire(2_000).await.expect(ANSWERED).expect("the places are free again");
}

/// This happens on a Galera node while a proxy uses another node. Nothing is granted before the leases of the
/// other server have ended.
pub async fn a_server_whose_record_names_another_server_is_not_used_further(database: &impl Database) {
    let store = open(database).await;
    let before = warm(&store, &["k"]).await;
    says(database, "UPDATE lockkeeper_meta SET identity='another',floor=floor+1 WHERE id=1").await;
    until("this server is taken into use again", async || {
        let asked = ask(&store, Op::Acquire(contract::claim(&["k"], "me")), 5_000).await.expect(ANSWERED);
        let outcome = asked.as_ref().map(|reply| &reply.outcomes[0]);
        assert!(!matches!(outcome, Ok(Outcome::Granted(_))), "{asked:?}");
        matches!(outcome, Ok(Outcome::Held(_)))
    })
    .await;
    let record =
        says(database, "SELECT epoch,floor FROM lockkeeper_meta WHERE id=1 AND identity<>'another'").await;
    let (epoch, floor): (u64, u64) = mysql_async::from_row(record.into_iter().next().expect("a record"));
    assert!(epoch == 1 && floor > token(&before), "{epoch} {floor}");
}

/// The lock of the first of two rows is granted when this proxy is no longer a member of its fleet. A write
/// of one row may be late by [`LOCK_WAIT_S`](crate::mysql::sql::LOCK_WAIT_S); the other proxies do not count a
/// proxy as gone before that.
pub async fn no_operation_succeeds_after_the_membership_of_a_proxy_has_ended(database: &impl Database) {
    let store = open(database).await;
    let mut stranger = database.stranger().await;
    warm(&store, &["a", "b"]).await;
    let registry = store.registry();
    let lock = format!("BEGIN; SELECT k FROM lockkeeper_lease WHERE k='a' FOR UPDATE; SELECT {NOW_US}");
    let claim = contract::claim(&["a", "b"], "late");
    for op in [Op::Acquire(claim.clone()), Op::Read { key: claim.keys[0].clone() }] {
        let now = stranger.says(&lock).await.into_iter().next().map(mysql_async::from_row).expect("a row");
        registry.allow(Some((ServerTime(now).plus_us(400_000), clock::now().plus_ms(60_000))));
        let told = ask(&store, op, 3_000);
        tokio::time::sleep(Duration::from_millis(700)).await;
        stranger.says("ROLLBACK").await;
        let told = told.await.expect(ANSWERED);
        assert!(told.is_err(), "{told:?}");
    }
    assert_eq!(holders(&store, &claim).await, 0);
}

/// The membership of a proxy ends while its transaction runs, after it has read its rows in time.
pub async fn a_slow_transaction_writes_nothing_after_the_membership_of_its_proxy(database: &impl Database) {
    let store = open(database).await;
    database.slow_down(Duration::from_millis(400)).await;
    let now = says(database, &format!("SELECT {NOW_US}")).await.into_iter().next().map(mysql_async::from_row);
    let until = ServerTime(now.expect("a row")).plus_us(500_000);
    store.registry().allow(Some((until, clock::now().plus_ms(60_000))));
    let claim = contract::claim(&["k", "l"], "late");
    let told = ask(&store, Op::Acquire(claim.clone()), 5_000).await.expect(ANSWERED);
    assert!(told.is_err(), "{told:?}");
    store.registry().allow(Some((ServerTime(u64::MAX >> 2), clock::now().plus_ms(60_000))));
    assert_eq!(holders(&store, &claim).await, 0);
}

/// A claim that waits while its proxy is no member was planned with key names that may be out of date when
/// the proxy is a member again.
pub async fn an_operation_that_waited_for_a_membership_is_not_written(database: &impl Database) {
    let store = open(database).await;
    let (registry, claim) = (store.registry(), contract::claim(&["k"], "late"));
    let commit = Commit {
        key: claim.keys[0].clone(),
        version: Token::default(),
        value: None,
        attempt: contract::fresh(),
        request: None,
        fingerprint: 1,
    };
    for op in [Op::Commit(commit), Op::Acquire(claim.clone())] {
        registry.allow(None);
        let told = ask(&store, op, 5_000);
        tokio::time::sleep(Duration::from_millis(700)).await;
        registry.allow(Some((ServerTime(u64::MAX >> 2), clock::now().plus_ms(60_000))));
        let told = told.await.expect(ANSWERED);
        assert!(told.is_err(), "{told:?}");
    }
    assert_eq!(holders(&store, &claim).await, 0);
}

/// The previous server may have granted the keys of the lease to another holder, in writes that the fail-over
/// has lost. The lease looks alive because the server's clock may have been set forward.
pub async fn an_ended_lease_is_not_renewed_while_leases_of_another_server_may_run(database: &impl Database) {
    let lease = granted(&open(database).await, Claim { ttl_ms: 300, ..contract::claim(&["k"], "me") }).await;
    tokio::time::sleep(Duration::from_millis(1_000)).await;
    let waits = format!(
        "UPDATE lockkeeper_meta SET grants_from={NOW_US}+60000000 WHERE id=1;\
         UPDATE lockkeeper_clock SET stepped_us={NOW_US},by_us=60000000 WHERE id=1"
    );
    says(database, &waits).await;
    let store = open(database).await;
    let renew = Op::Renew { lease, ttl_ms: Some(10_000) };
    let asked = ask(&store, renew, 5_000).await.expect(ANSWERED).expect("it is applied");
    assert_eq!(asked.outcomes[0], Outcome::Unknown);
}

/// The previous server may still be in use, and grants the keys to others once the lease has ended there.
pub async fn a_lease_is_not_extended_while_another_server_may_be_in_use(database: &impl Database) {
    let claim = Claim { ttl_ms: 5_000, ..contract::claim(&["k"], "me") };
    let lease = granted(&open(database).await, claim).await;
    // Longer than any lease.
    let waits = format!("UPDATE lockkeeper_meta SET grants_from={NOW_US}+100000000000 WHERE id=1");
    says(database, &waits).await;
    let store = open(database).await;
    let renew = Op::Renew { lease, ttl_ms: Some(60_000) };
    let told = ask(&store, renew, 5_000).await.expect(ANSWERED).expect("it is applied");
    assert!(matches!(told.outcomes[0], Outcome::Renewed { left_us: ..=5_000_000 }), "{told:?}");
}

/// A store does not use tables whose schema version is above its own.
pub async fn tables_of_a_later_version_are_not_used(database: &impl Database) {
    warm(&open(database).await, &["a"]).await;
    says(database, "UPDATE lockkeeper_meta SET version=99").await;
    let later = database.open(&StoreConfig::default());
    let health = later.ready(Duration::from_millis(800)).await;
    assert!(matches!(&health, Health::Unavailable { why } if why.contains("upgrade")), "{health:?}");
    says(database, "UPDATE lockkeeper_meta SET version=1").await;
    later.ready(Duration::from_secs(30)).await;
    warm(&later, &["a"]).await;
}
