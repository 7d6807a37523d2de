//! The keys of config.toml: their names, bounds and defaults.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use toml::de::DeTable;

use super::fault::{Fault, Location, suggestion};
use super::reader::{Document, Env, Section, resolve};
use super::{
    Config, EngineLimits, FleetConfig, HttpLimits, Limits, LogConfig, ManagedConfig, MemberConfig,
    PolicyConfig, PolicySource, Route, ServerBinary, ServerChoice, StoreConfig, guard,
};
use crate::lock::Key;

/// Environment variables of the command line, which are no keys of the configuration.
const OTHER_ENV: [&str; 5] =
    ["LOCKKEEPER_SERVER", "LOCKKEEPER_ADMIN", "LOCKKEEPER_TOKEN", "LOCKKEEPER_KEY", "LOCKKEEPER_LEASE_ID"];
const BUILTINS: [&str; 3] = ["default", "fair-groups", "backoff"];
const MAX_NAME: usize = 64;
/// The rule for names of policies, stores and applications, for error messages.
pub(super) const NAME_RULE: &str = "a name must have 1 to 64 characters, each one of a-z, 0-9, - and _";
/// How many stores a quorum may have.
const QUORUM: std::ops::RangeInclusive<usize> = 3..=9;
const MAX_SERVERS: usize = 16;
/// The longest duration that any key accepts, in milliseconds.
pub(super) const MAX_DURATION_MS: u64 = 3_600_000;

/// Parses and checks the text of a configuration. Faults name `file`, and relative paths start from it.
pub fn parse(file: &Path, text: &str, env: &Env) -> Result<Config, Vec<Fault>> {
    let (table, errors) = DeTable::parse_recoverable(text);
    let document = Document::new(file, text, env);
    for error in &errors {
        document.syntax(error);
    }
    let top = document.top(table.get_ref());
    let config = read(&top);
    top.finish();
    let mut warnings = document.unknown_env(&OTHER_ENV);
    match document.into_faults() {
        faults if faults.is_empty() => {
            warnings.extend(config.warnings.iter().cloned());
            Ok(Config { warnings, ..config })
        }
        faults => Err(faults),
    }
}

/// Reads all sections.
pub(super) fn read(top: &Section<'_>) -> Config {
    let defaults = Config::default();
    let store = store(&top.section("store"));
    let stores = stores(top, &store.server);
    let quorum = top.section("quorum");
    let quorum_patience = milliseconds(&quorum, "patience_ms", 10..=60_000, defaults.quorum_patience);
    quorum.finish();
    let (api, admin) = listeners(top, &defaults);
    let http = http(&top.section("http"));
    let limits = limits(&top.section("limits"));
    let engine = engine(&top.section("engine"));
    let fleet = fleet(&top.section("fleet"), &defaults.fleet);
    let policies = policies(top, defaults.policies);
    let routes = routes(top, &policies, &limits);
    let upstreams = guard::upstreams(&top.section("upstreams"));
    let (guards, warnings) = guard::guards(top, &policies, &limits, &[api, admin]);
    let log = log(&top.section("log"), defaults.log);
    let threads = threads(&top.section("runtime"), defaults.threads);
    let shutdown = top.section("shutdown");
    let grace = milliseconds(&shutdown, "grace_ms", 0..=600_000, defaults.grace);
    let drain = milliseconds(&shutdown, "drain_ms", 0..=600_000, defaults.drain);
    shutdown.finish();
    Config {
        store,
        stores,
        quorum_patience,
        api,
        admin,
        http,
        limits,
        engine,
        fleet,
        policies,
        routes,
        guards,
        upstreams,
        log,
        threads,
        grace,
        drain,
        file: None,
        warnings,
    }
}

fn store(section: &Section<'_>) -> StoreConfig {
    let defaults = StoreConfig::default();
    let managed = section.section("managed");
    let managed_config = ManagedConfig {
        binary: managed.parsed("server", ServerBinary::Auto, server_binary),
        data_dir: managed.parsed("data_dir", ".lockkeeper/mysql".into(), |text, place| match text {
            "" => Err("is empty; must be a directory".to_owned()),
            text => Ok(resolve(text, place)),
        }),
    };
    managed.finish();
    let config = StoreConfig {
        server: section
            .texts("url", server_urls)
            .flatten()
            .map_or(ServerChoice::Managed(managed_config), ServerChoice::Urls),
        lanes: section.integer("lanes", 1..=64, defaults.lanes),
        renewal_lanes: section.integer("renewal_lanes", 1..=16, defaults.renewal_lanes),
        batch: section.integer("batch", 1..=2_048, defaults.batch),
        max_queued: section.integer("max_queued", 1..=1_000_000, defaults.max_queued),
        row_connections: section.integer("row_connections", 1..=1_024, defaults.row_connections),
        timeout: milliseconds(section, "timeout_ms", 100..=60_000, defaults.timeout),
        require_durable: section.boolean("require_durable", defaults.require_durable),
        clean_after: Duration::from_secs(section.integer(
            "clean_after_s",
            60..=31_536_000,
            defaults.clean_after.as_secs(),
        )),
    };
    section.finish();
    config
}

