//! The validated configuration, read from config.toml.
//!
//! `raw` reads the keys of the file into the types of this module, which can only hold valid values. All faults are
//! reported at once, with file and line.

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

/// The whole configuration. [`Config::default`] is the configuration of `lockkeeper serve` without a file.
#[derive(Clone, Debug)]
pub struct Config {
    /// The store that keeps the locks.
    pub store: StoreConfig,
    /// The stores of the primitive `quorum`, sorted by name: none, or three to nine.
    pub stores: Vec<MemberConfig>,
    /// How long a quorum operation whose majority is undecided waits for the stores that have not answered.
    pub quorum_patience: Duration,
    /// The listen address of the API that applications use.
    pub api: SocketAddr,
    /// The listen address of the admin API: health, metrics, and the operators' requests.
    pub admin: SocketAddr,
    /// Limits on HTTP clients, for each listener.
    pub http: HttpLimits,
    /// Limits on locks and on the requests for them.
    pub limits: Limits,
    /// Limits on one call of a policy.
    pub engine: EngineLimits,
    /// How the proxies of the store find each other.
    pub fleet: FleetConfig,
    /// Sorted by name. Never empty: there is always a policy named `default`.
    pub policies: Vec<PolicyConfig>,
    /// In the order of the file. The first match wins; a resource that matches no route goes to `default`.
    pub routes: Vec<Route>,
    /// Listeners that pass requests on to an application, under locks.
    pub guards: Vec<GuardConfig>,
    /// Settings that all upstreams of guarded routes share.
    pub upstreams: UpstreamLimits,
    /// The format and filter of the log.
    pub log: LogConfig,
    /// The number of threads that serve requests.
    pub threads: usize,
    /// How long a proxy that is told to stop keeps serving while it reports that it is not ready.
    pub grace: Duration,
    /// The longest time that a shutdown waits for requests in progress.
    pub drain: Duration,
    /// The file that was read, if any.
    pub file: Option<PathBuf>,
    /// Warnings for the log, for example about environment variables that begin with `LOCKKEEPER_` and name no key.
    pub warnings: Vec<String>,
}

impl Config {
    /// The file that is read if no other file is named and this one exists.
    pub const DEFAULT_PATH: &str = "config.toml";

