//! Applies changed certificates.

use std::collections::BTreeMap;
use std::future::Future;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use crate::net::Tls;
use crate::watch::{Watcher, watch};

/// A larger file is no certificate.
const MAX_BYTES: usize = 16 << 20;

/// Watches the files of all listeners. The returned future reads the files of a listener again when one of them has
/// changed.
pub(super) fn follow(listeners: Vec<Arc<Tls>>) -> io::Result<(Watcher, impl Future<Output = ()>)> {
    let mut files: BTreeMap<String, PathBuf> = BTreeMap::new();
    for path in listeners.iter().flat_map(|tls| tls.files().paths()) {
        files.insert(path.display().to_string(), path.clone());
    }
    let (watcher, mut changes) = watch(files, MAX_BYTES)?;
    let apply = async move {
        while let Some((changed, _)) = changes.recv().await {
            let has = |tls: &&Arc<Tls>| tls.files().paths().any(|path| path.display().to_string() == changed);
            for tls in listeners.iter().filter(has) {
                // The other file of a pair may follow in a moment.
                match tls.reload() {
                    Ok(()) => tracing::debug!(file = changed, "the certificates were read"),
                    Err(error) => {
                        tracing::error!(%error, "the changed certificates are not used; the old ones stay");
                    }
                }
            }
        }
    };
    Ok((watcher, apply))
}
