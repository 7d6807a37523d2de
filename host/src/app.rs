//! Wires all parts: from a [`Config`] to a proxy that serves, and its orderly stop.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::admin::Admin;
use crate::api::Api;
use crate::config::{Config, GuardConfig, MemberConfig, ServerChoice, StoreConfig, naming};
use crate::fleet::{self, Fleet};
use crate::guard::Guard;
use crate::http;
use crate::lock::Space;
use crate::mysql::managed::{ManagedError, ManagedServer};
use crate::mysql::{Advisory, MysqlStore, OpenError, Row};
use crate::net::{self, Listener, TlsError};
use crate::peers::{self, PeerClient};
use crate::policy::{self, Engine, EngineError, Policies, Rejection};
use crate::service::{Parts, Peers, Service};
use crate::store::{Health, Member, Quorum, Router, Store};
use crate::telemetry::Metrics;
use crate::vital;
use crate::watch::watch;

mod policy_rollout;
pub(crate) mod reload;

use policy_rollout::PolicyRollout;
use reload::Refused;

/// How long the start waits for the store before the proxy serves without it.
const STORE_PATIENCE: Duration = Duration::from_secs(5);

/// How long operators' requests in progress may take after everything else has ended.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// Why the proxy cannot start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// A listener cannot bind its address.
    #[error("cannot listen at {address} ({key}): {source}")]
    Listen {
        /// The configuration key of the address, e.g. `api.listen`.
        key: &'static str,
        /// The address that cannot be bound.
        address: SocketAddr,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The certificate or the key of a guarded listener cannot be used.
    #[error("guard.tls: {0}")]
    Tls(#[from] TlsError),
    /// The policy engine cannot reserve its instances.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// Policies that cannot be loaded, by name.
    #[error("{}", list(.0))]
    Policies(Vec<(String, Rejection)>),
    /// The private server cannot be started.
    #[error(transparent)]
    Managed(#[from] ManagedError),
    /// The store cannot be opened.
    #[error(transparent)]
    Store(#[from] OpenError),
    /// The policy files or the configuration file cannot be watched.
    #[error("files cannot be watched: {0}")]
    Watch(io::Error),
    /// A task of the start panicked or was cancelled.
    #[error("a task of the start failed: {0}")]
    Task(#[from] tokio::task::JoinError),
}

impl StartError {
    /// Whether [`check`] would have found the error.
    pub fn is_fault_of_the_configuration(&self) -> bool {
        matches!(self, StartError::Tls(_) | StartError::Policies(_))
    }
}

fn list(rejections: &[(String, Rejection)]) -> String {
    let line = |(name, rejection): &(String, Rejection)| format!("policy `{name}`: {rejection}");
    rejections.iter().map(line).collect::<Vec<_>>().join("\n")
}

/// Finds the faults of the configuration that would keep [`App::build`] from starting on this machine: refused
/// policies, and certificates that do not match their keys. Opens no port and contacts no server; blocks while the
/// policies are compiled.
pub fn check(config: &Config) -> Vec<StartError> {
    let files = config.guards.iter().filter_map(|guard| guard.tls.as_ref());
    let certificates = files.filter_map(|files| net::tls_config(&files.cert, &files.key).err());
    let policies = match load_policies(config, &Metrics::default()) {
        Ok(_) => Vec::new(),
        Err(StartError::Policies(refused)) => {
            refused.into_iter().map(|refused| StartError::Policies(vec![refused])).collect()
        }
        Err(other) => vec![other],
    };
    certificates.map(StartError::from).chain(policies).collect()
}

/// A proxy that is ready to serve.
pub struct App {
    config: Config,
    api: Listener,
    admin: Listener,
    guards: Vec<Listener>,
    guard: Guard,
    /// Where other proxies send notifications to this proxy, and its name among them.
    peers: (Listener, String),
    managed: Option<ManagedServer>,
    stores: Vec<Arc<MysqlStore>>,
    policy_rollout: PolicyRollout,
    service: Service,
    fleet: Fleet,
    metrics: Metrics,
}

impl App {
    /// Opens the listeners, loads the policies, and starts or connects to the store.
    ///
    /// An unreachable store does not stop the start: `/ready` then says why the proxy is not ready.
    ///
    /// # Errors
    /// A problem that the operator has to fix; nothing is left running.
    pub async fn build(config: Config) -> Result<App, StartError> {
        net::raise_file_limit();
        let api = listen("api.listen", config.listeners.api)?;
        let admin = listen("admin.listen", config.listeners.admin)?;
        let peer_listener = listen("fleet.listen", config.fleet.listen)?;
        let guards = config.guards.iter().map(guarded_listener).collect::<Result<Vec<_>, _>>()?;
        let metrics = Metrics::default();
        let (settings, counts) = (config.clone(), metrics.clone());
        let policies = tokio::task::spawn_blocking(move || load_policies(&settings, &counts)).await??;
        let (managed, urls) = match &config.store.server {
            ServerChoice::Urls(urls) => (None, urls.clone()),
            ServerChoice::Managed(managed) => {
                let server = ManagedServer::start(managed).await?;
                let urls = vec![server.url().to_owned()];
                (Some(server), urls)
            }
        };
        let store = MysqlStore::open_any(&config.store, &urls, config.limits.max_ttl_ms, metrics.clone())?;
        let store = Arc::new(store);
        if let Health::Unavailable { why } = store.health() {
            tracing::info!("{why}");
        }
        log_health(&store.ready(STORE_PATIENCE).await);
        let members = members(&config, &metrics)?;
        let reached_at = reached_at(&config, &peer_listener);
        let peer_client = PeerClient::new(reached_at);
        let peers = (peer_listener, peer_client.name().to_owned());
        let loaded = policies.status().into_iter().map(|policy| (policy.name, policy.digest)).collect();
        let service = Service::start_closed(Parts {
            peers: Arc::new(peer_client),
            store: Arc::new(spaces(&config, &store, &members)),
            policies: policies.clone(),
            routes: config.routes.clone(),
            limits: config.limits.clone(),
            store_timeout_ms: u32::try_from(config.store.timeout.as_millis()).unwrap_or(u32::MAX),
            metrics: metrics.clone(),
        });
        let fleet = Fleet::start(fleet::Parts {
            registry: Arc::new(store.registry()),
            service: service.clone(),
            policies: policies.clone(),
            routes: config.routes.clone(),
            naming: naming(&config.guards),
            address: reached_at.to_string(),
            beat: config.fleet.beat,
            metrics: metrics.clone(),
        });
        let guard = Guard::new(
            &config.guards,
            &config.upstreams,
            service.clone(),
            config.limits.clone(),
            config.http.clone(),
            metrics.clone(),
        );
        let policy_rollout = PolicyRollout::new(policies, fleet.clone(), loaded);
        let stores = std::iter::once(store).chain(members.into_iter().map(|(_, store)| store)).collect();
        Ok(App {
            config,
            api,
            admin,
            guards,
            guard,
            peers,
            managed,
            stores,
            policy_rollout,
            service,
            fleet,
            metrics,
        })
    }

    /// Serves until `stop`, and for `grace_ms` longer while `/ready` already says that the proxy is not ready. Then
    /// drains: waiters are answered, held connections are notified, and requests in progress and session-based locks
    /// may end within `drain_ms`. Leases stay in the store, and a private server is stopped.
    ///
    /// # Errors
    /// The policy files or the configuration file cannot be watched.
    pub async fn run(self, stop: CancellationToken) -> Result<(), StartError> {
        let policy_rollout = self.policy_rollout.clone();
        let files = policy::files(&self.config.policies);
        let watching = watch(files, self.config.engine.max_component_bytes);
        let (watcher, changes) = watching.map_err(StartError::Watch)?;
        let guard = Arc::new(self.guard);
        let (config_watcher, refused, config_reloads) =
            reload::watch_routes(&self.config, guard.clone(), self.fleet.clone(), self.metrics.clone())
                .map_err(StartError::Watch)?;
        let reloads = [
            vital::spawn("the reload of policies", policy_rollout.clone().reload(changes)),
            vital::spawn("the reload of the configuration", config_reloads),
        ];
        let [draining, drained] = [CancellationToken::new(), CancellationToken::new()];
        let api = Api::new(
            self.service.clone(),
            self.config.limits.clone(),
            self.config.http.clone(),
            draining.clone(),
        );
        let admin =
            admin(&self.config, &self.service, &self.fleet, &self.metrics, policy_rollout, refused, &stop);
        let guards: Vec<String> = self.guards.iter().map(url).collect();
        tracing::info!(api = %url(&self.api), admin = %url(&self.admin), guard = guards.join(","), "serving");
        let (limits, metrics) = (self.config.http, self.metrics);
        let (peers, name) = self.peers;
        vital::spawn(
            "notifications from other proxies",
            peers::serve(peers, name, self.service.clone(), draining.clone()),
        );
        let serve = http::serve(self.api, api, limits.clone(), metrics.clone(), draining.clone());
        let mut fronts = vec![vital::spawn("the listener of the API", serve)];
        for (listener, front) in self.guards.into_iter().zip(guard.fronts()) {
            let serve = http::serve(listener, front, limits.clone(), metrics.clone(), draining.clone());
            fronts.push(vital::spawn("a guarded listener", serve));
        }
        // The admin API serves until the end, to report that the proxy is not ready.
        let serve = http::serve(self.admin, admin, limits, metrics, drained.clone());
        let operators = vital::spawn("the listener of the admin API", serve);

        stop.cancelled().await;
        tracing::info!(grace = ?self.config.shutdown.grace, "stopping");
        tokio::time::sleep(self.config.shutdown.grace).await;
        draining.cancel();
        tracing::info!(longest = ?self.config.shutdown.drain, "draining");
        drop((watcher, config_watcher));
        reloads.iter().for_each(JoinHandle::abort);
        if tokio::time::timeout(self.config.shutdown.drain, drain(&self.service, fronts, &guard))
            .await
            .is_err()
        {
            tracing::warn!("the drain timed out: requests were still in progress, or locks were still held");
        }
        drained.cancel();
        let _ = tokio::time::timeout(LAST_WORDS, operators).await;
        self.fleet.leave().await;
        for store in self.stores {
            store.close().await;
        }
        if let Some(server) = self.managed {
            server.stop().await;
        }
        tracing::info!("stopped");
        Ok(())
    }
}

/// Waits until no request is being served, and no client relies on a lock that ends with the proxy.
async fn drain(service: &Service, fronts: Vec<JoinHandle<()>>, guard: &Guard) {
    service.drain().await;
    for front in fronts {
        let _ = front.await;
    }
    guard.drain().await;
    // The connections that ended have released what they held.
    service.drain().await;
    service.rested().await;
}

fn admin(
    config: &Config,
    service: &Service,
    fleet: &Fleet,
    metrics: &Metrics,
    policy_rollout: PolicyRollout,
    config_refused: Refused,
    stop: &CancellationToken,
) -> Admin {
    Admin {
        service: service.clone(),
        policies: Arc::new(policy_rollout),
        fleet: fleet.clone(),
        metrics: metrics.clone(),
        max_component_bytes: config.engine.max_component_bytes,
        http: config.http.clone(),
        config_refused,
        stop: stop.clone(),
    }
}

fn listen(key: &'static str, address: SocketAddr) -> Result<Listener, StartError> {
    let tcp = net::bind(address).map_err(|source| StartError::Listen { key, address, source })?;
    Ok(Listener::plain(tcp))
}

fn guarded_listener(guard: &GuardConfig) -> Result<Listener, StartError> {
    let Listener { tcp, .. } = listen("guard.listen", guard.listen)?;
    Ok(match &guard.tls {
        None => Listener::plain(tcp),
        Some(files) => Listener::tls(tcp, net::tls_config(&files.cert, &files.key)?),
    })
}

/// The address at which other proxies reach the listener.
fn reached_at(config: &Config, peers: &Listener) -> SocketAddr {
    let bound = peers.tcp.local_addr().unwrap_or(config.fleet.listen);
    config.fleet.advertise.unwrap_or(bound)
}

fn url(listener: &Listener) -> String {
    let scheme = if listener.tls.is_some() { "https" } else { "http" };
    let address = listener.tcp.local_addr();
    address.map_or_else(|_| "closed".to_owned(), |address| format!("{scheme}://{address}"))
}

fn load_policies(config: &Config, metrics: &Metrics) -> Result<Policies, StartError> {
    let engine = Engine::new(&config.engine)?;
    Policies::load(&engine, &config.policies, &config.limits, metrics).map_err(StartError::Policies)
}

/// The stores of a quorum, by name.
fn members(config: &Config, metrics: &Metrics) -> Result<Vec<(String, Arc<MysqlStore>)>, OpenError> {
    let open = |member: &MemberConfig| {
        let store = MysqlStore::open(&config.store, &member.url, config.limits.max_ttl_ms, metrics.clone())?;
        Ok((member.name.clone(), Arc::new(store)))
    };
    config.quorum.members.iter().map(open).collect()
}

/// All primitives behind one store.
fn spaces(config: &Config, store: &Arc<MysqlStore>, members: &[(String, Arc<MysqlStore>)]) -> Router {
    let StoreConfig { batch, max_queued, row_connections, .. } = config.store;
    let advisory = Advisory::new(store, batch, max_queued);
    let row = Row::new(store, row_connections, max_queued);
    let mut others: Vec<(Space, Arc<dyn Store>)> =
        vec![(Space::Advisory, Arc::new(advisory)), (Space::Row, Arc::new(row))];
    if !members.is_empty() {
        let member =
            |(name, store): &(String, Arc<MysqlStore>)| Member { name: name.clone(), store: store.clone() };
        let fleet = store.clone();
        let allowed = Arc::new(move || fleet.may_write_until());
        let quorum = Quorum::new(members.iter().map(member).collect(), config.quorum.patience, allowed);
        others.push((Space::Quorum, Arc::new(quorum)));
    }
    Router::new(store.clone(), others)
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
