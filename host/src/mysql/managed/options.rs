//! The command lines that make a data folder and serve it.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::ManagedError;
use super::binary::{Binary, Kind};
use super::folder::{Folder, failed};

/// The command that the guardian runs.
#[derive(Clone, Debug)]
pub struct CommandLine {
    pub program: PathBuf,
    pub args: Vec<OsString>,
    /// A file that the program reads as its input.
    pub input: PathBuf,
}

/// MariaDB's system tables, in the order of its own installer, under the names of 10.x and of 11.x.
const SYSTEM_TABLES: [[&str; 2]; 6] = [
    ["mysql_system_tables.sql", "mariadb_system_tables.sql"],
    ["mysql_performance_tables.sql", "mariadb_performance_tables.sql"],
    ["mysql_system_tables_data.sql", "mariadb_system_tables_data.sql"],
    ["fill_help_tables.sql", "fill_help_tables.sql"],
    ["maria_add_gis_sp_bootstrap.sql", "maria_add_gis_sp_bootstrap.sql"],
    ["mysql_sys_schema.sql", "mariadb_sys_schema.sql"],
];

/// Serves the folder only on its socket. Every commit is on disk before it is answered; the defaults of MySQL
/// and MariaDB could lose some.
pub fn serve(binary: &Binary, folder: &Folder) -> CommandLine {
    let mut line = CommandLine::new(binary, folder, &folder.data());
    line.path("--socket", folder.socket());
    line.path("--pid-file", &folder.pid_file());
    line.path("--log-error", &folder.log());
    line.flags(&[
        "--skip-networking",
        "--max-connections=200",
        "--innodb-buffer-pool-size=128M",
        "--innodb-flush-log-at-trx-commit=1",
        "--sync-binlog=1",
        "--performance-schema=OFF",
    ]);
    if binary.kind == Kind::Mysql {
        // The binary log is on by default, and would grow for a month.
        line.flags(&["--max-binlog-size=128M", "--binlog-expire-logs-seconds=3600"]);
        // The server has no replicas, so the log need not contain whole rows.
        line.flags(&["--binlog-row-image=MINIMAL"]);
        line.flags(&["--loose-mysqlx=OFF", "--secure-file-priv=NULL"]);
    }
    line
}

/// Makes the data in [`Folder::unfinished`], with one account, `root@localhost`, without a password.
pub fn initialise(binary: &Binary, folder: &Folder) -> Result<CommandLine, ManagedError> {
    let mut line = CommandLine::new(binary, folder, &folder.unfinished());
    match binary.kind {
        Kind::Mysql => {
            line.flags(&["--initialize-insecure", "--secure-file-priv=NULL", "--loose-mysqlx=OFF"]);
        }
        Kind::Mariadb => {
            let sql = folder.dir().join("bootstrap.sql");
            fs::write(&sql, bootstrap_sql(binary)?).map_err(|source| failed("cannot write", &sql, source))?;
            line.flags(&["--bootstrap", "--silent-startup", "--enforce-storage-engine="]);
            line.input = sql;
        }
    }
    Ok(line)
}

/// Completes [`Folder::unfinished`] after the server has filled it.
pub fn initialised(binary: &Binary, folder: &Folder) -> Result<(), ManagedError> {
    if binary.kind == Kind::Mariadb {
        let sql = folder.dir().join("bootstrap.sql");
        fs::remove_file(&sql).map_err(|source| failed("cannot remove", &sql, source))?;
        let info = folder.unfinished().join("mysql_upgrade_info");
        let text = format!("{}-MariaDB", binary.version);
        fs::write(&info, text).map_err(|source| failed("cannot write", &info, source))?;
    }
    Ok(())
}

impl CommandLine {
    fn new(binary: &Binary, folder: &Folder, data: &Path) -> CommandLine {
        let mut line = CommandLine {
            program: binary.path.clone(),
            args: vec!["--no-defaults".into(), datadir(data)],
            input: "/dev/null".into(),
        };
        // Temporary tables are named by the process number, and a server in another container that shares
        // /tmp may have the same number.
        line.path("--tmpdir", folder.dir());
        if rustix::process::geteuid().is_root() {
            line.flags(&["--user=root"]);
        }
        line
    }

    fn flags(&mut self, flags: &[&str]) {
        self.args.extend(flags.iter().map(OsString::from));
    }

    fn path(&mut self, name: &str, path: &Path) {
        self.args.push(option(name, path));
    }
}

/// The argument by which a server of this folder is recognized.
pub fn datadir(data: &Path) -> OsString {
    option("--datadir", data)
}

fn option(name: &str, path: &Path) -> OsString {
    let mut text = OsString::from(name);
    text.push("=");
    text.push(path);
    text
}

/// MariaDB has no option that makes a data folder. Its installer feeds these files to the server.
fn bootstrap_sql(binary: &Binary) -> Result<Vec<u8>, ManagedError> {
    let share = share(binary)?;
    let mut sql = b"create database if not exists mysql;\nuse mysql;\nSET @auth_root_socket=NULL;\n".to_vec();
    for names in SYSTEM_TABLES {
        let path = names.iter().map(|name| share.join(name)).find(|path| path.is_file());
        let Some(path) = path else {
            let why = format!("{} has no {} to make the system tables from", share.display(), names[0]);
            return Err(ManagedError::Init { why });
        };
        sql.extend(fs::read(&path).map_err(|source| failed("cannot read", &path, source))?);
        sql.push(b'\n');
    }
    // The scripts also create accounts for TCP, which this server does not use.
    sql.extend(b"DELETE FROM mysql.global_priv WHERE User <> 'root' AND User <> 'mariadb.sys';\n");
    sql.extend(b"DELETE FROM mysql.global_priv WHERE User = 'root' AND Host <> 'localhost';\n");
    Ok(sql)
}

/// The folder of the server's SQL files: the folder of its messages or of its character sets, or the one
/// above.
fn share(binary: &Binary) -> Result<PathBuf, ManagedError> {
    let mut command = Command::new(&binary.path);
    command.args(["--no-defaults", "--verbose", "--help"]).stdin(Stdio::null());
    let unusable = |why: String| ManagedError::Unusable { path: binary.path.clone(), why };
    let out = command.output().map_err(|error| unusable(error.to_string()))?;
    let text = String::from_utf8_lossy(&out.stdout);
    let value = |name: &str| {
        let line = text.lines().find(|line| line.split_whitespace().next() == Some(name))?;
        Some(PathBuf::from(line[name.len()..].trim()))
    };
    let places = ["lc-messages-dir", "character-sets-dir"].into_iter().filter_map(value);
    let mut dirs: Vec<PathBuf> = Vec::new();
    for place in places {
        dirs.extend(place.parent().map(Path::to_path_buf));
        dirs.insert(0, place);
    }
    let has_tables = |dir: &PathBuf| SYSTEM_TABLES[0].iter().any(|name| dir.join(name).is_file());
    let found = dirs.into_iter().find(has_tables);
    found.ok_or_else(|| unusable("its folder of messages has no mysql_system_tables.sql".into()))
}