/// The stores of a quorum. Each must be a different server: otherwise one failure takes several stores down.
fn stores(top: &Section<'_>, main: &ServerChoice) -> Vec<MemberConfig> {
    let mut stores: Vec<MemberConfig> = Vec::new();
    let named = top.named("stores");
    let count = named.len();
    for (name, section) in named {
        if !is_plain_name(name) {
            section.complain_of_it(NAME_RULE);
        }
        if !QUORUM.contains(&count) {
            section.complain_of_it(format!(
                "is one of {count} stores; a quorum has {} to {}",
                QUORUM.start(),
                QUORUM.end()
            ));
        }
        let url = section.required("url", |text, _| check_url(text).map(|()| text.to_owned()));
        if let Some(url) = url {
            let main = matches!(main, ServerChoice::Urls(main) if main.contains(&url));
            if main || stores.iter().any(|store| store.url == url) {
                section.complain("url", "is given twice; each store of a quorum is a server of its own");
            }
            stores.push(MemberConfig { name: name.to_owned(), url });
        }
        section.finish();
    }
    stores.sort_by(|a, b| a.name.cmp(&b.name));
    stores
}

fn listeners(top: &Section<'_>, defaults: &Config) -> (SocketAddr, SocketAddr) {
    let (api, admin) = (top.section("api"), top.section("admin"));
    let api_address = api.parsed("listen", defaults.api, address);
    let admin_address = admin.parsed("listen", defaults.admin, address);
    if api_address == admin_address && api_address.port() != 0 {
        admin.complain("listen", format!("is {admin_address}, which is api.listen, too"));
    }
    api.finish();
    admin.finish();
    (api_address, admin_address)
}

fn fleet(section: &Section<'_>, defaults: &FleetConfig) -> FleetConfig {
    let fleet = FleetConfig {
        listen: section.parsed("listen", defaults.listen, address),
        advertise: section.parsed("advertise", None, |text, place| match text {
            "" => Ok(None),
            text => address(text, place).map(Some),
        }),
        beat: milliseconds(section, "beat_ms", 250..=4_000, defaults.beat),
    };
    let unreachable = |at: SocketAddr| at.ip().is_unspecified() || at.port() == 0;
    if fleet.listen.ip().is_unspecified() && fleet.advertise.is_none() {
        section.complain(
            "listen",
            "is every address of this machine: say with `advertise` which one others use",
        );
    }
    if fleet.advertise.is_some_and(unreachable) {
        section.complain("advertise", "must be an address and a port that other proxies can connect to");
    }
    section.finish();
    fleet
}

fn http(section: &Section<'_>) -> HttpLimits {
    let defaults = HttpLimits::default();
    let limits = HttpLimits {
        max_connections: section.integer("max_connections", 1..=1_000_000, defaults.max_connections),
        max_header_bytes: section.integer("max_header_bytes", 1_024..=1_048_576, defaults.max_header_bytes),
        max_body_bytes: section.integer("max_body_bytes", 1_024..=16_777_216, defaults.max_body_bytes),
        header_timeout: milliseconds(
            section,
            "header_timeout_ms",
            10..=MAX_DURATION_MS,
            defaults.header_timeout,
        ),
        body_timeout: milliseconds(section, "body_timeout_ms", 10..=MAX_DURATION_MS, defaults.body_timeout),
        idle_timeout: milliseconds(section, "idle_timeout_ms", 10..=MAX_DURATION_MS, defaults.idle_timeout),
        max_streams: section.integer("max_streams", 1..=100_000, defaults.max_streams),
        hosts: section.texts("hosts", host_names).unwrap_or(defaults.hosts),
    };
    section.finish();
    limits
}

fn host_names(names: &[&str]) -> Result<Vec<String>, String> {
    let is_name = |name: &&str| {
        let part = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
        (1..=253).contains(&name.len()) && name.bytes().all(part)
    };
    match names.iter().find(|name| !is_name(name)) {
        Some(name) => Err(format!("has {name:?}, which is not a host name; leave out scheme and port")),
        None => Ok(names.iter().map(|name| (*name).to_owned()).collect()),
    }
}

