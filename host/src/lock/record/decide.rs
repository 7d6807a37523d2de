//! Who is granted what: the effect of each operation on records, in the store or, for a delegated key, in the memory of a
//! proxy.

use std::num::NonZero;

use super::admission::admits;
use super::{
    COMMITS_KEPT, Claim, Commit, Committed, Denial, ENDED_KEPT, Ended, Env, Grant, Holder, Left, Level,
    MAX_LEVELS, MAX_REPEATS, NAMELESS_KEPT, Origin, Outcome, Record, Records, Release, StoredValue, Version,
    global_queue,
};
use crate::lock::{Key, LeaseRef, Mode, ServerTime, Token};

/// Decides a claim.
pub(super) fn acquire(records: &mut Records, claim: &Claim, env: &Env) -> Outcome {
    match claim.any {
        true => acquire_any(records, claim, env),
        false => acquire_all(records, claim, env),
    }
}

fn acquire_all(records: &mut Records, claim: &Claim, env: &Env) -> Outcome {
    if let Some(outcome) = rejoin(records, claim, env) {
        return outcome;
    }
    let mut worst = global_queue::ahead(records, &claim.keys, claim, env);
    for key in &*claim.keys {
        match admits(records.read(key), key, claim.mode, env) {
            Ok(()) => {}
            Err(Some(denial)) => {
                // While the key is held, the next waiter does not matter.
                let later = |seen: &Denial| seen.next_waiter.is_some() || seen.free_in_us < denial.free_in_us;
                if worst.as_ref().is_none_or(later) {
                    worst = Some(denial);
                }
            }
            Err(None) => return Outcome::Full,
        }
    }
    match worst {
        Some(denial) => global_queue::denied(records, claim, denial, env),
        None => {
            global_queue::granted(records, &claim.keys, claim, env);
            grant(records, claim, env)
        }
    }
}

/// Grants the first free key. The search begins at a key that depends on the claim, so that claims spread over
/// the keys.
fn acquire_any(records: &mut Records, claim: &Claim, env: &Env) -> Outcome {
    if let Some(outcome) = rejoin_any(records, claim, env) {
        return outcome;
    }
    let keys = claim.keys.len();
    let mut soonest: Option<Denial> = None;
    for n in 0..keys {
        let key = &claim.keys[(claim.attempt as usize).wrapping_add(n) % keys];
        let only = std::slice::from_ref(key);
        let next_waiter = global_queue::ahead(records, only, claim, env);
        match admits(records.read(key), key, claim.mode, env)
            .and(next_waiter.map_or(Ok(()), |next_waiter| Err(Some(next_waiter))))
        {
            Ok(()) => {
                global_queue::granted(records, only, claim, env);
                return chosen(key, grant(records, &claim.of(key), env));
            }
            Err(Some(denial)) if soonest.as_ref().is_none_or(|seen| seen.free_in_us > denial.free_in_us) => {
                soonest = Some(denial);
            }
            Err(_) => {}
        }
    }
    match soonest {
        Some(denial) => global_queue::denied(records, claim, denial, env),
        None => Outcome::Full,
    }
}

pub(super) fn rejoin_any(records: &mut Records, claim: &Claim, env: &Env) -> Option<Outcome> {
    claim.keys.iter().find_map(|key| Some(chosen(key, rejoin(records, &claim.of(key), env)?)))
}

fn chosen(key: &Key, outcome: Outcome) -> Outcome {
    match outcome {
        Outcome::Granted(grant) => Outcome::Granted(Grant { chosen: Some(key.clone()), ..grant }),
        outcome => outcome,
    }
}

pub(super) fn rejoin(records: &mut Records, claim: &Claim, env: &Env) -> Option<Outcome> {
    if claim.keep_ms.is_some()
        && let Some(kept) = claim.keys.iter().find_map(|key| kept(records.read(key), env))
    {
        return Some(Outcome::Done(kept.clone()));
    }
    repeat(records, claim, env).or_else(|| claim.reentrant.then(|| reenter(records, claim, env)).flatten())
}

/// Repeats the answer to a request id or an attempt that was answered before.
pub(super) fn repeat(records: &mut Records, claim: &Claim, env: &Env) -> Option<Outcome> {
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
        // The keys of this request have changed since then, so its grant does not cover them.
        return Some(Outcome::RequestReused { ended: false });
    }
    let mut grant =
        Grant { nonce, chosen: None, tokens: Vec::new(), left_us: u64::MAX, levels: 1, repeated: true };
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
        grant.left_us = grant.left_us.min(env.left_us(holder));
        grant.levels = holder.levels.len() as u32;
    }
    Some(Outcome::Granted(grant))
}

