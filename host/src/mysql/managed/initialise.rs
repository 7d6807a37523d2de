//! Makes the data of a new data folder.

use std::fs::{self, File};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::binary::Binary;
use super::command_line::CommandLine;
use super::error::ManagedError;
use super::folder::{Folder, gone};
use super::guardian::Guardian;
use super::kind::Kind;

/// MariaDB's system tables, in the order of its own installer, under the names of 10.x and of 11.x.
const SYSTEM_TABLES: [[&str; 2]; 6] = [
    ["mysql_system_tables.sql", "mariadb_system_tables.sql"],
    ["mysql_performance_tables.sql", "mariadb_performance_tables.sql"],
    ["mysql_system_tables_data.sql", "mariadb_system_tables_data.sql"],
    ["fill_help_tables.sql", "fill_help_tables.sql"],
    ["maria_add_gis_sp_bootstrap.sql", "maria_add_gis_sp_bootstrap.sql"],
    ["mysql_sys_schema.sql", "mariadb_sys_schema.sql"],
];

/// Lets the server make its data in a temporary place, and moves the data to [`Folder::data`] when it is
/// complete.
pub fn initialise(binary: &Binary, folder: &Folder) -> Result<(), ManagedError> {
    let failed = ManagedError::folder;
    let new = folder.unfinished();
    gone(fs::remove_dir_all(&new)).map_err(|source| failed("cannot remove", &new, source))?;
    fs::DirBuilder::new().mode(0o700).create(&new).map_err(|source| failed("cannot make", &new, source))?;
    let guardian = Guardian::spawn(&command(binary, folder)?, folder)
        .map_err(|error| ManagedError::Init { why: error.to_string() })?;
    let status = guardian.wait().map_err(|error| ManagedError::Init { why: error.to_string() })?;
    if !status.success() {
        let why = format!("{binary} ended with {status}. {}", folder.log_tail());
        return Err(ManagedError::Init { why });
    }
    complete(binary, folder)?;
    let data = folder.data();
    fs::rename(&new, &data).map_err(|source| failed("cannot move into place", &new, source))?;
    let synced = File::open(folder.dir()).and_then(|dir| dir.sync_all());
    synced.map_err(|source| failed("cannot sync", folder.dir(), source))
}

/// Makes the data in [`Folder::unfinished`], with one account, `root@localhost`, without a password.
fn command(binary: &Binary, folder: &Folder) -> Result<CommandLine, ManagedError> {
    let mut line = CommandLine::new(binary, folder, &folder.unfinished());
    match binary.kind {
        Kind::Mysql => {
            line.flags(&["--initialize-insecure", "--secure-file-priv=NULL", "--loose-mysqlx=OFF"]);
        }
        Kind::Mariadb => {
            let sql = folder.dir().join("bootstrap.sql");
            fs::write(&sql, bootstrap_sql(binary)?)
                .map_err(|source| ManagedError::folder("cannot write", &sql, source))?;
            line.flags(&["--bootstrap", "--silent-startup", "--enforce-storage-engine="]);
            line.input = sql;
        }
    }
    Ok(line)
}

/// Completes [`Folder::unfinished`] after the server has filled it.
fn complete(binary: &Binary, folder: &Folder) -> Result<(), ManagedError> {
    if binary.kind == Kind::Mariadb {
        let sql = folder.dir().join("bootstrap.sql");
        fs::remove_file(&sql).map_err(|source| ManagedError::folder("cannot remove", &sql, source))?;
        let info = folder.unfinished().join("mysql_upgrade_info");
        let text = format!("{}-MariaDB", binary.version);
        fs::write(&info, text).map_err(|source| ManagedError::folder("cannot write", &info, source))?;
    }
    Ok(())
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
        sql.extend(fs::read(&path).map_err(|source| ManagedError::folder("cannot read", &path, source))?);
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
