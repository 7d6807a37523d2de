//! config.toml, checked.
//!
//! `raw` mirrors the file; this module turns it into types that can only hold valid values, and
//! reports every fault at once, with file and line.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

mod fault;
mod guard;
mod raw;
mod reader;
#[cfg(test)]
mod tests;

pub use fault::{Fault, Location};
pub use guard::{
    Fit, GuardConfig, GuardLock, GuardRoute, MAX_SEEN_BYTES, Matched, Part, PathPattern, Template, TlsFiles,
    UpstreamLimits, naming,
};
pub use reader::Env;

/// Everything that can be configured. [`Config::default`] is what `lockkeeper serve` runs on when
/// there is no file.
#[derive(Clone, Debug)]
pub struct Config {
    pub store: StoreConfig,
    /// The stores of the primitive `quorum`, sorted by name: none, or three to nine.
    pub stores: Vec<MemberConfig>,
    /// How long an undecided majority waits for those who have not answered.
    pub quorum_patience: Duration,
    pub api: SocketAddr,
    pub admin: SocketAddr,
    pub http: HttpLimits,
    pub limits: Limits,
    pub engine: EngineLimits,
    pub fleet: FleetConfig,
    /// Never empty; sorted by name; one is named `default`.
    pub policies: Vec<PolicyConfig>,
    /// In the order of the file; the first match wins, and what matches none goes to `default`.
    pub routes: Vec<Route>,
    /// Listeners whose requests are passed on to an application, under locks.
    pub guards: Vec<GuardConfig>,
    pub upstreams: UpstreamLimits,
    pub log: LogConfig,
    /// Threads that serve requests.
    pub threads: usize,
    /// How long a proxy that is to stop goes on as before, and is not ready.
    pub grace: Duration,
    /// The longest that a shutdown waits for requests that are under way.
    pub drain: Duration,
    /// The file that was read.
    pub file: Option<PathBuf>,
    /// What should be said in the log: environment variables that look like ours and are not.
    pub warnings: Vec<String>,
}

impl Config {
    /// The file that is read where none is named, if it is there.
    pub const DEFAULT_PATH: &str = "config.toml";

    /// Reads a file, or where there is none, only the environment. Every fault is reported.
    pub fn load(path: Option<&Path>, env: &Env) -> Result<Config, Vec<Fault>> {
        let default = Path::new(Config::DEFAULT_PATH);
        let (path, text) = match path {
            Some(path) => (path, std::fs::read_to_string(path)),
            None if default.exists() => (default, std::fs::read_to_string(default)),
            None => (default, Ok(String::new())),
        };
        let text = text.map_err(|error| {
            vec![Fault { place: Location::File(path.to_owned()), what: format!("cannot be read: {error}") }]
        })?;
        let file = path.exists().then(|| path.to_owned());
        Ok(Config { file, ..raw::parse(path, &text, env)? })
    }
}

/// The environment of this process, as [`Config::load`] takes it.
pub fn process_env() -> Env {
    let ours = std::env::vars_os().filter_map(|(name, value)| {
        let name = name.into_string().ok().filter(|name| name.starts_with(reader::ENV_PREFIX))?;
        // What is not UTF-8 is no valid value of anything, and is reported as such.
        Some((name, value.to_string_lossy().into_owned()))
    });
    ours.collect()
}

#[derive(Clone, Debug)]
pub struct StoreConfig {
    pub server: ServerChoice,
    /// Connections for acquires and releases: keys are spread over them by hash. 1 to 64.
    pub lanes: usize,
    /// Connections for renewals. 1 to 16.
    pub renewal_lanes: usize,
    /// The most operations that one transaction carries. 1 to 2,048.
    pub batch: usize,
    /// The most operations that may wait for a lane, over all lanes.
    pub max_queued: usize,
    /// Connections that hold row locks, one for each lease of the primitive `row`. 1 to 1,024.
    pub row_connections: usize,
    /// How long a call may wait for the store before it is answered 503.
    pub timeout: Duration,
    /// Refuse to start on settings that can lose a committed grant, instead of warning.
    pub require_durable: bool,
    /// Rows that nobody has held for this long are deleted; their tokens are not given out again.
    pub clean_after: Duration,
}