/// Adds a level if the owner already holds all keys under one lease.
fn reenter(records: &mut Records, claim: &Claim, env: &Env) -> Option<Outcome> {
    let own = |holder: &&Holder| {
        holder.owner == claim.owner
            && holder.tag.principal == claim.tag.principal
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
    let mut grant =
        Grant { nonce, chosen: None, tokens: Vec::new(), left_us: u64::MAX, levels: 0, repeated: true };
    for key in &*claim.keys {
        let holder = records.read(key).holders.iter().find(|holder| holder.nonce == nonce)?;
        if holder.levels.len() >= MAX_LEVELS {
            return Some(Outcome::Full);
        }
    }
    for key in &*claim.keys {
        let holder = records.write(key).holders.iter_mut().find(|holder| holder.nonce == nonce)?;
        holder.levels.push(level_of(claim));
        env.lengthen(holder, claim.ttl_ms);
        grant.tokens.push(holder.token);
        grant.left_us = grant.left_us.min(env.left_us(holder));
        grant.levels = holder.levels.len() as u32;
    }
    Some(Outcome::Granted(grant))
}

fn grant(records: &mut Records, claim: &Claim, env: &Env) -> Outcome {
    let until = env.end_of(claim.ttl_ms);
    // If no minimum was asked for, the value is 0 and not `now`, because the next `now` of a store may be a
    // little earlier.
    let at_least_until = match claim.at_least_ms {
        0 => ServerTime(0),
        ms => env.now.plus_ms(ms),
    };
    // One token for the whole lease, above the last tokens of all its keys, so that the fencing token of a
    // resource does not depend on which of its keys is the first.
    let last = claim.keys.iter().map(|key| records.read(key).token).max().unwrap_or_default();
    let token = env.token_after(last);
    for key in &*claim.keys {
        let record = records.write(key);
        // While the clock is in doubt, the holder of an expired lease may still count on it, so it stays.
        for gone in record.holders.extract_if(.., |holder| env.is_past(holder)) {
            remember(&mut record.ended, &gone);
        }
        record.token = token;
        record.holders.push(Holder {
            nonce: claim.attempt,
            owner: claim.owner.clone(),
            mode: claim.mode,
            token,
            lowest_token: token,
            keys: claim.keys.len() as u32,
            since: env.now,
            until,
            ttl_ms: claim.ttl_ms,
            at_least_until,
            delay_ms: claim.delay_ms,
            keep_ms: claim.keep_ms,
            released_by: None,
            levels: vec![level_of(claim)],
            tag: claim.tag.clone(),
        });
    }
    Outcome::Granted(Grant {
        nonce: claim.attempt,
        chosen: None,
        tokens: vec![token; claim.keys.len()],
        left_us: u64::from(claim.ttl_ms) * 1_000,
        levels: 1,
        repeated: false,
    })
}

fn level_of(claim: &Claim) -> Level {
    Level { attempts: vec![claim.attempt], request: claim.request.clone(), fingerprint: claim.fingerprint }
}

fn remember(ended: &mut Vec<Ended>, holder: &Holder) {
    for level in &holder.levels {
        push_ended(
            ended,
            Ended {
                nonce: holder.nonce,
                released_by: holder.released_by,
                request: level.request.clone(),
                committed: None,
            },
        );
    }
}

/// Adds an entry and drops the oldest one of its kind if there are too many. Entries without a request id are
/// kept only for a short while, for a caller that repeats its release. Batches whose answer was lost do not
/// depend on them: see [`super::replay`].
fn push_ended(ended: &mut Vec<Ended>, entry: Ended) {
    let kind =
        |ended: &Ended| (ended.request.is_some(), ended.request.is_some() && ended.committed.is_some());
    let entry_kind = kind(&entry);
    let most = match entry_kind {
        (false, _) => NAMELESS_KEPT,
        (true, false) => ENDED_KEPT,
        (true, true) => COMMITS_KEPT,
    };
    ended.push(entry);
    let alike = |ended: &&Ended| kind(ended) == entry_kind;
    if ended.iter().filter(alike).count() > most
        && let Some(oldest) = ended.iter().position(|ended| alike(&ended))
    {
        ended.remove(oldest);
    }
}

/// Whether the reference goes with the token of this holder.
fn is_named(lease: &LeaseRef, holder: &Holder) -> bool {
    lease.token.is_none_or(|token| holder.accepts(token))
}

/// Checks that the lease is complete and running: that it is on every key, and that the first key accepts its
/// token.
///
/// # Errors
/// [`Outcome::Lost`], [`Outcome::Forbidden`], or [`Outcome::Unknown`] if the records do not tell.
fn live(records: &Records, lease: &LeaseRef, env: &Env) -> Result<(), Outcome> {
    let mut found = Ok(());
    for (n, key) in lease.keys.iter().enumerate() {
        let mut holders = records.read(key).holders.iter().filter(|holder| holder.nonce == lease.nonce);
        let own = holders.find(|holder| env.lasts(holder) && (n > 0 || is_named(lease, holder)));
        let own = own.ok_or(Outcome::Lost)?;
        if !lease.is_allowed(&own.tag.principal) {
            return Err(Outcome::Forbidden);
        }
        if env.may_be_taken(own) {
            found = Err(Outcome::Unknown);
        }
    }
    found
}

pub(super) fn renew(records: &mut Records, lease: &LeaseRef, ttl_ms: Option<u32>, env: &Env) -> Outcome {
    if let Err(outcome) = live(records, lease, env) {
        return outcome;
    }
    let mut left_us = u64::MAX;
    for key in &*lease.keys {
        let holders = &mut records.write(key).holders;
        for holder in holders.iter_mut().filter(|holder| holder.nonce == lease.nonce) {
            env.lengthen(holder, ttl_ms.unwrap_or(holder.ttl_ms));
            left_us = left_us.min(env.left_us(holder));
        }
    }
    Outcome::Renewed { left_us }
}

pub(super) fn raise(records: &mut Records, lease: &LeaseRef, tokens: Option<&[Token]>, env: &Env) -> Outcome {
    if let Err(outcome) = live(records, lease, env) {
        return outcome;
    }
    let mut left_us = u64::MAX;
    for (n, key) in lease.keys.iter().enumerate() {
        let token = tokens.and_then(|tokens| tokens.get(n).copied());
        let own = |holder: &&Holder| holder.nonce == lease.nonce;
        let record = records.read(key);
        let is_accepted = |token: Token| {
            record.token >= token && record.holders.iter().filter(own).all(|holder| holder.accepts(token))
        };
        let Some(token) = token.filter(|token| !is_accepted(*token)) else {
            let left = record.holders.iter().filter(own).map(|holder| env.left_us(holder));
            left_us = left.min().unwrap_or(0).min(left_us);
            continue;
        };
        let record = records.write(key);
        record.token = record.token.max(token);
        for holder in record.holders.iter_mut().filter(|holder| holder.nonce == lease.nonce) {
            holder.token = holder.token.max(token);
            holder.lowest_token = holder.lowest_token.min(token);
            left_us = left_us.min(env.left_us(holder));
        }
    }
    Outcome::Renewed { left_us }
}

pub(super) fn release(records: &mut Records, asked: &Release, env: &Env) -> Outcome {
    let Release { lease, attempt, outcome } = asked;
    let attempt = *attempt;
    if let Some(levels_left) = released_before(records, lease, attempt) {
        return Outcome::Released { levels_left };
    }
    if outcome.is_some() && lease.keys.iter().all(|key| is_kept_of(records.read(key), lease)) {
        return Outcome::Released { levels_left: 0 };
    }
    let live = live(records, lease, env);
    if let Err(outcome @ (Outcome::Unknown | Outcome::Forbidden)) = live {
        return outcome;
    }
    let whole = live.is_ok();
    if whole && outcome.is_some() && !keeps_outcomes(records, lease) {
        return Outcome::Lost;
    }
    // A lease that has lost some of its keys is lost; removing the rest unblocks the other keys.
    let is_rest = |holder: &Holder| {
        let named = is_named(lease, holder) && lease.is_allowed(&holder.tag.principal);
        env.lasts(holder) && holder.keys as usize == lease.keys.len() && named
    };
    let own = |holder: &Holder| holder.nonce == lease.nonce && (whole || is_rest(holder));
    // If the answer is `Lost`, it is `Lost` again when the release is repeated.
    let attempt = NonZero::new(attempt).filter(|_| whole);
    let mut levels_left = 0;
    for key in &*lease.keys {
        let Some(place) = records.read(key).holders.iter().position(own) else { continue };
        let record = records.write(key);
        let holder = &mut record.holders[place];
        holder.released_by = attempt;
        if holder.levels.len() > 1 {
            let level = holder.levels.pop();
            levels_left = holder.levels.len() as u32;
            let request = level.and_then(|level| level.request);
            let ended = Ended { nonce: lease.nonce, released_by: attempt, request, committed: None };
            push_ended(&mut record.ended, ended);
        } else {
            let holder = record.holders.swap_remove(place);
            record.not_before = record.not_before.max(holder.at_least_until);
            remember(&mut record.ended, &holder);
            if let Some(Left { value, origin }) = outcome.as_ref().filter(|_| whole) {
                let keep_ms = holder.keep_ms.map_or(0, NonZero::get);
                let (since, until) = (env.now, env.now.plus_ms(keep_ms));
                let (value, origin) = (value.clone(), *origin);
                record.kept = Some(StoredValue { value, since, until, nonce: lease.nonce, origin });
            }
        }
    }
    if whole { Outcome::Released { levels_left } } else { Outcome::Lost }
}

/// The levels left after this same release, if it was applied before and its answer was lost.
fn released_before(records: &Records, lease: &LeaseRef, attempt: u64) -> Option<u32> {
    let record = records.read(&lease.keys[0]);
    record
        .ended
        .iter()
        .find(|ended| ended.nonce == lease.nonce && ended.released_by == NonZero::new(attempt))?;
    let holder = record.holders.iter().find(|holder| holder.nonce == lease.nonce);
    Some(holder.map_or(0, |holder| holder.levels.len() as u32))
}

pub(super) fn abandon(records: &mut Records, keys: &[Key], attempt: u64, env: &Env) -> Outcome {
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
        } else if env.lasts(holder) {
            // Not remembered as ended: the request had no answer and may be repeated.
            record.holders.swap_remove(place);
        }
    }
    Outcome::Abandoned
}

