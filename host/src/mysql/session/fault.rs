//! Why an exchange with a server failed, and exchanges on a connection that is not checked yet.

use mysql_async::prelude::AsQuery;
use mysql_async::{DriverError, Error, Row};

use super::preflight;
use super::wire::Wire;
use crate::lock::maps::HashMap;

/// Why an exchange failed. The variant says what to do next.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Fault {
    /// The connection, or the server behind it, cannot be used any more. The statements may have been
    /// applied.
    #[error("{why}")]
    Broken { why: String, slug: &'static str },
    /// Nothing was applied. A retry may succeed.
    #[error("{why}")]
    Conflict { why: String },
    /// Nothing was applied. A retry will not succeed.
    #[error("{why}")]
    Rejected { why: String },
}

impl Fault {
    /// The name of the fault in metrics.
    pub fn slug(&self) -> &'static str {
        match self {
            Fault::Broken { slug, .. } => slug,
            Fault::Conflict { .. } => "conflict",
            Fault::Rejected { .. } => "rejected",
        }
    }

    /// Whether the server has ended the session, or the connection is closed. After every other fault the
    /// server may keep the session and its locks.
    pub fn ended_session(&self) -> bool {
        matches!(self, Fault::Broken { slug: "connection", .. })
    }

    /// The server did not answer in time; `what` names the work.
    pub fn timeout(what: &str) -> Fault {
        Fault::Broken { why: format!("the MySQL server did not answer in time ({what})"), slug: "timeout" }
    }
}

impl From<Error> for Fault {
    fn from(error: Error) -> Fault {
        let why = error.to_string();
        match &error {
            Error::Server(server) => match server.code {
                // Deadlock, lock wait, snapshot conflict, duplicate key, statement interrupted, too many
                // prepared statements, and our own stop before a late COMMIT (1690).
                1205 | 1213 | 1020 | 1062 | 1317 | 3024 | 1969 | 3572 | 1461 | 1690 => {
                    Fault::Conflict { why }
                }
                // Values that do not fit, packets that are too large, syntax errors.
                1064 | 1153 | 1264 | 1366 | 1406 | 1301 => Fault::Rejected { why },
                1290 | 1792 | 1836 => Fault::Broken { why: preflight::explain(&error), slug: "read_only" },
                // The server shuts down, the session was killed, or it was idle for too long.
                1053 | 1927 | 4031 => Fault::Broken { why: preflight::explain(&error), slug: "connection" },
                _ => Fault::Broken { why: preflight::explain(&error), slug: "server" },
            },
            Error::Driver(DriverError::PacketTooLarge) => Fault::Rejected { why },
            _ => Fault::Broken { why: preflight::explain(&error), slug: "connection" },
        }
    }
}

/// Whether a connection names a database that does not exist.
pub fn is_missing_database(error: &Error) -> bool {
    matches!(error, Error::Server(error) if error.code == 1049)
}

/// Whether a statement names a table that does not exist.
pub fn is_missing_table(error: &Error) -> bool {
    matches!(error, Error::Server(error) if error.code == 1146)
}

/// Sends statements on a connection that is not checked yet.
pub async fn exchange(wire: &mut Wire, sql: impl AsQuery + 'static) -> Result<Vec<Vec<Row>>, Fault> {
    Ok(wire.exchange(sql).await?)
}

/// The server's variables that [`preflight::check`] reads.
pub async fn variables(wire: &mut Wire) -> Result<HashMap<String, String>, Fault> {
    let sets = exchange(wire, preflight::VARIABLES).await?;
    let pairs = sets.into_iter().flatten().filter_map(|row| mysql_async::from_row_opt(row).ok());
    Ok(pairs.map(|(name, value): (String, String)| (name.to_ascii_lowercase(), value)).collect())
}
