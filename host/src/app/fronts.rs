//! The fronts of a proxy: their listening sockets, and the tasks that serve them.

use std::net::SocketAddr;
use std::sync::Arc;

use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::errors::StartError;
use crate::admin::{Admin, Health};
use crate::api::Api;
use crate::config::{Config, FleetConfig, GuardConfig, HttpLimits, ListenAddress, ListenerConfig, TlsFiles};
use crate::guard::Guard;
use crate::http::{self, Handler};
use crate::latest;
use crate::net::{Listener, Tls};
use crate::peers;
use crate::service::Service;
use crate::store::registry::PeerSecret;
use crate::telemetry::Metrics;
use crate::vital;

/// The listening sockets of a proxy.
pub struct Listeners {
    /// The API that applications use.
    pub api: Listener,
    /// The admin API.
    pub admin: Listener,
    /// Health and metrics alone.
    pub health: Option<Listener>,
    /// The guarded listeners, in the order of the configuration.
    pub guards: Vec<Listener>,
    /// Where other proxies notify this proxy.
    pub peers: Listener,
}

impl Listeners {
    /// Binds all addresses.
    pub fn bind(config: &Config) -> Result<Listeners, StartError> {
        let ListenerConfig { api, admin, health } = &config.listeners;
        let health = health.as_ref().map(|address| listen("health.listen", address, None));
        let guarded = |guard: &GuardConfig| listen("guard.listen", &guard.listen, guard.tls.as_ref());
        Ok(Listeners {
            api: listen("api.listen", &api.listen, api.tls.as_ref())?,
            admin: listen("admin.listen", &admin.listen, admin.tls.as_ref())?,
            health: health.transpose()?,
            peers: listen("fleet.listen", &config.fleet.listen.into(), None)?,
            guards: config.guards.iter().map(guarded).collect::<Result<_, _>>()?,
        })
    }

    /// The address at which other proxies reach this one.
    pub fn peer_address(&self, config: &FleetConfig) -> SocketAddr {
        let bound = match self.peers.address() {
            Ok(ListenAddress::Tcp(address)) => address,
            _ => config.listen,
        };
        config.advertise.unwrap_or(bound)
    }

    /// Serves all fronts.
    pub fn serve(self, fronts: Fronts<'_>) -> Serving {
        self.log();
        let [draining, drained] = [CancellationToken::new(), CancellationToken::new()];
        let (name, secret) = fronts.peer;
        let (service, metrics) = (fronts.service.clone(), fronts.metrics.clone());
        let notified = peers::serve(self.peers, name, secret, service, metrics, draining.clone());
        let http = Http { limits: fronts.config.http.clone(), metrics: fronts.metrics };
        vital::spawn("notifications from other proxies", notified);
        let access = fronts.admin.access.clone();
        let api = Api::new(fronts.service, fronts.config.limits.clone(), access, draining.clone());
        let mut clients = vec![http.serve("the listener of the API", self.api, api, &draining)];
        for (listener, front) in self.guards.into_iter().zip(fronts.guard.fronts()) {
            clients.push(http.serve("a guarded listener", listener, front, &draining));
        }
        let mut operators = Vec::new();
        if let Some(listener) = self.health {
            let health = Health::new(fronts.admin.clone());
            operators.push(http.serve("the listener of health and metrics", listener, health, &drained));
        }
        operators.push(http.serve("the listener of the admin API", self.admin, fronts.admin, &drained));
        Serving { draining, drained, clients, operators }
    }

    /// TLS of all listeners that have it.
    pub fn tls(&self) -> Vec<Arc<Tls>> {
        let listeners = [&self.api, &self.admin].into_iter().chain(&self.guards);
        listeners.filter_map(|listener| listener.tls().cloned()).collect()
    }

    fn log(&self) {
        let guards: Vec<String> = self.guards.iter().map(url).collect();
        let health = self.health.as_ref().map(url);
        tracing::info!(api = %url(&self.api), admin = %url(&self.admin), health, guard = guards.join(","), "serving");
    }
}

/// What the fronts serve.
pub struct Fronts<'a> {
    pub config: &'a Config,
    pub metrics: Metrics,
    /// The name of this proxy among the proxies of its store, and the secret of these.
    pub peer: (String, latest::Receiver<Option<PeerSecret>>),
    pub service: Service,
    pub guard: &'a Guard,
    pub admin: Admin,
}

/// The fronts while they serve.
pub struct Serving {
    /// Ends the fronts of clients and peers.
    pub draining: CancellationToken,
    /// Ends the admin API. It serves until the end, to report that the proxy is not ready.
    pub drained: CancellationToken,
    /// The fronts of clients. Each ends once its requests in progress have ended.
    pub clients: Vec<JoinHandle<()>>,
    /// The admin API, and health.
    pub operators: Vec<JoinHandle<()>>,
}

/// What all HTTP fronts share.
struct Http {
    limits: HttpLimits,
    metrics: Metrics,
}

impl Http {
    /// Serves a front until `stop`, and until its requests in progress have ended.
    fn serve(
        &self,
        name: &'static str,
        listener: Listener,
        front: impl Handler,
        stop: &CancellationToken,
    ) -> JoinHandle<()> {
        vital::spawn(
            name,
            http::serve(listener, front, self.limits.clone(), self.metrics.clone(), stop.clone()),
        )
    }
}

fn listen(
    key: &'static str,
    address: &ListenAddress,
    files: Option<&TlsFiles>,
) -> Result<Listener, StartError> {
    let listener = Listener::bind(address);
    let listener = listener.map_err(|source| StartError::Listen { key, address: address.clone(), source })?;
    Ok(match files {
        None => listener,
        Some(files) => listener.with_tls(load_tls(files)?),
    })
}

/// The certificates of all listeners.
pub fn tls_files(config: &Config) -> impl Iterator<Item = &TlsFiles> {
    let apis = [&config.listeners.api, &config.listeners.admin].into_iter().map(|api| &api.tls);
    apis.chain(config.guards.iter().map(|guard| &guard.tls)).flatten()
}

/// TLS for HTTP with these files.
pub fn load_tls(files: &TlsFiles) -> Result<Arc<Tls>, StartError> {
    Ok(Tls::load(files, http::ALPN)?)
}

fn url(listener: &Listener) -> String {
    let scheme = if listener.tls().is_some() { "https" } else { "http" };
    match listener.address() {
        Ok(ListenAddress::Tcp(address)) => format!("{scheme}://{address}"),
        Ok(socket @ ListenAddress::Unix { .. }) => socket.to_string(),
        Err(_) => "closed".to_owned(),
    }
}
