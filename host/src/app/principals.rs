//! Applies the file of principals and roles, and its changes.

use std::collections::BTreeSet;
use std::future::Future;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::errors::StartError;
use crate::auth::Auth;
use crate::config::{AuthConfig, AuthRules, Fault};
use crate::telemetry::{Metrics, Subject};
use crate::watch::{Changes, Watcher, watch};

/// A larger file is not one of principals and roles.
const MAX_BYTES: usize = 16 << 20;
/// How long a file with faults waits for the next try.
const RETRY: Duration = Duration::from_secs(2);
const BETWEEN_READINGS: Duration = Duration::from_millis(300);
/// A file that changes all the time is taken as it is after this many readings.
const READINGS: u32 = 10;

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

/// Watches the file, and the files of keys that it names. The returned future applies each change, as a whole or not at
/// all.
pub(super) fn follow(
    config: &AuthConfig,
    auth: Auth,
    metrics: Metrics,
) -> io::Result<impl Future<Output = ()> + use<>> {
    let file = config.file.clone();
    let mut watched: BTreeSet<PathBuf> = file.iter().cloned().collect();
    let (mut watcher, mut changes) = watch_all(&watched)?;
    Ok(async move {
        let Some(file) = file else { return };
        // The contents at the start may have changed since they were loaded.
        let mut seen: Option<Vec<Fault>> = None;
        loop {
            tokio::select! {
                changed = changes.recv() => if changed.is_none() { return },
                // A fault may be one of the file's mode, which is no change of its contents.
                () = tokio::time::sleep(RETRY), if seen.is_some() => {}
            }
            let settled = settled(&file).await;
            let trouble = settled.is_err().then(|| {
                // Without its faults: nobody is asked for credentials for the readiness.
                "the changed file of principals is not used; the log of the proxy says why".to_owned()
            });
            metrics.troubles.note(Subject::Principals, trouble);
            match settled {
                Ok(rules) => {
                    seen = None;
                    if auth.replace(&rules) {
                        tracing::info!(principals = rules.principals.len(), "the principals were replaced");
                        // The watch may have reported another content than this one.
                        watcher.look_again();
                    }
                    let files = rules.files(&file);
                    if files != watched {
                        match watch_all(&files) {
                            Ok(again) => (watcher, changes, watched) = (again.0, again.1, files),
                            Err(error) => tracing::error!(%error, "files of keys cannot be watched"),
                        }
                    }
                }
                Err(faults) if seen.as_ref() == Some(&faults) => {}
                Err(faults) => {
                    for fault in &faults {
                        let fault = fault.to_string();
                        tracing::error!(
                            fault,
                            "the changed file of principals is not used; the old one stays"
                        );
                    }
                    seen = Some(faults);
                }
            }
        }
    })
}

fn watch_all(files: &BTreeSet<PathBuf>) -> io::Result<(Watcher, Changes)> {
    watch(files.iter().map(|file| (file.display().to_string(), file.clone())).collect(), MAX_BYTES)
}

/// The rules, once two readings are equal: the beginning of a file that is being written can be valid, and lack what
/// denies.
async fn settled(file: &Path) -> Result<AuthRules, Vec<Fault>> {
    let mut rules = AuthRules::load(file);
    for _ in 0..READINGS {
        tokio::time::sleep(BETWEEN_READINGS).await;
        let again = AuthRules::load(file);
        if again == rules {
            break;
        }
        rules = again;
    }
    rules
}
