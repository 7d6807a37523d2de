//! A version that exceeds its guard goes back by itself.
//!
//! Each proxy compares what a version answers with what the version before answered: a candidate while claims take the keys of both,
//! and a live version shortly after it went live. The first proxy that finds the guard exceeded calls the change off, or proposes the
//! version before. The record says why. A version that comes back is not watched, by itself or by an operator, so two versions
//! cannot replace each other again and again; and no file that changes late brings the other one back.

use super::drive::Trouble;
use super::{Fleet, component_of, machine};
use crate::audit::Entry;
use crate::coverage::{Branch, reached};
use crate::store::registry::{PolicyRecord, PolicyVersion, View};

/// How the reason in a record begins whose live version or candidate comes back by itself.
const BY_ITSELF: &str = "rolled back by itself: ";

/// Whether the version before comes back by itself, or has come back.
pub(super) fn is_by_itself(record: &PolicyRecord) -> bool {
    record.note.as_ref().is_some_and(|why| why.starts_with(BY_ITSELF))
}

/// The version that was rolled back by itself, if the record is about that.
pub(super) fn rolled_back(record: &PolicyRecord) -> Option<&PolicyVersion> {
    let rolled_back = if record.candidate.is_some() { Some(&record.live) } else { record.previous.as_ref() };
    rolled_back.filter(|_| is_by_itself(record))
}

impl Fleet {
    /// Calls off the change of a policy, or rolls back its live version, if the guard is exceeded on this proxy. Tells whether the
    /// record has changed.
    pub(super) async fn watch_live(&self, view: &View, record: &PolicyRecord) -> bool {
        let (policies, name) = (&self.0.policies, record.name.as_str());
        if record.candidate.is_some() {
            let why = policies.candidate_exceeded(name).filter(|_| record.note.is_none());
            let Some(why) = why else { return false };
            let why = format!("proxy {}: {why}", machine::shown(self.0.state.lock().id));
            let ended = self.call_off_by_itself(record, &why).await;
            if ended {
                tracing::error!(policy = name, "the policy change is called off: {why}");
            }
            return ended;
        }
        let Some(previous) = &record.previous else { return false };
        // A proxy that joins has known the version for a shorter time than the fleet.
        let known_us = view.now.us_since(record.since);
        match policies.exceeded(name, &previous.digest, known_us) {
            Some(why) => self.relapse(record, &why).await,
            None => false,
        }
    }

    /// Ends a change or a canary, and records that no operator did. Tells whether there was one.
    pub(super) async fn call_off_by_itself(&self, record: &PolicyRecord, why: &str) -> bool {
        let (name, seq) = (record.name.as_str(), record.seq);
        let ended = self.0.registry.call_off(name.to_owned(), seq, why.to_owned()).await.unwrap_or(false);
        if ended {
            self.by_itself("policy.rollback", name, why);
            self.0.view.send_modify(|view| machine::called_off(view, name, seq, why));
        }
        ended
    }

    /// Proposes the version before the live one, because of `why`. Tells whether the record has changed.
    pub(crate) async fn relapse(&self, record: &PolicyRecord, why: &str) -> bool {
        let (policies, name) = (&self.0.policies, record.name.as_str());
        let Some(previous) = record.previous.as_ref().filter(|_| self.is_member().is_ok()) else {
            return false;
        };
        let proxy = machine::shown(self.0.state.lock().id);
        let why = format!("{BY_ITSELF}proxy {proxy}: {why} ({})", record.live.digest);
        let prepared = match self.prepared(record, previous).await {
            Ok(prepared) => prepared,
            Err(Trouble::Refused(refusal)) => {
                let why = format!("{why}; it stays, because the version before is refused: {refusal}");
                tracing::error!(policy = name, "a version is not rolled back: {why}");
                policies.note(name, why);
                policies.end_watch(name);
                return false;
            }
            Err(trouble) => {
                tracing::warn!(policy = name, "a version cannot be rolled back yet: {trouble}; {why}");
                return false;
            }
        };
        let component = component_of(prepared.generation());
        let (seq, version) = (record.seq, component.version.clone());
        self.0.prepared.lock().insert(name.to_owned(), prepared);
        match self.0.registry.propose(name.to_owned(), seq, component, Some(why.clone())).await {
            Ok(true) => {}
            Ok(false) => return false,
            Err(error) => {
                tracing::warn!(policy = name, %error, "a version may not have been rolled back: {why}");
                return false;
            }
        }
        reached(Branch::Relapses);
        tracing::error!(policy = name, "a version is being {why}");
        self.by_itself("policy.rollback", name, &why);
        self.0.view.send_modify(|view| machine::proposed(view, name, seq, version, Some(why)));
        true
    }

    /// Writes what the proxies do by themselves into the audit log.
    fn by_itself(&self, verb: &'static str, policy: &str, why: &str) {
        self.0.audit.ended(&Entry {
            front: "fleet",
            request_id: String::new(),
            peer: String::new(),
            principal: None,
            credential: None,
            refused_credential: None,
            request: String::new(),
            verb: Some(verb),
            on: Some(policy.to_owned()),
            verdict: "by_itself".to_owned(),
            why: Some(why.to_owned()),
        });
    }
}
