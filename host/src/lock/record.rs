//! The durable state of a key, and what each operation makes of it.
//!
//! A store reads the records of an operation's keys under its own locks, calls [`apply`], and
//! writes back the records that changed, all in one transaction. So what is decided here holds on
//! every server and in every proxy, and can be tested without either.

use std::collections::BTreeMap;

use super::{Key, LeaseRef, Mode, ServerTime, Token};

/// Ended grants that a key remembers, to tell a repeated call from a new one.
pub const ENDED_KEPT: usize = 8;
/// The most holders that one key has at a time.
pub const MAX_HOLDERS: usize = 1024;
/// Callers that may be told of one grant by repeating its request and can still undo it; with more,
/// the grant stays until it is released or ends.
pub const MAX_REPEATS: usize = 8;
/// The deepest re-entrance of one holder.
pub const MAX_LEVELS: usize = 64;

/// The durable state of one key.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Record {
    /// The last token that was given out.
    pub token: Token,
    pub holders: Vec<Holder>,
    /// Nobody is granted the key before this moment (lock-at-least, lock-delay).
    pub not_before: ServerTime,
    /// The last [`ENDED_KEPT`] grants that ended, oldest first.
    pub ended: Vec<Ended>,
}

/// One grant of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// The `attempt` of the claim that made the grant; part of the lease's identity.
    pub nonce: u64,
    pub owner: Box<str>,
    pub mode: Mode,
    pub token: Token,
    /// How many keys the lease holds; this record is one of them.
    pub keys: u32,
    pub since: ServerTime,
    pub until: ServerTime,
    /// The time that the lease was granted for, and is renewed for unless asked otherwise.
    pub ttl_ms: u32,
    /// After a release the key stays taken until this moment.
    pub at_least_until: ServerTime,
    /// After an expiry the key stays taken this long.
    pub delay_ms: u32,
    /// The `attempt` of the last release that gave up a level; 0 where there was none.
    pub released_by: u64,
    /// One for each time the owner was granted the key and has not released it; never empty.
    pub levels: Vec<Level>,
    pub tag: Tag,
}

/// One acquire that a holder rests on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Level {
    /// The claims that were answered with this level: more than one where a request was repeated.
    /// It is undone when the last of them is abandoned. At most [`MAX_REPEATS`].
    pub attempts: Vec<u64>,
    /// The request id, where the client gave one.
    pub request: Option<Box<str>>,
    pub fingerprint: u64,
}

/// What decisions do not look at: kept so that a holder can be shown, and planned again when its
/// policy is replaced.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tag {
    pub resource: Box<str>,
    /// `name@sha256:digest` of the policy generation that planned the lease.
    pub policy: Box<str>,
    pub labels: Vec<(Box<str>, Box<str>)>,
}

/// A grant that is over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended {
    pub nonce: u64,
    /// The `attempt` of the release that ended it; 0 where it was not released.
    pub released_by: u64,
    /// Its request id, where the client gave one: that id is used up.
    pub request: Option<Box<str>>,
}

/// An acquire, as the store is asked for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// Sorted, each once, at least one.
    pub keys: std::sync::Arc<[Key]>,
    /// A random number that no other claim has. Kept when the same claim is sent again because its
    /// answer was lost.
    pub attempt: u64,
    pub owner: Box<str>,
    pub request: Option<Box<str>>,
    /// A hash of what was asked, to notice a request id that comes back with another body.
    pub fingerprint: u64,
    pub mode: Mode,
    pub ttl_ms: u32,
    pub at_least_ms: u32,
    pub delay_ms: u32,
    pub reentrant: bool,
    pub tag: Tag,
}

/// What a store can be asked to do to its records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Op {
    /// Grant all keys or none.
    Acquire(Claim),
    /// The grant that this claim has already: by its request id, or because its owner holds the keys.
    /// Never a new one, so it may be asked past a queue.
    Rejoin(Claim),
    /// Let the lease end `ttl_ms` from now, or, with `None`, the time from now that it was granted
    /// for; never earlier than it would have.
    Renew { lease: LeaseRef, ttl_ms: Option<u32> },
    /// Give up one level; the last one ends the lease. `attempt` is a random number that no other
    /// release has, kept when this one is sent again because its answer was lost.
    Release { lease: LeaseRef, attempt: u64 },
    /// Undo the grant that the claim `attempt` may have been given, if nobody else was answered with it.
    Abandon { keys: std::sync::Arc<[Key]>, attempt: u64 },
    /// Take the key from whoever holds it; the token moves on.
    Force { key: Key },
}

