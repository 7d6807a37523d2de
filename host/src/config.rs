//! The validated configuration, read from config.toml.
//!
//! Each section has a file. It contains the type that the rest of the proxy sees, which can only hold valid
//! values, and a function `read` with the keys, ranges, defaults and checks. A new key needs a field and a line in
//! `read`.
//!
//! | sections | file |
//! | --- | --- |
//! | `[store]`, `[store.managed]`, `[store.tls]` | `store`; `store_tls` |
//! | `[stores.NAME]`, `[quorum]` | `quorum` |
//! | `[api]`, `[admin]`, `[health]` | `listeners`; of any listener: `listen`, its address; `tls`, its certificates |
//! | `[audit]` | `audit` |
//! | `[auth]`, and the file of principals and roles | `auth`; `jwt`: the issuers of signed tokens |
//! | `[http]` | `http` |
//! | `[limits]` | `limits` |
//! | `[engine]` | `engine` |
//! | `[policies.NAME]` | `policies` |
//! | `[[routes]]` | `routes` |
//! | `[[guard]]`, `[[guard.routes]]` | `guard`; `guard/{route,lock,pattern}`; `naming`: what names guarded requests |
//! | `[upstreams]` | `upstreams` |
//! | `[recording]` | `recording` |
//! | `[fleet]` | `fleet` |
//! | `[log]` | `log` |
//! | `[runtime]`, `[shutdown]` | `process` |
//!
//! `reader` reads the document. It tracks line numbers, applies environment variables, and collects all faults,
//! which are reported at once.

use std::path::{Path, PathBuf};

use toml::de::DeTable;

mod audit;
mod auth;
mod engine;
mod fault;
mod fleet;
mod guard;
mod http;
mod jwt;
mod limits;
mod listen;
mod listeners;
mod log;
mod naming;
mod policies;
mod process;
mod quorum;
mod reader;
mod recording;
mod routes;
mod setting;
mod store;
mod store_tls;
#[cfg(test)]
mod tests;
mod tls;
mod upstreams;
mod values;
mod wildcard;

pub use audit::AuditConfig;
pub use auth::{AuthConfig, AuthRules, PrincipalConfig, PrincipalLimits, Role, Rule, TokenConfig, Verb};
pub use engine::EngineLimits;
pub(crate) use fault::suggestion;
pub use fault::{Fault, Location};
pub use fleet::FleetConfig;
pub use guard::{
    Extension, Fit, GuardConfig, GuardLock, GuardRoute, MAX_SEEN_BYTES, Matched, Part, PathPattern, Template,
    TrustForwarded,
};
pub use http::HttpLimits;
pub use jwt::{JwtIssuer, JwtKey, JwtSubject};
pub use limits::Limits;
pub use listen::{ListenAddress, socket_path};
pub use listeners::{ApiListener, ListenerConfig};
pub use log::LogConfig;
pub use naming::naming;
pub use policies::{PolicyConfig, PolicySigners, PolicySource, PushGuard, Signer};
pub use process::{RuntimeConfig, ShutdownConfig};
pub use quorum::{MemberConfig, QuorumConfig};
pub use reader::Env;
pub use recording::{Masking, RecordingConfig};
pub use routes::Route;
pub use setting::{SettingPath, SettingPlaces};
pub use store::{ManagedConfig, ServerBinary, ServerChoice, StoreConfig};
pub use store_tls::{Authorities, StoreTls};
pub use tls::TlsFiles;
pub use upstreams::UpstreamLimits;
pub use wildcard::Wildcard;

use reader::{Document, Section};

/// Environment variables of the command line, which are no keys of the configuration.
const OTHER_ENV: [&str; 10] = [
    "LOCKKEEPER_SERVER",
    "LOCKKEEPER_ADMIN",
    "LOCKKEEPER_CREDENTIALS_FILE",
    "LOCKKEEPER_ALLOW_PLAINTEXT",
    "LOCKKEEPER_CA_FILE",
    "LOCKKEEPER_CERT_FILE",
    "LOCKKEEPER_KEY_FILE",
    "LOCKKEEPER_TOKEN",
    "LOCKKEEPER_KEY",
    "LOCKKEEPER_LEASE_ID",
];

