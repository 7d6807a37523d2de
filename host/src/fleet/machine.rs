//! Decides what a member does next, from the records. Pure.
//!
//! The records of a policy form a sequence: settled on X, both X and Y, settled on Y (or, if the change was called
//! off, on X again), and so on. A claim takes the keys of X, of both, or of Y. Each record shares a version with the
//! next, so members that are one record apart exclude each other. This module ensures that members that may grant are
//! never further apart: a candidate becomes live only when every member that may grant has acknowledged the record
//! with both versions.

use std::collections::{BTreeMap, BTreeSet};

use crate::lock::ServerTime;
use crate::store::registry::{CanaryRecord, Member, PolicyRecord, PolicyVersion, View};

/// How long heartbeats are faster after a record has changed, in microseconds.
const HURRY_US: u64 = 10_000_000;

/// One action of a member. Several members may try the same action at once; one of them succeeds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FleetAction {
    /// Delete the row of a member that is gone.
    Evict { id: u64, beat: ServerTime },
    /// Apply the record, and acknowledge it.
    ApplyRecord(Box<PolicyRecord>),
    /// Make the candidate live: every member takes the keys of both versions.
    Settle { name: String, seq: u64 },
}

/// The actions of the member `me`, which has acknowledged `acks`, if the members in `gone` are gone.
pub fn steps(view: &View, me: u64, acks: &BTreeMap<String, u64>, gone: &BTreeSet<u64>) -> Vec<FleetAction> {
    let mut steps = evictions(view, me, gone);
    for record in &view.records {
        // A view may have been read before this proxy's own last step: older records are done.
        if acks.get(&record.name).is_none_or(|acked| *acked < record.seq) {
            steps.push(FleetAction::ApplyRecord(Box::new(record.clone())));
        } else if record.candidate.is_some() && waited_for(view, &record.name, record.seq).is_empty() {
            steps.push(FleetAction::Settle { name: record.name.clone(), seq: record.seq });
        }
    }
    steps
}

/// The evictions of the members in `gone`, other than `me`.
pub fn evictions(view: &View, me: u64, gone: &BTreeSet<u64>) -> Vec<FleetAction> {
    let is_gone = |member: &&Member| member.id != me && gone.contains(&member.id);
    let evict = |member: &Member| FleetAction::Evict { id: member.id, beat: member.beat };
    view.members.iter().filter(is_gone).map(evict).collect()
}

/// Whether a member is gone: no other heartbeat was seen for as long as its last one is valid. Both the store's clock
/// and this proxy's own clock must say so, so setting the store's clock forward evicts no member.
pub fn is_silent(view: &View, member: &Member, seen_for_us: u64) -> bool {
    view.now > member.until && seen_for_us > member.until.us_since(member.beat)
}

/// Whether a change began a short while ago and is not over: heartbeats are faster then. A longer change waits for a
/// lease, a silent member or an operator, and faster heartbeats would not end it sooner.
pub fn hurries(view: &View) -> bool {
    let pending = |record: &PolicyRecord| {
        record.candidate.is_some() || !waited_for(view, &record.name, record.seq).is_empty()
    };
    view.records.iter().any(|record| view.now.us_since(record.since) < HURRY_US && pending(record))
}

/// How to make a version the live one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Beginning {
    /// Propose it as the successor of the record `seq`.
    Propose { seq: u64 },
    /// It is the candidate of the record `seq`, or has become live after that record.
    Join { seq: u64 },
    /// It is the live version, but the record `seq` has another candidate, or a canary.
    CallOff { seq: u64 },
    /// Another change is pending.
    Busy,
    /// There is a canary of another version.
    Tried,
}

/// Decides how to make `version` the live one.
pub fn beginning(record: &PolicyRecord, version: &PolicyVersion) -> Beginning {
    let seq = record.seq;
    match &record.candidate {
        Some(candidate) if candidate == version => Beginning::Join { seq },
        Some(_) if record.live == *version => Beginning::CallOff { seq },
        Some(_) => Beginning::Busy,
        None => match &record.canary {
            Some(canary) if canary.version == *version => Beginning::Propose { seq },
            Some(_) if record.live == *version => Beginning::CallOff { seq },
            Some(_) => Beginning::Tried,
            None if record.live == *version => Beginning::Join { seq: seq.saturating_sub(1) },
            None => Beginning::Propose { seq },
        },
    }
}

/// Updates the view after a change was called off.
pub fn called_off(view: &mut View, name: &str, seq: u64, why: &str) {
    if let Some(record) = view.records.iter_mut().find(|record| record.name == name && record.seq == seq) {
        (record.seq, record.candidate, record.note) = (seq + 1, None, Some(why.to_owned()));
        (record.canary, record.since) = (None, view.now);
    }
}