fn limits(section: &Section<'_>) -> Limits {
    let defaults = Limits::default();
    let limits = Limits {
        max_resource_bytes: section.integer("max_resource_bytes", 1..=4_096, defaults.max_resource_bytes),
        max_owner_bytes: section.integer("max_owner_bytes", 32..=1_024, defaults.max_owner_bytes),
        max_request_id_bytes: section.integer(
            "max_request_id_bytes",
            16..=1_024,
            defaults.max_request_id_bytes,
        ),
        max_labels: section.integer("max_labels", 0..=256, defaults.max_labels),
        max_label_bytes: section.integer("max_label_bytes", 1..=4_096, defaults.max_label_bytes),
        max_keys: section.integer("max_keys", 1..=16, defaults.max_keys),
        max_key_bytes: section.integer("max_key_bytes", 1..=Key::MAX_BYTES as u64, defaults.max_key_bytes),
        min_ttl_ms: section.integer("min_ttl_ms", 10..=DAY_MS, defaults.min_ttl_ms),
        max_ttl_ms: section.integer("max_ttl_ms", 10..=DAY_MS, defaults.max_ttl_ms),
        max_wait_ms: section.integer("max_wait_ms", 0..=DAY_MS, defaults.max_wait_ms),
        max_waiters: section.integer("max_waiters", 0..=1_000_000, defaults.max_waiters),
        max_waiters_total: section.integer("max_waiters_total", 0..=10_000_000, defaults.max_waiters_total),
        max_permits: section.integer("max_permits", 1..=1_000_000, defaults.max_permits),
        max_hold_ms: section.integer("max_hold_ms", 100..=30 * DAY_MS, defaults.max_hold_ms),
        max_lock_delay_ms: section.integer("max_lock_delay_ms", 0..=DAY_MS, defaults.max_lock_delay_ms),
        max_keep_ms: section.integer("max_keep_ms", 1_000..=30 * DAY_MS, defaults.max_keep_ms),
        max_value_bytes: section.integer("max_value_bytes", 64..=1_048_576, defaults.max_value_bytes),
        drift_per_mille: section.integer("drift_per_mille", 0..=500, defaults.drift_per_mille),
        watch_buffer: section.integer("watch_buffer", 16..=1_048_576, defaults.watch_buffer),
    };
    if limits.min_ttl_ms > limits.max_ttl_ms {
        let what =
            format!("is {}, over limits.max_ttl_ms, which is {}", limits.min_ttl_ms, limits.max_ttl_ms);
        section.complain("min_ttl_ms", what);
    }
    section.finish();
    limits
}

const DAY_MS: u64 = 86_400_000;

fn engine(section: &Section<'_>) -> EngineLimits {
    let defaults = EngineLimits::default();
    let limits = EngineLimits {
        fuel: section.integer("fuel", 10_000..=1_000_000_000_000, defaults.fuel),
        time: milliseconds(section, "time_ms", 1..=10_000, defaults.time),
        memory_bytes: section.integer("memory_bytes", 65_536..=268_435_456, defaults.memory_bytes),
        max_component_bytes: section.integer(
            "max_component_bytes",
            1_024..=67_108_864,
            defaults.max_component_bytes,
        ),
        max_answer_bytes: section.integer("max_answer_bytes", 1_024..=1_048_576, defaults.max_answer_bytes),
        instances: section.integer("instances", 1..=1_000, defaults.instances),
        faults_to_suspend: section.integer("faults_to_suspend", 1..=1_000_000, defaults.faults_to_suspend),
        suspend: milliseconds(section, "suspend_ms", 0..=MAX_DURATION_MS, defaults.suspend),
    };
    section.finish();
    limits
}

/// The policies by name. If the file has no policy named `default`, the built-in one is added.
fn policies(top: &Section<'_>, builtin: Vec<PolicyConfig>) -> Vec<PolicyConfig> {
    let mut policies = Vec::new();
    for (name, section) in top.named("policies") {
        if !is_plain_name(name) {
            section.complain_of_it(NAME_RULE);
        }
        if name == guard::NO_LOCK {
            section.complain_of_it("has the name that stands for a guarded route without a lock");
        }
        let source = section.required("path", policy_source);
        let settings = section.free("settings");
        section.finish();
        // If the source is invalid, the name still counts, because routes may use it.
        let source = source.unwrap_or_else(|| PolicySource::Builtin("default".into()));
        policies.push(PolicyConfig { name: name.to_owned(), source, settings });
    }
    if !policies.iter().any(|policy| policy.name == "default") {
        policies.extend(builtin);
    }
    policies.sort_by(|a, b| a.name.cmp(&b.name));
    policies
}

