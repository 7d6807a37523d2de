//! Reloads config.toml when it changes. Guarded routes are replaced while the proxy runs; all other changes need a
//! restart.

use std::collections::BTreeMap;
use std::future::Future;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::config::{Config, GuardConfig, GuardRoute, naming, process_env};
use crate::fleet::{Fleet, NotNamed, Renaming};
use crate::guard::{Change, Guard};
use crate::telemetry::{Metrics, Subject};
use crate::watch::{Changes, Watcher, watch};

/// A larger file is not a configuration.
const MAX_BYTES: usize = 16 << 20;
/// How long routes wait before they are tried again, if this proxy alone can tell whether they can be used.
const RETRY: Duration = Duration::from_secs(1);
/// How long routes wait before they are tried again, if requests had to wait until the try failed; twice as long
/// after each try. Then a request that takes hours delays other requests by two seconds every two minutes.
const PAUSE: Duration = Duration::from_secs(5);
const LONGEST_PAUSE: Duration = Duration::from_secs(120);

/// Watches the configuration file that the proxy was started with, if any.
pub(super) fn watch_routes(
    config: &Config,
    guard: Arc<Guard>,
    fleet: Fleet,
    metrics: Metrics,
) -> io::Result<(Watcher, impl Future<Output = ()> + use<>)> {
    let files: BTreeMap<String, PathBuf> =
        config.file.iter().map(|file| ("config".to_owned(), file.clone())).collect();
    let (watcher, changes) = watch(files, MAX_BYTES)?;
    let running =
        Running { config: config.clone(), seen: rest(config), guard, fleet, metrics, refused: None };
    Ok((watcher, running.follow(changes)))
}

/// Why a changed configuration is not used.
#[derive(Debug)]
pub(crate) enum NotUsed {
    Faulty(Vec<String>),
    /// The configuration can be used once the fleet has changed. It is tried again.
    Yet(String),
    /// The configuration can be used once leases have ended. It is tried again, but less often.
    Held(String),
}

impl NotUsed {
    fn faults(self) -> Vec<String> {
        match self {
            NotUsed::Faulty(faults) => faults,
            NotUsed::Yet(why) | NotUsed::Held(why) => vec![why],
        }
    }
}

struct Running {
    config: Config,
    /// The last contents of the file apart from the guarded listeners.
    seen: String,
    guard: Arc<Guard>,
    fleet: Fleet,
    metrics: Metrics,
    /// Why the changed file is not used.
    refused: Option<String>,
}

impl Running {
    async fn follow(mut self, mut changes: Changes) {
        let (mut retry, mut pause) = (None, PAUSE);
        loop {
            tokio::select! {
                changed = changes.recv() => match changed {
                    None => return,
                    // A file that is gone changes nothing.
                    Some((_, None)) => continue,
                    Some((_, Some(_))) => {}
                },
                () = tokio::time::sleep(retry.unwrap_or_default()), if retry.is_some() => {}
            }
            let loaded = self.load().await;
            (retry, pause) = match loaded {
                Err(NotUsed::Held(_)) => (Some(pause), (pause * 2).min(LONGEST_PAUSE)),
                Err(NotUsed::Yet(_)) => (Some(RETRY), pause),
                _ => (None, PAUSE),
            };
            let loaded = loaded.map_err(NotUsed::faults);
            let refused = loaded.as_ref().err().map(|faults| faults.join("; "));
            let trouble = refused.as_ref().map(|why| format!("the changed configuration is not used: {why}"));
            self.metrics.troubles.note(Subject::Configuration, trouble);
            let before = std::mem::replace(&mut self.refused, refused.clone());
            if before == refused && retry.is_some() {
                continue;
            }
            let was_refused = before.is_some();
            match loaded {
                Ok(Some(routes)) => {
                    self.metrics.config.load("live");
                    tracing::info!(routes, "guarded routes were replaced");
                }
                Ok(None) if was_refused => {
                    tracing::info!("the configuration is fine again; its routes are live");
                }
                Ok(None) => {}
                Err(faults) => {
                    self.metrics.config.load("refused");
                    for fault in faults {
                        tracing::error!(fault, "the changed configuration is not used; the old routes stay");
                    }
                }
            }
        }
    }

