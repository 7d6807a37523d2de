//! config.toml as it changes: guarded routes are replaced while the proxy runs, the rest at a restart.

use std::collections::BTreeMap;
use std::future::Future;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::config::{Config, GuardConfig, GuardRoute, process_env};
use crate::guard::Guard;
use crate::telemetry::Metrics;
use crate::watch::{Changes, Watcher, watch};

/// A file over this size is no configuration.
const MAX_BYTES: usize = 16 << 20;

/// Watches the file that the proxy was started with, where there was one.
pub(super) fn watch_routes(
    config: &Config,
    guard: Arc<Guard>,
    metrics: Metrics,
) -> io::Result<(Watcher, impl Future<Output = ()> + use<>)> {
    let files: BTreeMap<String, PathBuf> =
        config.file.iter().map(|file| ("config".to_owned(), file.clone())).collect();
    let (watcher, changes) = watch(files, MAX_BYTES)?;
    let running = Running { config: config.clone(), rest: rest(config), guard, metrics };
    Ok((watcher, running.follow(changes)))
}

struct Running {
    config: Config,
    rest: String,
    guard: Arc<Guard>,
    metrics: Metrics,
}

impl Running {
    async fn follow(mut self, mut changes: Changes) {
        while changes.recv().await.is_some() {
            match self.load() {
                Ok(None) => {}
                Ok(Some(routes)) => {
                    self.metrics.config_load("live");
                    tracing::info!(routes, "guarded routes were replaced");
                }
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
    fn load(&mut self) -> Result<Option<usize>, Vec<String>> {
        let changed = Config::load(self.config.file.as_deref(), &process_env())
            .map_err(|faults| faults.iter().map(ToString::to_string).collect::<Vec<_>>())?;
        let rest = rest(&changed);
        if rest != self.rest {
            let file = self.config.file.as_deref().unwrap_or(Path::new(Config::DEFAULT_PATH));
            tracing::warn!(
                "{} has changed beyond [[guard.routes]]; the rest needs a restart",
                file.display()
            );
            self.rest = rest;
        }
        if format!("{:?}", changed.guards) == format!("{:?}", self.config.guards) {
            return Ok(None);
        }
        fits(&self.config, &changed.guards).map_err(|fault| vec![fault])?;
        self.guard.reload(&changed.guards);
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
