//! Joins the fleet, follows its records, and counts those as gone that are.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use futures_util::future::OptionFuture;
use serde_json::{Map, Value};
use tokio_util::task::AbortOnDropHandle;

use super::machine::{self, FleetAction, Joining, Newcomer, PolicyVersions};
use super::{Fleet, Records, Stage, host, version_of, versions};
use crate::clock;
use crate::coverage::{Branch, reached};
use crate::latest;
use crate::lock::maps::HashMap;
use crate::lock::{Instant, ServerTime};
use crate::policy::Prepared;
use crate::random;
use crate::store::StoreError;
use crate::store::registry::{Component, Member, PolicyRecord, PolicyVersion, Pulse, View};
use crate::vital;

/// A statement of a process that has ended may still wait for a row's lock: so long, in microseconds.
const LAST_WORDS_US: u64 = 1_500_000;
const RETRY: Duration = Duration::from_millis(200);

/// Why a record cannot be followed.
#[derive(Debug, thiserror::Error)]
pub(super) enum Trouble {
    #[error("{0}")]
    Refused(String),
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The next view tells.
    #[error("the record has changed meanwhile")]
    Changed,
}

/// What is remembered from view to view.
struct Watch {
    views: latest::Receiver<View>,
    /// The first beat that was seen of each member.
    first_beats: BTreeMap<u64, ServerTime>,
    /// The last beat that was seen of each member, and when it was first seen.
    last_beats: BTreeMap<u64, (ServerTime, Instant)>,
    /// When a member's process was first seen to have ended.
    ended: HashMap<u64, Instant>,
}

impl Watch {
    async fn next(&mut self) -> View {
        if self.views.changed().await.is_err() {
            return std::future::pending().await;
        }
        let view = self.views.borrow_and_update().clone();
        self.first_beats.retain(|id, _| view.member(*id).is_some());
        self.last_beats.retain(|id, _| view.member(*id).is_some());
        for member in &view.members {
            self.first_beats.entry(member.id).or_insert(member.beat);
            let seen = (member.beat, clock::now());
            let last = self.last_beats.entry(member.id).or_insert(seen);
            if last.0 != member.beat {
                *last = seen;
            }
        }
        view
    }

    /// Members that are silent for as long as their beats last, and those whose processes have ended, and whose last
    /// statements have, too.
    fn gone(&mut self, view: &View, here: &str) -> BTreeSet<u64> {
        let now = clock::now();
        let ended = view.members.iter().filter(|member| host::has_ended(&member.host, here));
        let ended: Vec<u64> = ended.map(|member| member.id).collect();
        self.ended.retain(|id, _| ended.contains(id));
        for id in &ended {
            self.ended.entry(*id).or_insert(now);
        }
        let long_ago = |since: Instant| now.us_since(since) >= LAST_WORDS_US;
        let ended = ended.into_iter().filter(|id| self.ended.get(id).is_some_and(|since| long_ago(*since)));
        let is_silent = |member: &&Member| {
            let last = self.last_beats.get(&member.id).filter(|(beat, _)| *beat == member.beat);
            last.is_some_and(|(_, seen)| machine::is_silent(view, member, view.asked_at.us_since(*seen)))
        };
        ended.chain(view.members.iter().filter(is_silent).map(|member| member.id)).collect()
    }
}

impl Fleet {
    /// Joins, and joins again whenever it was counted as gone.
    pub(super) async fn run(self) {
        let views = self.0.view.subscribe();
        let mut watch = Watch {
            views,
            first_beats: BTreeMap::new(),
            last_beats: BTreeMap::new(),
            ended: HashMap::default(),
        };
        let stop = self.0.stop.clone();
        let work = async {
            let mut fresh = true;
            loop {
                self.join(&mut watch, fresh).await;
                self.follow(&mut watch, fresh).await;
                fresh = false;
            }
        };
        tokio::select! {
            biased;
            () = work => {}
            () = stop.cancelled() => {}
        }
    }