pub(super) fn force(records: &mut Records, key: &Key, env: &Env) -> Outcome {
    let record = records.read(key);
    let holders = record.holders.iter().filter(|holder| !env.is_past(holder)).count() as u32;
    if holders == 0 && record.not_before <= env.now {
        return Outcome::Forced { holders: 0 };
    }
    let record = records.write(key);
    record.token = env.token_after(record.token);
    record.not_before = ServerTime(0);
    for gone in std::mem::take(&mut record.holders) {
        remember(&mut record.ended, &gone);
    }
    Outcome::Forced { holders }
}

/// Whether the lease stored its outcome before.
fn is_kept_of(record: &Record, lease: &LeaseRef) -> bool {
    record.kept.as_ref().is_some_and(|kept| kept.nonce == lease.nonce)
}

fn keeps_outcomes(records: &Records, lease: &LeaseRef) -> bool {
    let keeps = |holder: &Holder| holder.nonce == lease.nonce && holder.keep_ms.is_some();
    lease.keys.iter().all(|key| records.read(key).holders.iter().any(keeps))
}

/// The stored value of the key, if it has not expired.
fn kept<'a>(record: &'a Record, env: &Env) -> Option<&'a StoredValue> {
    record.kept.as_ref().filter(|kept| kept.until > env.now)
}

