//! Records in this proxy's memory, for keys that it alone decides on.
//!
//! A *guard* excludes the other proxies from a key: something that the database gives to one session, such as a
//! named lock or the lock of a row. While this proxy has the guard, the key's record is valid in its memory, and
//! [`record::apply`] decides on it as on a record in the database. When the guard is given back, other proxies
//! may grant the key. When it is lost, the leases on the key are lost too.
//!
//! This module takes no guards and asks no server; its caller does both.

use super::{Page, Stored};
use crate::lock::maps::{BoundedMap, HashMap};
use crate::lock::record::{self, Cause, Claim, Denial, Doubt, Env, Op, Outcome, Record, Records};
use crate::lock::{Instant, Key, ServerTime, Token};

/// After this many grants in a row a guard goes back to the server, so that other proxies have a chance.
const PASSES: u32 = 64;
/// The number of keys that are remembered after their guard was given back.
const PAST: usize = 4_096;
/// The latest time to ask again for a key that another session has, in microseconds; no event tells that it
/// is free.
const ELSEWHERE_US: u64 = 30_000_000;

/// The guarded keys, and recent keys whose guard was given back. `G` says what guards a key.
pub struct LocalRecords<G> {
    entries: HashMap<Key, Entry<G>>,
    /// To recognize a repeated call. It does not show what other proxies have done to the key since.
    past: BoundedMap<Key, Record>,
}

struct Entry<G> {
    record: Record,
    guard: G,
    passes: u32,
    /// Its leases are lost, and their holders were told. Until the guard is given back, the key is granted to
    /// nobody, and no lease on it is renewed.
    ended: bool,
}

/// The inputs for the decisions of one batch.
#[derive(Clone, Copy)]
pub struct DecisionInputs {
    /// The time on our own clock.
    pub own: Instant,
    /// The time by the clock of the records.
    pub now: ServerTime,
    /// New tokens are above this. There are enough of them for the whole batch.
    pub above: Token,
    /// Nothing is granted before this, by the clock of the records.
    pub grants_from: ServerTime,
    /// Until when the guards surely exclude other proxies, on our own clock. No holder is certain of its lease
    /// for longer.
    pub certain_until: Instant,
}

impl DecisionInputs {
    fn env(&self) -> Env {
        Env { others: self.above, grants_from: self.grants_from, ..Env::certain(self.now) }
    }

    fn capped(&self, outcome: Outcome) -> Outcome {
        let certain = self.certain_until.us_since(self.own);
        match outcome {
            Outcome::Granted(mut grant) => {
                grant.left_us = grant.left_us.min(certain);
                Outcome::Granted(grant)
            }
            Outcome::Renewed { left_us } => Outcome::Renewed { left_us: left_us.min(certain) },
            outcome => outcome,
        }
    }
}

impl<G> Default for LocalRecords<G> {
    fn default() -> LocalRecords<G> {
        LocalRecords { entries: HashMap::default(), past: BoundedMap::new(PAST) }
    }
}

impl<G: Clone> LocalRecords<G> {
    /// Whether this proxy guards the key.
    pub fn has(&self, key: &Key) -> bool {
        self.entries.contains_key(key)
    }

    /// The guard of the key.
    pub fn guard(&self, key: &Key) -> Option<&G> {
        self.entries.get(key).map(|entry| &entry.guard)
    }

    /// Whether the key has no holder.
    pub fn is_idle(&self, key: &Key, now: ServerTime) -> bool {
        self.entries.get(key).is_none_or(|entry| entry.record.until() <= now)
    }

    /// Adds a key whose guard was taken.
    pub fn insert(&mut self, key: Key, guard: G) {
        let record = self.past.remove(&key).unwrap_or_default();
        self.entries.insert(key, Entry { record, guard, passes: 0, ended: false });
    }

    /// Whether a client has a lease on one of the keys with such guards.
    pub fn is_held(&self, now: ServerTime, which: impl Fn(&G) -> bool) -> bool {
        let mut entries = self.entries.values().filter(|entry| which(&entry.guard));
        entries.any(|entry| entry.record.holders.iter().any(|holder| holder.until > now))
    }