fn routes(top: &Section<'_>, policies: &[PolicyConfig], limits: &Limits) -> Vec<Route> {
    let names: Vec<&str> = policies.iter().map(|policy| policy.name.as_str()).collect();
    let read = |section: Section<'_>| {
        let resource = section.required("resource", |text, _| match text.len() {
            length if (1..=limits.max_resource_bytes).contains(&length) => Ok(text.to_owned()),
            length => Err(format!("has {length} bytes; must have 1 to {} bytes", limits.max_resource_bytes)),
        });
        let policy = section.required("policy", |text, _| {
            if names.contains(&text) {
                return Ok(text.to_owned());
            }
            let hint = suggestion(text, &names);
            Err(format!("no policy is named `{text}`; there are {}{hint}", names.join(", ")))
        });
        section.finish();
        Some(Route { resource: resource?, policy: policy? })
    };
    top.list("routes").into_iter().filter_map(read).collect()
}

/// 0 stands for the default.
fn threads(section: &Section<'_>, default: usize) -> usize {
    let threads = section.integer("threads", 0..=1_024, 0);
    section.finish();
    if threads == 0 { default } else { threads }
}

fn log(section: &Section<'_>, defaults: LogConfig) -> LogConfig {
    let log = LogConfig {
        json: section.parsed("format", defaults.json, |text, _| match text {
            "text" => Ok(false),
            "json" => Ok(true),
            other => Err(format!("is `{other}`; must be \"text\" or \"json\"")),
        }),
        filter: section.parsed("filter", defaults.filter, |text, _| {
            match tracing_subscriber::EnvFilter::try_new(text) {
                Ok(_) => Ok(text.to_owned()),
                Err(error) => Err(format!("`{text}` is not a log filter: {error}")),
            }
        }),
    };
    section.finish();
    log
}

/// Reads a duration in milliseconds.
pub(super) fn milliseconds(
    section: &Section<'_>,
    key: &'static str,
    range: std::ops::RangeInclusive<u64>,
    default: Duration,
) -> Duration {
    let default = u64::try_from(default.as_millis()).unwrap_or(u64::MAX);
    Duration::from_millis(section.integer(key, range, default))
}

/// Parses an address with a port.
pub(super) fn address(text: &str, _place: &Location) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| format!("`{text}` is not an address; must be like 127.0.0.1:7070 or [::1]:7070"))
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
fn check_url(text: &str) -> Result<(), String> {
    if text == "managed" {
        return Err("\"managed\" cannot be one of several servers".to_owned());
    }
    let opts = mysql_async::Opts::from_url(text).map_err(|error| {
        format!("must be \"managed\" or like mysql://user:pass@host:3306/lockkeeper: {error}")
    })?;
    match opts.db_name() {
        Some(name) if !name.is_empty() => Ok(()),
        _ => Err("names no database; must be like mysql://user:pass@host:3306/lockkeeper".to_owned()),
    }
}

fn server_binary(text: &str, place: &Location) -> Result<ServerBinary, String> {
    match text {
        "auto" => Ok(ServerBinary::Auto),
        "mysql" => Ok(ServerBinary::Mysql),
        "mariadb" => Ok(ServerBinary::Mariadb),
        path if path.contains('/') => {
            let path = resolve(path, place);
            if path.is_file() { Ok(ServerBinary::Path(path)) } else { Err(missing(&path)) }
        }
        other => {
            Err(format!("is `{other}`; must be \"auto\", \"mysql\", \"mariadb\" or the path of a mysqld"))
        }
    }
}

fn policy_source(text: &str, place: &Location) -> Result<PolicySource, String> {
    if let Some(name) = text.strip_prefix("builtin:") {
        if BUILTINS.contains(&name) {
            return Ok(PolicySource::Builtin(name.to_owned()));
        }
        let hint = suggestion(name, &BUILTINS);
        return Err(format!("`{name}` is not built in; there are {}{hint}", BUILTINS.join(", ")));
    }
    let path = resolve(text, place);
    if path.is_file() { Ok(PolicySource::File(path)) } else { Err(missing(&path)) }
}

/// Whether a name keeps [`NAME_RULE`].
pub(super) fn is_plain_name(name: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '_';
    (1..=MAX_NAME).contains(&name.len()) && name.chars().all(is_plain)
}

fn missing(path: &Path) -> String {
    format!("there is no file {}", path.display())
}
