//! What a member does next, from what is recorded. Pure.
//!
//! The records of a policy follow one another: settled on X, both X and Y, settled on Y (or, called off,
//! on X again), and so on. A claim takes X's keys, both's, or Y's. Each record has a name in common with
//! the next, so members that are one record apart exclude each other. That they are never further apart
//! where it matters is kept here: a candidate becomes the live one only when every member that may grant
//! has acknowledged the record of both.

use std::collections::{BTreeMap, BTreeSet};

use crate::lock::ServerTime;
use crate::store::registry::{Member, PolicyRecord, PolicyVersion, View};

/// How long beats come faster after a record has changed, in microseconds.
const HURRY_US: u64 = 10_000_000;

/// One thing to be done. Each may be done by several members at once: one of them wins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FleetAction {
    /// The member is gone.
    Evict { id: u64, beat: ServerTime },
    /// Go where the record is, and acknowledge it.
    ApplyRecord(PolicyRecord),
    /// Every member names keys by both.
    Settle { name: String, seq: u64 },
}

/// What the member `me` does, which has acknowledged `acks`. `gone`: members that are.
pub fn steps(view: &View, me: u64, acks: &BTreeMap<String, u64>, gone: &BTreeSet<u64>) -> Vec<FleetAction> {
    let mut steps = evictions(view, me, gone);
    for record in &view.records {
        // A view may have been read before this proxy's own last step: what is older is done.
        if acks.get(&record.name).is_none_or(|acked| *acked < record.seq) {
            steps.push(FleetAction::ApplyRecord(record.clone()));
        } else if record.candidate.is_some() && waited_for(view, &record.name, record.seq).is_empty() {
            steps.push(FleetAction::Settle { name: record.name.clone(), seq: record.seq });
        }
    }
    steps
}

pub fn evictions(view: &View, me: u64, gone: &BTreeSet<u64>) -> Vec<FleetAction> {
    let is_gone = |member: &&Member| member.id != me && gone.contains(&member.id);
    let evict = |member: &Member| FleetAction::Evict { id: member.id, beat: member.beat };
    view.members.iter().filter(is_gone).map(evict).collect()
}

/// Whether a member is gone: for as long as its beat lasts, no other one was seen. It counts on its own clock, as this proxy
/// does, so a store's clock that was set forward makes none gone.
pub fn is_silent(view: &View, member: &Member, seen_for_us: u64) -> bool {
    view.now > member.until && seen_for_us > member.until.us_since(member.beat)
}

/// Whether something is under way that began a short while ago: beats come faster then. What takes longer
/// waits for a lease, a silent member or an operator, and is not over sooner for being asked about.
pub fn hurries(view: &View) -> bool {
    let pending = |record: &PolicyRecord| {
        record.candidate.is_some() || !waited_for(view, &record.name, record.seq).is_empty()
    };
    view.records.iter().any(|record| view.now.us_since(record.since) < HURRY_US && pending(record))
}

/// How a version becomes the live one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Beginning {
    /// It is proposed to follow the record `seq`.
    Propose { seq: u64 },
    /// It is the candidate of the record `seq`, or has become the live version after it.
    Join { seq: u64 },
    /// It is the live version, and the record `seq` has another one as its candidate.
    CallOff { seq: u64 },
    /// Another change is under way.
    Busy,
}

pub fn beginning(record: &PolicyRecord, version: &PolicyVersion) -> Beginning {
    let seq = record.seq;
    match &record.candidate {
        Some(candidate) if candidate == version => Beginning::Join { seq },
        Some(_) if record.live == *version => Beginning::CallOff { seq },
        Some(_) => Beginning::Busy,
        None if record.live == *version => Beginning::Join { seq: seq.saturating_sub(1) },
        None => Beginning::Propose { seq },
    }
}

/// The view after a change was called off.
pub fn called_off(view: &mut View, name: &str, seq: u64, why: &str) {
    if let Some(record) = view.records.iter_mut().find(|record| record.name == name && record.seq == seq) {
        (record.seq, record.candidate, record.note) = (seq + 1, None, Some(why.to_owned()));
        record.since = view.now;
    }
}

/// What the view is after this member's acknowledgement, as far as that may be told before it is recorded:
/// to those who wait at this proxy.
pub fn acknowledged(view: &mut View, me: u64, acks: &BTreeMap<String, u64>) {
    if let Some(me) = view.members.iter_mut().find(|member| member.id == me) {
        me.acks = Some(acks.clone());
    }
}

