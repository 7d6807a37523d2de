//! Replaces a policy on all members.

use std::time::Duration;

use super::drive::{self, Trouble};
use super::machine::{self, Beginning, Fate};
use super::{Fleet, Stage, component_of, relapse, version_of};
use crate::clock;
use crate::policy::{Generation, Prepared};
use crate::store::StoreError;
use crate::store::registry::{PolicyRecord, PolicyVersion, View};

/// How long the caller of a change waits for all members; the change continues after that.
const PATIENCE: Duration = Duration::from_secs(30);
/// How often a change is started again because another change was first.
pub(super) const TRIES: usize = 4;

/// The result of a change that was started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Changed {
    /// All members follow the new version.
    Live,
    /// The change continues; these members have not followed yet.
    UnderWay {
        /// The names of these members.
        waits_for: Vec<String>,
    },
    /// The version was live already, and the change to this digest was called off.
    CalledOff {
        /// The digest of the component that does not go live.
        candidate: String,
    },
}

/// Why a change failed.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChangeError {
    /// Another change of this policy is in progress.
    #[error("another change of this policy is under way on the fleet, since {since_ms} ms; it waits for proxy {}; try again when it is over, or call it off: push what is live, or roll back", .waits_for.join(", "))]
    Busy {
        /// How long ago that change reached its current step, in milliseconds.
        since_ms: u32,
        /// The members that have not acknowledged that step.
        waits_for: Vec<String>,
    },
    /// Another version is tried as a canary, with its digest.
    #[error("the version {0} is tried as a canary; promote it, or abort it, before another change")]
    Tried(String),
    /// The change was called off while the caller waited, with the reason. The old generation stays live.
    #[error("{0}")]
    CalledOff(String),
    /// This proxy refuses the version that a rollback would restore.
    #[error("{0}")]
    Refused(String),
    /// This proxy cannot check now the version that a rollback would restore.
    #[error("{0}")]
    Overloaded(String),
    /// The version before was rolled back by itself, for this reason.
    #[error("the version before was {0}; push it if it is to be live again")]
    CameBack(String),
    /// The record of the policy with this name has no previous generation to restore.
    #[error("policy `{0}` has no earlier generation to go back to")]
    NothingToRollBack(String),
    /// This proxy is not a member of its fleet, with the reason.
    #[error("this proxy is not a member of its fleet: {0}")]
    NotJoined(String),
    /// Other changes of the policy interfered; the list of policies shows the result.
    #[error("other changes have followed this one; look at GET /v1/policies")]
    Superseded,
    /// The store did not answer.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl Fleet {
    /// Makes a checked generation the live one on all members. If it is live already, a pending change to another
    /// generation is called off.
    ///
    /// # Errors
    /// The change was not started, or was called off: the old generation stays live.
    pub async fn change(&self, prepared: Prepared) -> Result<Changed, ChangeError> {
        self.change_with(prepared, None).await
    }

    /// As [`Fleet::change`]. `note`: what the record says of the change, whose version is then not watched.
    async fn change_with(&self, prepared: Prepared, note: Option<&str>) -> Result<Changed, ChangeError> {
        let generation = prepared.generation().clone();
        let (name, version) = (generation.name(), version_of(&generation));
        let mut views = self.0.view.subscribe();
        for _ in 0..TRIES {
            self.is_member()?;
            let mut view = views.borrow_and_update().clone();
            if !is_settled_elsewhere(view.record(name), &version) {
                // The other change may be over by now.
                self.0.fresh_view(&mut views).await;
                view = views.borrow_and_update().clone();
            }
            let Some(record) = view.record(name) else { continue };
            let begun = match machine::beginning(record, &version) {
                Beginning::Join { seq } => Some(self.outcome(name, seq, &version).await?),
                Beginning::Busy => return Err(busy(&view, record)),
                Beginning::Tried => return Err(ChangeError::Tried(tried(record))),
                Beginning::CallOff { .. } => self.call_off(record).await?,
                Beginning::Propose { seq } => {
                    if let Prepared::Changed(_) = &prepared {
                        self.0.prepared.lock().insert(name.to_owned(), prepared.clone());
                    }
                    self.propose(name, seq, &generation, note).await?
                }
            };
            if let Some(changed) = begun {
                return Ok(changed);
            }
            self.0.fresh_view(&mut views).await;
        }
        Err(ChangeError::Superseded)
    }

    /// Restores the previous generation on all members, or calls off a pending change.
    ///
    /// # Errors
    /// Those of [`Fleet::change`]; also if there is no previous generation.
    pub async fn roll_back(&self, name: &str) -> Result<Changed, ChangeError> {
        self.is_member()?;
        let record = self.fresh_record(name).await.ok_or(ChangeError::Superseded)?;
        if let Some(candidate) = record.candidate.as_ref().filter(|_| relapse::is_by_itself(&record)) {
            return self.outcome(name, record.seq, candidate).await;
        }
        if !record.is_settled() {
            return self.call_off(&record).await?.ok_or(ChangeError::Superseded);
        }
        if let Some(why) = record.note.clone().filter(|_| relapse::is_by_itself(&record)) {
            return Err(ChangeError::CameBack(why));
        }
        let previous = record.previous.clone();
        let previous = previous.ok_or_else(|| ChangeError::NothingToRollBack(name.to_owned()))?;
        let prepared = self.prepared(&record, &previous).await.map_err(|trouble| match trouble {
            Trouble::Refused(why) => ChangeError::Refused(why),
            Trouble::Overloaded(why) => ChangeError::Overloaded(why),
            Trouble::Store(error) => ChangeError::Store(error),
            Trouble::Changed => ChangeError::Superseded,
        })?;
        let proxy = machine::shown(self.0.state.lock().id);
        let note = format!("an operator rolled back {} at proxy {proxy}", record.live.digest);
        self.change_with(prepared, Some(&note)).await
    }

    /// The record of a policy, read from now on.
    pub(crate) async fn fresh_record(&self, name: &str) -> Option<PolicyRecord> {
        let mut views = self.0.view.subscribe();
        self.0.fresh_view(&mut views).await;
        views.borrow_and_update().record(name).cloned()
    }

    /// Proposes a generation as the candidate. `None` if the record has changed.
    pub(super) async fn propose(
        &self,
        name: &str,
        seq: u64,
        generation: &Generation,
        note: Option<&str>,
    ) -> Result<Option<Changed>, ChangeError> {
        let component = component_of(generation);
        let (version, note) = (component.version.clone(), note.map(str::to_owned));
        if !self.0.registry.propose(name.to_owned(), seq, component, note.clone()).await? {
            return Ok(None);
        }
        tracing::info!(policy = &**generation.id(), "a policy change on all proxies begins");
        self.0.view.send_modify(|view| machine::proposed(view, name, seq, version.clone(), note));
        self.0.hurry.notify_one();
        self.outcome(name, seq + 1, &version).await.map(Some)
    }

    /// Drops the record's candidate; the live version stays. `None` if the record has changed.
    pub(super) async fn call_off(&self, record: &PolicyRecord) -> Result<Option<Changed>, ChangeError> {
        let PolicyRecord { name, seq, live, candidate, .. } = record;
        let candidate = candidate.as_ref().map(|candidate| candidate.digest.clone());
        let candidate = candidate.unwrap_or_else(|| tried(record));
        let why = format!(
            "an operator kept {} at proxy {}, and {candidate} does not go live",
            live.digest,
            machine::shown(self.0.state.lock().id)
        );
        if !self.0.registry.call_off(name.clone(), *seq, why.clone()).await? {
            return Ok(None);
        }
        tracing::info!(policy = name, candidate, "a policy change on all proxies is called off");
        self.0.view.send_modify(|view| machine::called_off(view, name, *seq, &why));
        self.0.hurry.notify_one();
        self.outcome(name, *seq, live).await.map(|changed| match changed {
            Changed::Live => Some(Changed::CalledOff { candidate }),
            other => Some(other),
        })
    }

    pub(super) fn is_member(&self) -> Result<(), ChangeError> {
        let state = self.0.state.lock();
        match state.stage {
            Stage::Member => Ok(()),
            _ => Err(ChangeError::NotJoined(state.trouble.clone().unwrap_or_default())),
        }
    }

    /// Waits for the end of the change whose record with both versions has the number `seq`.
    pub(super) async fn outcome(
        &self,
        name: &str,
        seq: u64,
        version: &PolicyVersion,
    ) -> Result<Changed, ChangeError> {
        let mut views = self.0.view.subscribe();
        let until = clock::now().plus_us(PATIENCE.as_micros() as u64);
        loop {
            let fate = {
                let view: &View = &views.borrow_and_update();
                match machine::fate(view, name, seq, version) {
                    Fate::Pending { waits_for } => Err(drive::names(view, &waits_for)),
                    over => Ok(over),
                }
            };
            let waits_for = match fate {
                Ok(Fate::CalledOff(why)) => return Err(ChangeError::CalledOff(why)),
                Ok(Fate::Unknown) => return Err(ChangeError::Superseded),
                Ok(_) => return Ok(Changed::Live),
                Err(waits_for) => waits_for,
            };
            tokio::select! {
                biased;
                changed = views.changed() => if changed.is_err() {
                    return Err(ChangeError::Store(StoreError::stopped()));
                },
                () = clock::sleep_until(until) => return Ok(Changed::UnderWay { waits_for }),
                () = self.0.stop.cancelled() => return Err(ChangeError::Store(StoreError::stopped())),
            }
        }
    }
}

/// Whether no change is pending and another version is live.
fn is_settled_elsewhere(record: Option<&PolicyRecord>, version: &PolicyVersion) -> bool {
    record.is_some_and(|record| record.candidate.is_none() && record.live != *version)
}

/// The digest of the canary.
pub(super) fn tried(record: &PolicyRecord) -> String {
    record.canary.as_ref().map(|canary| canary.version.digest.clone()).unwrap_or_default()
}

pub(super) fn busy(view: &View, record: &PolicyRecord) -> ChangeError {
    let waits_for = drive::names(view, &machine::waited_for(view, &record.name, record.seq));
    ChangeError::Busy { since_ms: view.now.ms_since(record.since), waits_for }
}
