//! Joins the fleet, follows its records, and counts those as gone that are.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use serde_json::{Map, Value};
use tokio::sync::watch;

use super::machine::{self, Joining, Newcomer, Step};
use super::{Fleet, Stage, component_of, host, version_of};
use crate::lock::ServerTime;
use crate::policy::Prepared;
use crate::store::StoreError;
use crate::store::registry::{Member, Pulse, Record, Version, View};

/// A statement of a process that has ended may still wait for a row's lock: so long, in microseconds.
const LAST_WORDS_US: u64 = 1_500_000;
const RETRY: Duration = Duration::from_millis(200);

/// Why a record cannot be followed.
#[derive(Debug, thiserror::Error)]
enum Trouble {
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
    views: watch::Receiver<View>,
    /// The first beat that was seen of each member.
    first_beats: BTreeMap<u64, ServerTime>,
    /// When a member's process was first seen to have ended.
    ended: HashMap<u64, ServerTime>,
}

impl Watch {
    async fn next(&mut self) -> View {
        if self.views.changed().await.is_err() {
            return std::future::pending().await;
        }
        let view = self.views.borrow_and_update().clone();
        for member in &view.members {
            self.first_beats.entry(member.id).or_insert(member.beat);
        }
        view
    }

    /// Members whose processes have ended, and whose last statements have, too.
    fn dead(&mut self, view: &View, here: &str) -> BTreeSet<u64> {
        let ended = view.members.iter().filter(|member| host::has_ended(&member.host, here));
        let ended: Vec<u64> = ended.map(|member| member.id).collect();
        self.ended.retain(|id, _| ended.contains(id));
        for id in &ended {
            self.ended.entry(*id).or_insert(view.now);
        }
        let long_ago = |since: ServerTime| view.now.us_since(since) >= LAST_WORDS_US;
        ended.into_iter().filter(|id| self.ended.get(id).is_some_and(|since| long_ago(*since))).collect()
    }
}

impl Fleet {
    /// Joins, and joins again whenever it was counted as gone.
    pub(super) async fn run(self) {
        let views = self.0.view.subscribe();
        let mut watch = Watch { views, first_beats: BTreeMap::new(), ended: HashMap::new() };
        let stop = self.0.stop.clone();
        let work = async {
            let mut fresh = true;
            loop {
                self.join(&mut watch, fresh).await;
                fresh = false;
                self.follow(&mut watch).await;
            }
        };
        tokio::select! {
            () = work => {}
            () = stop.cancelled() => {}
        }
    }

    /// Returns when this proxy is a member and grants.
    async fn join(&self, watch: &mut Watch, fresh: bool) {
        loop {
            let id = self.register().await;
            match self.establish(watch, id, fresh).await {
                Some(acks) => {
                    let mut state = self.0.state();
                    (state.stage, state.acks, state.trouble) = (Stage::Member, acks, None);
                    break;
                }
                None => tracing::info!("the proxy joins its fleet again"),
            }
        }
        // With this beat it is allowed to write.
        self.0.fresh_view(&mut watch.views).await;
        self.0.service.open().await;
        let state = self.0.state();
        tracing::info!(id = machine::shown(state.id), "joined the fleet");
    }

    async fn register(&self) -> u64 {
        loop {
            let id = rand::random_range(1..u64::MAX);
            let pulse = Pulse { id, acks: None, ..self.0.pulse() };
            match self.0.registry.register(pulse).await {
                Ok(()) => {
                    let mut state = self.0.state();
                    (state.id, state.stage, state.acks) = (id, Stage::Joining, BTreeMap::new());
                    self.0.hurry.notify_one();
                    return id;
                }
                Err(error) => self.0.state().trouble = Some(error.to_string()),
            }
            tokio::time::sleep(RETRY).await;
        }
    }

