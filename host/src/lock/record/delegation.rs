//! Delegations: a proxy decides about a key in its memory for a while.
//!
//! A delegation is an exclusive holder of the key in the store, so all that holds for leases holds for it: other proxies
//! respect it until its end, a fail-over waits for its end, and a clock that is in doubt keeps it. Its tag names the
//! proxy. Beneath it, that proxy decides on a copy of the record by [`apply`](super::apply()), and grants only what ends
//! before the delegation does. The tokens up to [`Record::token`] are its own.
//!
//! The record keeps the holders that it had when it was delegated, and nobody reads them while the delegation lasts. They
//! are the answer to an [`Op::Delegate`] whose first answer was lost, and have ended when it has.

use std::sync::Arc;

use super::decide::{acquire, repeat};
use super::{
    Delegate, Delegated, Env, Extend, GlobalQueueChange, Grant, Holder, Level, Op, Outcome, Record, Records,
    Restore, Tag, global_queue,
};
use crate::lock::{Key, Mode, ServerTime, Token};

/// The proxy to which the key is delegated.
fn owner<'a>(record: &'a Record, env: &Env) -> Option<&'a Arc<str>> {
    let mut running = record.holders.iter().filter(|holder| !env.is_past(holder));
    running.find_map(|holder| holder.tag.delegated_to.as_ref())
}

fn has_delegation(record: &Record, nonce: u64) -> bool {
    record.holders.iter().any(|holder| holder.nonce == nonce && holder.tag.delegated_to.is_some())
}

/// The outcome of an operation on a key that is delegated: only its owner knows the leases of the key. The record notes
/// that a claim's proxy waits, so that the owner does not keep the key from it.
pub(super) fn elsewhere(records: &mut Records, op: &Op, env: &Env) -> Option<Outcome> {
    match op {
        Op::GlobalQueue { .. } | Op::Extend(_) | Op::Restore(_) | Op::Delegate(_) => return None,
        // The delegation itself is undone.
        Op::Abandon { keys, attempt } if has_delegation(records.read(&keys[0]), *attempt) => return None,
        _ => {}
    }
    let delegated = |key: &Key| Some((key.clone(), owner(records.read(key), env)?.clone()));
    let (key, proxy) = op.keys().iter().find_map(delegated)?;
    if let Op::Acquire(claim) = op {
        // Perhaps one of several keys is free.
        if claim.any
            && !claim.may_have_its_lease()
            && let granted @ Outcome::Granted(_) = acquire(records, claim, env)
        {
            return Some(granted);
        }
        if claim.waits && claim.global.is_none() {
            global_queue::mark(records, std::slice::from_ref(&key), &claim.proxy, env);
        }
    }
    Some(Outcome::Elsewhere { key, proxy })
}

/// Grants the claim, and delegates its key if nothing is against it. Otherwise the claim is decided as without a
/// delegation.
pub(super) fn delegate(records: &mut Records, asked: &Delegate, env: &Env) -> Outcome {
    let claim = &asked.claim;
    if let Some(outcome) = delegated_before(records, asked, env) {
        return outcome;
    }
    let as_claim = Op::Acquire(claim.clone());
    if let Some(outcome) = elsewhere(records, &as_claim, env) {
        return outcome;
    }
    let outcome = acquire(records, claim, env);
    let Outcome::Granted(grant) = outcome else { return outcome };
    let record = records.read(&claim.keys[0]);
    let is_alone = |holder: &Holder| holder.nonce == grant.nonce || env.is_past(holder);
    let ends = record.until().plus_ms(asked.extra_ms);
    // A fail-over waits for the longest lease.
    let is_short = ends <= env.now.plus_us(env.longest_us);
    let is_plain =
        record.global_queue.is_empty() && record.kept.is_none() && record.holders.iter().all(is_alone);
    if grant.repeated || claim.keys.len() > 1 || !is_short || !is_plain {
        return Outcome::Granted(grant);
    }
    let record = records.write(&claim.keys[0]);
    let is_wanted = global_queue::is_wanted(record, &claim.proxy, env);
    let copy = Record { wanted: Vec::new(), ..record.clone() };
    let delegation = holder(asked, record.token, ends, env);
    let last_token = Token(record.token.0.saturating_add(asked.tokens));
    record.token = last_token;
    record.holders.push(delegation.clone());
    delegated(grant, copy, &delegation, (last_token, is_wanted), env)
}

fn delegated(
    grant: Grant,
    record: Record,
    delegation: &Holder,
    (last_token, is_wanted): (Token, bool),
    env: &Env,
) -> Outcome {
    let left_us = env.left_us(delegation);
    Outcome::Delegated(Box::new(Delegated { grant, record, last_token, left_us, is_wanted }))
}