/// The whole configuration. [`Config::default`] is the configuration of `lockkeeper serve` without a file.
#[derive(Clone, Debug)]
pub struct Config {
    /// The store that keeps the locks.
    pub store: StoreConfig,
    /// The stores of the primitive `quorum`.
    pub quorum: QuorumConfig,
    /// The listeners of the API and the admin API.
    pub listeners: ListenerConfig,
    /// Whether clients must authenticate.
    pub auth: AuthConfig,
    /// The log of refusals and of operators' actions.
    pub audit: AuditConfig,
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
    /// Settings that all upstreams of guarded routes share.
    pub upstreams: UpstreamLimits,
    /// Listeners that pass requests on to an application, under locks.
    pub guards: Vec<GuardConfig>,
    /// What is recorded of the lock requests.
    pub recording: RecordingConfig,
    /// The format and filter of the log.
    pub log: LogConfig,
    /// The threads of the process.
    pub runtime: RuntimeConfig,
    /// How the process stops.
    pub shutdown: ShutdownConfig,
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
        Ok(Config { file, ..Config::parse(path, &text, env)? })
    }

    /// Parses and checks the text of a configuration. Faults name `file`, and relative paths start from it.
    pub(crate) fn parse(file: &Path, text: &str, env: &Env) -> Result<Config, Vec<Fault>> {
        let (table, errors) = DeTable::parse_recoverable(text);
        let document = Document::new(file, text, env);
        for error in &errors {
            document.syntax(error);
        }
        let mut config = Config::read(&document.top(table.get_ref()));
        config.warnings.splice(0..0, document.unknown_env(&OTHER_ENV));
        match document.into_faults() {
            faults if faults.is_empty() => Ok(config),
            faults => Err(faults),
        }
    }

    /// Reads all sections.
    fn read(top: &Section<'_>) -> Config {
        let store = StoreConfig::read(&top.section("store"));
        let quorum = QuorumConfig::read(top, &store.server);
        let auth = AuthConfig::read(&top.section("auth"));
        let audit = AuditConfig::read(&top.section("audit"));
        let listeners = ListenerConfig::read(top, &auth);
        let http = HttpLimits::read(&top.section("http"));
        let limits = Limits::read(&top.section("limits"));
        let engine = EngineLimits::read(&top.section("engine"));
        let fleet = FleetConfig::read(&top.section("fleet"));
        let policies = policies::read(top);
        let routes = routes::read(top, &policies, &limits);
        let upstreams = UpstreamLimits::read(&top.section("upstreams"));
        let (guards, mut warnings) = guard::read(top, &policies, &limits, &listeners);
        warnings.extend(plaintext_warnings(&store, &quorum));
        let recording = RecordingConfig::read(&top.section("recording"));
        let log = LogConfig::read(&top.section("log"));
        let runtime = RuntimeConfig::read(&top.section("runtime"));
        let shutdown = ShutdownConfig::read(&top.section("shutdown"));
        top.finish();
        Config {
            store,
            quorum,
            listeners,
            auth,
            audit,
            http,
            limits,
            engine,
            fleet,
            policies,
            routes,
            upstreams,
            guards,
            recording,
            log,
            runtime,
            shutdown,
            file: None,
            warnings,
        }
    }
}

impl Default for Config {
    fn default() -> Config {
        reader::defaults(Config::read)
    }
}

fn plaintext_warnings(store: &StoreConfig, quorum: &QuorumConfig) -> Vec<String> {
    let main = match &store.server {
        ServerChoice::Urls(urls) => urls.as_slice(),
        ServerChoice::Managed(_) => &[],
    };
    let urls = main.iter().chain(quorum.members.iter().map(|member| &member.url));
    urls.filter_map(|url| store.plaintext_warning(url)).collect()
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