    /// What this member has acknowledged when it may grant; `None` where its row is gone.
    async fn establish(&self, watch: &mut Watch, id: u64, fresh: bool) -> Option<BTreeMap<String, u64>> {
        let own = self.0.own();
        loop {
            let view = watch.next().await;
            if self.0.state().stage == Stage::Out {
                return None;
            }
            if view.member(id).is_none() {
                continue;
            }
            self.evict(watch, &view, id).await;
            let (routes, first_beats) = (self.0.routes.as_str(), &watch.first_beats);
            let newcomer = Newcomer { id, routes, own: fresh.then_some(&own), first_beats };
            let established = match machine::joining(&view, &newcomer) {
                Joining::Wait(why) => Err(Trouble::Refused(why)),
                Joining::Found => self.found(id).await,
                Joining::Follow => self.catch_up(id, &view, &own, fresh).await,
            };
            match established {
                Ok(acks) => return Some(acks),
                Err(Trouble::Changed) => {}
                Err(trouble) => {
                    let mut state = self.0.state();
                    if state.trouble.as_deref() != Some(&trouble.to_string()) {
                        tracing::warn!("the proxy does not grant locks yet: {trouble}");
                        state.trouble = Some(trouble.to_string());
                    }
                }
            }
            self.0.hurry_after(RETRY).await;
        }
    }

    async fn found(&self, id: u64) -> Result<BTreeMap<String, u64>, Trouble> {
        let policies = &self.0.policies;
        let own = |name: &str| Some((name.to_owned(), component_of(&*policies.get(name)?)));
        let own = policies.names().filter_map(own).collect();
        self.0.registry.found(id, own).await?.ok_or(Trouble::Changed)
    }

    /// Goes where the records are, and becomes a member if they are still the same then.
    async fn catch_up(
        &self,
        id: u64,
        view: &View,
        own: &BTreeMap<String, Version>,
        fresh: bool,
    ) -> Result<BTreeMap<String, u64>, Trouble> {
        for name in own.keys().filter(|name| view.record(name).is_none()) {
            let Some(generation) = self.0.policies.get(name) else { continue };
            self.0.registry.record(name.clone(), component_of(&generation)).await?;
            return Err(Trouble::Changed);
        }
        for record in &view.records {
            self.conform(record).await?;
            if !fresh {
                // The policy may have changed and changed back: leases by other keys must be seen.
                self.0.service.look_again(&record.name).await?;
            }
        }
        self.0.service.settled().await;
        let acks: BTreeMap<String, u64> =
            view.records.iter().map(|record| (record.name.clone(), record.seq)).collect();
        if !self.0.registry.establish(id, acks.clone()).await? {
            return Err(Trouble::Changed);
        }
        for (name, version) in own.iter().filter(|_| fresh) {
            if let Some(record) = view.record(name).filter(|record| record.live != *version) {
                self.differs(name, version, &record.live);
            }
        }
        Ok(acks)
    }

    fn differs(&self, name: &str, own: &Version, live: &Version) {
        let what = format!(
            "config.toml has {} with the settings {}, and the other proxies go by {} with {}; this one does, \
             too: to change them all, `lockkeeper policy push {name} FILE`",
            own.digest, own.settings, live.digest, live.settings
        );
        tracing::warn!(policy = name, "{what}");
        self.0.policies.note(name, what);
    }

    /// Returns when this proxy was counted as gone.
    async fn follow(&self, watch: &mut Watch) {
        loop {
            let view = watch.next().await;
            let (id, acks) = {
                let state = self.0.state();
                if state.stage != Stage::Member {
                    return;
                }
                (state.id, state.acks.clone())
            };
            let dead = watch.dead(&view, &self.0.host);
            let mut moved = false;
            for step in machine::steps(&view, id, &acks, &dead) {
                moved |= match step {
                    Step::Evict { id, beat } => self.evict_one(&view, id, beat).await,
                    Step::Conform(record) => self.acknowledge(&record).await,
                    Step::Settle { name, seq } => self.settle(&name, seq).await,
                };
            }
            if moved {
                self.0.hurry.notify_one();
            }
        }
    }

    async fn evict(&self, watch: &mut Watch, view: &View, me: u64) {
        let dead = watch.dead(view, &self.0.host);
        for step in machine::evictions(view, me, &dead) {
            if let Step::Evict { id, beat } = step {
                self.evict_one(view, id, beat).await;
            }
        }
    }

