//! Finds a server's program, and asks it for its kind.

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::error::ManagedError;
use super::kind::Kind;
use super::places;
use crate::config::ServerBinary;

/// A program that reported its version.
#[derive(Clone, Debug)]
pub struct Binary {
    /// The path of the program.
    pub path: PathBuf,
    /// The kind that the program reported.
    pub kind: Kind,
    /// The version without suffixes, e.g. `9.7.4`.
    pub version: String,
}

/// Finds the requested server. If any kind will do, takes the kind that made the data folder, or prefers
/// MySQL if there is no data yet.
pub fn find(wanted: &ServerBinary, made_by: Option<Kind>) -> Result<Binary, ManagedError> {
    let (kind, name) = match wanted {
        ServerBinary::Path(path) => {
            return probe(path).map_err(|why| ManagedError::Unusable { path: path.clone(), why });
        }
        ServerBinary::Mysql => (Some(Kind::Mysql), "MySQL server (mysqld)"),
        ServerBinary::Mariadb => (Some(Kind::Mariadb), "MariaDB server (mariadbd)"),
        ServerBinary::Auto => (made_by, "MySQL or MariaDB server (mysqld or mariadbd)"),
    };
    search(kind, &candidates()).map_err(|skipped| {
        let skipped = match skipped.is_empty() {
            true => String::new(),
            false => format!(" ({})", skipped.join("; ")),
        };
        ManagedError::NotFound { wanted: name, skipped }
    })
}

/// The first candidate of this kind. Without a kind, the first MySQL, or else the first MariaDB. The error
/// says why each existing candidate was skipped.
fn search(kind: Option<Kind>, candidates: &[PathBuf]) -> Result<Binary, Vec<String>> {
    let mut skipped = Vec::new();
    let mut second = None;
    for path in candidates.iter().filter(|path| path.is_file()) {
        match probe(path).and_then(supported) {
            Ok(binary) if kind.unwrap_or(Kind::Mysql) == binary.kind => return Ok(binary),
            Ok(binary) if kind.is_none() => second = second.or(Some(binary)),
            Ok(binary) => skipped.push(format!("{} is {}", path.display(), binary.kind)),
            Err(why) => skipped.push(format!("{}: {why}", path.display())),
        }
    }
    second.ok_or(skipped)
}

/// The paths of possible servers: installed ones first, then those that `cargo xtask servers` fetched.
fn candidates() -> Vec<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut found: Vec<PathBuf> =
        ["mysqld", "mariadbd"].iter().flat_map(|name| places::candidates(name, &path)).collect();
    if let Some(servers) = fetched() {
        found.push(servers.join("mysql/bin/mysqld"));
        found.push(servers.join("mariadb/bin/mariadbd"));
    }
    found
}

/// `servers` in the target directory that this executable was built into. Cargo marks that directory with a
/// file; a folder of that name elsewhere (say, below /tmp) is not trusted.
fn fetched() -> Option<PathBuf> {
    let exe = std::env::current_exe().ok()?;
    let target = exe.ancestors().skip(1).find(|dir| dir.join("CACHEDIR.TAG").is_file())?;
    Some(target.join("servers"))
}

/// Asks a program for its version.
fn probe(path: &Path) -> Result<Binary, String> {
    // An absolute path, because the guardian works in another folder.
    let path = std::path::absolute(path).map_err(|error| error.to_string())?;
    let out = Command::new(&path).args(["--no-defaults", "--version"]).stdin(Stdio::null()).output();
    let out = out.map_err(|error| format!("it cannot be run: {error}"))?;
    let text = String::from_utf8_lossy(&out.stdout);
    let version = text.split("Ver ").nth(1).and_then(|rest| rest.split_whitespace().next());
    let Some(version) = version.filter(|_| out.status.success()) else {
        return Err("it is no MySQL or MariaDB server: it did not answer --version as one".into());
    };
    let kind = if text.contains("MariaDB") { Kind::Mariadb } else { Kind::Mysql };
    // `9.7.4-2`: the part after the hyphen belongs to the package.
    let version = version.split('-').next().unwrap_or(version).to_owned();
    Ok(Binary { path, kind, version })
}

fn supported(binary: Binary) -> Result<Binary, String> {
    let least = match binary.kind {
        Kind::Mysql => (8, 0),
        Kind::Mariadb => (10, 6),
    };
    let mut numbers = binary.version.split('.').map(|part| part.parse().unwrap_or(0));
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    if version < least {
        return Err(format!("{binary} is too old: at least {}.{} is needed", least.0, least.1));
    }
    Ok(binary)
}

impl fmt::Display for Binary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind, self.version)
    }
}
