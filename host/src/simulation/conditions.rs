//! The simulated server under the conditions that MySQL and MariaDB have to meet, too. See [`crate::mysql::conditions`].

use std::sync::Arc;
use std::time::Duration;

use super::network::{Fate, Network, Route, Trip};
use super::pair::Pair;
use super::server::Server;
use super::simulate;
use crate::config::StoreConfig;
use crate::lock::record::{Op, Outcome};
use crate::mysql::MysqlStore;
use crate::mysql::conditions::*;
use crate::store::contract;
use crate::telemetry::Metrics;

/// A network that loses nothing.
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

pub fn open(config: &StoreConfig, server: Arc<Server>) -> MysqlStore {
    MysqlStore::simulated(config, vec![route(server)], 3_600_000, Metrics::default())
}

impl Database for Arc<Server> {
    fn open(&self, config: &StoreConfig) -> MysqlStore {
        open(config, self.clone())
    }

    async fn stranger(&self) -> Stranger {
        Stranger::simulated(route(self.clone())).await
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

/// The COMMIT of a transaction succeeds although another node of the cluster has undone the transaction. Its client is not told
/// that it was applied.
async fn what_another_node_has_undone_is_not_confirmed(server: &Arc<Server>) {
    let pair = Pair::cluster(server.clone());
    let store = crate::mysql::conditions::open(server).await;
    Database::slow_down(server, Duration::from_millis(800)).await;
    let claim = contract::claim(&["k", "l"], "me");
    let told = ask(&store, Op::Acquire(claim), 5_000);
    // By then the first row has been inserted, and the second one has not.
    tokio::time::sleep(Duration::from_millis(1_200)).await;
    let other_node = "UPDATE lockkeeper_meta SET epoch=epoch+1,identity='second' WHERE id=1;\
         INSERT INTO lockkeeper_lease (k,token,until_us,revision,state) VALUES ('k',1,1,4096,'{}')";
    pair.second().stranger().await.says(other_node).await;
    let told = told.await.expect("it is answered");
    let is_granted = told.as_ref().is_ok_and(|reply| matches!(reply.outcomes[0], Outcome::Granted(_)));
    assert!(!is_granted, "{told:?}");
}

macro_rules! named {
    ($($name:ident)*) => {
        /// Each condition with its name. It panics where it is not met.
        pub const ALL: &[(&str, fn())] = &[
            $((stringify!($name), || {
                simulate(0, async { $name(&Server::new("server-1")).await });
            })),*
        ];
    };
}

crate::conditions! {
    named
    what_another_node_has_undone_is_not_confirmed
    a_paused_server_applies_nothing_late
    a_session_is_not_closed_under_its_holders
}