    fn record(&self, key: &Key) -> Option<&Record> {
        self.entries.get(key).map(|entry| &entry.record).or_else(|| self.past.get(key))
    }

    /// Remembers a key whose guard was given back. The key is idle, so its record has no running lease.
    fn remember(&mut self, key: &Key, entry: Entry<G>) {
        self.past.insert(key.clone(), entry.record);
    }

    /// Decides one operation, unless it would make a new grant, which needs a guard for all of its keys and a
    /// token. So a reentrant claim, a repeated one or a refused one costs no statement.
    ///
    /// A free key whose guard has ended, or is not `fit` for the operation, counts as held until the guard is
    /// given back.
    pub fn try_apply(
        &mut self,
        op: &Op,
        inputs: &DecisionInputs,
        fit: impl Fn(&G) -> bool,
    ) -> Option<Outcome> {
        let Op::Acquire(claim) = op else { return Some(self.apply(op, inputs, fit)) };
        let guarded: Vec<Key> = claim.keys.iter().filter(|key| self.has(key)).cloned().collect();
        // Of an unguarded key only the end of a request with an id can be known.
        if !guarded.is_empty() || claim.request.is_some() {
            let rejoined = self.apply(&Op::Rejoin(claim.clone()), inputs, &fit);
            if rejoined != Outcome::Absent {
                return Some(rejoined);
            }
        }
        if guarded.is_empty() || (claim.any && guarded.len() < claim.keys.len()) {
            return None;
        }
        let probe = Op::Acquire(Claim { keys: guarded.into(), ..claim.clone() });
        match self.decide(&probe, inputs).0 {
            // One of several keys, whose guard is about to be given back.
            Outcome::Granted(grant) if claim.any => grant.chosen.map(|key| elsewhere(&key, 0)),
            Outcome::Granted(_) => {
                let unfit = |key: &&Key| {
                    self.entries.get(*key).is_some_and(|entry| entry.ended || !fit(&entry.guard))
                };
                let unfit = claim.keys.iter().find(unfit).or_else(|| self.exhausted(claim, inputs.now));
                unfit.map(|key| elsewhere(key, self.frees_in_us(key, inputs.now)))
            }
            outcome => Some(inputs.capped(outcome)),
        }
    }

    /// Decides a group, unless an operation of it needs a guard or a token; then nothing is applied. A part
    /// that was applied before the server is asked would be applied again if the server does not answer.
    pub fn try_group(&mut self, group: &[Op], inputs: &DecisionInputs) -> Option<Vec<Outcome>> {
        // Whether a later claim needs them depends on the operations before it.
        if group.iter().skip(1).any(|op| matches!(op, Op::Acquire(_))) {
            return None;
        }
        group.iter().map(|op| self.try_apply(op, inputs, |_| true)).collect()
    }

    fn frees_in_us(&self, key: &Key, now: ServerTime) -> u64 {
        self.entries.get(key).map_or(0, |entry| entry.record.until().us_since(now))
    }

    fn has_ended(&self, key: &Key) -> bool {
        self.entries.get(key).is_some_and(|entry| entry.ended)
    }

    /// Decides one operation. A key without a guard has no known holder and is not granted; nor is a key
    /// whose guard is not `fit` for the operation.
    pub fn apply(&mut self, op: &Op, inputs: &DecisionInputs, fit: impl Fn(&G) -> bool) -> Outcome {
        if let Op::Acquire(claim) = op
            && claim.any
        {
            return self.apply_any(claim, inputs, fit);
        }
        match op {
            Op::Acquire(claim) => {
                if let Some(key) = claim.keys.iter().find(|key| !self.has(key)) {
                    return elsewhere(key, ELSEWHERE_US);
                }
                if let Some(key) = claim.keys.iter().find(|key| self.has_ended(key)) {
                    return elsewhere(key, self.frees_in_us(key, inputs.now));
                }
                if let Some(key) = self.exhausted(claim, inputs.now) {
                    return elsewhere(key, 0);
                }
            }
            // A lease that has ended can be released, but nothing else.
            Op::Rejoin(claim) if claim.keys.iter().any(|key| self.has_ended(key)) => return Outcome::Absent,
            Op::Renew { lease, .. } | Op::Raise { lease, .. }
                if lease.keys.iter().any(|key| self.has_ended(key)) =>
            {
                return Outcome::Lost;
            }
            _ => {}
        }
        let (outcome, records) = self.decide(op, inputs);
        if let (Op::Acquire(claim), Outcome::Granted(_)) = (op, &outcome)
            && let Some(key) = claim.keys.iter().find(|key| self.guard(key).is_some_and(|guard| !fit(guard)))
        {
            return elsewhere(key, self.frees_in_us(key, inputs.now));
        }
        self.keep(&outcome, &records);
        inputs.capped(outcome)
    }

