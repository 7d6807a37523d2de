//! The command lines of a server.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use super::binary::Binary;
use super::folder::Folder;
use super::kind::Kind;

/// The command that the guardian runs.
#[derive(Clone, Debug)]
pub struct CommandLine {
    /// The path of the program.
    pub program: PathBuf,
    /// Its arguments.
    pub args: Vec<OsString>,
    /// A file that the program reads as its input.
    pub input: PathBuf,
}

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

impl CommandLine {
    /// The options that every server of the folder has; it uses `data` as its data.
    pub fn new(binary: &Binary, folder: &Folder, data: &Path) -> CommandLine {
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

    /// Adds options.
    pub fn flags(&mut self, flags: &[&str]) {
        self.args.extend(flags.iter().map(OsString::from));
    }

    /// Adds an option whose value is a path.
    pub fn path(&mut self, name: &str, path: &Path) {
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
