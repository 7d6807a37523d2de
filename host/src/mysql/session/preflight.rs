//! The requirements for a server, and messages for operators.

use mysql_async::{DriverError, Error, IoError};
use tokio_rustls::rustls;

use crate::lock::maps::HashMap;

/// Name and value of every variable that is checked when a connection is opened. `SHOW` leaves out variables
/// that a server lacks; `SELECT @@name` would fail.
pub const VARIABLES: &str = "SHOW GLOBAL VARIABLES WHERE Variable_name IN ('version','version_comment',\
    'innodb_flush_log_at_trx_commit','sync_binlog','log_bin','binlog_format','read_only','super_read_only','server_uuid',\
    'server_uid','server_id','port','datadir','hostname','wsrep_on','group_replication_group_name',\
    'group_replication_single_primary_mode','group_replication_consistency',\
    'rpl_semi_sync_source_enabled','rpl_semi_sync_source_wait_point','rpl_semi_sync_source_timeout',\
    'rpl_semi_sync_source_wait_no_replica','rpl_semi_sync_master_wait_no_slave',\
    'rpl_semi_sync_master_enabled','rpl_semi_sync_master_wait_point','rpl_semi_sync_master_timeout');\
    SHOW GLOBAL STATUS WHERE Variable_name IN ('wsrep_ready')";

/// The message for a read-only server.
pub const READ_ONLY: &str = "the MySQL server is read-only: it is a replica or was demoted; point \
    store.url at the primary, or wait until it is writable again";

const OLDEST_MYSQL: (u32, u32) = (8, 0);
const OLDEST_MARIADB: (u32, u32) = (10, 6);
/// A day, for a source of semi-synchronous replication. By then an operator has repaired the replica.
const LONG_TIMEOUT_MS: u64 = 86_400_000;

/// A server that may be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Server {
    /// Name and version, e.g. `MySQL 9.7.4`.
    pub name: String,
    /// Identifies the server; changes at a fail-over. Each node of a Galera cluster is a server of its own:
    /// if two nodes take writes at the same time, both may confirm a write of one row, and one of the writes
    /// is lost.
    pub identity: String,
    /// Settings that weaken the guarantees of a lock, one sentence each.
    pub warnings: Vec<String>,
    /// Whether the server is a node of a Galera cluster.
    pub galera: bool,
}

/// Checks a server. The error is a sentence that says why the server cannot be used and what to do.
pub fn check(variables: &HashMap<String, String>, require_durable: bool) -> Result<Server, String> {
    let value = |name: &str| variables.get(name).map_or("", String::as_str);
    let version = value("version");
    let mariadb = version.contains("MariaDB") || value("version_comment").contains("MariaDB");
    let product = if mariadb { "MariaDB" } else { "MySQL" };
    let number = version.split(['-', '+']).next().unwrap_or_default();
    let name = format!("{product} {number}");
    let oldest = if mariadb { OLDEST_MARIADB } else { OLDEST_MYSQL };
    if parse_version(number).is_none_or(|version| version < oldest) {
        let (major, minor) = oldest;
        return Err(format!("the server is {name}; Lockkeeper needs {product} {major}.{minor} or later"));
    }
    if is_read_only(value("read_only")) || is_read_only(value("super_read_only")) {
        return Err(READ_ONLY.to_owned());
    }
    if value("wsrep_ready").eq_ignore_ascii_case("off") && is_on(value("wsrep_on")) {
        return Err("this Galera node is not part of a primary component; check the cluster".to_owned());
    }
    if is_on(value("log_bin")) && value("binlog_format").eq_ignore_ascii_case("statement") {
        return Err("the server's binlog_format is STATEMENT, so it refuses every write of a READ COMMITTED transaction \
             (error 1665); set it to ROW or MIXED"
            .to_owned());
    }
    let grouped = !value("group_replication_group_name").is_empty();
    if grouped && !is_on(value("group_replication_single_primary_mode")) {
        return Err("all servers of this replication group accept writes, and a row lock on one server does not exclude \
             the others; set group_replication_single_primary_mode to ON"
            .to_owned());
    }
    let mut warnings = weak_durability(value);
    if require_durable && !warnings.is_empty() {
        return Err(format!("{} (store.require_durable is set)", warnings.join("; ")));
    }
    let consistency = value("group_replication_consistency");
    if grouped && consistency.eq_ignore_ascii_case("eventual") {
        warnings.push(
            "group_replication_consistency is EVENTUAL: a new primary answers before it has applied all grants of \
             the last one; set it to BEFORE_ON_PRIMARY_FAILOVER"
                .to_owned(),
        );
    }
    warnings.extend(weak_replication(value));
    let galera = is_on(value("wsrep_on"));
    if galera {
        warnings.push(
            "the server is a Galera node: one node is used at a time, so name the nodes in store.url, not a load \
             balancer that spreads connections over them"
                .to_owned(),
        );
    }
    Ok(Server { name, identity: identity(value), warnings, galera })
}

