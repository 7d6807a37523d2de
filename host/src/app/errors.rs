//! Why a proxy cannot start.

use std::io;
use std::path::PathBuf;

use crate::config::{Fault, ListenAddress, PolicyConfig};
use crate::mysql::OpenError;
use crate::mysql::managed::ManagedError;
use crate::pem::TlsError;
use crate::policy::{EngineError, Rejection};

/// Why the proxy cannot start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// A listener cannot bind its address.
    #[error("cannot listen at {address} ({key}): {source}")]
    Listen {
        /// The configuration key of the address, e.g. `api.listen`.
        key: &'static str,
        /// The address that cannot be bound.
        address: ListenAddress,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The certificate or the key of a listener cannot be used.
    #[error("tls: {0}")]
    Tls(#[from] TlsError),
    /// The certificates for the connections to the store cannot be used.
    #[error("store.tls: {0}")]
    StoreTls(TlsError),
    /// The file of principals and roles has faults.
    #[error("{}", lines(.0))]
    Auth(Vec<Fault>),
    /// The audit log cannot be opened.
    #[error("audit.file: {}: {source}", path.display())]
    Audit {
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The recording cannot be begun.
    #[error("recording.dir: {}: {source}", dir.display())]
    Recording {
        /// The folder.
        dir: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The policy engine cannot reserve its instances.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// Policies that cannot be loaded: a line for each fault.
    #[error("{}", .0.join("\n"))]
    Policies(Vec<String>),
    /// The private server cannot be started.
    #[error(transparent)]
    Managed(#[from] ManagedError),
    /// The store cannot be opened.
    #[error(transparent)]
    Store(#[from] OpenError),
    /// The policy files or the configuration file cannot be watched.
    #[error("files cannot be watched: {0}")]
    Watch(io::Error),
    /// A task of the start panicked or was cancelled.
    #[error("a task of the start failed: {0}")]
    Task(#[from] tokio::task::JoinError),
}

impl StartError {
    /// Whether [`check`](super::check) would have found the error.
    pub fn is_fault_of_the_configuration(&self) -> bool {
        use StartError::{Auth, Policies, StoreTls, Tls};
        matches!(self, Tls(_) | StoreTls(_) | Auth(_) | Policies(_))
    }
}

fn lines(faults: &[Fault]) -> String {
    faults.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}

/// A line for each policy that cannot be loaded, and for each setting that does not fit, with the line of the configuration.
pub(super) fn refused(configs: &[PolicyConfig], rejections: &[(String, Rejection)]) -> Vec<String> {
    let (mut lines, mut faults) = (Vec::new(), Vec::new());
    for (name, rejection) in rejections {
        let config = configs.iter().find(|config| config.name == *name);
        let Rejection::SettingFaults { faults: of_settings } = rejection else {
            lines.push(format!("policy `{name}`: {rejection}"));
            continue;
        };
        for fault in of_settings {
            let what = format!("policies.{name}.settings.{fault}");
            match config.and_then(|config| config.setting_places.of(&fault.path)) {
                Some(place) => faults.push(Fault { place, what }),
                None => lines.push(what),
            }
        }
    }
    faults.sort_by(|a, b| a.place.cmp(&b.place));
    lines.extend(faults.iter().map(ToString::to_string));
    lines
}
