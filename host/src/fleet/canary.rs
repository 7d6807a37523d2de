//! Canaries: a version of a policy decides for a share of the keys, and goes live, or ends by itself.

use bytes::Bytes;

use super::change::{self, ChangeError, Changed};
use super::drive::Trouble;
use super::machine;
use super::{Fleet, PushError, Pushed, component_of, version_of};
use crate::coverage::{Branch, reached};
use crate::policy::{CanaryTerms, Policies, PolicyStatus, Prepared};
use crate::store::registry::{CanaryRecord, PolicyRecord, View};

impl Fleet {
    /// Checks a component, and lets it decide for a share of the policy's keys on all proxies. If it does so already, it gets
    /// these terms.
    ///
    /// Also returns the proxies that have not followed yet.
    ///
    /// # Errors
    /// [`PushError`]: why there is no such canary.
    pub async fn canary(
        &self,
        name: &str,
        component: Bytes,
        terms: &CanaryTerms,
    ) -> Result<(PolicyStatus, Vec<String>), PushError> {
        let prepared = self.check(name, component).await?;
        if let Prepared::Unchanged(_) = prepared {
            return Err(PushError::Refused("the component is live already".to_owned()));
        }
        let waits_for = self.try_out(name, prepared, terms).await?;
        Ok((self.status_of(name)?, waits_for))
    }

    /// Makes the canary of a policy live on all proxies.
    ///
    /// # Errors
    /// [`PushError`]: why the policy keeps its generation.
    pub async fn promote(&self, name: &str) -> Result<Pushed, PushError> {
        if self.0.policies.get(name).is_none() {
            return Err(PushError::Unknown);
        }
        let record = self.fresh_record(name).await;
        let canary = record.as_ref().and_then(|record| record.canary.clone());
        let (Some(record), Some(canary)) = (record, canary) else {
            return Err(PushError::Refused(format!("policy `{name}` has no canary")));
        };
        let prepared = self.prepared(&record, &canary.version).await;
        let prepared = prepared.map_err(|trouble| PushError::Unavailable(trouble.to_string()))?;
        let generation = prepared.generation().clone();
        self.0.prepared.lock().insert(name.to_owned(), prepared);
        // If the canary has ended, or has got another share, the record has another number.
        let changed = match self.propose(name, record.seq, &generation, None).await {
            Ok(Some(changed)) => Ok(changed),
            Ok(None) => {
                let why = "the canary has changed meanwhile, or has ended; `lockkeeper policy list` shows it";
                return Err(PushError::Busy(why.to_owned()));
            }
            Err(error) => Err(error),
        };
        self.pushed(name, changed)
    }

    /// Ends the canary of a policy, or its change in progress. Unlike a rollback, it never replaces what is live.
    ///
    /// # Errors
    /// [`PushError`]: there is nothing to end, or it cannot be ended now.
    pub async fn abort(&self, name: &str) -> Result<Pushed, PushError> {
        if self.0.policies.get(name).is_none() {
            return Err(PushError::Unknown);
        }
        let Some(record) = self.fresh_record(name).await.filter(|record| !record.is_settled()) else {
            return Err(PushError::Refused(format!(
                "policy `{name}` has no canary, and is not being changed"
            )));
        };
        let ended = self.call_off(&record).await;
        self.pushed(name, ended.and_then(|ended| ended.ok_or(ChangeError::Superseded)))
    }

    /// Makes a checked generation the canary on all members. Returns the members that have not followed yet.
    pub(crate) async fn try_out(
        &self,
        name: &str,
        prepared: Prepared,
        terms: &CanaryTerms,
    ) -> Result<Vec<String>, ChangeError> {
        let generation = prepared.generation().clone();
        let mut views = self.0.view.subscribe();
        for _ in 0..change::TRIES {
            self.is_member()?;
            self.0.fresh_view(&mut views).await;
            let view = views.borrow_and_update().clone();
            let Some(record) = view.record(name) else { continue };
            if record.candidate.is_some() {
                return Err(change::busy(&view, record));
            }
            if record.canary.as_ref().is_some_and(|canary| canary.version != version_of(&generation)) {
                return Err(ChangeError::Tried(change::tried(record)));
            }
            let (seq, terms) = (record.seq, in_text(terms));
            self.0.prepared.lock().insert(name.to_owned(), prepared.clone());
            let component = component_of(&generation);
            if self.0.registry.canary(name.to_owned(), seq, component, terms.clone()).await? {
                tracing::info!(policy = &**generation.id(), terms, "a canary begins on all proxies");
                let canary = CanaryRecord { version: version_of(&generation), terms };
                self.0.view.send_modify(|view| machine::tried(view, name, seq, canary));
                self.0.hurry.notify_one();
                let waits_for = match self.outcome(name, seq, &record.live).await? {
                    Changed::UnderWay { waits_for } => waits_for,
                    Changed::Live | Changed::CalledOff { .. } => Vec::new(),
                };
                let now = self.0.view.borrow().record(name).cloned();
                return match now {
                    // A proxy has refused it.
                    Some(PolicyRecord { canary: None, candidate: None, note: Some(why), .. }) => {
                        Err(ChangeError::CalledOff(why))
                    }
                    _ => Ok(waits_for),
                };
            }
        }
        Err(ChangeError::Superseded)
    }

