//! Pushes of policies by operators and by files that change: the check on this proxy, then the change on all proxies.

use std::sync::Arc;

use bytes::Bytes;

use super::change::{ChangeError, Changed};
use super::{Fleet, relapse};
use crate::policy::{Digest, Generation, Policies, PolicyStatus, Prepared, Rejection};

/// The result of a push or rollback that was accepted.
#[derive(Clone, Debug)]
pub enum Pushed {
    /// All proxies follow the new generation.
    Live(PolicyStatus),
    /// The component is already the live generation.
    Unchanged(PolicyStatus),
    /// The change goes on without the caller; the proxies in `waits_for` have not followed yet.
    UnderWay {
        /// The status of the policy on this proxy.
        policy: PolicyStatus,
        /// The proxies that have not followed yet.
        waits_for: Vec<String>,
    },
    /// The live generation stays: the change to the component with the digest `candidate` was cancelled.
    CalledOff {
        /// The status of the policy on this proxy.
        policy: PolicyStatus,
        /// The digest of the component that does not go live.
        candidate: String,
    },
}

/// The reason why a push or rollback changed nothing.
#[derive(Clone, Debug)]
pub enum PushError {
    /// No policy has this name.
    Unknown,
    /// The component was refused, with one sentence for the operator.
    Refused(String),
    /// Another change of the policy is in progress.
    Busy(String),
    /// The component cannot be checked now, but may be soon, with the reason.
    Overloaded(String),
    /// Nothing is wrong with the component, but it cannot be made live now, with the reason.
    Unavailable(String),
}

impl Fleet {
    /// Checks a component and makes it the policy's live generation, with the policy's current settings. If the
    /// component is refused, the policy keeps its live generation. Pushing the component that is already live cancels
    /// a change that is in progress.
    ///
    /// # Errors
    /// [`PushError`]: why the policy keeps its generation.
    pub async fn push(&self, name: &str, component: Bytes) -> Result<Pushed, PushError> {
        if let Some(tried) = self.tried_beside(name, &component) {
            // Before the component is compiled: a file is tried again and again.
            return Err(PushError::Busy(ChangeError::Tried(tried).to_string()));
        }
        let prepared = self.check(name, component).await?;
        // The fleet decides: this proxy may be one step behind, or a change may be pending.
        match (self.change(prepared.clone()).await, &prepared) {
            (Ok(Changed::Live), Prepared::Unchanged(_)) => {
                self.0.policies.commit(prepared);
                Ok(Pushed::Unchanged(self.status_of(name)?))
            }
            (changed, _) => self.pushed(name, changed),
        }
    }

    /// As [`Fleet::push`], for a file that has changed on this proxy. Files change on one proxy after another: a file does not bring
    /// back the version that the proxies have rolled back by themselves.
    ///
    /// # Errors
    /// Those of [`Fleet::push`].
    pub async fn push_file(&self, name: &str, component: Bytes) -> Result<Pushed, PushError> {
        let view = self.0.view.borrow().clone();
        if let Some(record) = view.record(name)
            && let Some(version) = relapse::rolled_back(record)
            && version.digest == Digest::of(&component).to_string()
        {
            let why = record.note.clone().unwrap_or_default();
            let why = format!("the file has the version that was {why}; push it if it is to be live again");
            tracing::warn!(policy = name, "a changed file is not loaded: {why}");
            return Err(PushError::Refused(why));
        }
        self.push(name, component).await
    }

    /// The digest of the policy's canary, if this component is neither the canary nor what is live.
    fn tried_beside(&self, name: &str, component: &[u8]) -> Option<String> {
        let view = self.0.view.borrow();
        let record = view.record(name)?;
        let (digest, tried) = (Digest::of(component).to_string(), &record.canary.as_ref()?.version.digest);
        (digest != *tried && digest != record.live.digest).then(|| tried.clone())
    }

    /// Restores the generation that was live before on all proxies, or cancels a change that is in progress.
    ///
    /// # Errors
    /// [`PushError`]: why the policy keeps its generation.
    pub async fn push_previous(&self, name: &str) -> Result<Pushed, PushError> {
        if self.0.policies.get(name).is_none() {
            return Err(PushError::Unknown);
        }
        let changed = self.roll_back(name).await;
        self.pushed(name, changed)
    }

