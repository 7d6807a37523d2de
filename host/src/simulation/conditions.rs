//! Runs the conditions for MySQL and MariaDB on the simulated server. See [`crate::mysql::conditions`].

use std::sync::Arc;
use std::time::Duration;

use super::network::{Fate, Network, Route, Trip};
use super::pair::Pair;
use super::server::Server;
use super::simulate;
use crate::config::StoreConfig;
use crate::lock::record::{Claim, Op, Outcome};
use crate::lock::{Instant, Mode, Space};
use crate::mysql::MysqlStore;
use crate::mysql::conditions::*;
use crate::store::contract;
use crate::store::{Member, Quorum, Store};
use crate::telemetry::Metrics;
use crate::vital::process::Process;

/// A network without losses.
struct Calm;

impl Network for Calm {
    fn trip(&self, _sql: &[u8]) -> Trip {
        let way = Duration::from_micros(200);
        Trip { hesitation: Duration::ZERO, there: way, back: way, fate: Fate::Delivered }
    }
}

fn route(server: Arc<Server>) -> Route {
    Route { from: 0, servers: vec![server], network: Arc::new(Calm) }
}

/// Opens a store on a simulated server.
pub fn open(config: &StoreConfig, server: Arc<Server>) -> MysqlStore {
    MysqlStore::simulated(config, vec![route(server).named()], 3_600_000, Metrics::default())
}

impl Database for Arc<Server> {
    fn open(&self, config: &StoreConfig) -> MysqlStore {
        open(config, self.clone())
    }

    async fn stranger(&self) -> Stranger {
        Stranger::simulated(Arc::new(route(self.clone()))).await
    }

    fn pause(&self) {
        Server::pause(self);
    }

    fn go_on(&self) {
        Server::go_on(self);
    }

    async fn slow_down(&self, each: Duration) {
        Server::slow_down(self, each);
    }
}

/// COMMIT succeeds although another node of the cluster has undone the transaction. The client must not be told that
/// the transaction was applied.
async fn a_transaction_that_another_node_rolled_back_is_not_confirmed(server: &Arc<Server>) {
    let pair = Pair::cluster(server.clone());
    let store = crate::mysql::conditions::open(server).await;
    Database::slow_down(server, Duration::from_millis(800)).await;
    let claim = contract::claim(&["k", "l"], "me");
    let told = ask(&store, Op::Acquire(claim), 5_000);
    // By then the first row has been inserted, and the second row has not.
    tokio::time::sleep(Duration::from_millis(1_200)).await;
    let other_node = "UPDATE lockkeeper_meta SET epoch=epoch+1,identity='second' WHERE id=1;\
         INSERT INTO lockkeeper_lease (k,token,until_us,revision,state) VALUES ('k',1,1,4096,'{}')";
    pair.second().stranger().await.says(other_node).await;
    let told = told.await.expect("it is answered");
    let is_granted = told.as_ref().is_ok_and(|reply| matches!(reply.outcomes[0], Outcome::Granted(_)));
    assert!(!is_granted, "{told:?}");
}

/// The clock is set forward, back, and forward again. One proxy misses the first two steps and another one the last
/// two, so neither notices that the clock was set back. A lease that one of them grants in between must not count as
/// ended on the other.
async fn a_clock_that_is_set_forward_and_back_ends_no_lease(server: &Arc<Server>) {
    set_forward_and_back(server, 60_000_000).await;
    set_forward_and_back(&Server::new("server-2"), 3_000_000).await;
}

async fn set_forward_and_back(server: &Arc<Server>, by_us: i64) {
    let proxy = || {
        let (process, config) = (Arc::new(Process::new(0)), StoreConfig::default());
        let open = || {
            MysqlStore::simulated(&config, vec![route(server.clone()).named()], 60_000, Metrics::default())
        };
        let store = Arc::new(process.enter(open));
        (process, store)
    };
    let asks = async |(process, store): &(Arc<Process>, Arc<MysqlStore>), owner: &str| {
        let claim = Claim { ttl_ms: 5_000, ..contract::claim(&["k"], owner) };
        let store = store.clone();
        let asking = async move { ask(&*store, Op::Acquire(claim), 5_000).await.expect("it is answered") };
        let told = process.run(asking).await.expect("the proxy lives").expect("the server is there");
        matches!(told.outcomes[0], Outcome::Granted(_))
    };
    let (first, second) = (proxy(), proxy());
    tokio::time::sleep(Duration::from_secs(3)).await;
    // Each pause is shorter than the 10 s after which a proxy asks what others have seen.
    second.0.pause();
    server.set_clock(by_us);
    tokio::time::sleep(Duration::from_millis(8_500)).await;
    first.0.pause();
    server.set_clock(-by_us);
    second.0.resume();
    assert!(asks(&second, "one").await);
    tokio::time::sleep(Duration::from_millis(4_400)).await;
    server.set_clock(by_us);
    first.0.resume();
    assert!(!asks(&first, "another").await, "the lease has half a second left");
}

