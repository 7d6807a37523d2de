//! Replaces a policy on all members.

use std::time::Duration;

use super::machine::{self, Fate};
use super::{Fleet, Stage, component_of, drive, version_of};
use crate::clock;
use crate::policy::Prepared;
use crate::store::StoreError;
use crate::store::registry::{Version, View};

/// How long whoever asked for a change waits for all members; the change goes on after that.
const PATIENCE: Duration = Duration::from_secs(30);
/// How often a change is begun again because another one was first.
const TRIES: usize = 4;

/// What became of a change that was begun.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Changed {
    /// All members go by it.
    Live,
    /// It goes on; these members have not followed yet.
    UnderWay { waits_for: Vec<String> },
}

#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChangeError {
    #[error("another change of this policy is under way on the fleet, since {since_ms} ms; it waits for proxy {}; try again when it is over", .waits_for.join(", "))]
    Busy { since_ms: u32, waits_for: Vec<String> },
    #[error("{0}")]
    CalledOff(String),
    #[error("this proxy is not a member of its fleet: {0}")]
    NotJoined(String),
    #[error("other changes have followed this one; look at GET /v1/policies")]
    Superseded,
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl Fleet {
    /// Makes a checked generation the live one of all members.
    ///
    /// # Errors
    /// Where it was not begun, or was called off: the old one stays.
    pub async fn change(&self, prepared: Prepared) -> Result<Changed, ChangeError> {
        let generation = prepared.generation().clone();
        let (name, version) = (generation.name(), version_of(&generation));
        let mut views = self.0.view.subscribe();
        for _ in 0..TRIES {
            self.is_member()?;
            let mut view = views.borrow_and_update().clone();
            if view.record(name).is_none_or(|record| record.candidate.is_some() || record.live == version) {
                // It may be over by now.
                self.0.fresh_view(&mut views).await;
                view = views.borrow_and_update().clone();
            }
            let Some(record) = view.record(name) else { continue };
            match &record.candidate {
                Some(candidate) if *candidate == version => {
                    return self.outcome(name, record.seq, &version).await;
                }
                Some(_) => {
                    let waits_for = drive::names(&view, &machine::waited_for(&view, name, record.seq));
                    return Err(ChangeError::Busy { since_ms: view.now.ms_since(record.since), waits_for });
                }
                None if record.live == version => {
                    return self.outcome(name, record.seq.saturating_sub(1), &version).await;
                }
                None => {}
            }
            if let Ok(mut known) = self.0.prepared.lock() {
                known.insert(name.to_owned(), prepared.clone());
            }
            let seq = record.seq;
            if self.0.registry.propose(name.to_owned(), seq, component_of(&generation)).await? {
                tracing::info!(policy = &**generation.id(), "a change of all proxies begins");
                self.0.view.send_modify(|view| machine::proposed(view, name, seq, version.clone()));
                self.0.hurry.notify_one();
                return self.outcome(name, seq + 1, &version).await;
            }
            self.0.fresh_view(&mut views).await;
        }
        Err(ChangeError::Superseded)
    }

    fn is_member(&self) -> Result<(), ChangeError> {
        let state = self.0.state();
        match state.stage {
            Stage::Member => Ok(()),
            _ => Err(ChangeError::NotJoined(state.trouble.clone().unwrap_or_default())),
        }
    }

    /// Waits for the end of the change whose record of both has this number.
    async fn outcome(&self, name: &str, seq: u64, version: &Version) -> Result<Changed, ChangeError> {
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
                changed = views.changed() => if changed.is_err() {
                    return Err(ChangeError::Store(StoreError::stopped()));
                },
                () = clock::sleep_until(until) => return Ok(Changed::UnderWay { waits_for }),
                () = self.0.stop.cancelled() => return Err(ChangeError::Store(StoreError::stopped())),
            }
        }
    }
}