/// Whether this value of the variable `read_only` means read-only.
pub fn is_read_only(value: &str) -> bool {
    !value.is_empty() && !matches!(value.to_ascii_lowercase().as_str(), "0" | "off")
}

/// The message for a failed connection: what went wrong, and what the operator can do about it.
pub fn explain(error: &Error) -> String {
    match error {
        Error::Server(server) => {
            let advice = match server.code {
                1040 | 1203 | 1226 => {
                    "the server has too many connections: raise max_connections, or lower store.lanes"
                }
                1044 | 1045 | 1698 | 2059 => {
                    "the server refuses the account: check user and password in store.url, its grants, and whether it \
                     needs a certificate (store.tls.cert)"
                }
                1142 | 1143 | 1227 | 1370 => {
                    "the account lacks a privilege: it needs SELECT, INSERT, UPDATE, DELETE and, for the \
                     first start, CREATE on the database"
                }
                1049 => "the database does not exist, and the account may not create it",
                1129 | 1130 => "the server refuses connections from this host",
                1290 | 1792 | 1836 => READ_ONLY,
                3159 => "the server demands encrypted connections: set store.tls.ca",
                1021 | 1114 | 3675 => "the server's disk is full",
                1053 | 1077 | 1078 | 1079 => "the server is shutting down",
                1927 | 4031 => "the server closed the connection",
                1146 | 1054 => "a table is missing or has other columns: were they changed by hand?",
                _ => "the server answered with an error",
            };
            match server.code {
                // The message names the account, its host, or the database. Clients and probes can read this text.
                1044 | 1045 | 1129 | 1130 | 1142 | 1143 | 1227 | 1370 | 1698 => {
                    tracing::debug!(code = server.code, message = server.message, "the server refuses the account");
                    format!("{advice} (error {})", server.code)
                }
                code => format!("{advice} (error {code}: {})", server.message),
            }
        }
        Error::Driver(DriverError::NoClientSslFlagFromServer) => {
            "the MySQL server offers no TLS, which store.tls demands: give it a certificate, or remove store.tls".to_owned()
        }
        Error::Io(error) => match tls_error(error) {
            Some(rustls::Error::InvalidCertificate(why)) => {
                format!("the certificate of the MySQL server is refused (store.tls): {why}")
            }
            Some(error) => format!("TLS with the MySQL server fails (store.tls): {error}"),
            None => format!("the MySQL server cannot be reached: {error}"),
        },
        Error::Driver(DriverError::ConnectionClosed) => "the MySQL server closed the connection".to_owned(),
        other => other.to_string(),
    }
}

/// The error of the TLS library, if it is one.
fn tls_error(error: &IoError) -> Option<&rustls::Error> {
    let source: &(dyn std::error::Error + 'static) = match error {
        IoError::Io(error) => error.get_ref()?,
        IoError::Tls(error) => std::error::Error::source(error)?,
    };
    source.downcast_ref()
}

fn parse_version(number: &str) -> Option<(u32, u32)> {
    let mut parts = number.split('.');
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

fn is_on(value: &str) -> bool {
    matches!(value.to_ascii_lowercase().as_str(), "on" | "1")
}

fn weak_durability<'a>(value: impl Fn(&str) -> &'a str) -> Vec<String> {
    let mut warnings = Vec::new();
    let flush = value("innodb_flush_log_at_trx_commit");
    // MariaDB's 3 means the same as 1.
    if !matches!(flush, "1" | "3") {
        warnings.push(format!(
            "innodb_flush_log_at_trx_commit is {flush}: a crash can lose committed locks; set it to 1"
        ));
    }
    let sync = value("sync_binlog");
    if is_on(value("log_bin")) && sync != "1" {
        warnings.push(format!(
            "sync_binlog is {sync} and the binary log is on: after a crash replicas can have other locks than \
             the primary; set it to 1"
        ));
    }
    warnings
}