/// Three servers, and a quorum of them that has begun to grant.
async fn quorum(server: &Arc<Server>) -> ([Arc<Server>; 3], Quorum) {
    let servers = [server.clone(), Server::new("server-2"), Server::new("server-3")];
    let member = |server: &Arc<Server>| Member {
        name: "member".to_owned(),
        store: Arc::new(open(&StoreConfig::default(), server.clone())),
    };
    let members = servers.iter().map(member).collect();
    let quorum = Quorum::new(members, Duration::from_millis(200), Arc::new(|| Instant(u64::MAX)));
    tokio::time::sleep(Duration::from_secs(3)).await;
    (servers, quorum)
}

async fn outcome(store: &impl Store, claim: Claim) -> Option<Outcome> {
    let keys = claim.keys.iter().map(|key| key.clone().within(Space::Quorum)).collect();
    let asked = ask(store, Op::Acquire(Claim { keys, ..claim }), 1_000).await.expect("it is answered");
    asked.ok().map(|mut reply| reply.outcomes.remove(0))
}

/// Does something while one of the servers is paused. Requests to that server are late when it goes on.
async fn without<T>(server: &Arc<Server>, happens: impl Future<Output = T>) -> T {
    server.pause();
    let happened = happens.await;
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    server.go_on();
    tokio::time::sleep(Duration::from_secs(1)).await;
    happened
}

/// Each of three leases of one permit is missing on another one of three members, so no member has granted more than
/// two.
async fn permits_of_a_quorum_are_counted_over_all_members(server: &Arc<Server>) {
    let (servers, quorum) = quorum(server).await;
    let mode = Mode::Permits { count: 1, limit: 2 };
    let is_granted_without = async |away: usize| {
        let told =
            without(&servers[away], outcome(&quorum, Claim { mode, ..contract::claim(&["k"], "me") })).await;
        matches!(told, Some(Outcome::Granted(_)))
    };
    assert!(is_granted_without(2).await);
    assert!(is_granted_without(0).await);
    assert!(!is_granted_without(1).await, "there are two permits");
}

/// Two of three members know the lease of a request, and the third has granted the key to another client.
async fn a_repeated_request_is_not_refused_by_a_quorum_that_has_its_lease(server: &Arc<Server>) {
    let (servers, quorum) = quorum(server).await;
    for lacking in 0..servers.len() {
        let key = format!("k{lacking}");
        let claim = |owner| Claim { ttl_ms: 60_000, ..contract::claim(&[&key], owner) };
        let asks = || Claim { request: Some(key.as_str().into()), ..claim("me") };
        let told = without(&servers[lacking], outcome(&quorum, asks())).await;
        assert!(matches!(told, Some(Outcome::Granted(_))), "{told:?}");
        let alone = open(&StoreConfig::default(), servers[lacking].clone());
        tokio::time::sleep(Duration::from_secs(3)).await;
        let told = outcome(&alone, claim("another")).await;
        assert!(matches!(told, Some(Outcome::Granted(_))), "{told:?}");
        let told = outcome(&quorum, asks()).await;
        assert!(matches!(told, Some(Outcome::Granted(_))), "{told:?}");
        for silent in (0..servers.len()).filter(|silent| *silent != lacking) {
            let told = without(&servers[silent], outcome(&quorum, asks())).await;
            assert!(!matches!(told, Some(Outcome::Held(_))), "{told:?}");
        }
    }
}

/// Another client holds the key at two of three members. The third member has granted the key to a claim that was not
/// told so. One of the two members is silent when the same claim is repeated.
async fn a_claim_without_a_majority_is_refused_although_one_member_granted_it(server: &Arc<Server>) {
    let (servers, quorum) = quorum(server).await;
    let claim = |owner| Claim { ttl_ms: 60_000, ..contract::claim(&["k"], owner) };
    let told = without(&servers[2], outcome(&quorum, claim("another"))).await;
    assert!(matches!(told, Some(Outcome::Granted(_))), "{told:?}");
    let asks = claim("me");
    let told = without(&servers[0], without(&servers[1], outcome(&quorum, asks.clone()))).await;
    assert!(told.is_none(), "{told:?}");
    let told = without(&servers[1], outcome(&quorum, asks)).await;
    assert!(matches!(told, Some(Outcome::Held(_))), "{told:?}");
}

macro_rules! named {
    ($($name:ident)*) => {
        /// All conditions, by name. A condition that is not met panics.
        pub const ALL: &[(&str, fn())] = &[
            $((stringify!($name), || {
                simulate(0, async { $name(&Server::new("server-1")).await });
            })),*
        ];
    };
}

crate::conditions! {
    named
    a_clock_that_is_set_forward_and_back_ends_no_lease
    a_transaction_that_another_node_rolled_back_is_not_confirmed
    a_paused_server_applies_nothing_late
    an_unresponsive_session_is_not_closed_before_its_leases_end
    permits_of_a_quorum_are_counted_over_all_members
    a_repeated_request_is_not_refused_by_a_quorum_that_has_its_lease
    a_claim_without_a_majority_is_refused_although_one_member_granted_it
}