impl Op {
    pub fn keys(&self) -> &[Key] {
        match self {
            Op::Acquire(claim) | Op::Rejoin(claim) => &claim.keys,
            Op::Renew { lease, .. } | Op::Release { lease, .. } => &lease.keys,
            Op::Abandon { keys, .. } => keys,
            Op::Force { key } => std::slice::from_ref(key),
        }
    }
}

/// What became of an [`Op`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    Granted(Grant),
    /// A [`Op::Rejoin`] found no grant of its own.
    Absent,
    /// An acquire found a key taken.
    Held(Denial),
    /// The request id was used with another body, or its lease has ended.
    RequestReused {
        ended: bool,
    },
    /// The owner is at [`MAX_LEVELS`], or the key at [`MAX_HOLDERS`].
    Full,
    Renewed {
        /// What is left of the lease, in microseconds, at the moment of [`Env::now`].
        left_us: u64,
    },
    Released {
        /// Levels that the owner still holds.
        levels_left: u32,
    },
    /// The lease is unknown, has expired, or belongs to another.
    Lost,
    /// How many holders were put out.
    Forced {
        holders: u32,
    },
    Abandoned,
}

/// A grant, new or found again by its request id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    pub nonce: u64,
    /// One for each key, in their order.
    pub tokens: Vec<Token>,
    /// What is left of the lease, in microseconds, at the moment of [`Env::now`].
    pub left_us: u64,
    /// Levels that the owner now holds.
    pub levels: u32,
    /// Whether the grant was there before: the same request, or the owner's own lease.
    pub repeated: bool,
}

/// Why a key could not be had.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Denial {
    pub key: Key,
    /// The holder that stands in the way the longest; `None` while only a delay does.
    pub holder: Option<HeldBy>,
    /// Microseconds until the first change that could let this claim in, unless somebody releases.
    pub free_in_us: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldBy {
    pub owner: Box<str>,
    pub mode: Mode,
    pub token: Token,
    pub since: ServerTime,
    pub until: ServerTime,
}

/// What a decision knows of the store beside the records.
#[derive(Clone, Copy, Debug)]
pub struct Env {
    /// The store's clock, read after the records were locked.
    pub now: ServerTime,
    /// Every new token is above this: the store's epoch, and the tokens of rows that were cleaned up.
    pub floor: Token,
    /// No new grants before this moment: leases of the server that was here before may still run.
    pub grants_from: ServerTime,
    /// Whether expired leases may be taken over. False while the store's clock is in doubt.
    pub takeover: bool,
}

/// The records that an operation works on, with a note of those that changed.
#[derive(Clone, Debug, Default)]
pub struct Records {
    entries: BTreeMap<Key, Entry>,
}

#[derive(Clone, Debug)]
struct Entry {
    record: Record,
    stored: bool,
    changed: bool,
}

impl Records {
    /// `None` stands for a key that the store has no row of.
    pub fn insert(&mut self, key: Key, record: Option<Record>) {
        let stored = record.is_some();
        let record = record.unwrap_or_default();
        self.entries.insert(key, Entry { record, stored, changed: false });
    }

    pub fn get(&self, key: &Key) -> Option<&Record> {
        self.entries.get(key).map(|entry| &entry.record)
    }

    /// Each changed record with whether the store has a row of it, in the order of the keys.
    pub fn changed(&self) -> impl Iterator<Item = (&Key, &Record, bool)> {
        self.entries
            .iter()
            .filter(|(_, entry)| entry.changed)
            .map(|(key, entry)| (key, &entry.record, entry.stored))
    }

    fn read(&self, key: &Key) -> &Record {
        &self.entries.get(key).expect("the store reads every key of an operation").record
    }

    fn write(&mut self, key: &Key) -> &mut Record {
        let entry = self.entries.get_mut(key).expect("the store reads every key of an operation");
        entry.changed = true;
        &mut entry.record
    }
}

/// Decides one operation and changes the records accordingly.
///
/// # Panics
/// Where `records` lacks a key of the operation.
pub fn apply(records: &mut Records, op: &Op, env: &Env) -> Outcome {
    match op {
        Op::Acquire(claim) => acquire(records, claim, env),
        Op::Rejoin(claim) => rejoin(records, claim, env).unwrap_or(Outcome::Absent),
        Op::Renew { lease, ttl_ms } => renew(records, lease, *ttl_ms, env),
        Op::Release { lease, attempt } => release(records, lease, *attempt, env),
        Op::Abandon { keys, attempt } => abandon(records, keys, *attempt, env),
        Op::Force { key } => force(records, key, env),
    }
}

