//! `[store]`: the MySQL or MariaDB server that keeps the locks.

use std::path::PathBuf;
use std::time::Duration;

use super::fault::Location;
use super::reader::{Section, defaults, resolve};
use super::store_tls::{StoreTls, check_parameters, remote_address};
use super::values;

/// How many servers `url` may name.
const MAX_SERVERS: usize = 16;

/// The connection to the store: the MySQL or MariaDB server.
#[derive(Clone, Debug)]
pub struct StoreConfig {
    /// The server to connect to, or to start.
    pub server: ServerChoice,
    /// TLS towards the servers, other than over a Unix socket. `None`: no connection is encrypted.
    pub tls: Option<StoreTls>,
    /// Whether connections to other machines may be plain, because something else encrypts them.
    pub allow_plaintext: bool,
    /// Connections for acquires and releases, 1 to 64. Keys are assigned to them by hash.
    pub lanes: usize,
    /// Connections for renewals, 1 to 16.
    pub renewal_lanes: usize,
    /// The most operations in one transaction, 1 to 2,048.
    pub batch: usize,
    /// The most operations that may wait for a lane, summed over all lanes.
    pub max_queued: usize,
    /// Connections that hold row locks, 1 to 1,024. Each lease of the primitive `row` needs one.
    pub row_connections: usize,
    /// How long a call may wait for the store before it is answered with 503.
    pub timeout: Duration,
    /// Refuse to start if the server's settings can lose a committed grant, instead of logging a warning.
    pub require_durable: bool,
    /// How long a row must have had no holder before it is deleted. Its tokens are not issued again.
    pub clean_after: Duration,
}

/// The server that the store uses.
#[derive(Clone, Debug)]
pub enum ServerChoice {
    /// The URLs of existing servers, 1 to 16, in order of preference: `mysql://user:pass@host:3306/database`, or with
    /// `?socket=/path`. If there are several, the proxy finds the primary among them.
    Urls(Vec<String>),
    /// A private server that the proxy starts and stops.
    Managed(ManagedConfig),
}

/// The private server.
#[derive(Clone, Debug)]
pub struct ManagedConfig {
    /// Which server binary to start.
    pub binary: ServerBinary,
    /// The folder of the server's data.
    pub data_dir: PathBuf,
}

/// The binary of the private server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServerBinary {
    /// The kind of server that made the data folder. For a new folder: MySQL if it is installed, otherwise MariaDB.
    Auto,
    /// An installed MySQL server.
    Mysql,
    /// An installed MariaDB server.
    Mariadb,
    /// The path of a `mysqld` or `mariadbd`.
    Path(PathBuf),
}

impl StoreConfig {
    /// Reads `[store]`.
    pub(super) fn read(section: &Section<'_>) -> StoreConfig {
        let managed = ManagedConfig::read(&section.section("managed"));
        let tls = StoreTls::read(&section.section("tls"));
        let urls = section.texts("url", server_urls).flatten();
        let config = StoreConfig {
            server: urls.map_or(ServerChoice::Managed(managed), ServerChoice::Urls),
            tls,
            allow_plaintext: section.boolean("allow_plaintext", false),
            lanes: section.integer("lanes", 1..=64, 1),
            renewal_lanes: section.integer("renewal_lanes", 1..=16, 1),
            batch: section.integer("batch", 1..=2_048, 512),
            max_queued: section.integer("max_queued", 1..=1_000_000, 100_000),
            row_connections: section.integer("row_connections", 1..=1_024, 16),
            timeout: section.milliseconds("timeout_ms", 100..=60_000, 5_000),
            require_durable: section.boolean("require_durable", false),
            clean_after: section.seconds("clean_after_s", 60..=31_536_000, 3_600),
        };
        section.finish();
        config
    }

    /// The warning that connections to the server of this URL can be read by others, if they can.
    pub fn plaintext_warning(&self, url: &str) -> Option<String> {
        let address = remote_address(url).filter(|_| self.tls.is_none() && !self.allow_plaintext)?;
        Some(format!(
            "connections to {address} are not encrypted: others on the network can read and change the locks, and can \
             find out the password; set store.tls.ca, or store.allow_plaintext = true if something else encrypts them"
        ))
    }
}

impl Default for StoreConfig {
    fn default() -> StoreConfig {
        defaults(StoreConfig::read)
    }
}

impl ManagedConfig {
    fn read(section: &Section<'_>) -> ManagedConfig {
        let config = ManagedConfig {
            binary: section.parsed("server", ServerBinary::Auto, server_binary),
            data_dir: section.parsed("data_dir", ".lockkeeper/mysql".into(), |text, place| match text {
                "" => Err("is empty; must be a directory".to_owned()),
                text => Ok(resolve(text, place)),
            }),
        };
        section.finish();
        config
    }
}

fn server_binary(text: &str, place: &Location) -> Result<ServerBinary, String> {
    match text {
        "auto" => Ok(ServerBinary::Auto),
        "mysql" => Ok(ServerBinary::Mysql),
        "mariadb" => Ok(ServerBinary::Mariadb),
        path if path.contains('/') => values::file(path, place).map(ServerBinary::Path),
        other => {
            Err(format!("is `{other}`; must be \"auto\", \"mysql\", \"mariadb\" or the path of a mysqld"))
        }
    }
}

/// `None` for the private server. One text may name several servers, because an environment variable holds only one
/// text.
fn server_urls(texts: &[&str]) -> Result<Option<Vec<String>>, String> {
    if texts == ["managed"] {
        return Ok(None);
    }
    let urls: Vec<String> = texts.iter().flat_map(|text| split_urls(text)).collect();
    if !(1..=MAX_SERVERS).contains(&urls.len()) {
        return Err(format!("names {} servers; must name 1 to {MAX_SERVERS}", urls.len()));
    }
    for (n, url) in urls.iter().enumerate() {
        let of_several = if urls.len() > 1 { format!("server {}: ", n + 1) } else { String::new() };
        check_url(url).map_err(|what| format!("{of_several}{what}"))?;
        if urls[..n].contains(url) {
            return Err(format!("server {} is in the list twice", n + 1));
        }
    }
    Ok(Some(urls))
}

/// Splits at the commas that are followed by another URL, because a password may contain commas.
fn split_urls(text: &str) -> Vec<String> {
    let mut urls: Vec<String> = Vec::new();
    for part in text.split(',') {
        match urls.last_mut() {
            Some(last) if !part.trim_start().starts_with("mysql://") => *last = format!("{last},{part}"),
            _ => urls.push(part.trim_start().to_owned()),
        }
    }
    urls.into_iter().map(|url| url.trim_end().to_owned()).collect()
}

/// Checks one URL. The text may contain a password, so no message repeats it.
pub(super) fn check_url(text: &str) -> Result<(), String> {
    if text == "managed" {
        return Err("\"managed\" cannot be one of several servers".to_owned());
    }
    let opts = mysql_async::Opts::from_url(text).map_err(|error| {
        format!("must be \"managed\" or like mysql://user:pass@host:3306/lockkeeper: {error}")
    })?;
    check_parameters(text)?;
    match opts.db_name() {
        Some(name) if !name.is_empty() => Ok(()),
        _ => Err("names no database; must be like mysql://user:pass@host:3306/lockkeeper".to_owned()),
    }
}
