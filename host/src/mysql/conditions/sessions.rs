//! Conditions for locks that depend on sessions.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;

use super::database::{ANSWERED, Database, ask, granted, granted_in_time, holders, lease, open, says, until};
use crate::clock;
use crate::config::StoreConfig;
use crate::lock::record::{Claim, Op, Outcome, Release};
use crate::lock::{Key, Mode, ServerTime, Space};
use crate::mysql::sql::NOW_US;
use crate::mysql::{Advisory, MysqlStore, Row};
use crate::store::registry::Registry;
use crate::store::{Router, Store, contract};

/// When a proxy is no longer a member, the others may count it as gone and use other names for its keys. So
/// its holders are certain of their locks only while it is a member, and their leases end with the
/// membership.
pub async fn session_locks_end_with_the_membership_of_their_proxy(database: &impl Database) {
    const MEMBER_MS: u32 = 3_000;
    let store = open(database).await;
    let registry = store.registry();
    let allow = |ms| registry.allow(Some((ServerTime(u64::MAX), clock::now().plus_ms(ms))));
    for (space, sessions) in sessions(&store) {
        // Opens the session, and waits until the server counts tokens.
        allow(60_000);
        granted_in_time(&*sessions, within("another", space)).await;
        allow(MEMBER_MS);
        let claim = within("k", space);
        let reply = ask(&*sessions, Op::Acquire(claim.clone()), 5_000).await.expect(ANSWERED);
        let reply = reply.expect("it is granted");
        let Outcome::Granted(grant) = &reply.outcomes[0] else { panic!("{space:?}: {reply:?}") };
        assert!(grant.left_us <= u64::from(MEMBER_MS) * 1_000, "{space:?}: {grant:?}");
        registry.allow(None);
        allow(60_000);
        let renew = Op::Renew { lease: lease(&claim, &reply).expect("it is granted"), ttl_ms: None };
        let renewed = ask(&*sessions, renew, 5_000).await.expect(ANSWERED).expect("it is answered");
        assert_eq!(renewed.outcomes[0], Outcome::Lost, "{space:?}");
    }
}

/// A session that does not answer is given up. The server may still have its locks, and the holders are
/// certain of them. So the session is not closed before the leases end, because closing it would free the
/// locks.
pub async fn an_unresponsive_session_is_not_closed_before_its_leases_end(database: &impl Database) {
    const LASTS_MS: u32 = 15_000;
    let (store, other) = (open(database).await, open(database).await);
    let (ours, theirs) = (sessions(&store), sessions(&other));
    // Opens the sessions, and waits until the server counts tokens.
    for (n, (space, sessions)) in ours.iter().chain(&theirs).enumerate() {
        granted_in_time(&**sessions, within(&format!("another-{n}"), *space)).await;
    }
    let mut ends = Vec::new();
    for (space, sessions) in &ours {
        let claim = Claim { ttl_ms: LASTS_MS, ..within("k", *space) };
        granted_in_time(&**sessions, claim).await;
        ends.push(clock::now().plus_ms(LASTS_MS));
    }
    database.pause();
    // Longer than the proxy waits for a session with leases.
    tokio::time::sleep(Duration::from_millis(12_500)).await;
    database.go_on();
    for ((space, sessions), end) in theirs.iter().zip(ends) {
        let claim = Claim { owner: "other".into(), ..within("k", *space) };
        until("the lock is free", async || {
            let asked = ask(&**sessions, Op::Acquire(claim.clone()), 5_000).await.expect(ANSWERED);
            asked.is_ok_and(|reply| lease(&claim, &reply).is_some())
        })
        .await;
        // The end was noted some time after the lease began.
        assert!(clock::now().plus_ms(1_000) > end, "{space:?}: it was granted before the lease ended");
    }
}

/// The lock of a session exists on one node of a cluster; sessions on other nodes do not see it.
pub async fn session_locks_end_when_the_record_names_another_server(database: &impl Database) {
    let store = open(database).await;
    let mut held = Vec::new();
    for (space, sessions) in sessions(&store) {
        let lease = granted_in_time(&*sessions, within("k", space)).await;
        held.push((sessions, Op::Renew { lease, ttl_ms: Some(10_000) }));
    }
    for (sessions, renew) in held {
        until("the lock of a session is over", async || {
            // The proxy notices this, and records its own server again.
            says(database, "UPDATE lockkeeper_meta SET identity='another' WHERE id=1").await;
            let asked = ask(&*sessions, renew.clone(), 5_000).await.expect(ANSWERED);
            asked.is_ok_and(|reply| matches!(reply.outcomes[0], Outcome::Lost))
        })
        .await;
    }
}

