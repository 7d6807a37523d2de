//! A private server that starts and stops with the proxy, for trials and tests.
//!
//! It listens only on a socket in its own data folder, has one account, and keeps full durability. A guardian
//! process (see [`guardian`]) stops it when the proxy is gone, however the proxy ended. The [`supervisor`]
//! restarts it when it dies by itself.
//!
//! ```text
//! data_dir/                 mode 0700; created by the proxy, or empty before
//!   lockkeeper.lock         held while a proxy uses the folder
//!   data/                   the server's data; appears complete or not at all
//!   error.log  server.pid  server.sock
//! ```

use std::path::{Path, PathBuf};
use std::time::Duration;

use mysql_async::prelude::Queryable;

use crate::clock;
use crate::config::ManagedConfig;

mod binary;
mod command_line;
mod error;
mod folder;
mod guardian;
mod initialise;
mod kind;
mod leftover;
mod places;
mod supervisor;
#[cfg(test)]
mod tests;

pub use error::ManagedError;
pub use kind::Kind;

use binary::Binary;
use folder::Folder;
use supervisor::Supervisor;

/// The database that the URL names.
const DATABASE: &str = "lockkeeper";
/// How long a server may take until it answers; it may have to recover from a crash first.
const START_LIMIT: Duration = Duration::from_secs(120);
const POLL: Duration = Duration::from_millis(50);
/// The error of a Galera node that does not serve yet.
const NOT_JOINED: u16 = 1047;

/// A running private server. If it is dropped without [`ManagedServer::stop`], it is also told to stop, but
/// the drop does not wait for it.
pub struct ManagedServer {
    url: String,
    binary: Binary,
    folder: Folder,
    supervisor: Supervisor,
}

impl ManagedServer {
    /// Starts the server on its data folder, which is created first if it is missing, and waits until the
    /// server answers. Takes about 1 s, and 3 s more the first time.
    ///
    /// # Errors
    /// If the server cannot be started; no process is left running. The message says what to do.
    pub async fn start(config: &ManagedConfig) -> Result<ManagedServer, ManagedError> {
        ManagedServer::start_with(config, &[]).await
    }

    /// Like [`ManagedServer::start`], with additional options for the server. For tests that need more of a
    /// server than a socket.
    ///
    /// # Errors
    /// As for [`ManagedServer::start`].
    pub async fn start_with(
        config: &ManagedConfig,
        options: &[String],
    ) -> Result<ManagedServer, ManagedError> {
        let config = config.clone();
        let prepared = tokio::task::spawn_blocking(move || prepare(&config)).await;
        let (binary, folder) = prepared.map_err(|error| ManagedError::Start { why: error.to_string() })??;
        let mut command = command_line::serve(&binary, &folder);
        command.args.extend(options.iter().map(Into::into));
        let supervisor = Supervisor::start(command, folder.clone());
        let url = url(folder.socket(), DATABASE);
        let server = ManagedServer { url, binary, folder, supervisor };
        server.wait_until_ready().await?;
        tracing::info!(
            server = %server.binary,
            pid = server.pid(),
            data_dir = %server.folder.dir().display(),
            socket = %server.folder.socket().display(),
            "the private server is ready"
        );
        Ok(server)
    }

    /// `mysql://root@localhost/lockkeeper?socket=…`. The database exists.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The server's process now; `None` while it is restarted. For tests that kill it.
    pub fn pid(&self) -> Option<u32> {
        self.supervisor.pid()
    }

    /// Whether the server is MySQL or MariaDB.
    pub fn kind(&self) -> Kind {
        self.binary.kind
    }

    /// The version as the server reports it, e.g. `9.7.4`.
    pub fn version(&self) -> &str {
        &self.binary.version
    }

    /// The file that the server writes its errors to.
    pub fn log(&self) -> PathBuf {
        self.folder.log()
    }

    /// Stops the server and waits until it is gone. It is killed after about 30 s.
    pub async fn stop(mut self) {
        self.supervisor.stop().await;
    }

    async fn wait_until_ready(&self) -> Result<(), ManagedError> {
        let began = clock::now();
        loop {
            if let Some(why) = self.supervisor.over() {
                return Err(self.failed(&why));
            }
            match tokio::time::timeout(Duration::from_secs(5), self.create_database()).await {
                Ok(Ok(())) => break,
                Ok(Err(mysql_async::Error::Server(error))) if error.code != NOT_JOINED => {
                    return Err(ManagedError::Start { why: error.to_string() });
                }
                // The server is not up yet.
                Ok(Err(_)) | Err(_) => {}
            }
            if u128::from(clock::now().us_since(began)) > START_LIMIT.as_micros() {
                return Err(self.failed(&format!("it did not answer within {} s", START_LIMIT.as_secs())));
            }
            tokio::time::sleep(POLL).await;
        }
        self.supervisor.ready();
        Ok(())
    }

    async fn create_database(&self) -> Result<(), mysql_async::Error> {
        let opts = mysql_async::Opts::from_url(&url(self.folder.socket(), ""))?;
        let mut conn = mysql_async::Conn::new(opts).await?;
        conn.query_drop(format!("CREATE DATABASE IF NOT EXISTS {DATABASE}")).await?;
        conn.disconnect().await
    }

    fn failed(&self, why: &str) -> ManagedError {
        let why = format!("{why}. {}", self.folder.log_tail());
        ManagedError::Start { why }
    }
}

/// Does everything before the server runs. Blocks.
fn prepare(config: &ManagedConfig) -> Result<(Binary, Folder), ManagedError> {
    let folder = Folder::open(&config.data_dir)?;
    let binary = binary::find(&config.binary, folder.made_by())?;
    leftover::stop_all(&folder)?;
    folder.tidy()?;
    match folder.made_by() {
        None => {
            tracing::info!(server = %binary, data_dir = %folder.dir().display(), "making the data folder");
            initialise::initialise(&binary, &folder)?;
        }
        Some(made_by) if made_by != binary.kind => {
            let dir = folder.dir().to_path_buf();
            return Err(ManagedError::OtherKind { dir, made_by, server: binary.kind });
        }
        Some(_) => {}
    }
    Ok((binary, folder))
}

fn url(socket: &Path, database: &str) -> String {
    use std::os::unix::ffi::OsStrExt;
    let mut text = format!("mysql://root@localhost/{database}?socket=");
    for byte in socket.as_os_str().as_bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'/' | b'.' | b'-' | b'_' => text.push(*byte as char),
            _ => text += &format!("%{byte:02X}"),
        }
    }
    text
}