fn acquire(records: &mut Records, claim: &Claim, env: &Env) -> Outcome {
    if let Some(outcome) = rejoin(records, claim, env) {
        return outcome;
    }
    let mut worst: Option<Denial> = None;
    for key in &*claim.keys {
        match admits(records.read(key), key, claim, env) {
            Ok(()) => {}
            Err(Some(denial)) => {
                if worst.as_ref().is_none_or(|seen| seen.free_in_us < denial.free_in_us) {
                    worst = Some(denial);
                }
            }
            Err(None) => return Outcome::Full,
        }
    }
    match worst {
        Some(denial) => Outcome::Held(denial),
        None => grant(records, claim, env),
    }
}

fn rejoin(records: &mut Records, claim: &Claim, env: &Env) -> Option<Outcome> {
    repeat(records, claim, env).or_else(|| claim.reentrant.then(|| reenter(records, claim, env)).flatten())
}

/// A request id, or an attempt, that was answered before.
fn repeat(records: &mut Records, claim: &Claim, env: &Env) -> Option<Outcome> {
    let matches = |level: &Level| {
        level.attempts.contains(&claim.attempt) || (claim.request.is_some() && level.request == claim.request)
    };
    let (nonce, same_body, alive) = claim
        .keys
        .iter()
        .find_map(|key| {
            let record = records.read(key);
            record.holders.iter().find_map(|holder| {
                let level = holder.levels.iter().find(|level| matches(level))?;
                let same_body = level.fingerprint == claim.fingerprint;
                Some((holder.nonce, same_body, holder.until > env.now))
            })
        })
        .or_else(|| {
            let ended = |key| {
                let used = |ended: &&Ended| claim.request.is_some() && ended.request == claim.request;
                records.read(key).ended.iter().find(used)
            };
            claim.keys.iter().find_map(ended).map(|ended| (ended.nonce, true, false))
        })?;
    if !same_body || !alive {
        return Some(Outcome::RequestReused { ended: same_body });
    }
    let whole = claim.keys.iter().all(|key| {
        let same = |h: &Holder| h.nonce == nonce && h.keys as usize == claim.keys.len();
        records.read(key).holders.iter().any(same)
    });
    if !whole {
        // The keys of this request have changed since: the grant that it had cannot stand for them.
        return Some(Outcome::RequestReused { ended: false });
    }
    let mut grant = Grant { nonce, tokens: Vec::new(), left_us: u64::MAX, levels: 1, repeated: true };
    for key in &*claim.keys {
        let holder = records.write(key).holders.iter_mut().find(|holder| holder.nonce == nonce)?;
        let level = holder.levels.iter_mut().find(|level| matches(level));
        if let Some(level) = level
            && !level.attempts.contains(&claim.attempt)
            && level.attempts.len() < MAX_REPEATS
        {
            level.attempts.push(claim.attempt);
        }
        grant.tokens.push(holder.token);
        grant.left_us = grant.left_us.min(holder.until.us_since(env.now));
        grant.levels = holder.levels.len() as u32;
    }
    Some(Outcome::Granted(grant))
}

/// The owner holds all the keys already, under one lease.
fn reenter(records: &mut Records, claim: &Claim, env: &Env) -> Option<Outcome> {
    let own = |holder: &&Holder| {
        holder.owner == claim.owner
            && holder.until > env.now
            && holder.mode == claim.mode
            && holder.keys as usize == claim.keys.len()
    };
    let nonce = records.read(&claim.keys[0]).holders.iter().find(own)?.nonce;
    let everywhere = claim
        .keys
        .iter()
        .all(|key| records.read(key).holders.iter().any(|holder| holder.nonce == nonce && own(&holder)));
    if !everywhere {
        return None;
    }
    let mut grant = Grant { nonce, tokens: Vec::new(), left_us: u64::MAX, levels: 0, repeated: true };
    for key in &*claim.keys {
        let holder = records.read(key).holders.iter().find(|holder| holder.nonce == nonce)?;
        if holder.levels.len() >= MAX_LEVELS {
            return Some(Outcome::Full);
        }
    }
    for key in &*claim.keys {
        let holder = records.write(key).holders.iter_mut().find(|holder| holder.nonce == nonce)?;
        holder.levels.push(level_of(claim));
        holder.until = holder.until.max(env.now.plus_ms(claim.ttl_ms));
        grant.tokens.push(holder.token);
        grant.left_us = grant.left_us.min(holder.until.us_since(env.now));
        grant.levels = holder.levels.len() as u32;
    }
    Some(Outcome::Granted(grant))
}

