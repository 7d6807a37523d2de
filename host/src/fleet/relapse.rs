//! A version that exceeds its guard shortly after it went live goes back by itself.
//!
//! Each proxy compares what the live version answers with what the version before answered. The first one that finds the guard
//! exceeded proposes the version before, as an operator's rollback would. The record says why until the next change, and a
//! version that came back by itself is not watched, so two versions cannot replace each other again and again.

use super::drive::Trouble;
use super::{Fleet, component_of, machine};
use crate::audit::Entry;
use crate::store::registry::{PolicyRecord, View};

impl Fleet {
    /// Rolls back the live version of a policy if it has exceeded its guard on this proxy. Tells whether the record has changed.
    pub(super) async fn watch_live(&self, view: &View, record: &PolicyRecord) -> bool {
        if !record.is_settled() || record.note.is_some() {
            return false;
        }
        // A proxy that joins has known the version for a shorter time than the fleet.
        let known_us = view.now.us_since(record.since);
        match self.0.policies.exceeded(&record.name, known_us) {
            Some(why) => self.relapse(record, &why).await,
            None => false,
        }
    }

    /// Proposes the version before the live one, because of `why`. Tells whether the record has changed.
    pub(crate) async fn relapse(&self, record: &PolicyRecord, why: &str) -> bool {
        let (policies, name) = (&self.0.policies, record.name.as_str());
        let Some(previous) = record.previous.as_ref().filter(|_| self.is_member().is_ok()) else {
            return false;
        };
        let why = format!("proxy {}: {why} ({})", machine::shown(self.0.state.lock().id), record.live.digest);
        let prepared = match self.prepared(record, previous).await {
            Ok(prepared) => prepared,
            Err(Trouble::Refused(refusal)) => {
                let why = format!("{why}; it stays, because the version before is refused: {refusal}");
                tracing::error!(policy = name, "a version is not rolled back: {why}");
                policies.note(name, why);
                policies.end_watch(name);
                return false;
            }
            // Tried again at the next heartbeat.
            Err(_) => return false,
        };
        let component = component_of(prepared.generation());
        let (seq, version) = (record.seq, component.version.clone());
        self.0.prepared.lock().insert(name.to_owned(), prepared);
        let proposed = self.0.registry.propose(name.to_owned(), seq, component, Some(why.clone())).await;
        if !proposed.unwrap_or(false) {
            return false;
        }
        tracing::error!(policy = name, "a version is rolled back: {why}");
        self.0.metrics.fleet.change("rolled_back");
        self.by_itself("policy.rollback", name, &why);
        self.0.view.send_modify(|view| machine::proposed(view, name, seq, version, Some(why)));
        true
    }

    /// Writes what the proxies do by themselves into the audit log.
    pub(super) fn by_itself(&self, verb: &'static str, policy: &str, why: &str) {
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
