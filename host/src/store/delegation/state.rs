//! Which keys this proxy has, and what becomes of the operations on them. Pure: what is to be done is returned as [`Work`].

use std::collections::VecDeque;
use std::sync::Arc;

use tokio::sync::Notify as Signal;

use super::super::{Done, Reply, StoreError};
use super::held::{self, Decision, Held};
use super::{Bounds, Life};
use crate::coverage::{Branch, reached};
use crate::lock::maps::{BoundedMap, HashMap};
use crate::lock::record::{Claim, Delegate, Extend, Op, Restore, When};
use crate::lock::{Instant, Key, ServerTime};
use crate::mutex::Mutex;
use crate::random;

/// After another proxy has asked for a key, this proxy asks for no delegation of it for this long, in microseconds: the
/// other proxy asks the store for the key a few times in that time.
const QUIET_US: u64 = 20_000;
/// How many keys a proxy has at most.
const MAX_KEYS: usize = 100_000;
/// Of how many keys the claims are counted.
const RECENT: usize = 16_384;
/// A key that is claimed this often within [`WINDOW_US`] is delegated.
const OFTEN: u32 = 10;
/// See [`OFTEN`], in microseconds.
const WINDOW_US: u64 = 1_000_000;

#[derive(Default)]
pub(super) struct State {
    pub keys: HashMap<Key, Entry>,
    /// Nothing is delegated.
    pub suspended: bool,
    /// Nothing is delegated any more.
    pub is_stopping: bool,
    pub life: Life,
    recent: Recent,
    /// When another proxy last asked for keys.
    recalled: Recalled,
    /// What waits until other proxies give keys back.
    pub asking: HashMap<Key, Arc<Signal>>,
    /// The store's clock, less this proxy's own.
    pub ahead_us: u64,
}

struct Recent(BoundedMap<Key, (Instant, u32)>);

struct Recalled(BoundedMap<Key, Instant>);

pub(super) struct Entry {
    pub stage: Stage,
    pub waiting: VecDeque<Waiting>,
    /// The record goes back as soon as it is known.
    pub goes_back: bool,
}

pub(super) enum Stage {
    /// The store was asked for the delegation, or to undo it.
    Asked,
    Held(Box<Held>),
    /// The store was asked to extend it.
    Extending(Box<Held>),
    /// The record is on its way to the store.
    Returning(Box<Held>),
}

pub(super) struct Group {
    pub ops: Vec<Op>,
    pub is_renewal: bool,
    /// It has waited for an extension.
    pub was_extended: bool,
    pub deadline: Instant,
    pub done: Done,
}

pub(super) enum Waiting {
    Group(Group),
    /// A group with several keys. The last key that it waits for lets it go.
    Several(Arc<Mutex<Option<Group>>>),
}

/// What is to be done when the state is no longer locked.
pub(super) enum Work {
    Forward(Group),
    Answer(Done, Result<Reply, StoreError>),
    Delegate(Group, Key, Box<Delegate>, Life),
    Extend(Extend),
    Restore(Box<Restore>),
    Lost(Vec<u64>),
}

impl Default for Recent {
    fn default() -> Recent {
        Recent(BoundedMap::new(RECENT))
    }
}

impl Default for Recalled {
    fn default() -> Recalled {
        Recalled(BoundedMap::new(RECENT))
    }
}

impl Recalled {
    /// Whether another proxy may be about to ask the store for the key.
    fn was_recalled(&self, key: &Key, now: Instant) -> bool {
        self.0.get(key).is_some_and(|at| now.us_since(*at) < QUIET_US)
    }
}

impl Recent {
    /// Counts a claim, and says whether there are many.
    fn is_busy(&mut self, key: &Key, now: Instant) -> bool {
        let (since, count) = self.0.get(key).copied().unwrap_or((now, 0));
        let (since, count) = if now.us_since(since) > WINDOW_US { (now, 1) } else { (since, count + 1) };
        self.0.insert(key.clone(), (since, count));
        count >= OFTEN
    }
}