    /// Applies what the record says of a canary.
    pub(super) async fn apply_canary(&self, record: &PolicyRecord) -> Result<(), Trouble> {
        let (policies, name): (&Policies, _) = (&self.0.policies, record.name.as_str());
        let now = policies.active(name).and_then(|active| active.canary.clone());
        let Some(canary) = &record.canary else {
            if now.is_some() {
                policies.try_out(name, None);
                reached(Branch::CanaryEnds);
                if let Some(why) = &record.note {
                    policies.note(name, format!("a canary was rolled back: {why}"));
                }
            }
            return Ok(());
        };
        let terms: CanaryTerms = match serde_json::from_str(&canary.terms) {
            Ok(terms) => terms,
            Err(error) => return self.refuse(record, &format!("its terms cannot be read: {error}")).await,
        };
        let same = now.filter(|now| version_of(&now.generation) == canary.version);
        if same.as_ref().is_some_and(|same| same.terms == terms) {
            return Ok(());
        }
        let generation = match same {
            Some(same) => same.generation.clone(),
            None => match self.prepared(record, &canary.version).await {
                Ok(prepared) => prepared.generation().clone(),
                Err(Trouble::Refused(why)) => return self.refuse(record, &why).await,
                Err(trouble) => return Err(trouble),
            },
        };
        policies.try_out(name, Some((generation, terms)));
        reached(Branch::CanaryBegins);
        self.0.metrics.fleet.change("canary");
        Ok(())
    }

    /// Ends a canary that this proxy cannot run: it could not go live, either.
    async fn refuse(&self, record: &PolicyRecord, why: &str) -> Result<(), Trouble> {
        let why = format!("proxy {} refuses it: {why}", machine::shown(self.0.state.lock().id));
        tracing::error!(policy = record.name, "a canary is ended: {why}");
        self.0.registry.call_off(record.name.clone(), record.seq, why).await?;
        Err(Trouble::Changed)
    }

    /// Ends a canary that this proxy has found to be worse, or takes its next step when that is due. Tells whether the
    /// record has changed.
    pub(super) async fn watch_canary(&self, view: &View, record: &PolicyRecord) -> bool {
        let name = record.name.as_str();
        let active = self.0.policies.active(name);
        let (Some(recorded), Some(canary)) =
            (&record.canary, active.and_then(|active| active.canary.clone()))
        else {
            return false;
        };
        if let Some(why) = canary.verdict() {
            let digest = &recorded.version.digest;
            let why = format!("proxy {}: {why} ({digest})", machine::shown(self.0.state.lock().id));
            tracing::error!(policy = name, "a canary is rolled back: {why}");
            let ended = self.call_off_by_itself(record, &why).await;
            if ended {
                self.0.metrics.fleet.change("canary_rolled_back");
            }
            return ended;
        }
        let terms = &canary.terms;
        let is_due =
            terms.every_ms > 0 && view.now.us_since(record.since) >= terms.every_ms.saturating_mul(1_000);
        // A proxy that has seen enough of it takes the step.
        if !is_due || !canary.is_tried() || !machine::waited_for(view, name, record.seq).is_empty() {
            return false;
        }
        let (seq, registry) = (record.seq, &self.0.registry);
        let next = match terms.next() {
            Some(next) => {
                tracing::info!(policy = name, share = next.share, "a canary decides for more keys");
                registry.canary_terms(name.to_owned(), seq, in_text(&next)).await
            }
            None => {
                tracing::info!(policy = &**canary.generation.id(), "a canary goes live");
                registry.propose(name.to_owned(), seq, component_of(&canary.generation), None).await
            }
        };
        next.unwrap_or(false)
    }
}

fn in_text(terms: &CanaryTerms) -> String {
    // Serialization fails only for maps whose keys are not text, and there are none here.
    serde_json::to_string(terms).unwrap_or_default()
}
