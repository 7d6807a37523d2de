//! Applies the file of principals and roles, and its changes.

use std::collections::BTreeMap;
use std::future::Future;
use std::io;
use std::path::PathBuf;

use super::errors::StartError;
use crate::auth::Auth;
use crate::config::{AuthConfig, AuthRules};
use crate::watch::{Watcher, watch};

/// A larger file is not one of principals and roles.
const MAX_BYTES: usize = 16 << 20;

/// The principals at the start.
///
/// # Errors
/// The file has faults.
pub(super) fn load(config: &AuthConfig) -> Result<Auth, StartError> {
    match &config.file {
        None => Ok(Auth::off()),
        Some(file) => AuthRules::load(file).map(|rules| Auth::new(&rules)).map_err(StartError::Auth),
    }
}

/// Watches the file. The returned future applies each change, as a whole or not at all.
pub(super) fn follow(
    config: &AuthConfig,
    auth: Auth,
) -> io::Result<(Watcher, impl Future<Output = ()> + use<>)> {
    let file = config.file.clone();
    let files: BTreeMap<String, PathBuf> =
        file.iter().map(|file| ("auth".to_owned(), file.clone())).collect();
    let (watcher, mut changes) = watch(files, MAX_BYTES)?;
    let apply = async move {
        let Some(file) = file else { return };
        // The contents at the start may have changed since they were loaded.
        while changes.recv().await.is_some() {
            match AuthRules::load(&file) {
                Ok(rules) => {
                    if auth.replace(&rules) {
                        tracing::info!(principals = rules.principals.len(), "the principals were replaced");
                    }
                }
                Err(faults) => {
                    let faults: Vec<String> = faults.iter().map(ToString::to_string).collect();
                    for fault in &faults {
                        tracing::error!(
                            fault,
                            "the changed file of principals is not used; the old one stays"
                        );
                    }
                    auth.refuse(faults.join("; "));
                }
            }
        }
    };
    Ok((watcher, apply))
}