/// After a fail-over that loses writes, tokens begin just ahead of the new server's clock. A token further
/// ahead could be given out a second time.
pub async fn tokens_of_sessions_and_leases_are_not_ahead_of_the_clock(database: &impl Database) {
    let store = open(database).await;
    says(database, &format!("UPDATE lockkeeper_meta SET floor={NOW_US} WHERE id=1")).await;
    let now = async || {
        let rows = says(database, &format!("SELECT {NOW_US}")).await;
        rows.into_iter().next().map(mysql_async::from_row::<u64>).expect("a row")
    };
    for (space, sessions) in sessions(&store) {
        granted_in_time(&*sessions, within("k", space)).await;
        let lease = granted(&store, contract::claim(&[&format!("{space:?}")], "me")).await;
        assert!(lease.token.expect("it has one").0 < now().await, "{space:?}: {lease:?}");
    }
}

/// A shared lock that joins another one opens no session, and so has no other reason to ask the server for a
/// token. But the resource may have had a lease since the first lock.
pub async fn a_joining_shared_lock_has_a_token_above_an_earlier_lease(database: &impl Database) {
    let store = open(database).await;
    let [_, (_, row)] = sessions(&store);
    let shared = |owner: &str| Claim { owner: owner.into(), mode: Mode::Shared, ..within("k", Space::Row) };
    granted_in_time(&*row, shared("one")).await;
    let between = granted(&store, contract::claim(&["k"], "me")).await;
    let joined = granted_in_time(&*row, shared("another")).await;
    assert!(joined.token > between.token, "{joined:?} after {between:?}");
}

/// A release makes room for an exclusive lock, but the session has only a shared lock of the row.
pub async fn an_exclusive_lock_is_not_granted_under_a_shared_lock_of_its_row(database: &impl Database) {
    let (store, other) = (open(database).await, open(database).await);
    let [[_, (_, row)], [_, (_, theirs)]] = [sessions(&store), sessions(&other)];
    let shared = |owner: &str| Claim { owner: owner.into(), mode: Mode::Shared, ..within("k", Space::Row) };
    let first = granted_in_time(&*row, shared("one")).await;
    let release = Op::Release(Release { lease: first, attempt: contract::fresh(), outcome: None });
    let exclusive = within("k", Space::Row);
    let (tell, told) = oneshot::channel();
    // Operations after a claim that asks the server are decided with the server's answer.
    let group = vec![Op::Acquire(within("another", Space::Row)), release, Op::Acquire(exclusive.clone())];
    row.submit(group, clock::now().plus_ms(5_000), Box::new(|result| drop(tell.send(result))));
    let reply = told.await.expect(ANSWERED).expect("it is applied");
    let is_granted = matches!(reply.outcomes[2], Outcome::Granted(_));
    let claim = shared("another");
    let asked = ask(&*theirs, Op::Acquire(claim.clone()), 5_000).await.expect(ANSWERED);
    let is_shared = asked.is_ok_and(|reply| lease(&claim, &reply).is_some());
    assert!(!(is_granted && is_shared), "{reply:?}");
}

/// A claim in two stores is granted in the first, and the rest of its group is refused by the second, which
/// is full. The claim was sent, so its caller undoes it.
pub async fn a_group_counts_as_sent_although_only_its_first_claim_was_sent(database: &impl Database) {
    let store = Arc::new(open(database).await);
    let [(space, advisory), _] = sessions(&store);
    granted_in_time(&*advisory, within("another", space)).await;
    let full = Row::new(&store, &StoreConfig { max_queued: 0, ..StoreConfig::default() });
    let router = Router::new(store.clone(), vec![(space, advisory.into()), (Space::Row, Arc::new(full))]);
    let claim = contract::claim(&["k"], "me");
    let keys = [claim.keys[0].clone(), claim.keys[0].clone().within(space)];
    let next = Op::Acquire(within("k", Space::Row));
    let (tell, told) = oneshot::channel();
    let group = vec![Op::Acquire(Claim { keys: keys.into(), ..claim.clone() }), next];
    router.submit(group, clock::now().plus_ms(5_000), Box::new(|result| drop(tell.send(result))));
    let error = told.await.expect(ANSWERED).expect_err("there is no place for the row lock");
    assert_eq!(holders(&store, &claim).await, 1);
    assert!(error.was_sent(), "{error}");
}

/// The stores of the primitives whose locks depend on sessions.
fn sessions(store: &MysqlStore) -> [(Space, Box<dyn Store>); 2] {
    let config = StoreConfig { batch: 64, max_queued: 1_000, row_connections: 8, ..StoreConfig::default() };
    let (advisory, row) = (Advisory::new(store, &config), Row::new(store, &config));
    [(Space::Advisory, Box::new(advisory)), (Space::Row, Box::new(row))]
}

/// A claim for a key of this space.
fn within(key: &str, space: Space) -> Claim {
    let claim = contract::claim(&[key], "me");
    let keys: Vec<Key> = claim.keys.iter().map(|key| key.clone().within(space)).collect();
    Claim { keys: keys.into(), ..claim }
}
