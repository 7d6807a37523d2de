//! Where the programs of database servers are installed. `cargo xtask` uses this file, too: it needs std alone.

use std::ffi::OsStr;
use std::path::PathBuf;

/// Folders that are searched after those of PATH: of Linux distributions, and of MySQL's own archives.
const FOLDERS: [&str; 4] = ["/usr/sbin", "/usr/libexec", "/usr/local/sbin", "/usr/local/mysql/bin"];

/// The paths at which a program of this name may be, in the order of preference, for this value of PATH.
pub fn candidates<'a>(name: &'a str, path: &'a OsStr) -> impl Iterator<Item = PathBuf> + 'a {
    let on_path = std::env::split_paths(path).filter(|dir| dir.is_absolute());
    on_path.chain(FOLDERS.map(PathBuf::from)).map(move |dir| dir.join(name))
}
