//! Wires all parts: from a [`Config`] to a proxy that serves, and its orderly stop.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::admin::Admin;
use crate::audit::Audit;
use crate::auth::{Auth, Guesses};
use crate::config::{Config, ShutdownConfig, naming};
use crate::fleet::{self, Fleet};
use crate::fronts::Access;
use crate::guard::Guard;
use crate::latest;
use crate::net;
use crate::peers::PeerClient;
use crate::policy::{self, Compiler, Engine, Policies};
use crate::recording::Recorder;
use crate::service::{self, Peers, Service};
use crate::shadow::Shadows;
use crate::store::registry::PeerSecret;
use crate::telemetry::Metrics;
use crate::vital;
use crate::watch::watch;

mod certificates;
mod errors;
mod fronts;
mod policy_files;
mod principals;
pub(crate) mod reload;
mod stores;

pub use errors::StartError;
use fronts::{Fronts, Listeners, Serving};
use stores::Stores;

/// How long operators' requests in progress may take after everything else has ended.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// Finds the faults of the configuration that would keep [`App::build`] from starting on this machine: refused
/// policies, and certificates that do not match their keys. Opens no port and contacts no server; blocks while the
/// policies are compiled.
pub fn check(config: &Config) -> Vec<StartError> {
    let certificates = fronts::tls_files(config).filter_map(|files| fronts::load_tls(files).err());
    let policies = match load_policies(config, &Metrics::default()) {
        Ok(_) => Vec::new(),
        Err(StartError::Policies(refused)) => {
            refused.into_iter().map(|refused| StartError::Policies(vec![refused])).collect()
        }
        Err(other) => vec![other],
    };
    let principals = principals::load(&config.auth).err();
    let store = stores::load_tls(config).err();
    certificates.chain(store).chain(principals).chain(policies).collect()
}