/// What semi-synchronous replication, if it is on, can still lose. MariaDB and earlier versions of MySQL call
/// the source master.
fn weak_replication<'a>(value: impl Fn(&str) -> &'a str) -> Vec<String> {
    let mut warnings = Vec::new();
    for (role, other) in [("source", "replica"), ("master", "slave")] {
        let of = |setting: &str| format!("rpl_semi_sync_{role}_{setting}");
        if !is_on(value(&of("enabled"))) {
            continue;
        }
        let (wait_point, timeout, waits) = (of("wait_point"), of("timeout"), of(&format!("wait_no_{other}")));
        if value(&waits).eq_ignore_ascii_case("off") {
            warnings.push(format!(
                "{waits} is OFF: while no replica is connected, the server confirms locks that are lost if it fails; set it to ON"
            ));
        }
        if value(&wait_point).eq_ignore_ascii_case("after_commit") {
            warnings.push(format!(
                "{wait_point} is AFTER_COMMIT: data that a proxy has read can be lost if this server fails; set it to AFTER_SYNC"
            ));
        }
        if let Some(ms) = value(&timeout).parse::<u64>().ok().filter(|ms| *ms < LONG_TIMEOUT_MS) {
            warnings.push(format!(
                "{timeout} is {ms}: if no replica answers for this many milliseconds, the server confirms locks \
                 that are lost if it fails; set it to {LONG_TIMEOUT_MS} or more"
            ));
        }
    }
    warnings
}