    /// Reads a file, or only the environment if there is no file. Every fault is reported.
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

/// The variables of this process's environment that [`Config::load`] reads.
pub fn process_env() -> Env {
    let ours = std::env::vars_os().filter_map(|(name, value)| {
        let name = name.into_string().ok().filter(|name| name.starts_with(reader::ENV_PREFIX))?;
        // Text that is not UTF-8 is no valid value of any key, so its key reports it.
        Some((name, value.to_string_lossy().into_owned()))
    });
    ours.collect()
}

/// The connection to the store: the MySQL or MariaDB server.
#[derive(Clone, Debug)]
pub struct StoreConfig {
    /// The server to connect to, or to start.
    pub server: ServerChoice,
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

/// One store of a quorum.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberConfig {
    /// The name of the store: NAME in the table `[stores.NAME]`.
    pub name: String,
    /// A URL as in [`ServerChoice::Urls`].
    pub url: String,
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

/// Limits on the requests and connections of HTTP clients.
#[derive(Clone, Debug)]
pub struct HttpLimits {
    /// The most open connections of a listener. A further connection is answered with 503 and closed.
    pub max_connections: usize,
    /// The size limit of a request line with its headers. A longer head is answered with 431.
    pub max_header_bytes: usize,
    /// The size limit of a request body. A longer body is answered with 413. Guarded routes have no such limit.
    pub max_body_bytes: usize,
    /// The time from the first byte of a request to the end of its headers. Also how long a new connection may be
    /// silent.
    pub header_timeout: Duration,
    /// The time from the end of the headers to the end of the body.
    pub body_timeout: Duration,
    /// How long an idle connection is kept after an answer.
    pub idle_timeout: Duration,
    /// Concurrent requests on one HTTP/2 connection.
    pub max_streams: u32,
    /// Host names, besides IP addresses and `localhost`, by which clients may reach the API and the admin API.
    pub hosts: Vec<String>,
}

/// Limits on locks and on the requests for them. Every value that a policy returns is clamped to these limits.
#[derive(Clone, Debug)]
pub struct Limits {
    /// The size limit of the name of a resource.
    pub max_resource_bytes: usize,
    /// The size limit of the name of an owner.
    pub max_owner_bytes: usize,
    /// The size limit of a request id.
    pub max_request_id_bytes: usize,
    /// The most labels of a request or a plan.
    pub max_labels: usize,
    /// The size limit of a label's name, of a label's value, and of a group.
    pub max_label_bytes: usize,
    /// The most keys of one lease.
    pub max_keys: usize,
    /// The size limit of a key.
    pub max_key_bytes: usize,
    /// The shortest lease.
    pub min_ttl_ms: u32,
    /// The longest lease. After a fail-over, no lease is granted until leases of this length have ended.
    pub max_ttl_ms: u32,
    /// The longest time that an acquire may wait.
    pub max_wait_ms: u32,
    /// The most waiters for one key.
    pub max_waiters: u32,
    /// The most waiters on this proxy.
    pub max_waiters_total: usize,
    /// The most permits of a key, and of a request.
    pub max_permits: u32,
    /// The longest time that the proxy keeps a lease alive.
    pub max_hold_ms: u32,
    /// The longest time that a key stays taken after a lease that ended without a release.
    pub max_lock_delay_ms: u32,
    /// The longest time that the outcome of a `once` is kept.
    pub max_keep_ms: u32,
    /// The size limit of an outcome, and of a value that is committed with a version.
    pub max_value_bytes: usize,
    /// The part of a lease, in thousandths, that is subtracted from the time a holder is promised, because clocks run
    /// at different speeds.
    pub drift_per_mille: u32,
    /// How many events a client of `/v1/watch` may lag behind before it misses events.
    pub watch_buffer: usize,
}

/// Limits on one call of a policy.
#[derive(Clone, Debug)]
pub struct EngineLimits {
    /// The approximate number of WebAssembly instructions.
    pub fuel: u64,
    /// The longest duration of the call.
    pub time: Duration,
    /// The size limit of the linear memory.
    pub memory_bytes: usize,
    /// The size limit of a component file.
    pub max_component_bytes: usize,
    /// The size limit of one answer.
    pub max_answer_bytes: usize,
    /// The most concurrent calls.
    pub instances: u32,
    /// After this many consecutive faults, a hook is not called for the time `suspend`.
    pub faults_to_suspend: u32,
    /// How long a hook is not called after `faults_to_suspend` faults.
    pub suspend: Duration,
}

/// How the proxies of one store find each other.
#[derive(Clone, Debug)]
pub struct FleetConfig {
    /// The address at which other proxies notify this proxy of its waiters' turns.
    pub listen: SocketAddr,
    /// The address at which other proxies reach `listen`, if it differs.
    pub advertise: Option<SocketAddr>,
    /// The interval of this proxy's heartbeats in the store.
    pub beat: Duration,
}

/// A policy: its component and its settings.
#[derive(Clone, Debug)]
pub struct PolicyConfig {
    /// The policy's name: 1 to 64 characters of `a-z`, `0-9`, `-` and `_`.
    pub name: String,
    /// Where the component comes from.
    pub source: PolicySource,
    /// The policy's settings table, which the component checks.
    pub settings: serde_json::Map<String, serde_json::Value>,
}

/// The source of a policy's component.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PolicySource {
    /// `builtin:default`, `builtin:fair-groups`, `builtin:backoff`.
    Builtin(String),
    /// A file that is watched, and loaded again when it changes.
    File(PathBuf),
}

/// Assigns resources to a policy by name. `*` matches any text, including `/`.
#[derive(Clone, Debug)]
pub struct Route {
    /// The pattern for the names of resources.
    pub resource: String,
    /// The name of the policy that decides about these resources.
    pub policy: String,
}

impl Route {
    /// Whether the route's pattern matches the whole name of the resource.
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

/// The format and filter of the log.
#[derive(Clone, Debug)]
pub struct LogConfig {
    /// Whether the log is JSON instead of text.
    pub json: bool,
    /// A `tracing` filter, e.g. `info` or `lockkeeper=debug`.
    pub filter: String,
}

/// The default number of worker threads. An operation spends nearly all of its time waiting for the server's disk, so
/// more workers cost more in wake-ups than they gain.
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
