//! config.toml as it changes: guarded routes are replaced while the proxy runs, the rest at a restart.

use std::collections::BTreeMap;
use std::future::Future;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::config::{Config, GuardConfig, GuardRoute, naming, process_env};
use crate::fleet::Fleet;
use crate::guard::Guard;
use crate::telemetry::Metrics;
use crate::watch::{Changes, Watcher, watch};

/// A file over this size is no configuration.
const MAX_BYTES: usize = 16 << 20;
/// How long routes that cannot be used yet wait to be tried again.
const RETRY: Duration = Duration::from_secs(1);

/// Why the changed configuration is not used; `None` where there is nothing wrong with it.
pub type Refused = tokio::sync::watch::Receiver<Option<String>>;

/// Watches the file that the proxy was started with, where there was one.
pub(super) fn watch_routes(
    config: &Config,
    guard: Arc<Guard>,
    fleet: Fleet,
    metrics: Metrics,
) -> io::Result<(Watcher, Refused, impl Future<Output = ()> + use<>)> {
    let files: BTreeMap<String, PathBuf> =
        config.file.iter().map(|file| ("config".to_owned(), file.clone())).collect();
    let (watcher, changes) = watch(files, MAX_BYTES)?;
    let (refused, said) = tokio::sync::watch::channel(None);
    let running = Running { config: config.clone(), seen: rest(config), guard, fleet, metrics, refused };
    Ok((watcher, said, running.follow(changes)))
}

/// Why a changed configuration is not used.
enum NotUsed {
    Faulty(Vec<String>),
    /// It will do once something has ended: it is tried again.
    Yet(String),
}

impl NotUsed {
    fn faults(self) -> Vec<String> {
        match self {
            NotUsed::Faulty(faults) => faults,
            NotUsed::Yet(why) => vec![why],
        }
    }
}

struct Running {
    config: Config,
    /// What the file last said beyond the routes.
    seen: String,
    guard: Arc<Guard>,
    fleet: Fleet,
    metrics: Metrics,
    refused: tokio::sync::watch::Sender<Option<String>>,
}

impl Running {
    async fn follow(mut self, mut changes: Changes) {
        let mut is_awaited = false;
        loop {
            tokio::select! {
                changed = changes.recv() => if changed.is_none() {
                    return;
                },
                () = tokio::time::sleep(RETRY), if is_awaited => {}
            }
            let loaded = self.load().await;
            is_awaited = matches!(loaded, Err(NotUsed::Yet(_)));
            let loaded = loaded.map_err(NotUsed::faults);
            let refused = loaded.as_ref().err().map(|faults| faults.join("; "));
            let before = self.refused.send_replace(refused.clone());
            if before == refused && is_awaited {
                continue;
            }
            let was_refused = before.is_some();
            match loaded {
                Ok(Some(routes)) => {
                    self.metrics.config_load("live");
                    tracing::info!(routes, "guarded routes were replaced");
                }
                Ok(None) if was_refused => {
                    tracing::info!("the configuration is fine again; its routes are live");
                }
                Ok(None) => {}
                Err(faults) => {
                    self.metrics.config_load("refused");
                    for fault in faults {
                        tracing::error!(fault, "the changed configuration is not used; the old routes go on");
                    }
                }
            }
        }
    }

    /// How many routes went live; `None` where there is nothing new.
    async fn load(&mut self) -> Result<Option<usize>, NotUsed> {
        let changed = Config::load(self.config.file.as_deref(), &process_env())
            .map_err(|faults| NotUsed::Faulty(faults.iter().map(ToString::to_string).collect()))?;
        let said = rest(&changed);
        if said != self.seen {
            let file = self.config.file.as_deref().unwrap_or(Path::new(Config::DEFAULT_PATH)).display();
            if said == rest(&self.config) {
                tracing::info!("beyond [[guard.routes]], {file} is again what the proxy runs on");
            } else {
                tracing::warn!("{file} has changed beyond [[guard.routes]]; the rest needs a restart");
            }
            self.seen = said;
        }
        if format!("{:?}", changed.guards) == format!("{:?}", self.config.guards) {
            return Ok(None);
        }
        fits(&self.config, &changed.guards).map_err(|fault| NotUsed::Faulty(vec![fault]))?;
        let change = self.guard.prepare(&changed.guards).map_err(NotUsed::Yet)?;
        let naming = naming(&changed.guards);
        if naming != self::naming(&self.config.guards) {
            self.fleet.name_requests(naming).await.map_err(NotUsed::Yet)?;
        }
        change.install();
        self.config.guards = changed.guards;
        Ok(Some(self.config.guards.iter().map(|guard| guard.routes.len()).sum()))
    }
}

/// Everything but the guarded listeners.
fn rest(config: &Config) -> String {
    format!("{:?}", Config { guards: Vec::new(), warnings: Vec::new(), ..config.clone() })
}

/// Whether the routes can go live on the listeners and the policies that there are.
fn fits(running: &Config, changed: &[GuardConfig]) -> Result<(), String> {
    let listeners = |guards: &[GuardConfig]| {
        guards.iter().map(|guard| (guard.listen, guard.tls.clone())).collect::<Vec<_>>()
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
