//! What `up` needs to know of config.toml. The proxy itself checks the file.

use std::net::SocketAddr;
use std::path::Path;

use anyhow::{Context, Result};

use crate::servers::Server;

pub struct Settings {
    pub api: SocketAddr,
    pub admin: SocketAddr,
    /// The guarded listeners.
    pub guards: Vec<Guard>,
    /// The server that keeps the locks.
    pub server: Server,
}

#[derive(Clone, Copy)]
pub struct Guard {
    pub listen: SocketAddr,
    pub scheme: &'static str,
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
        let address = |section: &str, env: &str, default: u16| {
            let listen = value(&[section, "listen"], env).and_then(|text| text.parse().ok());
            listen.unwrap_or(SocketAddr::from(([127, 0, 0, 1], default)))
        };
        let url = store.map(str::to_owned).or_else(|| value(&["store", "url"], "LOCKKEEPER_STORE_URL"));
        let server = value(&["store", "managed", "server"], "LOCKKEEPER_STORE_MANAGED_SERVER");
        Ok(Settings {
            api: address("api", "LOCKKEEPER_API_LISTEN", 7070),
            admin: address("admin", "LOCKKEEPER_ADMIN_LISTEN", 7071),
            guards: guards(&table),
            server: Server::choose(url.as_deref().unwrap_or("managed"), server.as_deref().unwrap_or("auto")),
        })
    }
}

fn guards(table: &toml::Table) -> Vec<Guard> {
    let guard = |guard: &toml::Value| {
        let listen = guard.get("listen")?.as_str()?.parse().ok()?;
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
    fn several_server_urls_in_a_file_are_joined_with_commas() {
        let text = "store.url = [\"mysql://one/\", \"mysql://two/\"]\nadmin.listen = 3";
        let table: toml::Table = text.parse().expect("it is TOML");
        let value = |path: &[&str]| setting(&table, path, "LOCKKEEPER_NOT_SET");
        assert_eq!(value(&["store", "url"]).as_deref(), Some("mysql://one/,mysql://two/"));
        assert_eq!(value(&["admin", "listen"]), None);
        assert_eq!(value(&["store", "managed", "server"]), None);
    }
}
