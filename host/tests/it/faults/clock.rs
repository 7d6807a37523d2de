//! A server's clock that was set forward while no proxy looked. To a store that starts, everything in the tables then
//! looks older.

use lockkeeper::lock::Key;
use lockkeeper::lock::record::{Claim, Commit, Op, Outcome, Version};
use lockkeeper::mysql::MysqlStore;
use lockkeeper::store::{Health, Store, contract};

use lockkeeper::mysql::conditions::{ask, granted};

use super::conditions::open;
use crate::harness::{database, eventually, sql};

const HOUR_US: u64 = 3_600_000_000;

/// Makes the only lease in the table an hour older.
async fn age_lease(url: &str) {
    let earlier = |field: &str| {
        let path = format!("'$.holders[0].{field}'");
        format!("{path},CAST(JSON_EXTRACT(state,{path}) AS UNSIGNED)-{HOUR_US}")
    };
    let state = format!("JSON_REPLACE(state,{},{})", earlier("since"), earlier("until"));
    sql(url, &format!("UPDATE lockkeeper_lease SET until_us=until_us-{HOUR_US},state={state} WHERE k='k'"))
        .await;
}

/// Makes the record of the clock an hour older.
async fn age_clock(url: &str) {
    let aged = format!("seen_us=seen_us-{HOUR_US},stepped_us=GREATEST(stepped_us,{HOUR_US})-{HOUR_US}");
    sql(url, &format!("UPDATE lockkeeper_clock SET {aged}")).await;
}

/// Stores a version with a value, which has no end.
async fn keep_for_ever(store: &MysqlStore, key: &str) {
    let key = Key::new(key).expect("it is a key");
    let read = ask(store, Op::Read { key: key.clone() }, 10_000).await.unwrap().expect("it is answered");
    let Outcome::Version(Version { version, .. }) = read.outcomes[0] else { panic!("{read:?}") };
    let commit = Commit {
        key,
        version,
        value: Some("1".into()),
        attempt: contract::fresh(),
        request: None,
        fingerprint: 1,
    };
    let made = ask(store, Op::Commit(commit), 10_000).await.unwrap().expect("it is answered");
    assert!(matches!(made.outcomes[0], Outcome::Committed { .. }), "{made:?}");
}

async fn asked(store: &MysqlStore, ttl_ms: u32) -> Outcome {
    let claim = Claim { ttl_ms, ..contract::claim(&["k"], "next") };
    let reply = ask(store, Op::Acquire(claim), 10_000).await.unwrap().expect("it is answered");
    reply.outcomes.into_iter().next().expect("one outcome")
}

on_both! {
    /// A store that starts after a step does not take over leases that only seem ended because of the step, and
    /// neither does the store that starts next. The rows of these leases are not cleaned up either, and a swap still
    /// knows them.
    async fn a_lease_survives_a_clock_set_forward_while_no_store_was_open(kind: Kind) {
        let url = database(kind).await;
        let first = open(&url).await;
        let lease = granted(&first, Claim { ttl_ms: 600_000, ..contract::claim(&["k"], "holder") }).await;
        keep_for_ever(&first, "kept").await;
        first.close().await;
        age_lease(&url).await;
        age_clock(&url).await;
        for which in ["the first to start", "the next one"] {
            let store = open(&url).await;
            let outcome = asked(&store, 1_000).await;
            assert!(matches!(outcome, Outcome::Held(_)), "{which}: {outcome:?}");
            let page = store.list(String::new(), None, 10).await.expect("it lists");
            let [stored, _] = &page.items[..] else { panic!("{which}: {page:?}") };
            assert!(!stored.has_ended(&stored.record.holders[0]), "{which}: {stored:?}");
            store.close().await;
        }
        let rows = sql(&url, "SELECT k FROM lockkeeper_lease").await;
        assert_eq!(rows.len(), 2, "{lease:?}");
    }

    /// A lease is over when the time it was granted for has passed, whatever the clock says.
    async fn a_lease_in_doubt_ends_after_its_ttl(kind: Kind) {
        let url = database(kind).await;
        let first = open(&url).await;
        granted(&first, Claim { ttl_ms: 700, ..contract::claim(&["k"], "holder") }).await;
        first.close().await;
        age_lease(&url).await;
        age_clock(&url).await;
        let store = open(&url).await;
        eventually("the lease is taken over", async || matches!(asked(&store, 1_000).await, Outcome::Granted(_)))
            .await;
        store.close().await;
    }

    /// A restart alone puts no lease in doubt: a lease that ended while the clock was watched is over.
    async fn a_lease_that_ended_before_a_restart_is_taken_over(kind: Kind) {
        let url = database(kind).await;
        let first = open(&url).await;
        granted(&first, Claim { ttl_ms: 600_000, ..contract::claim(&["k"], "holder") }).await;
        first.close().await;
        age_lease(&url).await;
        let store = open(&url).await;
        let outcome = asked(&store, 1_000).await;
        assert!(matches!(outcome, Outcome::Granted(_)), "{outcome:?}");
        store.close().await;
    }

    /// The wait after a change of the server is not cut short either.
    async fn a_wait_for_leases_of_another_server_is_not_shortened_by_a_clock_step(kind: Kind) {
        let url = database(kind).await;
        open(&url).await.close().await;
        let soon = "UPDATE lockkeeper_meta SET grants_from=(SELECT seen_us FROM lockkeeper_clock)+60000000";
        sql(&url, soon).await;
        sql(&url, &format!("UPDATE lockkeeper_meta SET grants_from=grants_from-{HOUR_US}")).await;
        age_clock(&url).await;
        for which in ["the first to start", "the next one"] {
            let store = open(&url).await;
            let outcome = asked(&store, 1_000).await;
            assert!(matches!(outcome, Outcome::Held(_)), "{which}: {outcome:?}");
            let health = store.health();
            let waits = |warning: &String| warning.contains("no lease is granted");
            assert!(
                matches!(&health, Health::Ready { warnings, .. } if warnings.iter().any(waits)),
                "{which}: {health:?}"
            );
            store.close().await;
        }
    }

    /// The clock is watched while a store is open.
    async fn the_clock_is_watched_while_a_store_is_open(kind: Kind) {
        let url = database(kind).await;
        let store = open(&url).await;
        let seen = async || -> u64 {
            sql(&url, "SELECT seen_us FROM lockkeeper_clock").await[0].get(0).expect("a number")
        };
        let first = seen().await;
        eventually("it is looked at again", async || seen().await > first).await;
        store.close().await;
    }

    /// Tables of an earlier version get the missing columns, and then no lease is in doubt.
    async fn tables_without_a_clock_table_are_upgraded(kind: Kind) {
        let url = database(kind).await;
        let first = open(&url).await;
        granted(&first, Claim { ttl_ms: 600_000, ..contract::claim(&["k"], "holder") }).await;
        first.close().await;
        age_lease(&url).await;
        sql(&url, "DROP TABLE lockkeeper_clock").await;
        sql(&url, "UPDATE lockkeeper_meta SET version=2").await;
        let store = open(&url).await;
        assert!(matches!(asked(&store, 1_000).await, Outcome::Granted(_)));
        eventually("an earlier version is refused from now on", async || {
            let version = sql(&url, "SELECT CAST(version AS SIGNED) FROM lockkeeper_meta").await;
            version[0].get::<i64, _>(0) == Some(3)
        })
        .await;
        store.close().await;
    }
}
