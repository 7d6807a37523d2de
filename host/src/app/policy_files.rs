//! Makes changed policy files live.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use tokio::task::{AbortHandle, JoinSet};

use crate::fleet::{Fleet, PushError};
use crate::policy::Digest;
use crate::watch::Changes;

/// How long a changed file waits for the next try while the store cannot tell which leases are held.
const RETRY: Duration = Duration::from_secs(1);

/// Makes changed files live, until the watcher is gone. A file that has to wait delays no other file, and newer
/// contents of the same file replace it. `loaded` has the digests of the components that the proxy was started with,
/// by policy.
pub(super) async fn follow(fleet: Fleet, mut loaded: BTreeMap<String, String>, mut changes: Changes) {
    let mut tasks = JoinSet::new();
    let mut latest: BTreeMap<String, AbortHandle> = BTreeMap::new();
    while let Some((name, component)) = changes.recv().await {
        // A file that is gone changes nothing.
        let Some(component) = component else { continue };
        // The contents of a file at the start have been loaded already, and the fleet's policy may have replaced
        // them.
        let known = loaded.remove(&name);
        if known.is_some_and(|known| known == Digest::of(&component).to_string()) {
            continue;
        }
        let task = tasks.spawn(push(fleet.clone(), name.clone(), component.into()));
        if let Some(older) = latest.insert(name, task) {
            older.abort();
        }
        while tasks.try_join_next().is_some() {}
    }
    tasks.join_all().await;
}

async fn push(fleet: Fleet, name: String, component: Bytes) {
    let mut told = false;
    while let Err(PushError::Unavailable(error) | PushError::Overloaded(error) | PushError::Busy(error)) =
        fleet.push_file(&name, component.clone()).await
    {
        if !std::mem::replace(&mut told, true) {
            tracing::warn!(policy = name, %error, "the changed file waits; it is tried again until it is live");
        }
        tokio::time::sleep(RETRY).await;
    }
}
