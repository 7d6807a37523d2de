//! Joins the fleet, applies its records, and evicts members that are gone.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use futures_util::future::OptionFuture;
use serde_json::{Map, Value};
use tokio_util::task::AbortOnDropHandle;

use super::machine::{self, FleetAction, Joining, Newcomer, PolicyVersions};
use super::{Fleet, Records, Stage, host, relapse, version_of, versions};
use crate::clock;
use crate::coverage::{Branch, reached};
use crate::latest;
use crate::lock::maps::HashMap;
use crate::lock::{Instant, ServerTime};
use crate::policy::Prepared;
use crate::random;
use crate::store::StoreError;
use crate::store::registry::{Component, Member, PeerSecret, PolicyRecord, PolicyVersion, Pulse, View};
use crate::vital;

/// How long a statement of a process that has ended may still wait for a row lock, in microseconds.
const LAST_WORDS_US: u64 = 1_500_000;
/// The pause before a failed step is tried again.
const RETRY: Duration = Duration::from_millis(200);

/// Why a record cannot be applied.
#[derive(Debug, thiserror::Error)]
pub(super) enum Trouble {
    #[error("{0}")]
    Refused(String),
    /// The component cannot be checked now, but may be soon.
    #[error("{0}")]
    Overloaded(String),
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The next view has the new record.
    #[error("the record has changed meanwhile")]
    Changed,
}

/// What is remembered across views.
struct Watch {
    views: latest::Receiver<View>,
    /// The first heartbeat that was seen of each member.
    first_beats: BTreeMap<u64, ServerTime>,
    /// The last heartbeat that was seen of each member, and when it was first seen.
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