impl State {
    /// Decides a group, lets it wait, or forwards it to the store.
    pub fn submit(&mut self, group: Group, now: Instant, bounds: &Bounds, work: &mut Vec<Work>) {
        let mut keys: Vec<&Key> = group.ops.iter().flat_map(Op::keys).collect();
        keys.sort_unstable();
        keys.dedup();
        let [key] = keys[..] else {
            let keys: Vec<Key> =
                keys.into_iter().filter(|key| self.keys.contains_key(key)).cloned().collect();
            return self.submit_several(group, &keys, now, work);
        };
        let key = key.clone();
        if self.keys.contains_key(&key) {
            return self.submit_one(&key, group, now, bounds, work);
        }
        match self.delegation_for(&key, &group, now, bounds) {
            Some(asked) => {
                let entry = Entry { stage: Stage::Asked, waiting: VecDeque::new(), goes_back: false };
                self.keys.insert(key.clone(), entry);
                work.push(Work::Delegate(group, key, asked, self.life));
            }
            None => work.push(Work::Forward(group)),
        }
    }

    /// A group of one key that is delegated, or about to be.
    pub fn submit_one(
        &mut self,
        key: &Key,
        group: Group,
        now: Instant,
        bounds: &Bounds,
        work: &mut Vec<Work>,
    ) {
        let life = self.life;
        let Some(entry) = self.keys.get_mut(key) else { return work.push(Work::Forward(group)) };
        let Stage::Held(held) = &mut entry.stage else {
            return entry.waiting.push_back(Waiting::Group(group));
        };
        if !life.may_grant || life.number != held.life || entry.goes_back {
            return self.give_back(key, Some(group), now, work);
        }
        match held.decide(&group.ops, now, bounds) {
            Decision::Done(outcomes) => {
                reached(Branch::DelegationDecides);
                let at = ServerTime(now.0.saturating_add(self.ahead_us));
                work.push(Work::Answer(group.done, Ok(Reply { outcomes, asked_at: now, now: at })));
                if held.is_due_back(now) {
                    self.give_back(key, None, now, work);
                }
            }
            // If the store answers too slowly, no extension is long enough.
            Decision::Extend(_) if group.was_extended => self.give_back(key, Some(group), now, work),
            Decision::Extend(asked) => {
                entry.waiting.push_back(Waiting::Group(Group { was_extended: true, ..group }));
                self.extend(key, asked, work);
            }
            Decision::GoBack => self.give_back(key, Some(group), now, work),
            Decision::Over => self.lose(key, Some(group), now, work),
        }
    }

    fn submit_several(&mut self, group: Group, delegated: &[Key], now: Instant, work: &mut Vec<Work>) {
        if delegated.is_empty() {
            return work.push(Work::Forward(group));
        }
        let group = Arc::new(Mutex::new(Some(group)));
        for key in delegated {
            if let Some(entry) = self.keys.get_mut(key) {
                entry.waiting.push_back(Waiting::Several(group.clone()));
                entry.goes_back = true;
            }
        }
        drop(group);
        delegated.iter().for_each(|key| self.give_back(key, None, now, work));
    }

    /// The delegation that the group asks for.
    fn delegation_for(
        &mut self,
        key: &Key,
        group: &Group,
        now: Instant,
        bounds: &Bounds,
    ) -> Option<Box<Delegate>> {
        let claim = group.ops.iter().find_map(claim_of)?;
        let delegable = claim.delegable.as_ref()?;
        let wants = match delegable.when {
            When::Always => true,
            // A claim behind a release comes from a waiter.
            When::Contended => self.recent.is_busy(key, now) || matches!(group.ops[0], Op::Release(_)),
        };
        let claims = group.ops.iter().filter(|op| claim_of(op).is_some()).count();
        let is_open = self.life.may_grant && !self.suspended && !self.is_stopping;
        let is_ours = is_open && !self.recalled.was_recalled(key, now) && self.keys.len() < MAX_KEYS;
        (wants && claims == 1 && is_ours && held::can_be_delegated(claim, bounds)).then(|| {
            Box::new(Delegate {
                claim: claim.clone(),
                nonce: random::within(1..u64::MAX),
                rules: (*delegable.rules).into(),
                extra_ms: held::extra_ms(held::blocks_ms(claim), bounds),
                tokens: bounds.tokens,
            })
        })
    }