    /// Records that a component with more than `max` bytes was refused, and returns the error.
    pub fn too_large(&self, name: &str, max: usize) -> PushError {
        self.refused(name, &Rejection::TooLarge { max })
    }

    /// The status of every policy on this proxy, sorted by name.
    pub fn policies(&self) -> Vec<PolicyStatus> {
        let records = self.records();
        let mut all = self.0.policies.status();
        for status in &mut all {
            let record = records.iter().find(|record| record.name == status.name);
            status.previous = record.and_then(|record| record.previous.clone());
        }
        all
    }

    pub(super) fn pushed(
        &self,
        name: &str,
        changed: Result<Changed, ChangeError>,
    ) -> Result<Pushed, PushError> {
        match changed {
            Ok(Changed::Live) => self.status_of(name).map(Pushed::Live),
            Ok(Changed::UnderWay { waits_for }) => {
                Ok(Pushed::UnderWay { policy: self.status_of(name)?, waits_for })
            }
            Ok(Changed::CalledOff { candidate }) => {
                Ok(Pushed::CalledOff { policy: self.status_of(name)?, candidate })
            }
            Err(error) => {
                if let ChangeError::CalledOff(why) | ChangeError::Refused(why) = &error {
                    self.0.policies.note(name, why.clone());
                }
                Err(error.into())
            }
        }
    }

    /// Loads a component to be asked beside the live generation, which is returned too.
    ///
    /// # Errors
    /// [`PushError`]: why the component is refused.
    pub async fn load_beside(
        &self,
        name: &str,
        component: Bytes,
    ) -> Result<(Arc<Generation>, Generation), PushError> {
        let policy = name.to_owned();
        let checked = self.checked(move |policies| policies.load_beside(&policy, &component)).await?;
        // It would replace nothing, so a refusal is not recorded.
        checked.map_err(|rejection| PushError::from(&rejection))
    }

    /// Checks a component that is to replace the live one, with the policy's current settings.
    pub(super) async fn check(&self, name: &str, component: Bytes) -> Result<Prepared, PushError> {
        let policy = name.to_owned();
        let checked = self.checked(move |policies| policies.prepare(&policy, &component, None)).await?;
        checked.map_err(|rejection| self.refused(name, &rejection))
    }

    async fn checked<T: Send + 'static>(
        &self,
        check: impl FnOnce(&Policies) -> Result<T, Rejection> + Send + 'static,
    ) -> Result<Result<T, Rejection>, PushError> {
        let policies = self.0.policies.clone();
        let checks = move || check(&policies);
        let checked = tokio::task::spawn_blocking(checks).await;
        checked.map_err(|error| PushError::Unavailable(format!("the check failed: {error}")))
    }

    /// Records a rejection that is about the component.
    fn refused(&self, name: &str, rejection: &Rejection) -> PushError {
        if self.0.policies.get(name).is_none() {
            return PushError::Unknown;
        }
        let error = PushError::from(rejection);
        if let PushError::Refused(_) = &error {
            self.0.policies.reject(name, rejection);
        }
        error
    }

    pub(super) fn status_of(&self, name: &str) -> Result<PolicyStatus, PushError> {
        self.policies().into_iter().find(|status| status.name == name).ok_or(PushError::Unknown)
    }
}

impl From<&Rejection> for PushError {
    fn from(rejection: &Rejection) -> PushError {
        match rejection {
            Rejection::Unknown { .. } => PushError::Unknown,
            rejection if rejection.is_passing() => PushError::Overloaded(rejection.to_string()),
            rejection => PushError::Refused(rejection.to_string()),
        }
    }
}

impl From<ChangeError> for PushError {
    fn from(error: ChangeError) -> PushError {
        match error {
            ChangeError::CalledOff(why) | ChangeError::Refused(why) => PushError::Refused(why),
            // No component was refused, so there is nothing to record.
            ChangeError::NothingToRollBack(_) | ChangeError::CameBack(_) => {
                PushError::Refused(error.to_string())
            }
            ChangeError::Busy { .. } | ChangeError::Tried(_) => PushError::Busy(error.to_string()),
            ChangeError::Overloaded(why) => PushError::Overloaded(why),
            error => PushError::Unavailable(error.to_string()),
        }
    }
}
