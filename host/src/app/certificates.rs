//! Applies changed certificates: those of listeners, and those for the connections to the store.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use crate::mysql::ClientTls;
use crate::net::Tls;
use crate::pem::TlsError;
use crate::telemetry::{Metrics, Subject};
use crate::watch::{Watcher, watch};

/// A larger file is no certificate.
const MAX_BYTES: usize = 16 << 20;

/// Files that are used together.
enum InUse {
    Listener(Arc<Tls>),
    Store(Arc<ClientTls>),
}

impl InUse {
    fn paths(&self) -> Vec<PathBuf> {
        match self {
            InUse::Listener(tls) => tls.files().paths().cloned().collect(),
            InUse::Store(tls) => tls.files().paths().cloned().collect(),
        }
    }

    fn reload(&self) -> Result<(), TlsError> {
        match self {
            InUse::Listener(tls) => tls.reload(),
            InUse::Store(tls) => tls.reload(),
        }
    }
}

/// Watches the files of all listeners, and those for the store. The returned future reads files that are used together
/// again when one of them has changed.
pub(super) fn follow(
    listeners: Vec<Arc<Tls>>,
    store: Option<Arc<ClientTls>>,
    metrics: Metrics,
) -> io::Result<(Watcher, impl Future<Output = ()>)> {
    let all: Vec<InUse> = listeners.into_iter().map(InUse::Listener).chain(store.map(InUse::Store)).collect();
    let mut files: BTreeMap<String, PathBuf> = BTreeMap::new();
    for path in all.iter().flat_map(InUse::paths) {
        files.insert(path.display().to_string(), path);
    }
    let (watcher, mut changes) = watch(files, MAX_BYTES)?;
    let apply = async move {
        let mut refused = BTreeSet::new();
        while let Some((changed, _)) = changes.recv().await {
            let has = |tls: &InUse| tls.paths().iter().any(|path| path.display().to_string() == changed);
            for (n, tls) in all.iter().enumerate().filter(|(_, tls)| has(tls)) {
                // The other file of a pair may follow in a moment.
                match tls.reload() {
                    Ok(()) => {
                        refused.remove(&n);
                        tracing::debug!(file = changed, "the certificates were read");
                    }
                    Err(error) => {
                        refused.insert(n);
                        tracing::error!(%error, "the changed certificates are not used; the old ones stay");
                    }
                }
            }
            let trouble = (!refused.is_empty())
                .then(|| "changed certificates are not used; the log of the proxy says why".to_owned());
            metrics.troubles.note(Subject::Certificates, trouble);
        }
    };
    Ok((watcher, apply))
}