    /// Members that have been silent for as long as a heartbeat is valid, and members whose processes, and the last
    /// statements of these, have ended.
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
    /// Joins the fleet, and joins again whenever this proxy was evicted.
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
                let is_open = self.join(&mut watch, fresh).await;
                self.follow(&mut watch, !is_open).await;
                fresh = false;
            }
        };
        tokio::select! {
            biased;
            () = work => {}
            () = stop.cancelled() => {}
        }
    }

    /// Returns when this proxy is a member. Tells whether it grants from then on: if it joins again, or if all leases
    /// in the store are known to have the keys that the records name.
    async fn join(&self, watch: &mut Watch, fresh: bool) -> bool {
        let are_named = loop {
            let id = self.register().await;
            match self.activate(watch, id, fresh).await {
                Some((acks, are_named)) => {
                    let mut state = self.0.state.lock();
                    (state.stage, state.acks, state.trouble) = (Stage::Member, acks, None);
                    (state.since, state.held_up) = (clock::now(), BTreeMap::new());
                    break are_named;
                }
                None => tracing::info!("the proxy joins its fleet again"),
            }
        };
        let opens = !fresh || are_named;
        // The answer to this heartbeat allows this proxy to write.
        self.0.fresh_view(&mut watch.views).await;
        // The proxies of the store learn of new rules before this proxy grants by them.
        let view = self.0.view.borrow().clone();
        self.record_rules(&view).await;
        let state = self.0.state.lock();
        // The proxy may have been evicted just now; then it has to join again.
        if state.stage == Stage::Member {
            reached(if fresh { Branch::Joins } else { Branch::JoinsAgain });
            tracing::info!(id = machine::shown(state.id), "joined the fleet");
            if fresh && are_named {
                reached(Branch::StartsNamed);
                self.0.service.take_as_named();
            }
            if opens {
                self.0.service.open();
            }
        }
        opens
    }

    async fn register(&self) -> u64 {
        loop {
            let id = random::within(1..u64::MAX);
            let pulse = Pulse { id, acks: None, ..self.0.pulse() };
            match self.0.registry.register(pulse).await {
                Ok(()) => {
                    let mut state = self.0.state.lock();
                    (state.id, state.stage, state.acks) = (id, Stage::Joining, BTreeMap::new());
                    state.since = clock::now();
                    self.0.hurry.notify_one();
                    return id;
                }
                Err(error) => self.0.state.lock().trouble = Some(error.to_string()),
            }
            tokio::time::sleep(RETRY).await;
        }
    }

    /// Becomes a member that may grant. Returns the records that it has acknowledged, and whether every lease is known
    /// to have the keys that these name. `None` if its row is gone.
    async fn activate(
        &self,
        watch: &mut Watch,
        id: u64,
        fresh: bool,
    ) -> Option<(BTreeMap<String, u64>, bool)> {
        let own = self.0.own();
        // A proxy initializes the records only once: if two proxies with different policies start at the same time,
        // the first then follows the second.
        let mut founds = fresh;
        loop {
            let view = watch.next().await;
            if self.0.state.lock().stage == Stage::Out {
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
                Ok(Some(acks)) => return Some((acks, self.are_named(&view))),
                Ok(None) => {
                    founds = false;
                    self.0.hurry.notify_one();
                }
                Err(Trouble::Changed) => {}
                Err(trouble) => {
                    let mut state = self.0.state.lock();
                    if state.trouble.as_deref() != Some(&trouble.to_string()) {
                        tracing::warn!("the proxy does not grant locks yet: {trouble}");
                        state.trouble = Some(trouble.to_string());
                    }
                }
            }
        }
    }

    /// Records this proxy's own policies. Afterwards, the proxy follows the records.
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

    /// Fails while the store has leases of guarded requests, from proxies that died or were stopped before an
    /// application had answered. This proxy does not know which names it would give to those requests.
    async fn outlives_old_names(&self, why: &str) -> Result<(), Trouble> {
        let leases = self.0.service.guarded_leases().await?;
        let Some(resource) = leases.values().min() else { return Ok(()) };
        let count = leases.len();
        Err(Trouble::Refused(format!(
            "{why}, and {count} leases of guarded requests have not ended, one of them on {resource}"
        )))
    }

    /// Applies the records, and becomes a member if they have not changed meanwhile.
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
        // Requests that this proxy sent before it was evicted may still be granted until they are answered.
        self.0.service.settled().await;
        for name in own.keys().filter(|_| !fresh) {
            // A policy may have changed and changed back: this proxy must see leases under other keys, and its
            // waiters are granted as soon as it may write.
            self.0.service.look_again(name).await?;
        }
        // A claim that was sent during that read takes the old keys only. It is answered before this proxy may write.
        self.0.service.settled().await;
        let acks: BTreeMap<String, u64> =
            view.records.iter().map(|record| (record.name.clone(), record.seq)).collect();
        self.forget_other_names(view).await?;
        let me = Pulse { id, acks: Some(acks.clone()), ..self.0.pulse() };
        if !self.0.registry.activate(me).await? {
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
        // A push keeps the settings that are live.
        let remedy = match own.settings == live.settings {
            true => format!("to change the component of all, `lockkeeper policy push {name} FILE`"),
            false => "new settings go live when all proxies have stopped and start again".to_owned(),
        };
        let what = format!(
            "config.toml has {} with the settings {}, and the other proxies go by {} with {}; this one does, \
             too: {remedy}",
            own.digest, own.settings, live.digest, live.settings
        );
        tracing::warn!(policy = name, "{what}");
        self.0.policies.note(name, what);
    }

    /// Applies the records, and returns when this proxy was evicted. With `looks`, as after a start, the proxy grants
    /// once it has read all leases in the store. It applies records before that, too, so that no change waits for it.
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
                let state = self.0.state.lock();
                if state.stage != Stage::Member {
                    return;
                }
                (state.id, state.acks.clone())
            };
            if view.peer_secret.is_none()
                && let Err(error) = self.0.registry.agree_on(PeerSecret::random()).await
            {
                tracing::debug!(%error, "the proxies of this store have no secret yet, so waiters of several proxies poll");
            }
            let mut moved = self.record_rules(&view).await;
            let gone = watch.gone(&view, &self.0.host);
            for step in machine::steps(&view, id, &acks, &gone) {
                moved |= match step {
                    FleetAction::Evict { id, beat } => self.evict_one(&view, id, beat).await,
                    FleetAction::ApplyRecord(record) => self.acknowledge(&record).await,
                    FleetAction::Settle { name, seq } => self.settle(&name, seq).await,
                };
            }
            for record in view.records.iter().filter(|record| acks.get(&record.name) == Some(&record.seq)) {
                moved |= self.watch_canary(&view, record).await;
                moved |= self.watch_live(&view, record).await;
            }
            match moved {
                true => self.0.hurry.notify_one(),
                false => self.record_names(&view, &acks).await,
            }
        }
    }

    /// Starts a task that reads all leases; dropping the handle aborts the task. Returns the generations, by policy,
    /// under which the leases were read.
    fn look(&self) -> AbortOnDropHandle<BTreeMap<String, u64>> {
        let fleet = self.clone();
        AbortOnDropHandle::new(vital::spawn("the read of earlier leases", async move {
            let generations = fleet.generations();
            fleet.0.service.look_at_all().await;
            generations
        }))
    }

    fn generations(&self) -> BTreeMap<String, u64> {
        self.0.policies.numbers().map(|(name, number)| (name.to_owned(), number)).collect()
    }

    /// Lets this proxy grant, unless another generation has gone live since the leases were read. A proxy that is no
    /// longer a member stays closed, and reads the leases when it joins again.
    fn is_opened_after(&self, looked: &BTreeMap<String, u64>) -> bool {
        if *looked != self.generations() {
            return false;
        }
        // The state stays locked, so the proxy cannot be evicted and closed in between.
        let state = self.0.state.lock();
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

    /// Makes the candidate live, after all members have acknowledged the record with both versions. The servers of a
    /// quorum do not know the records, so their tokens are raised first.
    async fn settle(&self, name: &str, seq: u64) -> bool {
        if let Err(error) = self.0.service.raise_tokens().await {
            self.0.state.lock().held_up.insert(name.to_owned(), error.to_string());
            return false;
        }
        let settled = self.0.registry.settle(name.to_owned(), seq, self.0.pulse()).await.unwrap_or(false);
        if settled {
            reached(Branch::Settled);
            self.0.view.send_modify(|view| machine::settled(view, name, seq));
        }
        settled
    }

    /// Whether the record was acknowledged, or its change called off.
    async fn acknowledge(&self, record: &PolicyRecord) -> bool {
        let name = &record.name;
        match self.follows(record).await {
            Ok(None) => {
                reached(Branch::Acknowledged);
                let (id, acks) = {
                    let mut state = self.0.state.lock();
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
                if self.0.state.lock().held_up.insert(name.clone(), why.clone()).is_none() {
                    tracing::info!(policy = name, "the policy change waits: {why}");
                }
                tokio::time::sleep(RETRY).await;
                false
            }
            Err(Trouble::Refused(why)) if record.candidate.is_some() => {
                let why = format!("proxy {} refuses it: {why}", machine::shown(self.0.state.lock().id));
                tracing::error!(policy = name, "the policy change is called off: {why}");
                self.0.registry.call_off(name.clone(), record.seq, why).await.unwrap_or(false)
            }
            Err(trouble) => {
                tracing::warn!(policy = name, "this proxy does not follow the fleet's policy yet: {trouble}");
                self.0.state.lock().held_up.insert(name.clone(), trouble.to_string());
                tokio::time::sleep(RETRY).await;
                false
            }
        }
    }

    /// Applies the record. Returns the reason that keeps this member from acknowledging it, if any.
    ///
    /// The order matters. Once the record is applied, this member plans nothing by the previous record. Once its
    /// pending requests have settled, nothing that was planned by the previous record can still be granted. Only then
    /// does a read of the leases see all of them.
    async fn follows(&self, record: &PolicyRecord) -> Result<Option<String>, Trouble> {
        self.apply_record(record).await?;
        self.0.service.settled().await;
        Ok(self.waits_for_leases(record).await)
    }

    /// The reason to wait before proxies may use the candidate's keys alone: a lease that they would not respect.
    /// This includes proxies that join later: until the lease has ended, the record makes them take the keys of both
    /// versions.
    async fn waits_for_leases(&self, record: &PolicyRecord) -> Option<String> {
        let candidate = self.0.policies.active(&record.name)?.candidate.clone()?;
        // If the leases cannot be read, the error is the reason.
        self.0.service.holds_up(candidate).await.unwrap_or_else(|error| Some(error.to_string()))
    }

    /// Makes claims take the keys that the record demands. A policy that this proxy does not have needs no keys.
    async fn apply_record(&self, record: &PolicyRecord) -> Result<(), Trouble> {
        let (service, policies) = (&self.0.service, &self.0.policies);
        let Some(naming) = policies.active(&record.name) else {
            self.resume_delegations();
            return Ok(());
        };
        if version_of(&naming.live) != record.live {
            let known = naming.candidate.clone().filter(|known| version_of(known) == record.live);
            let next = match known {
                Some(candidate) => Prepared::Changed(candidate),
                None => self.prepared(record, &record.live).await?,
            };
            service.go_live(next).await?;
            self.0.metrics.fleet.change("live");
            if let Some(why) = &record.note {
                policies.end_watch(&record.name);
                if relapse::is_by_itself(record) {
                    policies.note(&record.name, why.clone());
                    self.0.metrics.fleet.change("rolled_back");
                }
            }
        } else if record.candidate.is_none() && naming.candidate.is_some() {
            policies.name_with(&record.name, None);
            reached(Branch::CalledOff);
            self.0.metrics.fleet.change("called_off");
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
            // Other proxies cannot see the leases beneath a delegation, and keep away from all of its policy.
            service.suspend_delegations().await;
        }
        self.apply_canary(record).await?;
        self.resume_delegations();
        Ok(())
    }

    /// Lets this proxy grant keys from its memory again if no policy is being changed.
    fn resume_delegations(&self) {
        if self.0.view.borrow().records.iter().all(|record| record.candidate.is_none()) {
            self.0.service.resume_delegations();
        }
    }

    /// Returns a recorded version, checked by this proxy.
    pub(super) async fn prepared(
        &self,
        record: &PolicyRecord,
        version: &PolicyVersion,
    ) -> Result<Prepared, Trouble> {
        let known = self.0.prepared.lock().remove(&record.name);
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
        checked.map_err(|rejection| {
            let kind = if rejection.is_passing() { Trouble::Overloaded } else { Trouble::Refused };
            kind(rejection.to_string())
        })
    }
}

/// The names of members of a view, for messages.
pub(super) fn names(view: &View, ids: &[u64]) -> Vec<String> {
    let name = |id: &u64| match view.member(*id).map(|member: &Member| member.address.as_str()) {
        Some(address) if !address.is_empty() => format!("{} ({address})", machine::shown(*id)),
        _ => machine::shown(*id),
    };
    ids.iter().map(name).collect()
}