    /// Returns when this proxy is a member. One that has been one before grants then.
    async fn join(&self, watch: &mut Watch, fresh: bool) {
        loop {
            let id = self.register().await;
            match self.activate(watch, id, fresh).await {
                Some(acks) => {
                    let mut state = self.0.state();
                    (state.stage, state.acks, state.trouble) = (Stage::Member, acks, None);
                    (state.since, state.held_up) = (clock::now(), BTreeMap::new());
                    break;
                }
                None => tracing::info!("the proxy joins its fleet again"),
            }
        }
        // With this beat it is allowed to write.
        self.0.fresh_view(&mut watch.views).await;
        let state = self.0.state();
        // Unless it was counted as gone just now, and has to join again.
        if state.stage == Stage::Member {
            reached(if fresh { Branch::Joins } else { Branch::JoinsAgain });
            tracing::info!(id = machine::shown(state.id), "joined the fleet");
            if !fresh {
                self.0.service.open();
            }
        }
    }

    async fn register(&self) -> u64 {
        loop {
            let id = random::within(1..u64::MAX);
            let pulse = Pulse { id, acks: None, ..self.0.pulse() };
            match self.0.registry.register(pulse).await {
                Ok(()) => {
                    let mut state = self.0.state();
                    (state.id, state.stage, state.acks) = (id, Stage::Joining, BTreeMap::new());
                    state.since = clock::now();
                    self.0.hurry.notify_one();
                    return id;
                }
                Err(error) => self.0.state().trouble = Some(error.to_string()),
            }
            tokio::time::sleep(RETRY).await;
        }
    }

    /// What this member has acknowledged when it may grant; `None` where its row is gone.
    async fn activate(&self, watch: &mut Watch, id: u64, fresh: bool) -> Option<BTreeMap<String, u64>> {
        let own = self.0.own();
        // Only once: of two that start together, each with policies of its own, the first follows the second.
        let mut founds = fresh;
        loop {
            let view = watch.next().await;
            if self.0.state().stage == Stage::Out {
                return None;
            }
            if view.member(id).is_none() {
                continue;
            }
            self.evict(watch, &view, id).await;
            let naming = self.0.naming.lock().await;
            let (routes, names) = (self.0.fingerprint(), versions(&naming));
            let (routes, names, first_beats) = (routes.as_str(), &names, &watch.first_beats);
            let newcomer = Newcomer { id, routes, naming: names, own: founds.then_some(&own), first_beats };
            let joining = machine::joining(&view, &newcomer);
            let records = match joining {
                Joining::Rename => naming.clone(),
                _ => self.0.own_records(&naming),
            };
            let established = match joining {
                Joining::Wait(why) => Err(Trouble::Refused(why)),
                Joining::Initialize | Joining::Rename => {
                    reached(Branch::Founds);
                    self.initialize(id, &view, names, records).await
                }
                Joining::Follow => self.catch_up(id, &view, (&own, records), fresh).await.map(Some),
            };
            drop(naming);
            match established {
                Ok(Some(acks)) => return Some(acks),
                Ok(None) => {
                    founds = false;
                    self.0.hurry.notify_one();
                }
                Err(Trouble::Changed) => {}
                Err(trouble) => {
                    let mut state = self.0.state();
                    if state.trouble.as_deref() != Some(&trouble.to_string()) {
                        tracing::warn!("the proxy does not grant locks yet: {trouble}");
                        state.trouble = Some(trouble.to_string());
                    }
                }
            }
        }
    }

    /// Its own policies are the recorded ones then, and it goes on as one that follows.
    async fn initialize(
        &self,
        id: u64,
        view: &View,
        names: &PolicyVersions,
        own: Records,
    ) -> Result<Option<BTreeMap<String, u64>>, Trouble> {
        if let Some(why) = machine::named_otherwise(view, names) {
            self.outlives_old_names(&why).await?;
        }
        let differs = |(name, own): &(String, Component)| {
            view.record(name).is_none_or(|record| record.live != own.version)
        };
        if !view.records.is_empty() && own.iter().any(differs) {
            self.0.service.raise_tokens().await?;
        }
        match self.0.registry.initialize(id, own).await? {
            true => Ok(None),
            false => Err(Trouble::Changed),
        }
    }