    fn keep(&mut self, outcome: &Outcome, records: &Records) {
        let granted = matches!(outcome, Outcome::Granted(grant) if !grant.repeated);
        for (key, record, _) in records.changed() {
            if let Some(entry) = self.entries.get_mut(key) {
                entry.record = record.clone();
                entry.passes += u32::from(granted);
            }
        }
    }

    /// Removes the keys that have no holder, and returns them with their guards, which are to be given back.
    pub fn take_idle(&mut self, now: ServerTime, which: impl Fn(&G) -> bool) -> Vec<(Key, G)> {
        let idle = self.entries.iter().filter(|(_, entry)| entry.record.until() <= now);
        let idle: Vec<Key> = idle.map(|(key, _)| key.clone()).collect();
        self.take_if_idle(idle.iter(), now, which)
    }

    /// Like [`LocalRecords::take_idle`], for these keys only.
    pub fn take_if_idle<'a>(
        &mut self,
        keys: impl Iterator<Item = &'a Key>,
        now: ServerTime,
        which: impl Fn(&G) -> bool,
    ) -> Vec<(Key, G)> {
        let is_idle = |entry: &Entry<G>| entry.record.until() <= now && which(&entry.guard);
        let mut taken = Vec::new();
        for key in keys {
            if self.entries.get(key).is_some_and(is_idle)
                && let Some(entry) = self.entries.remove(key)
            {
                let guard = entry.guard.clone();
                self.remember(key, entry);
                taken.push((key.clone(), guard));
            }
        }
        taken
    }

    /// Decides a claim for any of its keys, among the keys with a fit guard. Nothing is known of the others.
    fn apply_any(&mut self, claim: &Claim, inputs: &DecisionInputs, fit: impl Fn(&G) -> bool) -> Outcome {
        let usable = |key: &&Key| self.guard(key).is_some_and(&fit) && !self.has_ended(key);
        let guarded: Vec<Key> = claim.keys.iter().filter(usable).cloned().collect();
        if guarded.is_empty() {
            return elsewhere(&claim.keys[0], ELSEWHERE_US);
        }
        let (outcome, records) =
            self.decide(&Op::Acquire(Claim { keys: guarded.into(), ..claim.clone() }), inputs);
        self.keep(&outcome, &records);
        inputs.capped(outcome)
    }

    fn decide(&self, op: &Op, inputs: &DecisionInputs) -> (Outcome, Records) {
        let mut records = Records::default();
        for key in op.keys() {
            records.insert(key.clone(), self.record(key).cloned());
        }
        let outcome = record::apply(&mut records, op, &inputs.env());
        (outcome, records)
    }

    /// A free key that was granted [`PASSES`] times in a row here.
    fn exhausted<'a>(&self, claim: &'a Claim, now: ServerTime) -> Option<&'a Key> {
        let exhausted = |entry: &Entry<G>| entry.passes >= PASSES && entry.record.until() <= now;
        claim.keys.iter().find(|key| self.entries.get(key).is_some_and(exhausted))
    }

    /// Ends the leases on keys with such guards. Their holders may be certain of them until `certain`, so the
    /// keys stay held until then. Returns the nonces of the running leases.
    pub fn end(&mut self, now: ServerTime, certain: ServerTime, which: impl Fn(&G) -> bool) -> Vec<u64> {
        let mut nonces = Vec::new();
        for entry in self.entries.values_mut().filter(|entry| !entry.ended && which(&entry.guard)) {
            entry.ended = true;
            for holder in entry.record.holders.iter_mut().filter(|holder| holder.until > now) {
                holder.until = holder.until.min(certain);
                nonces.push(holder.nonce);
            }
        }
        each_once(nonces)
    }

    /// Forgets the keys with such guards, which are gone. Returns the nonces of the running leases.
    pub fn lose(&mut self, now: ServerTime, lost: impl Fn(&G) -> bool) -> Vec<u64> {
        let gone: Vec<(Key, Entry<G>)> = self.entries.extract_if(|_, entry| lost(&entry.guard)).collect();
        let told_now = gone.into_iter().filter(|(_, entry)| !entry.ended);
        let holders = told_now.flat_map(|(_, entry)| entry.record.holders);
        each_once(holders.filter(|holder| holder.until > now).map(|holder| holder.nonce).collect())
    }

    /// The record of a key.
    pub fn read(&self, key: &Key, now: ServerTime) -> Option<Stored> {
        let record = self.record(key)?.clone();
        Some(Stored { key: key.clone(), record, now, doubt: Doubt::default() })
    }

    /// Held keys with this prefix after `after`, in no order.
    pub fn list(&self, prefix: &str, after: Option<&Key>, now: ServerTime) -> Vec<Stored> {
        let wanted = |key: &Key| {
            key.as_str().starts_with(prefix) && after.is_none_or(|after| key.as_str() > after.as_str())
        };
        let held = self.entries.iter().filter(|(key, entry)| wanted(key) && entry.record.until() > now);
        held.map(|(key, entry)| Stored {
            key: key.clone(),
            record: entry.record.clone(),
            now,
            doubt: Doubt::default(),
        })
        .collect()
    }
}