/// One store of a quorum.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberConfig {
    pub name: String,
    /// As one of [`ServerChoice::Urls`].
    pub url: String,
}

#[derive(Clone, Debug)]
pub enum ServerChoice {
    /// Servers that somebody else runs, the one that is liked best first:
    /// `mysql://user:pass@host:3306/database`, or with `?socket=/path`. 1 to 16. With several, the one
    /// that is the primary is found.
    Urls(Vec<String>),
    /// A private server that lives and dies with the proxy.
    Managed(ManagedConfig),
}

#[derive(Clone, Debug)]
pub struct ManagedConfig {
    pub binary: ServerBinary,
    pub data_dir: PathBuf,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServerBinary {
    Auto,
    Mysql,
    Mariadb,
    Path(PathBuf),
}

/// Limits of what HTTP clients may send and hold.
#[derive(Clone, Debug)]
pub struct HttpLimits {
    pub max_connections: usize,
    pub max_header_bytes: usize,
    pub max_body_bytes: usize,
    /// From the first byte of a request to the end of its headers; also how long a new connection
    /// may be silent.
    pub header_timeout: Duration,
    /// From the end of the headers to the end of the body.
    pub body_timeout: Duration,
    /// How long a connection is kept after an answer.
    pub idle_timeout: Duration,
    /// Requests at once on one HTTP/2 connection.
    pub max_streams: u32,
    /// Names by which clients may reach the API and the admin API, beside addresses and `localhost`.
    pub hosts: Vec<String>,
}

/// Limits of what is locked. Every value that a policy returns is clamped to them.
#[derive(Clone, Debug)]
pub struct Limits {
    pub max_resource_bytes: usize,
    pub max_owner_bytes: usize,
    pub max_request_id_bytes: usize,
    pub max_labels: usize,
    pub max_label_bytes: usize,
    pub max_keys: usize,
    pub max_key_bytes: usize,
    pub min_ttl_ms: u32,
    pub max_ttl_ms: u32,
    pub max_wait_ms: u32,
    /// Of one key.
    pub max_waiters: u32,
    /// Of the whole proxy.
    pub max_waiters_total: usize,
    pub max_permits: u32,
    pub max_hold_ms: u32,
    pub max_lock_delay_ms: u32,
    /// How long the outcome of a `once` is kept.
    pub max_keep_ms: u32,
    /// Of an outcome, and of a value that is committed with a version.
    pub max_value_bytes: usize,
    /// Subtracted from what a holder is told, for clocks that run at different speeds: parts per
    /// thousand of the lease.
    pub drift_per_mille: u32,
    pub watch_buffer: usize,
}

/// What one policy call may use.
#[derive(Clone, Debug)]
pub struct EngineLimits {
    pub fuel: u64,
    pub time: Duration,
    pub memory_bytes: usize,
    pub max_component_bytes: usize,
    /// Bytes that one answer may have.
    pub max_answer_bytes: usize,
    /// Calls that run at the same time.
    pub instances: u32,
    /// After this many faults in a row a hook is not asked for `suspend`.
    pub faults_to_suspend: u32,
    pub suspend: Duration,
}

/// The proxies that share a store.
#[derive(Clone, Debug)]
pub struct FleetConfig {
    /// Where others wake this proxy's waiters.
    pub listen: SocketAddr,
    /// Where they reach that, if it is another address.
    pub advertise: Option<SocketAddr>,
    /// How often a proxy tells the others that it lives.
    pub beat: Duration,
}

#[derive(Clone, Debug)]
pub struct PolicyConfig {
    pub name: String,
    pub source: PolicySource,
    pub settings: serde_json::Map<String, serde_json::Value>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PolicySource {
    /// `builtin:default`, `builtin:fair-groups`, `builtin:backoff`.
    Builtin(String),
    /// Watched, and loaded again when it changes.
    File(PathBuf),
}

/// Resources whose name matches go to a policy. `*` stands for any text, also across `/`.
#[derive(Clone, Debug)]
pub struct Route {
    pub resource: String,
    pub policy: String,
}

impl Route {
    pub fn matches(&self, resource: &str) -> bool {
        let mut parts = self.resource.split('*');
        let first = parts.next().unwrap_or_default();
        let Some(mut rest) = resource.strip_prefix(first) else { return false };
        let mut parts = parts.peekable();
        if parts.peek().is_none() {
            return rest.is_empty();
        }
        while let Some(part) = parts.next() {
            if parts.peek().is_none() {
                return rest.ends_with(part);
            }
            let Some(at) = rest.find(part) else { return false };
            rest = &rest[at + part.len()..];
        }
        true
    }
}

#[derive(Clone, Debug)]
pub struct LogConfig {
    pub json: bool,
    /// A `tracing` filter, e.g. `info` or `lockkeeper=debug`.
    pub filter: String,
}

/// More workers than that wake each other more than they help: an operation waits for the server's
/// disk nearly all of its time.
fn half_of_the_cores() -> usize {
    std::thread::available_parallelism().map_or(1, |cores| (cores.get() / 2).max(1))
}

impl Default for Config {
    fn default() -> Config {
        Config {
            store: StoreConfig::default(),
            stores: Vec::new(),
            quorum_patience: Duration::from_millis(500),
            api: SocketAddr::from(([127, 0, 0, 1], 7070)),
            admin: SocketAddr::from(([127, 0, 0, 1], 7071)),
            http: HttpLimits::default(),
            limits: Limits::default(),
            engine: EngineLimits::default(),
            fleet: FleetConfig {
                listen: SocketAddr::from(([127, 0, 0, 1], 0)),
                advertise: None,
                beat: Duration::from_secs(1),
            },
            policies: vec![PolicyConfig {
                name: "default".into(),
                source: PolicySource::Builtin("default".into()),
                settings: serde_json::Map::new(),
            }],
            routes: Vec::new(),
            guards: Vec::new(),
            upstreams: UpstreamLimits::default(),
            log: LogConfig { json: false, filter: "info".into() },
            threads: half_of_the_cores(),
            grace: Duration::ZERO,
            drain: Duration::from_secs(10),
            file: None,
            warnings: Vec::new(),
        }
    }
}

impl Default for StoreConfig {
    fn default() -> StoreConfig {
        StoreConfig {
            server: ServerChoice::Managed(ManagedConfig {
                binary: ServerBinary::Auto,
                data_dir: ".lockkeeper/mysql".into(),
            }),
            lanes: 1,
            renewal_lanes: 1,
            batch: 512,
            max_queued: 100_000,
            row_connections: 16,
            timeout: Duration::from_secs(5),
            require_durable: false,
            clean_after: Duration::from_secs(3600),
        }
    }
}

impl Default for HttpLimits {
    fn default() -> HttpLimits {
        HttpLimits {
            max_connections: 20_000,
            max_header_bytes: 16 * 1024,
            max_body_bytes: 64 * 1024,
            header_timeout: Duration::from_secs(10),
            body_timeout: Duration::from_secs(10),
            idle_timeout: Duration::from_secs(75),
            max_streams: 256,
            hosts: Vec::new(),
        }
    }
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            max_resource_bytes: 512,
            max_owner_bytes: 256,
            max_request_id_bytes: 128,
            max_labels: 16,
            max_label_bytes: 256,
            max_keys: 16,
            max_key_bytes: 1024,
            min_ttl_ms: 100,
            max_ttl_ms: 3_600_000,
            max_wait_ms: 3_600_000,
            max_waiters: 20_000,
            max_waiters_total: 100_000,
            max_permits: 1024,
            max_hold_ms: 86_400_000,
            max_lock_delay_ms: 600_000,
            max_keep_ms: 604_800_000,
            max_value_bytes: 16_384,
            drift_per_mille: 2,
            watch_buffer: 4096,
        }
    }
}

impl Default for EngineLimits {
    fn default() -> EngineLimits {
        EngineLimits {
            fuel: 10_000_000,
            time: Duration::from_millis(10),
            memory_bytes: 16 << 20,
            max_component_bytes: 2 << 20,
            max_answer_bytes: 64 * 1024,
            instances: 64,
            faults_to_suspend: 10,
            suspend: Duration::from_secs(1),
        }
    }
}