    /// Refused while the store has leases of guarded requests: of proxies that have died, or were stopped before an
    /// application had answered. It is not known which names this proxy would give those requests.
    async fn outlives_old_names(&self, why: &str) -> Result<(), Trouble> {
        let leases = self.0.service.guarded_leases().await?;
        let Some(resource) = leases.values().min() else { return Ok(()) };
        let count = leases.len();
        Err(Trouble::Refused(format!(
            "{why}, and {count} leases of guarded requests have not ended, one of them on {resource}"
        )))
    }

    /// Goes where the records are, and becomes a member if they are still the same then.
    async fn catch_up(
        &self,
        id: u64,
        view: &View,
        (own, records): (&BTreeMap<String, PolicyVersion>, Records),
        fresh: bool,
    ) -> Result<BTreeMap<String, u64>, Trouble> {
        if records.iter().any(|(name, _)| view.record(name).is_none()) {
            for (name, component) in records.into_iter().filter(|(name, _)| view.record(name).is_none()) {
                self.0.registry.record(name, component).await?;
            }
            return Err(Trouble::Changed);
        }
        for record in &view.records {
            self.apply_record(record).await?;
        }
        // What it asked for before it was counted as gone may be granted until then.
        self.0.service.settled().await;
        for name in own.keys().filter(|_| !fresh) {
            // A policy may have changed and changed back: leases by other keys must be seen, and its waiters
            // are granted as soon as it may write.
            self.0.service.look_again(name).await?;
        }
        // A claim that was sent during the look takes the old keys alone. It is answered before this proxy may write.
        self.0.service.settled().await;
        let acks: BTreeMap<String, u64> =
            view.records.iter().map(|record| (record.name.clone(), record.seq)).collect();
        if !self.0.registry.activate(id, acks.clone()).await? {
            return Err(Trouble::Changed);
        }
        for (name, version) in own.iter().filter(|_| fresh) {
            if let Some(record) = view.record(name).filter(|record| record.live != *version) {
                self.differs(name, version, &record.live);
            }
        }
        Ok(acks)
    }

    fn differs(&self, name: &str, own: &PolicyVersion, live: &PolicyVersion) {
        let what = format!(
            "config.toml has {} with the settings {}, and the other proxies go by {} with {}; this one does, \
             too: to change them all, `lockkeeper policy push {name} FILE`",
            own.digest, own.settings, live.digest, live.settings
        );
        tracing::warn!(policy = name, "{what}");
        self.0.policies.note(name, what);
    }

    /// Returns when this proxy was counted as gone. One that has just started grants once it has `looks`ed at the
    /// leases in the store. Until then it follows all the same, so that no change waits for it.
    async fn follow(&self, watch: &mut Watch, looks: bool) {
        let mut looking = looks.then(|| self.look());
        loop {
            let view = tokio::select! {
                biased;
                view = watch.next() => view,
                looked = OptionFuture::from(looking.as_mut()), if looking.is_some() => {
                    let again = !matches!(looked, Some(Ok(looked)) if self.is_opened_after(&looked));
                    looking = again.then(|| self.look());
                    continue;
                }
            };
            let (id, acks) = {
                let state = self.0.state();
                if state.stage != Stage::Member {
                    return;
                }
                (state.id, state.acks.clone())
            };
            let gone = watch.gone(&view, &self.0.host);
            let mut moved = false;
            for step in machine::steps(&view, id, &acks, &gone) {
                moved |= match step {
                    FleetAction::Evict { id, beat } => self.evict_one(&view, id, beat).await,
                    FleetAction::ApplyRecord(record) => self.acknowledge(&record).await,
                    FleetAction::Settle { name, seq } => self.settle(&name, seq).await,
                };
            }
            if moved {
                self.0.hurry.notify_one();
            }
        }
    }