    fn extend(&mut self, key: &Key, asked: Extend, work: &mut Vec<Work>) {
        let Some(entry) = self.keys.get_mut(key) else { return };
        if let Stage::Held(held) = std::mem::replace(&mut entry.stage, Stage::Asked) {
            entry.stage = Stage::Extending(held);
            work.push(Work::Extend(asked));
        }
    }

    /// Sends the record back, unless this proxy has ceased to be a member since it got the key: then the others may have
    /// stopped to respect its leases. The group, if there is one, is decided by the store after that.
    pub fn give_back(&mut self, key: &Key, group: Option<Group>, now: Instant, work: &mut Vec<Work>) {
        let Some(entry) = self.keys.get_mut(key) else { return };
        if matches!(&entry.stage, Stage::Held(held) if held.life != self.life.number) {
            return self.lose(key, group, now, work);
        }
        entry.waiting.extend(group.map(Waiting::Group));
        entry.goes_back = true;
        match std::mem::replace(&mut entry.stage, Stage::Asked) {
            Stage::Held(held) => {
                work.push(Work::Restore(Box::new(held.restore(now))));
                entry.stage = Stage::Returning(held);
            }
            stage => entry.stage = stage,
        }
    }

    /// Gives up a key with its leases: other proxies may grant it.
    fn lose(&mut self, key: &Key, group: Option<Group>, now: Instant, work: &mut Vec<Work>) {
        let leases = self.held(key).into_iter().flat_map(|held| held.leases(now));
        work.push(Work::Lost(leases.collect()));
        self.end(key, group, work);
    }

    /// A group of several keys waits until the key is back.
    pub fn wait_for_return(&mut self, key: &Key, several: Waiting, now: Instant, work: &mut Vec<Work>) {
        match self.keys.get_mut(key) {
            Some(entry) => {
                entry.waiting.push_back(several);
                self.give_back(key, None, now, work);
            }
            None => several.forward(work),
        }
    }

    /// Forgets a key: the store decides about it from now on.
    pub fn end(&mut self, key: &Key, group: Option<Group>, work: &mut Vec<Work>) {
        let Some(mut entry) = self.keys.remove(key) else { return };
        entry.waiting.extend(group.map(Waiting::Group));
        entry.waiting.into_iter().for_each(|waiting| waiting.forward(work));
    }

    /// What is due for some keys: answers that are late, extensions, and keys that go back.
    pub fn sweep(&mut self, now: Instant, work: &mut Vec<Work>) {
        let life = self.life;
        let due = self.keys.iter().filter(|(_, entry)| entry.is_late(now) || entry.due(now, life).is_some());
        let due: Vec<Key> = due.map(|(key, _)| key.clone()).collect();
        for key in due {
            let Some(entry) = self.keys.get_mut(&key) else { continue };
            while entry.is_late(now) {
                let late = match entry.waiting.pop_front() {
                    Some(Waiting::Group(group)) => Some(group),
                    Some(Waiting::Several(group)) => group.lock().take(),
                    None => None,
                };
                let why = "the store does not answer in time for a delegated key".to_owned();
                work.extend(late.map(|group| Work::Answer(group.done, Err(StoreError::Unsent { why }))));
            }
            match entry.due(now, life) {
                Some(Due::Lost) => self.lose(&key, None, now, work),
                Some(Due::Return) => self.give_back(&key, None, now, work),
                Some(Due::Extension(asked)) => self.extend(&key, asked, work),
                None => {}
            }
        }
    }
}

/// What is to be done for a key although no operation asks for it.
enum Due {
    Lost,
    Return,
    Extension(Extend),
}

impl Entry {
    fn due(&self, now: Instant, life: Life) -> Option<Due> {
        let Stage::Held(held) = &self.stage else { return None };
        match () {
            () if held.is_over(now) || life.number != held.life => Some(Due::Lost),
            () if self.goes_back || held.is_due_back(now) => Some(Due::Return),
            () => held.due(now).filter(|_| life.may_grant).map(Due::Extension),
        }
    }

    /// Whether a group has waited for too long.
    fn is_late(&self, now: Instant) -> bool {
        self.waiting.front().is_some_and(|waiting| waiting.is_late(now))
    }
}