/// MySQL has a UUID in its data folder. MariaDB has none. Its `server_uid`, if any, is made of the machine
/// and the port, so the data folder and the server's number are added.
fn identity<'a>(value: impl Fn(&str) -> &'a str) -> String {
    let uuid = value("server_uuid");
    if !uuid.is_empty() {
        return uuid.to_owned();
    }
    let machine = match value("server_uid") {
        "" => value("hostname"),
        uid => uid,
    };
    let mut identity =
        format!("mariadb:{machine}:{}:{}:{}", value("server_id"), value("port"), value("datadir"));
    // The width of the column. The machine's name comes first.
    while identity.len() > 255 {
        identity.pop();
    }
    identity
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reason_for_a_refused_account_names_neither_account_nor_database() {
        let server = |code: u16| {
            let (message, state) =
                ("denied: 'kuser'@'localhost' to 'secretdb'".to_owned(), "28000".to_owned());
            Error::Server(mysql_async::ServerError { code, message, state })
        };
        for code in [1044, 1045, 1129, 1130, 1142, 1143, 1227, 1370, 1698] {
            let said = explain(&server(code));
            assert!(
                said.contains(&code.to_string()) && !said.contains("kuser") && !said.contains("secretdb"),
                "{said}"
            );
        }
        assert!(explain(&server(1213)).contains("kuser"), "other messages help and are kept");
    }

    fn variables(pairs: &[(&str, &str)]) -> HashMap<String, String> {
        let sound = [
            ("version", "9.7.4"),
            ("innodb_flush_log_at_trx_commit", "1"),
            ("sync_binlog", "1"),
            ("log_bin", "ON"),
            ("read_only", "OFF"),
            ("server_uuid", "u-1"),
        ];
        sound.iter().chain(pairs).map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn a_sound_server_passes_without_a_warning() {
        let server = check(&variables(&[]), true).expect("it is sound");
        assert_eq!(
            server,
            Server { name: "MySQL 9.7.4".into(), identity: "u-1".into(), warnings: vec![], galera: false }
        );
    }

    #[test]
    fn old_servers_are_refused() {
        for (version, fine) in [
            ("5.7.44-log", false),
            ("8.0.36", true),
            ("10.5.1-MariaDB-log", false),
            ("10.6.0-MariaDB", true),
            ("11.8.2-MariaDB-ubu2404", true),
            ("nonsense", false),
        ] {
            let checked = check(&variables(&[("version", version)]), false);
            assert_eq!(checked.is_ok(), fine, "{version}");
        }
    }

    #[test]
    fn weak_settings_warn_and_are_refused_under_require_durable() {
        let weak = variables(&[("innodb_flush_log_at_trx_commit", "2"), ("sync_binlog", "0")]);
        assert_eq!(check(&weak, false).expect("it only warns").warnings.len(), 2);
        assert!(check(&weak, true).expect_err("it refuses").contains("require_durable"));
        let no_binlog = variables(&[("sync_binlog", "0"), ("log_bin", "OFF")]);
        assert!(check(&no_binlog, true).is_ok());
    }

    #[test]
    fn replicas_are_refused() {
        assert_eq!(check(&variables(&[("super_read_only", "ON")]), false), Err(READ_ONLY.to_owned()));
        assert_eq!(check(&variables(&[("read_only", "NO_LOCK")]), false), Err(READ_ONLY.to_owned()));
    }

    #[test]
    fn a_binary_log_of_statements_is_refused() {
        let statements = [("binlog_format", "STATEMENT")];
        assert!(check(&variables(&statements), false).expect_err("it refuses").contains("binlog_format"));
        let unlogged = [("binlog_format", "STATEMENT"), ("log_bin", "OFF")];
        for fine in [&unlogged[..], &[("binlog_format", "MIXED")], &[("binlog_format", "ROW")]] {
            assert!(check(&variables(fine), true).is_ok(), "{fine:?}");
        }
    }

    fn galera(pairs: &[(&str, &str)]) -> HashMap<String, String> {
        let node = [
            ("version", "11.8.2-MariaDB-log"),
            ("server_uuid", ""),
            ("server_uid", "u-2"),
            ("wsrep_on", "ON"),
            ("wsrep_ready", "ON"),
        ];
        variables(&[&node, pairs].concat())
    }

    #[test]
    fn a_galera_node_is_recognised_as_a_server_of_its_own() {
        let node = check(&galera(&[]), true).expect("it is sound");
        assert!(node.galera);
        assert!(
            node.identity.starts_with("mariadb:u-2:"),
            "each node is a server of its own: {}",
            node.identity
        );
        assert!(
            matches!(&node.warnings[..], [why] if why.contains("one node is used at a time")),
            "{node:?}"
        );
        assert!(check(&galera(&[("wsrep_on", "1")]), true).expect("it is sound").galera);
        let weak = [("innodb_flush_log_at_trx_commit", "2")];
        assert!(check(&galera(&weak), true).expect_err("it refuses").contains("require_durable"));
    }

    #[test]
    fn a_replication_group_has_one_primary_that_has_all_writes() {
        let member = |single: &str, consistency: &str| {
            variables(&[
                ("group_replication_group_name", "7d1c1f4e-0b5e-4a52-9d6b-3c1b6e6f0a11"),
                ("group_replication_single_primary_mode", single),
                ("group_replication_consistency", consistency),
            ])
        };
        let sound = check(&member("ON", "BEFORE_ON_PRIMARY_FAILOVER"), true).expect("it is sound");
        assert_eq!(sound.warnings, [""; 0]);
        let eventual = check(&member("ON", "EVENTUAL"), false).expect("it only warns");
        assert!(matches!(&eventual.warnings[..], [why] if why.contains("EVENTUAL")), "{eventual:?}");
        let several = check(&member("OFF", "BEFORE_ON_PRIMARY_FAILOVER"), false);
        assert!(several.is_err_and(|why| why.contains("group_replication_single_primary_mode")));
        let alone = variables(&[
            ("group_replication_group_name", ""),
            ("group_replication_single_primary_mode", "OFF"),
        ]);
        assert!(check(&alone, true).is_ok(), "the plugin is there, and no group");
    }

    #[test]
    fn semi_synchronous_replication_warns_of_what_it_loses() {
        for (role, other) in [("source", "replica"), ("master", "slave")] {
            let source = |enabled: &str, wait_point: &str, timeout: &str| {
                let of = |setting: &str| format!("rpl_semi_sync_{role}_{setting}");
                let mut variables = variables(&[]);
                variables.insert(of("enabled"), enabled.to_owned());
                variables.insert(of("wait_point"), wait_point.to_owned());
                variables.insert(of("timeout"), timeout.to_owned());
                check(&variables, true).expect("it is durable").warnings
            };
            assert_eq!(source("ON", "AFTER_SYNC", "86400000"), [""; 0]);
            assert_eq!(source("OFF", "AFTER_COMMIT", "10000"), [""; 0]);
            let after_commit = source("ON", "AFTER_COMMIT", "86400000");
            assert!(matches!(&after_commit[..], [why] if why.contains("AFTER_SYNC")), "{after_commit:?}");
            let short = source("ON", "AFTER_SYNC", "10000");
            assert!(matches!(&short[..], [why] if why.contains("timeout is 10000")), "{short:?}");
            let mut alone = variables(&[]);
            alone.insert(format!("rpl_semi_sync_{role}_enabled"), "ON".to_owned());
            alone.insert(format!("rpl_semi_sync_{role}_wait_no_{other}"), "OFF".to_owned());
            let alone = check(&alone, true).expect("it is durable").warnings;
            assert!(matches!(&alone[..], [why] if why.contains("is OFF")), "{alone:?}");
        }
    }

    #[test]
    fn a_galera_node_outside_of_its_cluster_is_refused() {
        let alone = check(&galera(&[("wsrep_ready", "OFF")]), false);
        assert!(alone.as_ref().is_err_and(|why| why.contains("primary component")), "{alone:?}");
    }

    #[test]
    fn a_server_with_the_galera_library_switched_off_is_no_galera_node() {
        let off = [("wsrep_on", "OFF"), ("wsrep_ready", "OFF")];
        let server = check(&galera(&off), true).expect("it is sound");
        assert!(!server.galera && server.warnings.is_empty(), "{server:?}");
    }
}