    /// Looks at all leases, beside what this task does, and until it is dropped: the generations, by policy, that
    /// they were looked at by.
    fn look(&self) -> AbortOnDropHandle<BTreeMap<String, u64>> {
        let fleet = self.clone();
        AbortOnDropHandle::new(vital::spawn("the look at the leases of before the start", async move {
            let generations = fleet.generations();
            fleet.0.service.look_at_all().await;
            generations
        }))
    }

    fn generations(&self) -> BTreeMap<String, u64> {
        let policies = &self.0.policies;
        let number = |name: &str| Some((name.to_owned(), policies.get(name)?.number()));
        policies.names().filter_map(number).collect()
    }

    /// Grants from now on, unless another generation has gone live since the leases were looked at. A proxy that is
    /// no member any more stays closed, and looks at them when it joins again.
    fn is_opened_after(&self, looked: &BTreeMap<String, u64>) -> bool {
        if *looked != self.generations() {
            return false;
        }
        // The stage is locked, so that it cannot be counted as gone and closed in between.
        let state = self.0.state();
        if state.stage == Stage::Member {
            self.0.service.open();
        }
        true
    }

    async fn evict(&self, watch: &mut Watch, view: &View, me: u64) {
        let gone = watch.gone(view, &self.0.host);
        for step in machine::evictions(view, me, &gone) {
            if let FleetAction::Evict { id, beat } = step {
                self.evict_one(view, id, beat).await;
            }
        }
    }

    async fn evict_one(&self, view: &View, id: u64, beat: ServerTime) -> bool {
        let evicted = self.0.registry.evict(id, beat).await.unwrap_or(false);
        if evicted {
            reached(Branch::CountsAsGone);
            let silent_ms = view.now.ms_since(beat);
            tracing::warn!(id = machine::shown(id), silent_ms, "a proxy is gone");
        }
        evicted
    }

    /// Where all members are seen to have acknowledged the record of both. The servers of a quorum know of no
    /// record: their tokens are raised before.
    async fn settle(&self, name: &str, seq: u64) -> bool {
        if let Err(error) = self.0.service.raise_tokens().await {
            self.0.state().held_up.insert(name.to_owned(), error.to_string());
            return false;
        }
        let settled = self.0.registry.settle(name.to_owned(), seq, self.0.pulse()).await.unwrap_or(false);
        if settled {
            reached(Branch::Settled);
            self.0.view.send_modify(|view| machine::settled(view, name, seq));
        }
        settled
    }

    /// Whether the record was followed, or called off.
    async fn acknowledge(&self, record: &PolicyRecord) -> bool {
        let name = &record.name;
        match self.follows(record).await {
            Ok(None) => {
                reached(Branch::Acknowledged);
                let (id, acks) = {
                    let mut state = self.0.state();
                    state.held_up.remove(name);
                    if state.stage == Stage::Member {
                        state.acks.insert(name.clone(), record.seq);
                    }
                    (state.id, state.acks.clone())
                };
                self.0.view.send_modify(|view| machine::acknowledged(view, id, &acks));
                true
            }
            Ok(Some(why)) => {
                reached(Branch::HeldUp);
                if self.0.state().held_up.insert(name.clone(), why.clone()).is_none() {
                    tracing::info!(policy = name, "the change of the policy waits: {why}");
                }
                tokio::time::sleep(RETRY).await;
                false
            }
            Err(Trouble::Refused(why)) if record.candidate.is_some() => {
                let why = format!("proxy {} refuses it: {why}", machine::shown(self.0.state().id));
                tracing::error!(policy = name, "the change is called off: {why}");
                self.0.registry.call_off(name.clone(), record.seq, why).await.unwrap_or(false)
            }
            Err(trouble) => {
                tracing::warn!(policy = name, "the fleet's policy is not followed yet: {trouble}");
                self.0.state().held_up.insert(name.clone(), trouble.to_string());
                tokio::time::sleep(RETRY).await;
                false
            }
        }
    }

