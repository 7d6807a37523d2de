//! The conditions under which something is or is not applied, on real servers. See [`lockkeeper::mysql::conditions`].

use std::time::Duration;

use lockkeeper::config::StoreConfig;
use lockkeeper::mysql::MysqlStore;
use lockkeeper::mysql::conditions::{self, Database, Stranger};
use lockkeeper::mysql::managed::ManagedServer;
use lockkeeper::telemetry::Metrics;
use rustix::process::Signal;

use super::signal;
use crate::harness::{database, folder, own_server, sql};

/// Opens a store on a server that the tests share.
pub(super) async fn open(url: &str) -> MysqlStore {
    conditions::open(&Real::shared(url)).await
}

struct Real<'a> {
    url: String,
    /// A server that belongs to this test, if any.
    server: Option<&'a ManagedServer>,
}

impl Real<'_> {
    fn shared(url: &str) -> Real<'static> {
        Real { url: url.to_owned(), server: None }
    }

    fn signal(&self, which: Signal) {
        signal(self.server.expect("a server of its own"), which);
    }
}

impl Database for Real<'_> {
    fn open(&self, config: &StoreConfig) -> MysqlStore {
        MysqlStore::open(config, &self.url, 3_600_000, Metrics::default()).expect("the URL is good")
    }

    async fn stranger(&self) -> Stranger {
        Stranger::at(&self.url).await
    }

    fn pause(&self) {
        self.signal(Signal::STOP);
    }

    fn go_on(&self) {
        self.signal(Signal::CONT);
    }

    async fn slow_down(&self, each: Duration) {
        let (table, seconds) = ("lockkeeper_lease", each.as_secs_f64());
        let slow = format!("CREATE TRIGGER slow BEFORE INSERT ON {table} FOR EACH ROW DO SLEEP({seconds})");
        sql(&self.url, &slow).await;
    }
}

macro_rules! on_real_servers {
    ($($name:ident)*) => {
        on_both! {$(
            async fn $name(kind: Kind) {
                conditions::$name(&Real::shared(&database(kind).await)).await;
            }
        )*}
    };
}

lockkeeper::conditions! { on_real_servers }

/// Conditions in which a server is paused.
macro_rules! on_own_servers {
    ($($name:ident)*) => {
        on_both! {$(
            async fn $name(kind: Kind) {
                let dir = folder();
                let server = own_server(kind, dir.path()).await;
                let real = Real { url: server.url().to_owned(), server: Some(&server) };
                conditions::$name(&real).await;
                server.stop().await;
            }
        )*}
    };
}

on_own_servers! { a_paused_server_applies_nothing_late an_unresponsive_session_is_not_closed_before_its_leases_end }