/// Updates the view after this member's acknowledgement. The update is only for callers that wait at this proxy,
/// because the acknowledgement is not recorded yet.
pub fn acknowledged(view: &mut View, me: u64, acks: &BTreeMap<String, u64>) {
    if let Some(me) = view.members.iter_mut().find(|member| member.id == me) {
        me.acks = Some(acks.clone());
    }
}

/// Updates the view after a change was proposed. `why`: why the proxies propose it by themselves.
pub fn proposed(view: &mut View, name: &str, seq: u64, candidate: PolicyVersion, why: Option<String>) {
    if let Some(record) = view.records.iter_mut().find(|record| record.name == name && record.seq == seq) {
        (record.seq, record.candidate, record.note) = (seq + 1, Some(candidate), why);
        (record.canary, record.since) = (None, view.now);
    }
}

/// Updates the view after a canary has begun, or has got other terms.
pub fn tried(view: &mut View, name: &str, seq: u64, canary: CanaryRecord) {
    if let Some(record) = view.records.iter_mut().find(|record| record.name == name && record.seq == seq) {
        (record.seq, record.canary, record.note) = (seq + 1, Some(canary), None);
        record.since = view.now;
    }
}

/// Updates the view after the candidate has become live.
pub fn settled(view: &mut View, name: &str, seq: u64) {
    let of_both = |record: &&mut PolicyRecord| record.name == name && record.seq == seq;
    if let Some(record) = view.records.iter_mut().find(of_both)
        && let Some(candidate) = record.candidate.take()
    {
        record.previous = Some(std::mem::replace(&mut record.live, candidate));
        (record.seq, record.since) = (seq + 1, view.now);
    }
}

/// Whether the store has lost a record that this member acknowledged before, as after a fail-over to a lagging
/// server. Other proxies may follow the older record instead.
pub fn has_forgotten(view: &View, acks: Option<&BTreeMap<String, u64>>) -> bool {
    let behind = |(name, acked): (&String, &u64)| view.record(name).is_none_or(|record| record.seq < *acked);
    acks.is_some_and(|acks| acks.iter().any(behind))
}

/// The members that have not acknowledged the record.
pub fn waited_for(view: &View, name: &str, seq: u64) -> Vec<u64> {
    let behind = view.members.iter().filter(|member| !member.has_acknowledged(name, seq));
    behind.map(|member| member.id).collect()
}

/// How a proxy joins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Joining {
    /// It must wait, for this reason.
    Wait(String),
    /// No other proxy may grant: this proxy records its own policies, and then follows the records.
    Initialize,
    /// No other proxy may grant: this proxy records its own names of guarded requests, and then follows the records.
    Rename,
    /// It follows the recorded policies, whatever its own are.
    Follow,
}

/// The protocol version of the program: members with different versions never grant side by side.
const PROTOCOL: &str = "3";

/// What a member records about itself, so that members that would not exclude each other can tell.
pub fn fingerprint(routes: &str) -> String {
    format!("{PROTOCOL}:{routes}")
}

/// The protocol version of a fingerprint; empty for program versions that recorded none.
fn protocol(fingerprint: &str) -> &str {
    fingerprint.split_once(':').map_or("", |(protocol, _)| protocol)
}

/// A joining proxy's information about itself.
pub struct Newcomer<'a> {
    pub id: u64,
    pub routes: &'a str,
    /// How the proxy names guarded requests, by record.
    pub naming: &'a PolicyVersions,
    /// The proxy's own policies, if they may become the recorded ones: it has just started, and has not recorded them
    /// before.
    pub own: Option<&'a BTreeMap<String, PolicyVersion>>,
    /// The first heartbeat that the proxy saw of each member.
    pub first_beats: &'a BTreeMap<u64, ServerTime>,
}

/// How guarded requests are named, by record.
pub type PolicyVersions = BTreeMap<String, PolicyVersion>;

/// How a running proxy may change the names of guarded requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Renaming {
    /// The fleet has recorded the new names, and the proxy could not join with its old names.
    Recorded,
    /// The proxy is the only one that may grant, and records the new names.
    Alone,
}

/// Why a proxy cannot change the names of requests while other proxies run.
pub const OTHERS: &str = "the new routes name requests differently, and other proxies go by the old ones: give all \
                          proxies the new routes, stop them all, and start them again";

/// How a proxy may change the names of guarded requests from `own` to `wanted`. `member` is `None` if the proxy is
/// not a member.
///
/// # Errors
/// The reason why it cannot now.
pub fn renaming(
    view: &View,
    member: Option<u64>,
    own: &PolicyVersions,
    wanted: &PolicyVersions,
) -> Result<Renaming, String> {
    let Some(me) = member else {
        // If the proxy has other records, the records under the wanted names may be outdated.
        return match own.keys().eq(wanted.keys()) && are_recorded(view, wanted) {
            true => Ok(Renaming::Recorded),
            false => Err("the new routes name requests differently, and the proxy is not in the fleet now; its /ready \
                          says why"
                .to_owned()),
        };
    };
    match view.members.iter().any(|member| member.id != me && member.acks.is_some()) {
        true => Err(OTHERS.to_owned()),
        false => Ok(Renaming::Alone),
    }
}