    /// Goes where the record is; what keeps this member from acknowledging it, if anything does.
    ///
    /// The order counts. Once it conforms, it plans nothing more by the record before. Once that has settled,
    /// nothing that was planned so can still be granted. Only then are the leases complete that are looked at.
    async fn follows(&self, record: &PolicyRecord) -> Result<Option<String>, Trouble> {
        self.apply_record(record).await?;
        self.0.service.settled().await;
        Ok(self.waits_for_leases(record).await)
    }

    /// Whether other proxies could go by the candidate's keys alone while a lease lasts that they would not respect. Those
    /// that join later are no exception: until the lease has ended the record has them take the keys of both.
    async fn waits_for_leases(&self, record: &PolicyRecord) -> Option<String> {
        let candidate = self.0.policies.active(&record.name)?.candidate.clone()?;
        // Where the leases cannot be read nobody knows.
        self.0.service.holds_up(candidate).await.unwrap_or_else(|error| Some(error.to_string()))
    }

    /// Has claims take the keys that the record says. A policy that this proxy does not have names none.
    async fn apply_record(&self, record: &PolicyRecord) -> Result<(), Trouble> {
        let (service, policies) = (&self.0.service, &self.0.policies);
        let Some(naming) = policies.active(&record.name) else { return Ok(()) };
        if version_of(&naming.live) != record.live {
            let known = naming.candidate.clone().filter(|known| version_of(known) == record.live);
            let next = match known {
                Some(candidate) => Prepared::Changed(candidate),
                None => self.prepared(record, &record.live).await?,
            };
            service.go_live(next).await?;
            self.0.metrics.fleet_change("live");
        } else if record.candidate.is_none() && naming.candidate.is_some() {
            service.name_alone(&record.name);
            reached(Branch::CalledOff);
            self.0.metrics.fleet_change("called_off");
            if let Some(why) = &record.note {
                policies.note(&record.name, format!("a change of all proxies was called off: {why}"));
            }
        }
        if let Some(candidate) = &record.candidate {
            let named = policies.active(&record.name).and_then(|naming| naming.candidate.clone());
            if named.is_none_or(|named| version_of(&named) != *candidate) {
                let next = self.prepared(record, candidate).await?;
                service.name_with(next).await?;
            }
        }
        Ok(())
    }

    /// A recorded version, checked by this proxy.
    pub(super) async fn prepared(
        &self,
        record: &PolicyRecord,
        version: &PolicyVersion,
    ) -> Result<Prepared, Trouble> {
        let known = self.0.prepared.lock().map(|mut known| known.remove(&record.name)).unwrap_or_default();
        if let Some(known) = known.filter(|known| version_of(known.generation()) == *version) {
            return Ok(known);
        }
        let bytes = self.0.registry.component(record.name.clone(), version.clone()).await?;
        let bytes = bytes.ok_or(Trouble::Changed)?;
        let settings: Map<String, Value> = serde_json::from_str(&version.settings)
            .map_err(|error| Trouble::Refused(format!("its settings cannot be read: {error}")))?;
        let (policies, name) = (self.0.policies.clone(), record.name.clone());
        let check = move || policies.prepare(&name, &bytes, Some(settings));
        let checked = vital::blocking(check).await;
        let checked = checked.map_err(|error| Trouble::Refused(format!("the check failed: {error}")))?;
        checked.map_err(|rejection| Trouble::Refused(rejection.to_string()))
    }
}

/// Members of a view, for those who name them.
pub(super) fn names(view: &View, ids: &[u64]) -> Vec<String> {
    let name = |id: &u64| match view.member(*id).map(|member: &Member| member.address.as_str()) {
        Some(address) if !address.is_empty() => format!("{} ({address})", machine::shown(*id)),
        _ => machine::shown(*id),
    };
    ids.iter().map(name).collect()
}