    async fn evict_one(&self, view: &View, id: u64, beat: ServerTime) -> bool {
        let evicted = self.0.registry.evict(id, beat).await.unwrap_or(false);
        if evicted {
            let silent_ms = view.now.ms_since(beat);
            tracing::warn!(id = machine::shown(id), silent_ms, "a proxy is gone");
        }
        evicted
    }

    /// Where all members are seen to have acknowledged the record of both.
    async fn settle(&self, name: &str, seq: u64) -> bool {
        let settled = self.0.registry.settle(name.to_owned(), seq, self.0.pulse()).await.unwrap_or(false);
        if settled {
            self.0.view.send_modify(|view| machine::settled(view, name, seq));
        }
        settled
    }

    /// Whether the record was followed, or called off.
    async fn acknowledge(&self, record: &Record) -> bool {
        let followed = self.conform(record).await;
        match followed {
            Ok(()) if self.waits_for_sessions(record).await => {
                tokio::time::sleep(RETRY).await;
                false
            }
            Ok(()) => {
                self.0.service.settled().await;
                let (id, acks) = {
                    let mut state = self.0.state();
                    if state.stage == Stage::Member {
                        state.acks.insert(record.name.clone(), record.seq);
                    }
                    (state.id, state.acks.clone())
                };
                self.0.view.send_modify(|view| machine::acknowledged(view, id, &acks));
                true
            }
            Err(Trouble::Refused(why)) if record.candidate.is_some() => {
                let why = format!("proxy {} refuses it: {why}", machine::shown(self.0.state().id));
                tracing::error!(policy = record.name, "the change is called off: {why}");
                let (name, seq) = (record.name.clone(), record.seq);
                self.0.registry.call_off(name, seq, why).await.unwrap_or(false)
            }
            Err(trouble) => {
                tracing::warn!(policy = record.name, "the fleet's policy is not followed yet: {trouble}");
                tokio::time::sleep(RETRY).await;
                false
            }
        }
    }

    /// Whether other proxies could go by the candidate's keys while a lease lasts that has none of them and
    /// that they cannot see.
    async fn waits_for_sessions(&self, record: &Record) -> bool {
        let alone = self.0.view.borrow().members.len() <= 1;
        let naming = self.0.policies.naming(&record.name);
        let Some(candidate) = naming.and_then(|naming| naming.candidate.clone()).filter(|_| !alone) else {
            return false;
        };
        // Where the store cannot be read, nobody knows.
        self.0.service.sessions_lack(candidate).await.unwrap_or(true)
    }

    /// Has claims take the keys that the record says. A policy that this proxy does not have names none.
    async fn conform(&self, record: &Record) -> Result<(), Trouble> {
        let (service, policies) = (&self.0.service, &self.0.policies);
        let Some(naming) = policies.naming(&record.name) else { return Ok(()) };
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
            self.0.metrics.fleet_change("called_off");
            if let Some(why) = &record.note {
                policies.note(&record.name, format!("a change of all proxies was called off: {why}"));
            }
        }
        if let Some(candidate) = &record.candidate {
            let named = policies.naming(&record.name).and_then(|naming| naming.candidate.clone());
            if named.is_none_or(|named| version_of(&named) != *candidate) {
                let next = self.prepared(record, candidate).await?;
                service.name_with(next).await?;
            }
        }
        Ok(())
    }

    /// A recorded version, checked by this proxy.
    async fn prepared(&self, record: &Record, version: &Version) -> Result<Prepared, Trouble> {
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
        let checked = tokio::task::spawn_blocking(check).await;
        let checked = checked.map_err(|error| Trouble::Refused(format!("the check failed: {error}")))?;
        checked.map_err(|rejection| Trouble::Refused(rejection.to_string()))
    }
}

impl super::Inner {
    async fn hurry_after(&self, pause: Duration) {
        tokio::time::sleep(pause.min(self.beat / super::HURRY)).await;
        self.hurry.notify_one();
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