/// A proxy that is ready to serve.
pub struct App {
    config: Config,
    metrics: Metrics,
    listeners: Listeners,
    stores: Stores,
    /// The name of this proxy among the proxies of its store, and the secret of these.
    peer: (String, latest::Receiver<Option<PeerSecret>>),
    service: Service,
    fleet: Fleet,
    shadows: Shadows,
    /// The digests of the components that the proxy was started with, by policy.
    loaded: BTreeMap<String, String>,
    guard: Arc<Guard>,
    auth: Auth,
    audit: Audit,
    recorder: Recorder,
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
        let metrics = Metrics::default();
        let auth = principals::load(&config.auth)?;
        let audit = Audit::open(&config.audit, &metrics).map_err(|source| {
            let path = config.audit.file.clone().unwrap_or_default();
            StartError::Audit { path, source }
        })?;
        let recorder = Recorder::begin(&config.recording, &config.limits, &metrics).map_err(|source| {
            let dir = config.recording.dir.clone().unwrap_or_default();
            StartError::Recording { dir, source }
        })?;
        let listeners = Listeners::bind(&config)?;
        let (settings, counts) = (config.clone(), metrics.clone());
        let policies = tokio::task::spawn_blocking(move || load_policies(&settings, &counts)).await??;
        let loaded = policies.status().into_iter().map(|policy| (policy.name, policy.digest)).collect();
        let stores = Stores::open(&config, &metrics).await?;
        let address = listeners.peer_address(&config.fleet);
        let peer_secret = latest::Sender::new(None);
        let peers = PeerClient::new(address, peer_secret.subscribe());
        let peer = (peers.name().to_owned(), peer_secret.subscribe());
        let service = Service::start_closed(service::Parts {
            peers: Arc::new(peers),
            store: Arc::new(stores.router(&config, &metrics)),
            policies: policies.clone(),
            routes: config.routes.clone(),
            limits: config.limits.clone(),
            store_timeout_ms: u32::try_from(config.store.timeout.as_millis()).unwrap_or(u32::MAX),
            metrics: metrics.clone(),
            recorder: recorder.clone(),
        });
        let shadows = Shadows::new(policies.clone(), metrics.clone());
        let fleet = Fleet::start(fleet::Parts {
            registry: Arc::new(stores.main.registry()),
            service: service.clone(),
            policies,
            routes: config.routes.clone(),
            naming: naming(&config.guards),
            address: address.to_string(),
            auth: auth.clone(),
            grace: config.auth.grace,
            peer_secret,
            audit: audit.clone(),
            config: config.fleet.clone(),
            metrics: metrics.clone(),
        });
        let guard = Arc::new(Guard::new(
            &config.guards,
            &config.upstreams,
            service.clone(),
            config.limits.clone(),
            config.http.clone(),
            metrics.clone(),
        ));
        Ok(App {
            config,
            metrics,
            listeners,
            stores,
            peer,
            service,
            fleet,
            shadows,
            loaded,
            guard,
            auth,
            audit,
            recorder,
        })
    }

    /// Serves until `stop`, and for `grace_ms` longer while `/ready` already says that the proxy is not ready. Then
    /// drains: waiters are answered, held connections are notified, and requests in progress and session-based locks
    /// may end within `drain_ms`. Leases stay in the store, and a private server is stopped.
    ///
    /// # Errors
    /// The policy files or the configuration file cannot be watched.
    pub async fn run(self, stop: CancellationToken) -> Result<(), StartError> {
        let App {
            config,
            metrics,
            listeners,
            stores,
            peer,
            service,
            fleet,
            shadows,
            loaded,
            guard,
            auth,
            audit,
            recorder,
        } = self;
        let files = policy::files(&config.policies);
        let (policy_watcher, changes) =
            watch(files, config.engine.max_component_bytes).map_err(StartError::Watch)?;
        let (config_watcher, config_reloads) =
            reload::watch_routes(&config, guard.clone(), fleet.clone(), metrics.clone())
                .map_err(StartError::Watch)?;
        let (tls_watcher, tls_changes) =
            certificates::follow(listeners.tls(), stores.tls.clone(), metrics.clone())
                .map_err(StartError::Watch)?;
        let auth_changes =
            principals::follow(&config.auth, auth.clone(), metrics.clone()).map_err(StartError::Watch)?;
        let reloads = [
            vital::spawn("the reload of certificates", tls_changes),
            vital::spawn("the reload of principals", auth_changes),
            vital::spawn("the reload of policies", policy_files::follow(fleet.clone(), loaded, changes)),
            vital::spawn("the reload of the configuration", config_reloads),
        ];
        let access = Access {
            http: config.http.clone(),
            auth,
            guesses: Guesses::new(config.auth.max_refused_per_second),
            audit,
            metrics: metrics.clone(),
        };
        let admin = Admin {
            service: service.clone(),
            fleet: fleet.clone(),
            shadows,
            metrics: metrics.clone(),
            engine: config.engine.clone(),
            access,
            stop: stop.clone(),
        };
        let fronts =
            Fronts { config: &config, metrics, peer, service: service.clone(), guard: &guard, admin };
        let Serving { draining, drained, clients, operators } = listeners.serve(fronts);

        stop.cancelled().await;
        let ShutdownConfig { grace, drain: longest } = config.shutdown;
        tracing::info!(?grace, "stopping");
        tokio::time::sleep(grace).await;
        draining.cancel();
        tracing::info!(?longest, "draining");
        drop((policy_watcher, config_watcher, tls_watcher));
        reloads.iter().for_each(JoinHandle::abort);
        if tokio::time::timeout(longest, drain(&service, clients, &guard)).await.is_err() {
            tracing::warn!("the drain timed out: requests were still in progress, or locks were still held");
        }
        drained.cancel();
        let _ = tokio::time::timeout(LAST_WORDS, join_all(operators)).await;
        fleet.leave().await;
        stores.close().await;
        recorder.close().await;
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

fn load_policies(config: &Config, metrics: &Metrics) -> Result<Policies, StartError> {
    let engine = Engine::new(&config.engine, Compiler::Child(metrics.clone()))?;
    Policies::load(&engine, &config.policies, &config.limits, metrics)
        .map_err(|rejections| StartError::Policies(errors::refused(&config.policies, &rejections)))
}
