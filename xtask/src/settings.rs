//! What `up` needs to know of config.toml. The proxy itself checks the file.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, Result};

use crate::servers::Server;

pub struct Settings {
    pub api: Address,
    pub admin: Address,
    /// The guarded listeners.
    pub guards: Vec<Guard>,
    /// The server that keeps the locks.
    pub server: Server,
}

#[derive(Clone)]
pub struct Guard {
    pub listen: Address,
    pub scheme: &'static str,
}

/// Where clients reach a listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

impl Address {
    /// The address to connect to, for one to listen on. The path of a socket starts from `folder`.
    fn reachable(self, folder: &Path) -> Address {
        match self {
            Address::Unix(path) => Address::Unix(folder.join(path)),
            Address::Tcp(mut address) => {
                if address.ip().is_unspecified() {
                    let localhost: IpAddr = if address.is_ipv4() {
                        Ipv4Addr::LOCALHOST.into()
                    } else {
                        Ipv6Addr::LOCALHOST.into()
                    };
                    address.set_ip(localhost);
                }
                Address::Tcp(address)
            }
        }
    }
}

impl FromStr for Address {
    type Err = std::net::AddrParseError;

    fn from_str(text: &str) -> Result<Address, Self::Err> {
        match text.strip_prefix("unix:") {
            Some(path) => Ok(Address::Unix(path.into())),
            None => text.parse().map(Address::Tcp),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Tcp(address) => address.fmt(f),
            Address::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

impl Settings {
    /// Reads a file, or takes the proxy's own defaults where there is none.
    ///
    /// `store` replaces the file's `store.url`.
    pub fn read(file: Option<&Path>, store: Option<&str>) -> Result<Settings> {
        let text = match file {
            Some(path) => {
                std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?
            }
            None => String::new(),
        };
        // Faults are the proxy's to report, with their lines.
        let table: toml::Table = text.parse().unwrap_or_default();
        let value = |path: &[&str], env: &str| setting(&table, path, env);
        let folder = std::path::absolute(file.unwrap_or(Path::new("config.toml")))?;
        let folder = folder.parent().unwrap_or(Path::new("/"));
        let address = |section: &str, env: &str, default: u16| {
            let listen = value(&[section, "listen"], env).and_then(|text| text.parse().ok());
            let default = Address::Tcp(SocketAddr::from(([127, 0, 0, 1], default)));
            listen.unwrap_or(default).reachable(folder)
        };
        let url = store.map(str::to_owned).or_else(|| value(&["store", "url"], "LOCKKEEPER_STORE_URL"));
        let server = value(&["store", "managed", "server"], "LOCKKEEPER_STORE_MANAGED_SERVER");
        Ok(Settings {
            api: address("api", "LOCKKEEPER_API_LISTEN", 7070),
            admin: address("admin", "LOCKKEEPER_ADMIN_LISTEN", 7071),
            guards: guards(&table, folder),
            server: Server::choose(url.as_deref().unwrap_or("managed"), server.as_deref().unwrap_or("auto")),
        })
    }
}

fn guards(table: &toml::Table, folder: &Path) -> Vec<Guard> {
    let guard = |guard: &toml::Value| {
        let listen: Address = guard.get("listen")?.as_str()?.parse().ok()?;
        let listen = listen.reachable(folder);
        Some(Guard { listen, scheme: if guard.get("tls").is_some() { "https" } else { "http" } })
    };
    table.get("guard").and_then(toml::Value::as_array).into_iter().flatten().filter_map(guard).collect()
}

fn setting(table: &toml::Table, path: &[&str], env: &str) -> Option<String> {
    if let Ok(text) = std::env::var(env) {
        return Some(text);
    }
    let (last, sections) = path.split_last()?;
    let section = sections.iter().try_fold(table, |table, name| table.get(*name)?.as_table());
    match section?.get(*last)? {
        toml::Value::String(text) => Some(text.clone()),
        // As in an environment variable.
        toml::Value::Array(several) => {
            Some(several.iter().filter_map(toml::Value::as_str).collect::<Vec<_>>().join(","))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_is_reached_at_its_address_or_its_socket() {
        let reached =
            |text: &str| text.parse::<Address>().map(|at| at.reachable(Path::new("/etc")).to_string());
        assert_eq!(reached("0.0.0.0:1").as_deref(), Ok("127.0.0.1:1"));
        assert_eq!(reached("[::]:1").as_deref(), Ok("[::1]:1"));
        assert_eq!(reached("10.0.0.1:1").as_deref(), Ok("10.0.0.1:1"));
        assert_eq!(reached("unix:a.sock").as_deref(), Ok("unix:/etc/a.sock"));
        assert_eq!(reached("unix:/run/a.sock").as_deref(), Ok("unix:/run/a.sock"));
    }

    #[test]
    fn several_server_urls_in_a_file_are_joined_with_commas() {
        let text = "store.url = [\"mysql://one/\", \"mysql://two/\"]\nadmin.listen = 3";
        let table: toml::Table = text.parse().expect("it is TOML");
        let value = |path: &[&str]| setting(&table, path, "LOCKKEEPER_NOT_SET");
        assert_eq!(value(&["store", "url"]).as_deref(), Some("mysql://one/,mysql://two/"));
        assert_eq!(value(&["admin", "listen"]), None);
        assert_eq!(value(&["store", "managed", "server"]), None);
    }
}
