//! Replaces policies, on request of operators and when files change.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::mpsc;
use tokio::task::{AbortHandle, JoinSet};

use crate::admin::{PolicyAdmin, PolicyAnswer, PushError, Pushed};
use crate::fleet::{ChangeError, Changed, Fleet};
use crate::policy::{Digest, Policies, PolicyStatus, Prepared, Rejection};

/// How long a changed file waits for the next try while the store cannot tell which leases are held.
const RETRY: Duration = Duration::from_secs(1);

#[derive(Clone)]
pub(super) struct PolicyRollout {
    policies: Policies,
    fleet: Fleet,
    /// The digests of the components that the proxy was started with, by policy.
    loaded: BTreeMap<String, String>,
}

impl PolicyRollout {
    /// `loaded` has the digests of the components that the proxy was started with, by policy.
    pub fn new(policies: Policies, fleet: Fleet, loaded: BTreeMap<String, String>) -> PolicyRollout {
        PolicyRollout { policies, fleet, loaded }
    }

    /// Makes changed files live, until the watcher is gone. A file that has to wait delays no other file, and newer
    /// contents of the same file replace it.
    pub async fn reload(mut self, mut changes: mpsc::Receiver<(String, Vec<u8>)>) {
        let mut tasks = JoinSet::new();
        let mut latest: BTreeMap<String, AbortHandle> = BTreeMap::new();
        while let Some((name, component)) = changes.recv().await {
            // The contents of a file at the start have been loaded already, and the fleet's policy may have replaced
            // them.
            let loaded = self.loaded.remove(&name);
            if loaded.is_some_and(|loaded| loaded == Digest::of(&component).to_string()) {
                continue;
            }
            let task = tasks.spawn(self.clone().follow_file(name.clone(), component.into()));
            if let Some(older) = latest.insert(name, task) {
                older.abort();
            }
            while tasks.try_join_next().is_some() {}
        }
        tasks.join_all().await;
    }

    async fn follow_file(self, name: String, component: Bytes) {
        let mut told = false;
        while let Err(PushError::Unavailable(error) | PushError::Busy(error)) =
            self.put(&name, component.clone()).await
        {
            if !std::mem::replace(&mut told, true) {
                tracing::warn!(policy = name, %error, "the changed file waits; it is tried again until it is live");
            }
            tokio::time::sleep(RETRY).await;
        }
    }

    async fn put(&self, name: &str, component: Bytes) -> Result<Pushed, PushError> {
        let (policies, policy) = (self.policies.clone(), name.to_owned());
        let checks = move || policies.prepare(&policy, &component, None);
        let prepared = self.checked(name, tokio::task::spawn_blocking(checks).await)?;
        // The fleet decides: this proxy may be one step behind, or a change may be pending.
        match (self.fleet.change(prepared.clone()).await, &prepared) {
            (Ok(Changed::Live), Prepared::Unchanged(_)) => {
                self.policies.commit(prepared);
                Ok(Pushed::Unchanged(self.status_of(name)?))
            }
            (changed, _) => self.pushed(name, changed),
        }
    }

    fn pushed(&self, name: &str, changed: Result<Changed, ChangeError>) -> Result<Pushed, PushError> {
        match changed {
            Ok(Changed::Live) => self.status_of(name).map(Pushed::Live),
            Ok(Changed::UnderWay { waits_for }) => {
                Ok(Pushed::UnderWay { policy: self.status_of(name)?, waits_for })
            }
            Ok(Changed::CalledOff { candidate }) => {
                Ok(Pushed::CalledOff { policy: self.status_of(name)?, candidate })
            }
            Err(ChangeError::CalledOff(why) | ChangeError::Refused(why)) => {
                self.policies.note(name, why.clone());
                Err(PushError::Refused(why))
            }
            // No component was refused, so there is nothing to record.
            Err(nothing @ ChangeError::NothingToRollBack(_)) => Err(PushError::Refused(nothing.to_string())),
            Err(busy @ ChangeError::Busy { .. }) => Err(PushError::Busy(busy.to_string())),
            Err(error) => Err(PushError::Unavailable(error.to_string())),
        }
    }

    fn checked(
        &self,
        name: &str,
        result: Result<Result<Prepared, Rejection>, tokio::task::JoinError>,
    ) -> Result<Prepared, PushError> {
        let result = result.map_err(|error| PushError::Unavailable(format!("the check failed: {error}")))?;
        result.map_err(|rejection| self.refused(name, &rejection))
    }

    /// Records a rejection.
    fn refused(&self, name: &str, rejection: &Rejection) -> PushError {
        if self.policies.get(name).is_none() {
            return PushError::Unknown;
        }
        self.policies.reject(name, rejection);
        PushError::Refused(rejection.to_string())
    }

    fn status_of(&self, name: &str) -> Result<PolicyStatus, PushError> {
        self.status().into_iter().find(|status| status.name == name).ok_or(PushError::Unknown)
    }
}

impl PolicyAdmin for PolicyRollout {
    fn status(&self) -> Vec<PolicyStatus> {
        let records = self.fleet.records();
        let mut all = self.policies.status();
        for status in &mut all {
            let record = records.iter().find(|record| record.name == status.name);
            status.previous = record.and_then(|record| record.previous.clone());
        }
        all
    }

    fn push(&self, name: &str, component: Bytes) -> PolicyAnswer<Pushed> {
        let (policy_rollout, name) = (self.clone(), name.to_owned());
        Box::pin(async move { policy_rollout.put(&name, component).await })
    }

    fn too_large(&self, name: &str, max: usize) -> PushError {
        self.refused(name, &Rejection::TooLarge { max })
    }

    fn rollback(&self, name: &str) -> PolicyAnswer<Pushed> {
        let (policy_rollout, name) = (self.clone(), name.to_owned());
        Box::pin(async move {
            if policy_rollout.policies.get(&name).is_none() {
                return Err(PushError::Unknown);
            }
            let changed = policy_rollout.fleet.roll_back(&name).await;
            policy_rollout.pushed(&name, changed)
        })
    }
}