/// One page of the items that [`LocalRecords::list`] found.
pub fn page(mut items: Vec<Stored>, limit: usize) -> Page {
    items.sort_by(|a, b| a.key.cmp(&b.key));
    let more = items.len() > limit;
    items.truncate(limit);
    Page { items, more, ..Page::default() }
}

/// The refusal for a key that another session has, or is to get next.
fn elsewhere(key: &Key, free_in_us: u64) -> Outcome {
    let (key, cause) = (key.clone(), Cause::OtherSession);
    Outcome::Held(Denial { key, cause, holder: None, free_in_us, next_waiter: None, joined: None })
}

fn each_once(mut nonces: Vec<u64>) -> Vec<u64> {
    nonces.sort_unstable();
    nonces.dedup();
    nonces
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lock::LeaseRef;
    use crate::lock::record::{Grant, Release};
    use crate::store::contract;

    /// The inputs at this many milliseconds, by both clocks.
    fn inputs(ms: u64) -> DecisionInputs {
        let own = Instant(ms * 1_000);
        DecisionInputs {
            own,
            now: ServerTime(own.0),
            above: Token(ms),
            grants_from: ServerTime(0),
            certain_until: Instant(u64::MAX),
        }
    }

    fn acquire(held: &mut LocalRecords<u8>, claim: &Claim, ms: u64) -> Option<Outcome> {
        held.try_apply(&Op::Acquire(claim.clone()), &inputs(ms), |_| true)
    }

    fn granted(held: &mut LocalRecords<u8>, claim: &Claim) -> LeaseRef {
        let outcome = held.apply(&Op::Acquire(claim.clone()), &inputs(0), |_| true);
        let Outcome::Granted(Grant { nonce, tokens, .. }) = outcome else { panic!("{outcome:?}") };
        LeaseRef { keys: claim.keys.clone(), nonce, token: Some(tokens[0]), principal: None }
    }

    #[test]
    fn an_ended_lease_is_held_while_its_holder_is_certain_and_is_never_renewed() {
        let mut held = LocalRecords::default();
        let mine = Claim { reentrant: true, request: Some("r".into()), ..contract::claim(&["k"], "me") };
        let other = contract::claim(&["other"], "me");
        for (claim, guard) in [(&mine, 1), (&other, 2)] {
            held.insert(claim.keys[0].clone(), guard);
        }
        let (lease, untouched) = (granted(&mut held, &mine), granted(&mut held, &other));
        assert_eq!(
            held.end(ServerTime(1_000_000), ServerTime(4_000_000), |guard| *guard == 1),
            [lease.nonce]
        );
        assert_eq!(held.end(ServerTime(1_000_000), ServerTime(9_000_000), |guard| *guard == 1), [0_u64; 0]);

        let renew = |lease: &LeaseRef| Op::Renew { lease: lease.clone(), ttl_ms: None };
        assert_eq!(held.apply(&renew(&lease), &inputs(1_000), |_| true), Outcome::Lost);
        assert!(matches!(held.apply(&renew(&untouched), &inputs(1_000), |_| true), Outcome::Renewed { .. }));
        // Nor is it entered again, repeated, or granted to another client.
        for claim in [
            mine.clone(),
            Claim { request: None, attempt: 7, ..mine.clone() },
            contract::claim(&["k"], "you"),
        ] {
            for ms in [1_000, 3_900, 60_000] {
                let outcome = acquire(&mut held, &claim, ms);
                let refused =
                    matches!(outcome, Some(Outcome::Held(_) | Outcome::RequestReused { ended: true }));
                assert!(refused, "{ms}: {outcome:?}");
                assert!(matches!(
                    held.apply(&Op::Acquire(claim.clone()), &inputs(ms), |_| true),
                    Outcome::Held(_)
                ));
            }
        }
        assert!(held.is_held(ServerTime(3_999_000), |guard| *guard == 1));
        assert!(!held.is_held(ServerTime(4_000_000), |guard| *guard == 1));
        assert_eq!(held.take_idle(ServerTime(5_000_000), |guard| *guard == 1).len(), 1);
        assert_eq!(
            held.apply(&renew(&lease), &inputs(5_000), |_| true),
            Outcome::Lost,
            "it is not remembered as running"
        );
    }

    /// If the server does not answer, the whole group comes again.
    #[test]
    fn no_operation_of_a_group_that_waits_for_the_server_is_applied() {
        let mut held = LocalRecords::default();
        let mine = Claim { reentrant: true, ..contract::claim(&["k"], "me") };
        held.insert(mine.keys[0].clone(), 1);
        let lease = granted(&mut held, &mine);
        let again = granted(&mut held, &Claim { attempt: 7, ..mine.clone() });
        assert_eq!(again.nonce, lease.nonce);
        let release = Op::Release(Release { lease, attempt: 1, outcome: None });
        let other = Op::Acquire(contract::claim(&["other"], "you"));
        let (key, now) = (&mine.keys[0], ServerTime(0));
        let levels =
            |held: &LocalRecords<u8>| held.read(key, now).map(|stored| stored.record.holders[0].levels.len());
        assert_eq!(held.try_group(&[release.clone(), other.clone()], &inputs(0)), None);
        assert_eq!(levels(&held), Some(2));
        assert_eq!(held.try_group(&[other], &inputs(0)), None);
        let released = [Outcome::Released { levels_left: 1 }];
        assert_eq!(held.try_group(&[release], &inputs(0)).as_deref(), Some(&released[..]));
        assert_eq!(levels(&held), Some(1));
    }

    #[test]
    fn an_ended_lease_can_be_released() {
        let mut held = LocalRecords::default();
        let mine = contract::claim(&["k"], "me");
        held.insert(mine.keys[0].clone(), 1);
        let lease = granted(&mut held, &mine);
        held.end(ServerTime(0), ServerTime(4_000_000), |_| true);
        let release = Op::Release(Release { lease, attempt: 1, outcome: None });
        assert_eq!(held.apply(&release, &inputs(1_000), |_| true), Outcome::Released { levels_left: 0 });
        assert!(held.is_idle(&mine.keys[0], ServerTime(1_000_000)));
        assert_eq!(held.lose(ServerTime(1_000_000), |_| true), [0_u64; 0]);
    }
}