/// The version of a key is its last token. A key without a row gets a row that begins at the token floor. The
/// floor is at least the last token of a row that was cleaned up, and so at least every version that a reader
/// may remember. Once the row exists, the version does not change until the next commit, whereas the floor
/// rises with each clean-up of other keys. No version is below [`Env::renamed`]: a version that was read
/// earlier belongs to a key that may have had another name.
pub(super) fn version(records: &mut Records, key: &Key, env: &Env) -> Version {
    if !records.is_stored(key) {
        records.write(key).token = env.floor;
    }
    let record = records.read(key);
    Version { version: record.token.max(env.renamed), kept: kept(record, env).cloned() }
}

pub(super) fn commit(records: &mut Records, asked: &Commit, env: &Env) -> Outcome {
    let Commit { key, version: read, value, attempt, request, fingerprint } = asked;
    if let Some(outcome) = committed_before(records.read(key), asked) {
        return outcome;
    }
    if let Some(denial) = in_the_way(records.read(key), key, env) {
        return Outcome::Held(denial);
    }
    let current = version(records, key, env);
    if current.version != *read {
        return Outcome::Conflict(current);
    }
    let record = records.write(key);
    let version = env.token_after(record.token);
    record.token = version;
    record.kept = value.as_ref().map(|value| StoredValue {
        value: value.clone(),
        since: env.now,
        until: ServerTime(u64::MAX),
        nonce: *attempt,
        origin: Origin::Api,
    });
    let committed = Some(Committed { version, fingerprint: *fingerprint });
    push_ended(
        &mut record.ended,
        Ended { nonce: *attempt, released_by: None, request: request.clone(), committed },
    );
    Outcome::Committed { version }
}

/// The answer to the same commit, if it was made before and its answer was lost.
fn committed_before(record: &Record, asked: &Commit) -> Option<Outcome> {
    let same = |ended: &&Ended| {
        ended.nonce == asked.attempt || (asked.request.is_some() && ended.request == asked.request)
    };
    let ended = record.ended.iter().find(same)?;
    Some(match ended.committed {
        Some(committed) if committed.fingerprint == asked.fingerprint => {
            Outcome::Committed { version: committed.version }
        }
        _ => Outcome::RequestReused { ended: false },
    })
}

/// A lease or a delay that blocks a commit. After a change of the server a commit need not wait for
/// `grants_from`: a version that was read before can be committed only if the new server has that same version.
fn in_the_way(record: &Record, key: &Key, env: &Env) -> Option<Denial> {
    let env = Env { grants_from: ServerTime(0), ..*env };
    admits(record, key, Mode::Exclusive, &env).err().flatten()
}