    /// Returns how many routes went live; `None` if nothing changed.
    async fn load(&mut self) -> Result<Option<usize>, NotUsed> {
        let changed = Config::load(self.config.file.as_deref(), &process_env())
            .map_err(|faults| NotUsed::Faulty(faults.iter().map(ToString::to_string).collect()))?;
        let said = rest(&changed);
        if said != self.seen {
            let file = self.config.file.as_deref().unwrap_or(Path::new(Config::DEFAULT_PATH)).display();
            if said == rest(&self.config) {
                tracing::info!("beyond [[guard.routes]], {file} is again what the proxy runs on");
            } else {
                tracing::warn!("{file} has changed outside [[guard.routes]]; the rest needs a restart");
            }
            self.seen = said;
        }
        if format!("{:?}", changed.guards) == format!("{:?}", self.config.guards) {
            return Ok(None);
        }
        fits(&self.config, &changed.guards).map_err(|fault| NotUsed::Faulty(vec![fault]))?;
        let naming = naming(&changed.guards);
        if naming == self::naming(&self.config.guards) {
            self.guard.replace(&changed.guards);
        } else {
            rename(&self.guard, &self.fleet, &changed.guards, &naming).await?;
        }
        self.config.guards = changed.guards;
        Ok(Some(self.config.guards.iter().map(|guard| guard.routes.len()).sum()))
    }
}

/// Replaces routes by routes that name requests differently.
pub(crate) async fn rename(
    guard: &Guard,
    fleet: &Fleet,
    guards: &[GuardConfig],
    naming: &BTreeMap<String, String>,
) -> Result<(), NotUsed> {
    let renaming = fleet.may_name(naming).await.map_err(NotUsed::Yet)?;
    let change = guard.prepare(guards);
    let agreed = match renaming {
        // The proxy that recorded these names has waited for the leases under the old names.
        Renaming::Recorded => fleet.follow_naming(naming).await.map_err(NotUsed::Yet),
        Renaming::Alone => agree(fleet, &change, naming).await,
    };
    match &agreed {
        Ok(()) => change.install(),
        Err(_) => change.give_up(),
    }
    agreed
}

/// Records the new names once no lease is left under the old ones. Requests wait until the outcome is known, because
/// a proxy that joins follows the record.
async fn agree(fleet: &Fleet, change: &Change<'_>, naming: &BTreeMap<String, String>) -> Result<(), NotUsed> {
    let mut named = record(fleet, change, naming).await?;
    while let Err(NotNamed::Unknown(why)) = named {
        tracing::warn!("it is not known whether the new routes were recorded; requests wait: {why}");
        tokio::time::sleep(RETRY).await;
        named = match fleet.has_named(naming).await {
            Some(named) => named,
            // Another proxy may have joined and died meanwhile, so the leases are checked again.
            None => record(fleet, change, naming).await.unwrap_or(Err(NotNamed::Unknown(why))),
        };
    }
    named.map_err(|not| match not {
        NotNamed::Refused(why) | NotNamed::Unknown(why) => NotUsed::Yet(why),
    })
}

/// Raises the tokens, waits for the leases, and records the new names. The tokens are raised after grants under the
/// old names have stopped, and before this proxy is known to be alone, because raising them may take a while.
async fn record(
    fleet: &Fleet,
    change: &Change<'_>,
    naming: &BTreeMap<String, String>,
) -> Result<Result<(), NotNamed>, NotUsed> {
    fleet.raise_tokens().await.map_err(NotUsed::Held)?;
    change.unhindered().await.map_err(NotUsed::Held)?;
    Ok(fleet.name_requests(naming).await)
}

/// The configuration without the guarded listeners.
fn rest(config: &Config) -> String {
    format!("{:?}", Config { guards: Vec::new(), warnings: Vec::new(), ..config.clone() })
}

/// Checks that the routes can go live with the current listeners and policies.
fn fits(running: &Config, changed: &[GuardConfig]) -> Result<(), String> {
    let listeners = |guards: &[GuardConfig]| {
        guards.iter().map(|guard| (guard.listen.clone(), guard.tls.clone())).collect::<Vec<_>>()
    };
    if listeners(&running.guards) != listeners(changed) {
        return Err("the listeners of [[guard]] have changed, which needs a restart".to_owned());
    }
    let is_new = |route: &&GuardRoute| {
        let policy = route.lock.as_ref().map(|lock| &lock.policy);
        policy.is_some_and(|policy| !running.policies.iter().any(|known| known.name == *policy))
    };
    match changed.iter().flat_map(|guard| &guard.routes).find(is_new).and_then(|route| route.lock.as_ref()) {
        Some(lock) => Err(format!("the policy `{}` is new, which needs a restart", lock.policy)),
        None => Ok(()),
    }
}