impl Waiting {
    /// Lets the store decide, if the group waits for no other key.
    fn forward(self, work: &mut Vec<Work>) {
        let group = match self {
            Waiting::Group(group) => Some(group),
            Waiting::Several(group) => Arc::into_inner(group).and_then(|group| group.lock().take()),
        };
        work.extend(group.map(Work::Forward));
    }

    fn is_late(&self, now: Instant) -> bool {
        match self {
            Waiting::Group(group) => group.deadline <= now,
            Waiting::Several(group) => group.lock().as_ref().is_none_or(|group| group.deadline <= now),
        }
    }
}

pub(super) fn claim_of(op: &Op) -> Option<&Claim> {
    match op {
        Op::Acquire(claim) => Some(claim),
        _ => None,
    }
}

impl State {
    /// The key was delegated.
    pub fn begin(&mut self, key: &Key, held: Box<Held>, now: Instant, work: &mut Vec<Work>) {
        let Some(entry) = self.keys.get_mut(key) else { return };
        entry.stage = Stage::Held(held);
        if self.suspended || entry.goes_back {
            self.give_back(key, None, now, work);
        }
    }

    /// The store has answered to an extension. `confirmed`: what it has confirmed.
    pub fn extended(&mut self, key: &Key, confirmed: Option<(&Extend, Instant, u64)>) {
        let Some(entry) = self.keys.get_mut(key) else { return };
        entry.stage = match std::mem::replace(&mut entry.stage, Stage::Asked) {
            Stage::Extending(mut held) => {
                if let Some((asked, asked_at, left_us)) = confirmed {
                    held.extended(asked, asked_at, left_us);
                }
                Stage::Held(held)
            }
            stage => stage,
        };
    }

    /// Groups that have waited in vain get an error, and the key goes back.
    pub fn refuse_waiting(&mut self, key: &Key, why: &str, work: &mut Vec<Work>) {
        let Some(entry) = self.keys.get_mut(key) else { return };
        entry.goes_back = true;
        for waiting in std::mem::take(&mut entry.waiting) {
            match waiting {
                Waiting::Group(group) => {
                    let error = StoreError::Unsent { why: why.to_owned() };
                    work.push(Work::Answer(group.done, Err(error)));
                }
                several @ Waiting::Several(_) => entry.waiting.push_back(several),
            }
        }
    }

    /// The key goes back as soon as that can be.
    pub fn mark_to_return(&mut self, key: &Key) {
        if let Some(entry) = self.keys.get_mut(key) {
            entry.goes_back = true;
        }
    }

    /// The store has not confirmed that the record is back.
    pub fn not_returned(&mut self, key: &Key) {
        let Some(entry) = self.keys.get_mut(key) else { return };
        entry.stage = match std::mem::replace(&mut entry.stage, Stage::Asked) {
            Stage::Returning(held) => Stage::Held(held),
            stage => stage,
        };
    }

    /// Another proxy waits for the key. Returns whether this proxy has the key.
    pub fn want(&mut self, key: &Key, now: Instant, work: &mut Vec<Work>) -> bool {
        self.asking.get(key).into_iter().for_each(|signal| signal.notify_waiters());
        let Some(entry) = self.keys.get_mut(key) else { return false };
        self.recalled.0.insert(key.clone(), now);
        match &mut entry.stage {
            Stage::Held(held) => {
                held.want(now);
                if held.is_due_back(now) {
                    self.give_back(key, None, now, work);
                }
            }
            Stage::Extending(held) => held.want(now),
            Stage::Asked => entry.goes_back = true,
            Stage::Returning(_) => {}
        }
        true
    }

    /// Sends all records back.
    pub fn give_all_back(&mut self, now: Instant, work: &mut Vec<Work>) {
        let keys: Vec<Key> = self.keys.keys().cloned().collect();
        keys.iter().for_each(|key| self.give_back(key, None, now, work));
    }

    /// The record of a key, if this proxy knows it.
    pub fn held(&self, key: &Key) -> Option<&Held> {
        match &self.keys.get(key)?.stage {
            Stage::Asked => None,
            Stage::Held(held) | Stage::Extending(held) | Stage::Returning(held) => Some(held),
        }
    }
}