/// Whether the record has room for the claim; `Err(None)` where it can hold no more holders.
fn admits(record: &Record, key: &Key, claim: &Claim, env: &Env) -> Result<(), Option<Denial>> {
    let from = record.not_before.max(env.grants_from);
    let mut used: u64 = 0;
    let mut holders = 0;
    let mut frees: Vec<(ServerTime, u64)> = Vec::new();
    let mut blocker: Option<&Holder> = None;
    for holder in &record.holders {
        let free_at = free_at(holder);
        if free_at <= env.now && env.takeover {
            continue;
        }
        holders += 1;
        let weight = weight_against(holder.mode, claim.mode);
        if weight > 0 {
            used = used.saturating_add(weight);
            frees.push((free_at, weight));
            if blocker.is_none_or(|seen| seen.until < holder.until) {
                blocker = Some(holder);
            }
        }
    }
    if holders >= MAX_HOLDERS {
        return Err(None);
    }
    let (wanted, room) = match claim.mode {
        Mode::Exclusive | Mode::Shared => (1, 1),
        Mode::Permits { count, limit } => (u64::from(count), u64::from(limit)),
    };
    let fits = used + wanted <= room;
    if fits && from <= env.now {
        return Ok(());
    }
    let mut free_in_us = from.us_since(env.now);
    if !fits {
        frees.sort_unstable();
        let enough = frees.iter().find(|(_, weight)| {
            used -= weight;
            used + wanted <= room
        });
        let at = enough.map_or(ServerTime(u64::MAX), |(at, _)| *at);
        free_in_us = free_in_us.max(at.us_since(env.now));
    }
    let holder = blocker.map(|holder| HeldBy {
        owner: holder.owner.clone(),
        mode: holder.mode,
        token: holder.token,
        since: holder.since,
        until: holder.until,
    });
    Err(Some(Denial { key: key.clone(), holder, free_in_us }))
}

/// When a holder that does nothing more is out of the way.
fn free_at(holder: &Holder) -> ServerTime {
    holder.until.plus_ms(holder.delay_ms).max(holder.at_least_until)
}

/// What a holder takes of the room that a claim counts in: all of it, nothing, or its permits.
fn weight_against(held: Mode, claimed: Mode) -> u64 {
    match (held, claimed) {
        (Mode::Shared, Mode::Shared) => 0,
        (Mode::Permits { count, .. }, Mode::Permits { .. }) => u64::from(count),
        _ => u64::from(u32::MAX),
    }
}

fn grant(records: &mut Records, claim: &Claim, env: &Env) -> Outcome {
    let until = env.now.plus_ms(claim.ttl_ms);
    // Not `now` where nothing was asked for: a store's next `now` may be a little earlier.
    let at_least_until = match claim.at_least_ms {
        0 => ServerTime(0),
        ms => env.now.plus_ms(ms),
    };
    let mut tokens = Vec::with_capacity(claim.keys.len());
    for key in &*claim.keys {
        let record = records.write(key);
        for gone in record.holders.extract_if(.., |holder| free_at(holder) <= env.now) {
            remember(&mut record.ended, &gone);
        }
        record.token = record.token.max(env.floor).next();
        record.holders.push(Holder {
            nonce: claim.attempt,
            owner: claim.owner.clone(),
            mode: claim.mode,
            token: record.token,
            keys: claim.keys.len() as u32,
            since: env.now,
            until,
            ttl_ms: claim.ttl_ms,
            at_least_until,
            delay_ms: claim.delay_ms,
            released_by: 0,
            levels: vec![level_of(claim)],
            tag: claim.tag.clone(),
        });
        tokens.push(record.token);
    }
    let left_us = until.us_since(env.now);
    Outcome::Granted(Grant { nonce: claim.attempt, tokens, left_us, levels: 1, repeated: false })
}

fn level_of(claim: &Claim) -> Level {
    Level { attempts: vec![claim.attempt], request: claim.request.clone(), fingerprint: claim.fingerprint }
}

fn remember(ended: &mut Vec<Ended>, holder: &Holder) {
    for level in &holder.levels {
        push_ended(
            ended,
            Ended { nonce: holder.nonce, released_by: holder.released_by, request: level.request.clone() },
        );
    }
}

