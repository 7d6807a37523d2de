//! The stores of a proxy, and its private server.

use std::sync::Arc;
use std::time::Duration;

use super::errors::StartError;
use crate::config::{Config, MemberConfig, ServerChoice};
use crate::lock::Space;
use crate::mysql::managed::ManagedServer;
use crate::mysql::{Advisory, ClientTls, MysqlStore, Row};
use crate::store::{Bounds, Delegations, Health, Member, Quorum, Router, Store};
use crate::telemetry::Metrics;

/// How long the start waits for the store before the proxy serves without it.
const PATIENCE: Duration = Duration::from_secs(5);

/// The stores of a proxy, and its private server.
pub struct Stores {
    /// The store of `[store]`.
    pub main: Arc<MysqlStore>,
    /// The stores of a quorum, by name.
    members: Vec<(String, Arc<MysqlStore>)>,
    managed: Option<ManagedServer>,
    /// TLS of all connections, if they have it.
    pub tls: Option<Arc<ClientTls>>,
}

impl Stores {
    /// Starts or connects to the servers. An unreachable server is no error: the store's health says so.
    pub async fn open(config: &Config, metrics: &Metrics) -> Result<Stores, StartError> {
        let tls = load_tls(config)?;
        let (managed, urls) = match &config.store.server {
            ServerChoice::Urls(urls) => (None, urls.clone()),
            ServerChoice::Managed(managed) => {
                let server = ManagedServer::start(managed).await?;
                let urls = vec![server.url().to_owned()];
                (Some(server), urls)
            }
        };
        let open = |urls: &[String]| {
            let longest_ms = config.limits.max_ttl_ms;
            MysqlStore::open_any(&config.store, urls, tls.as_ref(), longest_ms, metrics.clone()).map(Arc::new)
        };
        let main = open(&urls)?;
        if let Health::Unavailable { why } = main.health() {
            tracing::info!("{why}");
        }
        log_health(&main.ready(PATIENCE).await);
        let member =
            |member: &MemberConfig| Ok((member.name.clone(), open(std::slice::from_ref(&member.url))?));
        let members = config.quorum.members.iter().map(member).collect::<Result<_, StartError>>()?;
        Ok(Stores { main, members, managed, tls })
    }

    /// All primitives behind one store.
    pub fn router(&self, config: &Config, metrics: &Metrics) -> Router {
        let advisory = Advisory::new(&self.main, &config.store);
        let row = Row::new(&self.main, &config.store);
        let mut others: Vec<(Space, Arc<dyn Store>)> =
            vec![(Space::Advisory, Arc::new(advisory)), (Space::Row, Arc::new(row))];
        if !self.members.is_empty() {
            let member = |(name, store): &(String, Arc<MysqlStore>)| Member {
                name: name.clone(),
                store: store.clone(),
            };
            let members = self.members.iter().map(member).collect();
            let main = self.main.clone();
            let allowed = Arc::new(move || main.may_write_until());
            others.push((Space::Quorum, Arc::new(Quorum::new(members, config.quorum.patience, allowed))));
        }
        Router::new(Arc::new(delegations(config, &self.main, metrics)), others)
    }

    /// Closes the connections, and stops the private server.
    pub async fn close(self) {
        self.main.close().await;
        for (_, member) in self.members {
            member.close().await;
        }
        if let Some(server) = self.managed {
            server.stop().await;
        }
    }
}

/// The table's store, which lets this proxy grant some keys from its memory.
fn delegations(config: &Config, store: &Arc<MysqlStore>, metrics: &Metrics) -> Delegations {
    let bounds = Bounds {
        longest_ms: config.limits.max_ttl_ms,
        drift_per_mille: config.limits.drift_per_mille,
        timeout: config.store.timeout,
        tokens: Bounds::TOKENS,
    };
    Delegations::new(store.clone(), bounds, store.lives(), metrics.clone())
}

/// TLS towards the servers, if it is configured.
pub fn load_tls(config: &Config) -> Result<Option<Arc<ClientTls>>, StartError> {
    let tls = config.store.tls.as_ref().map(ClientTls::load).transpose();
    tls.map_err(StartError::StoreTls)
}

fn log_health(health: &Health) {
    match health {
        Health::Ready { server, warnings } => {
            tracing::info!(server, "the store is ready");
            for warning in warnings {
                tracing::warn!("{warning}");
            }
        }
        Health::Unavailable { why } => tracing::warn!(why, "the store is not ready; serving anyway"),
    }
}
