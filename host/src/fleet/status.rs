//! The state of the fleet for operators.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::{Map, Value};

use super::{Fleet, Inner, Stage, WRITES, drive, machine};
use crate::clock;
use crate::policy::PolicyStatus;
use crate::store::registry::{Member, PolicyRecord as Recorded, View};

/// The state of the fleet, as seen by one proxy.
#[derive(Clone, Debug, Serialize)]
pub struct FleetStatus {
    /// The id of the proxy that answers.
    pub id: String,
    /// Why the proxy grants nothing; absent if it is a member that may grant.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
    /// Ordered by id.
    pub members: Vec<MemberStatus>,
    /// The records of the policies.
    pub policies: Vec<PolicyRecord>,
}

/// The state of one member.
#[derive(Clone, Debug, Serialize)]
pub struct MemberStatus {
    /// The id of the membership; it is new each time the proxy joins.
    pub id: String,
    /// Whether this member is the proxy that answers.
    pub is_this: bool,
    /// The address for other proxies; empty if they cannot reach the member.
    pub address: String,
    /// The time since its last heartbeat, by the store's clock.
    pub silent_ms: u32,
    /// `member`, `joining`, or `silent` if it may not write any more.
    pub state: &'static str,
    /// For each policy, the number of the record that the member has acknowledged.
    pub acknowledged: BTreeMap<String, u64>,
}

/// A version that decides for a share of the keys.
#[derive(Clone, Debug, Serialize)]
pub struct CanaryStatus {
    /// The digest of the component: `sha256:` and 64 hex digits.
    pub digest: String,
    /// The share, and what ends the canary: [`CanaryTerms`](crate::policy::CanaryTerms).
    #[serde(flatten)]
    pub terms: Map<String, Value>,
}

/// The record of a policy for all proxies.
#[derive(Clone, Debug, Serialize)]
pub struct PolicyRecord {
    /// The name of the policy.
    pub name: String,
    /// `settled`; `both` while claims take the keys of two generations; or `canary`.
    pub phase: &'static str,
    /// Increases with every step of a change.
    pub seq: u64,
    /// The digest of the component: `sha256:` and 64 hex digits.
    pub digest: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    /// The digest that a pending change proposes.
    pub candidate: Option<String>,
    /// The version that decides for a share of the keys.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub canary: Option<CanaryStatus>,
    /// The digest that a rollback would restore.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub previous: Option<String>,
    /// The proxies that have not acknowledged `seq`.
    pub waits_for: Vec<String>,
    /// Why the proxy that answers has not acknowledged `seq`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub held_up: Option<String>,
    /// When `seq` was reached, in microseconds since 1970 by the store's clock.
    pub since_us: u64,
    /// The version in the manifest of the component. Absent if it has no manifest, and while the proxy that answers has another
    /// component.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// Why the last change was called off, or why the proxies made it by themselves.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

impl Fleet {
    /// The current state of the fleet.
    pub fn status(&self) -> FleetStatus {
        let (mut policies, trouble) = (self.records(), self.trouble());
        let live = self.policies();
        for record in &mut policies {
            let is_live = |live: &&PolicyStatus| live.name == record.name && live.digest == record.digest;
            let manifest = live.iter().find(is_live).and_then(|live| live.manifest.as_ref());
            record.version = manifest.map(|manifest| manifest.version.clone());
        }
        let view = self.0.view.borrow();
        let id = self.0.state.lock().id;
        let members = view.members.iter().map(|member| self.0.member(&view, member, id)).collect();
        FleetStatus { id: machine::shown(id), trouble, members, policies }
    }

    /// The records of all policies.
    pub fn records(&self) -> Vec<PolicyRecord> {
        let view = self.0.view.borrow();
        let held_up = self.0.state.lock().held_up.clone();
        let record = |record: &Recorded| PolicyRecord {
            held_up: held_up.get(&record.name).cloned(),
            ..policy_record(&view, record)
        };
        view.records.iter().filter(|record| record.is_policy()).map(record).collect()
    }

    /// Why this proxy grants nothing.
    pub fn trouble(&self) -> Option<String> {
        let state = self.0.state.lock();
        if state.stage != Stage::Member {
            let why = state.trouble.clone().unwrap_or_else(|| "it joins".to_owned());
            return Some(format!("not a member of the fleet: {why}"));
        }
        let silent_us = clock::now().us_since(state.heard?);
        let writes_us = (self.0.config.beat * WRITES).as_micros();
        if u128::from(silent_us) > writes_us {
            let seconds = silent_us / 1_000_000;
            return Some(format!("the store has not confirmed this proxy's membership for {seconds} s"));
        }
        if !self.0.service.is_open() {
            return Some("leases of before are looked at".to_owned());
        }
        self.0.rules.lock().trouble().filter(|(_, grants_nothing)| *grants_nothing).map(|(what, _)| what)
    }

    /// What an operator should put in order, although this proxy grants locks.
    pub fn warning(&self) -> Option<String> {
        self.0.rules.lock().trouble().filter(|(_, grants_nothing)| !grants_nothing).map(|(what, _)| what)
    }
}

impl Inner {
    fn member(&self, view: &View, member: &Member, this: u64) -> MemberStatus {
        let silent_ms = view.now.ms_since(member.beat);
        let state = match &member.acks {
            None => "joining",
            Some(_) if u128::from(silent_ms) > (self.config.beat * WRITES).as_millis() => "silent",
            Some(_) => "member",
        };
        MemberStatus {
            id: machine::shown(member.id),
            is_this: member.id == this,
            address: member.address.clone(),
            silent_ms,
            state,
            acknowledged: member.acks.clone().unwrap_or_default(),
        }
    }
}

fn policy_record(view: &View, record: &Recorded) -> PolicyRecord {
    PolicyRecord {
        name: record.name.clone(),
        phase: match (&record.candidate, &record.canary) {
            (Some(_), _) => "both",
            (None, Some(_)) => "canary",
            (None, None) => "settled",
        },
        seq: record.seq,
        digest: record.live.digest.clone(),
        candidate: record.candidate.as_ref().map(|candidate| candidate.digest.clone()),
        canary: record.canary.as_ref().map(|canary| CanaryStatus {
            digest: canary.version.digest.clone(),
            terms: serde_json::from_str(&canary.terms).unwrap_or_default(),
        }),
        previous: record.previous.as_ref().map(|previous| previous.digest.clone()),
        waits_for: drive::names(view, &machine::waited_for(view, &record.name, record.seq)),
        held_up: None,
        version: None,
        since_us: record.since.0,
        note: record.note.clone(),
    }
}
