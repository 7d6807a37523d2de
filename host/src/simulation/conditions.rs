//! The simulated server under the conditions that MySQL and MariaDB have to meet, too. See [`crate::mysql::conditions`].

use std::sync::Arc;
use std::time::Duration;

use super::network::{Fate, Network, Route, Trip};
use super::server::Server;
use super::simulate;
use crate::config::StoreConfig;
use crate::mysql::MysqlStore;
use crate::mysql::conditions::{self, Database, Stranger};
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

macro_rules! named {
    ($($name:ident)*) => {
        /// Each condition with its name. It panics where it is not met.
        pub const ALL: &[(&str, fn())] = &[
            (stringify!(a_paused_server_applies_nothing_late), || {
                simulate(0, async {
                    conditions::a_paused_server_applies_nothing_late(&Server::new("server-1")).await;
                });
            }),
            $((stringify!($name), || {
                simulate(0, async { conditions::$name(&Server::new("server-1")).await });
            })),*
        ];
    };
}

crate::conditions! { named }