fn push_ended(ended: &mut Vec<Ended>, entry: Ended) {
    if ended.len() >= ENDED_KEPT {
        ended.remove(0);
    }
    ended.push(entry);
}

/// Whether the lease is whole and running: in every key, with the token it was given.
fn is_live(records: &Records, lease: &LeaseRef, env: &Env) -> bool {
    lease.keys.iter().enumerate().all(|(n, key)| {
        records.read(key).holders.iter().any(|holder| {
            holder.nonce == lease.nonce && holder.until > env.now && (n > 0 || holder.token == lease.token)
        })
    })
}

fn renew(records: &mut Records, lease: &LeaseRef, ttl_ms: Option<u32>, env: &Env) -> Outcome {
    if !is_live(records, lease, env) {
        return Outcome::Lost;
    }
    let mut left_us = u64::MAX;
    for key in &*lease.keys {
        let holders = &mut records.write(key).holders;
        for holder in holders.iter_mut().filter(|holder| holder.nonce == lease.nonce) {
            holder.until = holder.until.max(env.now.plus_ms(ttl_ms.unwrap_or(holder.ttl_ms)));
            left_us = left_us.min(holder.until.us_since(env.now));
        }
    }
    Outcome::Renewed { left_us }
}

fn release(records: &mut Records, lease: &LeaseRef, attempt: u64, env: &Env) -> Outcome {
    if let Some(levels_left) = released_before(records, lease, attempt) {
        return Outcome::Released { levels_left };
    }
    if !is_live(records, lease, env) {
        return Outcome::Lost;
    }
    let mut levels_left = 0;
    for key in &*lease.keys {
        let record = records.write(key);
        let place = record.holders.iter().position(|holder| holder.nonce == lease.nonce);
        let Some(place) = place else { continue };
        let holder = &mut record.holders[place];
        holder.released_by = attempt;
        if holder.levels.len() > 1 {
            let level = holder.levels.pop();
            levels_left = holder.levels.len() as u32;
            let request = level.and_then(|level| level.request);
            push_ended(&mut record.ended, Ended { nonce: lease.nonce, released_by: attempt, request });
        } else {
            let holder = record.holders.swap_remove(place);
            record.not_before = record.not_before.max(holder.at_least_until);
            remember(&mut record.ended, &holder);
        }
    }
    Outcome::Released { levels_left }
}

/// The levels left by this very release, where it was applied and its answer lost.
fn released_before(records: &Records, lease: &LeaseRef, attempt: u64) -> Option<u32> {
    let record = records.read(&lease.keys[0]);
    record.ended.iter().find(|ended| ended.nonce == lease.nonce && ended.released_by == attempt)?;
    let holder = record.holders.iter().find(|holder| holder.nonce == lease.nonce);
    Some(holder.map_or(0, |holder| holder.levels.len() as u32))
}

fn abandon(records: &mut Records, keys: &[Key], attempt: u64, env: &Env) -> Outcome {
    for key in keys {
        let answered = |holder: &Holder| holder.levels.iter().any(|level| level.attempts.contains(&attempt));
        let Some(place) = records.read(key).holders.iter().position(answered) else { continue };
        let record = records.write(key);
        let holder = &mut record.holders[place];
        for level in &mut holder.levels {
            if level.attempts.len() < MAX_REPEATS {
                level.attempts.retain(|answered| *answered != attempt);
            }
        }
        let nobody_left = holder.levels.iter().all(|level| level.attempts.is_empty());
        if !nobody_left {
            holder.levels.retain(|level| !level.attempts.is_empty());
        } else if holder.until > env.now {
            // Not remembered as ended: the request had no answer and may be made again.
            record.holders.swap_remove(place);
        }
    }
    Outcome::Abandoned
}

fn force(records: &mut Records, key: &Key, env: &Env) -> Outcome {
    let live = |holder: &Holder| free_at(holder) > env.now;
    let record = records.read(key);
    let holders = record.holders.iter().filter(|holder| live(holder)).count() as u32;
    if holders == 0 && record.not_before <= env.now {
        return Outcome::Forced { holders: 0 };
    }
    let record = records.write(key);
    record.token = record.token.max(env.floor).next();
    record.not_before = ServerTime(0);
    for gone in std::mem::take(&mut record.holders) {
        remember(&mut record.ended, &gone);
    }
    Outcome::Forced { holders }
}

#[cfg(test)]
mod tests;
