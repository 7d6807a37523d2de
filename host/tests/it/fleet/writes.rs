//! The time until which a member may write, checked in the store itself. A proxy has its own limits in front of the
//! server's limit.

use lockkeeper::clock;
use lockkeeper::config::StoreConfig;
use lockkeeper::lock::ServerTime;
use lockkeeper::lock::record::{Op, Outcome, Release};
use lockkeeper::mysql::MysqlStore;
use lockkeeper::store::registry::Registry;
use lockkeeper::store::{Reply, Store, StoreError, contract};
use lockkeeper::telemetry::Metrics;
use tokio::sync::oneshot;

use super::*;

async fn ask(store: &MysqlStore, op: Op) -> Result<Reply, StoreError> {
    let (tell, told) = oneshot::channel();
    store.submit(vec![op], clock::now().plus_ms(1_500), Box::new(|result| drop(tell.send(result))));
    told.await.expect("an answer")
}

async fn cycle(store: &MysqlStore, keys: &[&str]) {
    let claim = contract::claim(keys, "member");
    let reply = ask(store, Op::Acquire(claim.clone())).await.expect("it is applied");
    let Outcome::Granted(grant) = &reply.outcomes[0] else { panic!("{reply:?}") };
    let lease = lockkeeper::lock::LeaseRef {
        keys: claim.keys,
        nonce: grant.nonce,
        token: Some(grant.tokens[0]),
        principal: None,
    };
    let release = Release { lease, attempt: contract::fresh(), outcome: None };
    ask(store, Op::Release(release)).await.expect("it is applied");
}

on_both! {
    /// The server refuses writes after the end of a membership, in each of the ways in which leases are written,
    /// whatever the proxy assumes.
    async fn nothing_is_written_after_the_end_of_a_membership(kind: Kind) {
        let config = StoreConfig { lanes: 1, ..StoreConfig::default() };
        let url = database(kind).await;
        let store = MysqlStore::open(&config, &url, 3_600_000, Metrics::default()).unwrap();
        store.ready(Duration::from_secs(30)).await;
        let registry = store.registry();
        let refused = ask(&store, Op::Acquire(contract::claim(&["a"], "nobody"))).await;
        assert!(refused.is_err(), "no member yet: {refused:?}");

        let (soon, far) = (clock::now().plus_ms(600_000), ServerTime(u64::MAX));
        // One remembered row, several remembered rows, and a row that is read first.
        for keys in [&["a"][..], &["b", "c"], &["d"]] {
            registry.allow(Some((far, soon)));
            if keys != ["d"] {
                cycle(&store, keys).await;
            }
            let before = store.read(contract::claim(&["a"], "").keys[0].clone()).await.unwrap();
            let over = before.expect("it was used").now;
            registry.allow(Some((over, soon)));
            let claim = contract::claim(keys, "past");
            let late = ask(&store, Op::Acquire(claim.clone())).await;
            assert!(late.is_err(), "{keys:?}: {late:?}");
            let stored = store.read(claim.keys[0].clone()).await.unwrap();
            assert_eq!(stored.map_or(0, |stored| stored.record.holders.len()), 0, "{keys:?}");
            registry.allow(Some((far, soon)));
            cycle(&store, keys).await;
        }
        store.close().await;
    }
}