/// The view after a change was begun.
pub fn proposed(view: &mut View, name: &str, seq: u64, candidate: PolicyVersion) {
    if let Some(record) = view.records.iter_mut().find(|record| record.name == name && record.seq == seq) {
        (record.seq, record.candidate, record.note) = (seq + 1, Some(candidate), None);
        record.since = view.now;
    }
}

/// The view after the candidate has become the live one.
pub fn settled(view: &mut View, name: &str, seq: u64) {
    let of_both = |record: &&mut PolicyRecord| record.name == name && record.seq == seq;
    if let Some(record) = view.records.iter_mut().find(of_both)
        && let Some(candidate) = record.candidate.take()
    {
        record.previous = Some(std::mem::replace(&mut record.live, candidate));
        (record.seq, record.note, record.since) = (seq + 1, None, view.now);
    }
}

/// Whether the store has lost a record that was acknowledged before the view was read, as at a fail-over to
/// a server that lags: others may follow what it has instead.
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
    /// Not yet: why.
    Wait(String),
    /// Nobody else may grant: its own policies become the recorded ones, and it follows them then.
    Initialize,
    /// Nobody else may grant: its own names of guarded requests become the recorded ones, and it follows them then.
    Rename,
    /// It takes the recorded policies, whatever its own are.
    Follow,
}

/// What the version of the program is known by: members with different ones do not grant beside each other.
const PROTOCOL: &str = "2";

/// What a member records of itself, so that members which would not exclude each other know it.
pub fn fingerprint(routes: &str) -> String {
    format!("{PROTOCOL}:{routes}")
}

/// Empty for versions that had none.
fn protocol(fingerprint: &str) -> &str {
    fingerprint.split_once(':').map_or("", |(protocol, _)| protocol)
}

/// What a proxy that joins knows of itself.
pub struct Newcomer<'a> {
    pub id: u64,
    pub routes: &'a str,
    /// How it names guarded requests, by record.
    pub naming: &'a PolicyVersions,
    /// Its own policies, where they may become the recorded ones: it has just started, and they have not been
    /// before.
    pub own: Option<&'a BTreeMap<String, PolicyVersion>>,
    /// The first beat that it saw of each member.
    pub first_beats: &'a BTreeMap<u64, ServerTime>,
}

/// How guarded requests are named, by record.
pub type PolicyVersions = BTreeMap<String, PolicyVersion>;

/// How a proxy comes to name guarded requests in another way while it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Renaming {
    /// The fleet names them so, and the proxy could not join by the names that it gave before.
    Recorded,
    /// It is the only one that may grant: it records the new names.
    Alone,
}

/// Why a proxy does not name requests in another way beside others.
pub const OTHERS: &str = "the new routes name requests differently, and other proxies go by the old ones: give all \
                          proxies the new routes, stop them all, and start them again";

/// How the proxy `member` comes to name guarded requests as `wanted`, where it has named them as `own`; `None` for one
/// that is no member.
///
/// # Errors
/// Why it cannot now.
pub fn renaming(
    view: &View,
    member: Option<u64>,
    own: &PolicyVersions,
    wanted: &PolicyVersions,
) -> Result<Renaming, String> {
    let Some(me) = member else {
        // Where it has other records, what is recorded under their names may be of a time before.
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

/// Whether each of these names is the recorded one.
pub fn are_recorded(view: &View, wanted: &PolicyVersions) -> bool {
    wanted.iter().all(|(name, version)| view.record(name).is_some_and(|record| record.live == *version))
}

/// Why guarded requests may have had other names before, as far as is recorded: under a record of the same name or
/// under another one. A proxy without guarded routes names none.
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
    // Whoever lives goes on with the recorded policies, and this one has to follow. Those that have died
    // are waited out, for their leases must be seen before other keys are granted.
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

/// What has become of a change whose record of both was `seq`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    /// These members have not followed yet.
    Pending {
        waits_for: Vec<u64>,
    },
    Live,
    CalledOff(String),
    /// Other changes have followed, and its end was not seen.
    Unknown,
}

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

/// A member's name, as people see it.
pub fn shown(id: u64) -> String {
    format!("{id:016x}")
}

#[cfg(test)]
mod tests;