/// Whether all these names equal the recorded ones.
pub fn are_recorded(view: &View, wanted: &PolicyVersions) -> bool {
    wanted.iter().all(|(name, version)| view.record(name).is_some_and(|record| record.live == *version))
}

/// Why guarded requests may have had other names before, according to the records: under a record of the same name or
/// under another one. A proxy without guarded routes names no requests.
pub fn named_otherwise(view: &View, own: &PolicyVersions) -> Option<String> {
    if own.is_empty() {
        return None;
    }
    if !are_recorded(view, own) {
        return Some("its [[guard]] names requests in another way than the proxies before it did".to_owned());
    }
    let other = view.records.iter().find(|record| record.is_naming() && !own.contains_key(&record.name))?;
    Some(format!("proxies with other guarded routes ({}) have used this store", other.name))
}

/// Decides how a proxy joins.
pub fn joining(view: &View, newcomer: &Newcomer<'_>) -> Joining {
    let may_grant = |member: &&Member| member.id != newcomer.id && member.acks.is_some();
    let others: Vec<&Member> = view.members.iter().filter(may_grant).collect();
    if let Some(other) = others.iter().find(|other| protocol(&other.routes) != protocol(newcomer.routes)) {
        return Joining::Wait(format!(
            "proxy {} runs another version of Lockkeeper, an earlier version as a rule, and the two do not exclude each \
             other: stop all proxies of the other version; their leases stay",
            shown(other.id)
        ));
    }
    if let Some(other) = others.iter().find(|other| other.routes != newcomer.routes) {
        return Joining::Wait(format!(
            "the [[routes]] of proxy {} are not this one's, and a resource that two policies name has no \
             exclusion: give both the same routes, or stop that proxy first",
            shown(other.id)
        ));
    }
    let is_other = |(name, version): &(&String, &PolicyVersion)| {
        view.record(name).is_some_and(|record| record.live != **version)
    };
    let renamed = newcomer.naming.iter().find(is_other);
    if let Some((name, _)) = renamed.filter(|_| !others.is_empty()) {
        return Joining::Wait(format!(
            "the routes of {name} are not those that the fleet goes by, and a request that two routes name differently \
             has no exclusion: stop the other proxies and start all with the same routes; where the listeners are in \
             front of different applications, give each a name with `application`"
        ));
    }
    let Some(own) = newcomer.own else {
        return if renamed.is_some() { Joining::Rename } else { Joining::Follow };
    };
    if others.is_empty() {
        return Joining::Initialize;
    }
    let differs = |(name, version): (&String, &PolicyVersion)| {
        view.record(name).is_some_and(|record| record.live != *version)
    };
    // If any other member is alive, the recorded policies stay, and this proxy must follow them. Dead members have to
    // expire first, because this proxy must see their leases before it grants other keys.
    let lives =
        |other: &Member| newcomer.first_beats.get(&other.id).is_some_and(|first| other.beat != *first);
    if !own.iter().any(differs) || others.iter().any(|other| lives(other)) {
        return Joining::Follow;
    }
    let ids: Vec<String> = others.iter().map(|other| shown(other.id)).collect();
    Joining::Wait(format!(
        "its policies are not the recorded ones, and it is not known yet whether proxy {} still lives",
        ids.join(", ")
    ))
}

/// The state of a change whose record with both versions was `seq`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    /// These members have not followed yet.
    Pending {
        waits_for: Vec<u64>,
    },
    Live,
    CalledOff(String),
    /// Other changes have followed, and the end of this change was not seen.
    Unknown,
}

/// The state of the change to `candidate` whose record with both versions was `seq`.
pub fn fate(view: &View, name: &str, seq: u64, candidate: &PolicyVersion) -> Fate {
    let Some(record) = view.record(name) else { return Fate::Unknown };
    let waits_for = waited_for(view, name, record.seq);
    if record.seq <= seq {
        return Fate::Pending { waits_for };
    }
    match (record.live == *candidate, record.seq - seq) {
        (true, 1) if !waits_for.is_empty() => Fate::Pending { waits_for },
        (true, _) => Fate::Live,
        (false, 1) => Fate::CalledOff(record.note.clone().unwrap_or_default()),
        (false, _) => Fate::Unknown,
    }
}

/// A member's id as it is displayed.
pub fn shown(id: u64) -> String {
    format!("{id:016x}")
}

#[cfg(test)]
mod tests;
