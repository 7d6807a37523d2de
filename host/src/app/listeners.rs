//! The listening sockets of a proxy.

use std::net::SocketAddr;

use super::errors::StartError;
use crate::config::{Config, FleetConfig, GuardConfig};
use crate::net::{self, Listener};

/// The listening sockets of a proxy.
pub struct Listeners {
    /// The API that applications use.
    pub api: Listener,
    /// The admin API.
    pub admin: Listener,
    /// The guarded listeners, in the order of the configuration.
    pub guards: Vec<Listener>,
    /// Where other proxies notify this proxy.
    pub peers: Listener,
}

impl Listeners {
    /// Binds all addresses.
    pub fn bind(config: &Config) -> Result<Listeners, StartError> {
        Ok(Listeners {
            api: bind("api.listen", config.listeners.api)?,
            admin: bind("admin.listen", config.listeners.admin)?,
            peers: bind("fleet.listen", config.fleet.listen)?,
            guards: config.guards.iter().map(guarded).collect::<Result<_, _>>()?,
        })
    }

    /// The address at which other proxies reach this one.
    pub fn peer_address(&self, config: &FleetConfig) -> SocketAddr {
        let bound = self.peers.tcp.local_addr().unwrap_or(config.listen);
        config.advertise.unwrap_or(bound)
    }

    /// Logs the addresses.
    pub fn log(&self) {
        let guards: Vec<String> = self.guards.iter().map(url).collect();
        tracing::info!(api = %url(&self.api), admin = %url(&self.admin), guard = guards.join(","), "serving");
    }
}

fn bind(key: &'static str, address: SocketAddr) -> Result<Listener, StartError> {
    let tcp = net::bind(address).map_err(|source| StartError::Listen { key, address, source })?;
    Ok(Listener::plain(tcp))
}

fn guarded(guard: &GuardConfig) -> Result<Listener, StartError> {
    let Listener { tcp, .. } = bind("guard.listen", guard.listen)?;
    Ok(match &guard.tls {
        None => Listener::plain(tcp),
        Some(files) => Listener::tls(tcp, net::tls_config(&files.cert, &files.key)?),
    })
}

fn url(listener: &Listener) -> String {
    let scheme = if listener.tls.is_some() { "https" } else { "http" };
    let address = listener.tcp.local_addr();
    address.map_or_else(|_| "closed".to_owned(), |address| format!("{scheme}://{address}"))
}