/// The delegation as a holder.
fn holder(asked: &Delegate, token: Token, until: ServerTime, env: &Env) -> Holder {
    let Delegate { claim, nonce, rules, .. } = asked;
    Holder {
        nonce: *nonce,
        owner: format!("proxy {}", claim.proxy).into(),
        mode: Mode::Exclusive,
        token,
        lowest_token: token,
        keys: 1,
        since: env.now,
        until,
        ttl_ms: until.ms_since(env.now),
        at_least_until: ServerTime(0),
        delay_ms: 0,
        keep_ms: None,
        released_by: None,
        levels: vec![Level { attempts: vec![*nonce], request: None, fingerprint: 0 }],
        tag: Tag {
            resource: claim.tag.resource.clone(),
            policy: rules.as_ref().into(),
            delegated_to: Some(claim.proxy.clone()),
            ..Tag::default()
        },
    }
}

/// The answer to the same operation, if it was applied before and its answer was lost.
fn delegated_before(records: &mut Records, asked: &Delegate, env: &Env) -> Option<Outcome> {
    let claim = &asked.claim;
    let record = records.read(&claim.keys[0]);
    let own = record.holders.iter().find(|holder| holder.nonce == asked.nonce)?.clone();
    let is_wanted = global_queue::is_wanted(record, &claim.proxy, env);
    let (mut copy, last_token) = (record.clone(), record.token);
    copy.token = own.token;
    copy.wanted.clear();
    copy.holders.retain(|holder| holder.nonce != asked.nonce);
    match repeat(records, claim, env)? {
        Outcome::Granted(grant) => {
            Some(delegated(Grant { repeated: false, ..grant }, copy, &own, (last_token, is_wanted), env))
        }
        other => Some(other),
    }
}

/// The place of the delegation, if it lasts.
fn lasting(record: &Record, nonce: u64, env: &Env) -> Result<usize, Outcome> {
    let place = record.holders.iter().position(|holder| holder.nonce == nonce && env.lasts(holder));
    match place.ok_or(Outcome::Lost)? {
        place if env.may_be_taken(&record.holders[place]) => Err(Outcome::Unknown),
        place => Ok(place),
    }
}

/// Extends a delegation.
pub(super) fn extend(records: &mut Records, asked: &Extend, env: &Env) -> Outcome {
    let Extend { key, nonce, ttl_ms, last_token } = asked;
    let place = match lasting(records.read(key), *nonce, env) {
        Ok(place) => place,
        Err(outcome) => return outcome,
    };
    let record = records.write(key);
    record.token = record.token.max(*last_token);
    let holder = &mut record.holders[place];
    env.lengthen(holder, *ttl_ms);
    let (left_us, own) = (env.left_us(holder), holder.tag.delegated_to.clone());
    // The owner may have missed the notification of the proxy that waits.
    Outcome::Extended {
        left_us,
        is_wanted: own.is_some_and(|own| global_queue::is_wanted(record, &own, env)),
    }
}

/// Puts the record of a delegation back, as if each of its grants had been written.
pub(super) fn restore(records: &mut Records, asked: &Restore, env: &Env) -> Outcome {
    let Restore { key, nonce, record: memory, at, passed } = asked;
    if let Err(outcome) = lasting(records.read(key), *nonce, env) {
        return outcome;
    }
    let record = records.write(key);
    let Record { token, holders, not_before, ended, wanted, .. } =
        on_another_clock(memory, *at, env.now, env.now.plus_us(env.set_back_us));
    (record.token, record.holders, record.not_before, record.ended) = (token, holders, not_before, ended);
    for wanted in &mut record.wanted {
        wanted.passed = wanted.passed.saturating_add(*passed);
    }
    // The note that the owner itself waits for the key.
    record.wanted.extend(wanted);
    match global_queue::change(records, key, &GlobalQueueChange::Look, env) {
        Outcome::GlobalQueue { next_waiter } => Outcome::Restored { next_waiter },
        _ => Outcome::Restored { next_waiter: None },
    }
}

/// The record by another clock: `at` and `now` are the same moment by the old and the new clock. Future times count from
/// `from` by the new clock.
pub fn on_another_clock(record: &Record, at: ServerTime, now: ServerTime, from: ServerTime) -> Record {
    let time = |time: ServerTime| match time {
        ServerTime(0) => ServerTime(0),
        time if time > at => from.plus_us(time.us_since(at)),
        time => ServerTime(now.0.saturating_sub(at.us_since(time))),
    };
    let mut record = record.clone();
    record.not_before = time(record.not_before);
    for holder in &mut record.holders {
        holder.since = time(holder.since);
        holder.until = time(holder.until);
        holder.at_least_until = time(holder.at_least_until);
    }
    for wanted in &mut record.wanted {
        wanted.since = time(wanted.since);
        wanted.until = time(wanted.until);
    }
    record
}
