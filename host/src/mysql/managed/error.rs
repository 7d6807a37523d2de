//! Why there is no private server.

use std::io;
use std::path::{Path, PathBuf};

use super::kind::Kind;

/// Why there is no private server. Every message says what to do about it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ManagedError {
    /// The requested server's program was not found.
    #[error(
        "no {wanted} was found on PATH, in the usual folders or in target/servers{skipped}: run `cargo xtask \
         servers` in a checkout, install the server's package, or set store.url to a server that runs"
    )]
    NotFound {
        /// The name of the requested server and of its program.
        wanted: &'static str,
        /// The programs that were skipped, each with the reason; empty if there were none.
        skipped: String,
    },
    /// The program cannot be used as a server.
    #[error("{} cannot be used as a server: {why}", path.display())]
    Unusable {
        /// The path of the program.
        path: PathBuf,
        /// The reason.
        why: String,
    },
    /// Another proxy holds the lock of the data folder.
    #[error(
        "the data folder {} is in use by another proxy: stop that one, or choose another \
         store.managed.data_dir",
        dir.display()
    )]
    InUse {
        /// The data folder.
        dir: PathBuf,
    },
    /// The data folder has files in it, but not the lock file that every data folder of a proxy has.
    #[error(
        "the data folder {} is not empty and was not made by lockkeeper: choose another \
         store.managed.data_dir",
        dir.display()
    )]
    Foreign {
        /// The data folder.
        dir: PathBuf,
    },
    /// The data folder belongs to another user.
    #[error(
        "the data folder {} belongs to the user {owner}: run the proxy as that user, or choose another \
         store.managed.data_dir",
        dir.display()
    )]
    Owner {
        /// The number of the user.
        owner: u32,
        /// The data folder.
        dir: PathBuf,
    },
    /// The other kind of server made the data folder.
    #[error(
        "the data folder {} was made by {made_by} and cannot be used by {server}: choose another \
         store.managed.data_dir, or the other server in store.managed.server",
        dir.display()
    )]
    OtherKind {
        /// The data folder.
        dir: PathBuf,
        /// The kind that made the data folder.
        made_by: Kind,
        /// The kind of the server that was found.
        server: Kind,
    },
    /// A file or folder of the data folder could not be read or written.
    #[error("the data folder: {what} {}: {source}", path.display())]
    Folder {
        /// What failed, e.g. `cannot open`.
        what: &'static str,
        /// The path of the file or folder.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The server of an earlier proxy still runs on the data folder and could not be stopped.
    #[error("process {pid} still serves the data folder {} and could not be stopped: {why}", dir.display())]
    Leftover {
        /// The process id of that server.
        pid: u32,
        /// The data folder.
        dir: PathBuf,
        /// Why the server could not be stopped.
        why: String,
    },
    /// The server could not make its system tables in a new data folder.
    #[error("the private server could not make its data folder: {why}")]
    Init {
        /// The cause; if the server failed, with the end of its log.
        why: String,
    },
    /// The server ended before it was ready, refused to make its database, or did not answer in time.
    #[error("the private server did not start: {why}")]
    Start {
        /// The cause; in most cases with the end of the server's log.
        why: String,
    },
}

impl ManagedError {
    /// An error of the data folder: the operation that failed (as `cannot open`), and its file or folder.
    pub(super) fn folder(what: &'static str, path: &Path, source: io::Error) -> ManagedError {
        ManagedError::Folder { what, path: path.to_path_buf(), source }
    }
}
