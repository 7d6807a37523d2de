//! The order between the waiters of several proxies: the global queue of a key, and turns without one.
//!
//! The **global queue** is part of the record, so joining it, being passed over and being granted are decided
//! in the transaction that grants. A waiter has the same sort key in the queues of all its keys: its rank, the
//! time at which it first joined a queue, and its ticket. So two waiters for the same keys never wait for each
//! other, even if one of them has lost its place in one of the queues. Places expire: a proxy that has ended
//! blocks other waiters for a short time only.
//!
//! For a key without a global queue, each proxy has a local queue and hands the key over in one step, so
//! another proxy would never find the key free. Therefore the record notes that a proxy waits when it denies
//! that proxy. After the key has been granted [`TURN_AFTER`] times to other proxies, it is the turn of the
//! proxy in the note. Nothing is written if no other proxy waits.

use std::sync::Arc;

use super::admission::admits;
use super::{
    Cause, Claim, Denial, Env, GlobalPlace, GlobalQueueChange, GlobalTicket, MAX_GLOBAL_QUEUE, MAX_WANTED,
    NextWaiter, Outcome, Record, Records, Wanted,
};
use crate::lock::{Key, Mode, ServerTime};

/// How long a place in the global queue lasts if its proxy does not extend it, and how long a free key is
/// reserved for the proxy of the next waiter.
pub const PLACE_MS: u32 = 5_000;
/// How often a key is granted to others before it is the turn of a proxy that waits for it. A handoff to
/// another proxy takes longer than a handoff within a proxy.
pub const TURN_AFTER: u32 = 16;
/// How long the note that a proxy waits lasts if the proxy does not renew it. A proxy asks for a held key twice
/// in that time.
pub const WANTED_MS: u32 = 60_000;

/// The denial of a claim that has to let another waiter have these keys first, if there is such a waiter.
pub(super) fn ahead(records: &Records, keys: &[Key], claim: &Claim, env: &Env) -> Option<Denial> {
    match &claim.global {
        Some(own) => ahead_in_global_queue(records, keys, own, env),
        None => turn_of_others(records, keys, claim, env),
    }
}

/// Handles a denial: the claim joins the global queues of its keys, or the record notes that its proxy waits.
pub(super) fn denied(records: &mut Records, claim: &Claim, mut denial: Denial, env: &Env) -> Outcome {
    match &claim.global {
        Some(own) if claim.waits => match join(records, claim, own, env) {
            Some(joined) => denial.joined = Some(joined),
            None => return Outcome::Crowded,
        },
        Some(_) => {}
        None => {
            if denial.next_waiter.is_some() {
                begin_turn(records, &denial.key, env);
            }
            if claim.waits {
                let keys = if claim.any { std::slice::from_ref(&denial.key) } else { &*claim.keys };
                mark(records, keys, &claim.proxy, env);
            }
        }
    }
    Outcome::Held(denial)
}

/// Handles a grant of these keys: removes the places of the claim, and counts that the other waiting proxies
/// were passed over.
pub(super) fn granted(records: &mut Records, keys: &[Key], claim: &Claim, env: &Env) {
    for key in keys {
        match &claim.global {
            Some(own) => remove(records, key, |place| place.ticket == own.number),
            None if records.read(key).wanted.is_empty() => {}
            None => {
                let wanted = &mut records.write(key).wanted;
                wanted.retain(|mark| mark.until > env.now && mark.proxy != claim.proxy);
                wanted.iter_mut().for_each(|mark| mark.passed = mark.passed.saturating_add(1));
            }
        }
    }
}

pub(super) fn change(records: &mut Records, key: &Key, change: &GlobalQueueChange, env: &Env) -> Outcome {
    match change {
        GlobalQueueChange::Look => {}
        GlobalQueueChange::Leave { proxy, ticket: Some(ticket) } => {
            remove(records, key, |place| place.ticket == *ticket && place.proxy == *proxy);
        }
        GlobalQueueChange::Leave { proxy, ticket: None } => unmark(records, key, proxy),
        GlobalQueueChange::Keep { tickets } => {
            let kept = |place: &GlobalPlace| tickets.contains(&place.ticket);
            if records.read(key).global_queue.iter().any(kept) {
                for place in records.write(key).global_queue.iter_mut().filter(|place| kept(place)) {
                    place.until = place.until.max(env.now.plus_ms(PLACE_MS));
                }
            }
        }
        GlobalQueueChange::Evict { proxy } => {
            remove(records, key, |place| place.proxy == *proxy && !place.returns);
            unmark(records, key, proxy);
        }
    }
    let gone = match change {
        GlobalQueueChange::Evict { proxy } => Some(proxy),
        _ => None,
    };
    // A place to which a client may return stays, but its proxy has ended and cannot be notified.
    let next_waiter =
        next_waiter(records.read(key), key, env).filter(|next_waiter| gone != Some(&next_waiter.proxy));
    Outcome::GlobalQueue { next_waiter }
}

fn ahead_in_global_queue(records: &Records, keys: &[Key], own: &GlobalTicket, env: &Env) -> Option<Denial> {
    let joined = joined_before(records, keys, own, env);
    keys.iter().find_map(|key| {
        let record = records.read(key);
        let first = live(record, env).next()?;
        let goes_first = match joined {
            _ if has_place(record, own, env) => first.ticket != own.number,
            joined @ Some(_) => first.order() < (own.rank, joined, own.number),
            None => first.rank <= own.rank,
        };
        goes_first.then(|| Denial {
            key: key.clone(),
            cause: Cause::GlobalQueue,
            holder: None,
            free_in_us: first.until.us_since(env.now),
            next_waiter: Some(turn_of(first)),
            joined: None,
        })
    })
}

/// When the waiter first joined a global queue. This is known from its places, even if the answer to its first
/// claim was lost or went to another proxy, and from the claim, even if all its places have expired.
fn joined_before(records: &Records, keys: &[Key], own: &GlobalTicket, env: &Env) -> Option<ServerTime> {
    let places = keys.iter().flat_map(|key| live(records.read(key), env));
    let mine = places.filter(|place| place.ticket == own.number).filter_map(|place| place.joined);
    mine.chain(own.joined).min()
}

/// Takes a place in the global queue of every key, or extends existing places. Returns `None` if a queue is
/// full.
fn join(records: &mut Records, claim: &Claim, own: &GlobalTicket, env: &Env) -> Option<ServerTime> {
    let keys = &*claim.keys;
    let has_room = |key: &Key| {
        let record = records.read(key);
        has_place(record, own, env) || live(record, env).count() < MAX_GLOBAL_QUEUE
    };
    if !keys.iter().all(has_room) {
        return None;
    }
    let joined = joined_before(records, keys, own, env).unwrap_or_else(|| {
        // Waiters that join in one transaction get distinct, rising times. They also rise if the clock was set
        // back, so that no later waiter passes an earlier one.
        let last = keys
            .iter()
            .flat_map(|key| &records.read(key).global_queue)
            .filter_map(|place| place.joined)
            .max();
        last.map_or(env.now, |last| env.now.max(last.plus_us(1)))
    });
    let place = GlobalPlace {
        ticket: own.number,
        proxy: claim.proxy.clone(),
        rank: own.rank,
        joined: Some(joined),
        returns: own.returns,
        until: env.now.plus_ms(PLACE_MS),
    };
    for key in keys {
        let mine = records.read(key).global_queue.iter().find(|place| place.ticket == own.number);
        // Not every poll is worth a write.
        let is_fresh = |mine: &GlobalPlace| mine.until.us_since(env.now) > u64::from(PLACE_MS) * 500;
        let is_same = |mine: &GlobalPlace| mine.order() == place.order() && mine.proxy == place.proxy;
        if mine.is_some_and(|mine| is_fresh(mine) && is_same(mine)) {
            continue;
        }
        let line = &mut records.write(key).global_queue;
        line.retain(|other| other.until > env.now && other.ticket != own.number);
        let at = line.iter().position(|other| other.order() > place.order()).unwrap_or(line.len());
        line.insert(at, place.clone());
    }
    Some(joined)
}

/// The denial if it is another proxy's turn on one of the keys. If it is also this proxy's turn on another of
/// the keys, the older of the two notes decides, so that two proxies do not wait for each other.
fn turn_of_others(records: &Records, keys: &[Key], claim: &Claim, env: &Env) -> Option<Denial> {
    let due = |key: &Key| marks(records.read(key), env).next().filter(|mark| mark.passed >= TURN_AFTER);
    keys.iter().find_map(|key| {
        let first = due(key).filter(|mark| mark.proxy != claim.proxy)?;
        let own = keys.iter().filter_map(due).filter(|mark| mark.proxy == claim.proxy);
        if own.map(|mark| mark.since).min().is_some_and(|own| own <= first.since) {
            return None;
        }
        Some(Denial {
            key: key.clone(),
            cause: Cause::Turn,
            holder: None,
            free_in_us: first.until.us_since(env.now).min(u64::from(PLACE_MS) * 1_000),
            next_waiter: Some(NextWaiter { proxy: first.proxy.clone(), ticket: None }),
            joined: None,
        })
    })
}

/// Begins the turn of the first proxy in the notes: the free key is reserved for it for [`PLACE_MS`] at most.
fn begin_turn(records: &mut Records, key: &Key, env: &Env) {
    let until = env.now.plus_ms(PLACE_MS);
    if marks(records.read(key), env).next().is_some_and(|mark| mark.until > until) {
        let first = records.write(key).wanted.iter_mut().find(|mark| mark.until > env.now);
        first.into_iter().for_each(|mark| mark.until = until);
    }
}

pub(super) fn mark(records: &mut Records, keys: &[Key], proxy: &Arc<str>, env: &Env) {
    for key in keys {
        let mine = marks(records.read(key), env).find(|mark| mark.proxy == *proxy);
        // Not every poll is worth a write. A turn that has begun is not extended, even if another key keeps the
        // proxy from using it.
        let stays = |mark: &Wanted| {
            let left_us = mark.until.us_since(env.now);
            left_us > u64::from(WANTED_MS) * 500
                || (mark.passed >= TURN_AFTER && left_us <= u64::from(PLACE_MS) * 1_000)
        };
        if mine.is_some_and(stays) || (mine.is_none() && marks(records.read(key), env).count() >= MAX_WANTED)
        {
            continue;
        }
        let (since, until) = (env.now, env.now.plus_ms(WANTED_MS));
        let wanted = &mut records.write(key).wanted;
        wanted.retain(|mark| mark.until > env.now);
        match wanted.iter_mut().find(|mark| mark.proxy == *proxy) {
            Some(mark) => mark.until = until,
            None => wanted.push(Wanted { proxy: proxy.clone(), passed: 0, since, until }),
        }
    }
}

fn remove(records: &mut Records, key: &Key, gone: impl Fn(&GlobalPlace) -> bool) {
    if records.read(key).global_queue.iter().any(&gone) {
        records.write(key).global_queue.retain(|place| !gone(place));
    }
}

fn unmark(records: &mut Records, key: &Key, proxy: &str) {
    if records.read(key).wanted.iter().any(|mark| *mark.proxy == *proxy) {
        records.write(key).wanted.retain(|mark| *mark.proxy != *proxy);
    }
}

fn turn_of(place: &GlobalPlace) -> NextWaiter {
    NextWaiter { proxy: place.proxy.clone(), ticket: Some(place.ticket) }
}

fn next_waiter(record: &Record, key: &Key, env: &Env) -> Option<NextWaiter> {
    let marked =
        || marks(record, env).next().map(|mark| NextWaiter { proxy: mark.proxy.clone(), ticket: None });
    let next = live(record, env).next().map(turn_of).or_else(marked)?;
    // The queue does not record the mode of its waiters: the mode that is admitted most easily decides.
    let permits = record.holders.iter().find_map(|holder| match holder.mode {
        Mode::Permits { limit, .. } if !env.is_past(holder) => Some(Mode::Permits { count: 1, limit }),
        _ => None,
    });
    admits(record, key, permits.unwrap_or(Mode::Shared), env).is_ok().then_some(next)
}

/// Whether the waiter has a place that has not expired.
fn has_place(record: &Record, own: &GlobalTicket, env: &Env) -> bool {
    live(record, env).any(|place| place.ticket == own.number)
}

/// The place of a waiter in the global queue of a key; 0 is the first.
pub(super) fn place(record: &Record, ticket: u64, env: &Env) -> Option<usize> {
    live(record, env).position(|place| place.ticket == ticket)
}

fn live<'a>(record: &'a Record, env: &Env) -> impl Iterator<Item = &'a GlobalPlace> {
    let now = env.now;
    record.global_queue.iter().filter(move |place| place.until > now)
}

/// Whether a proxy other than `own` waits for the key.
pub(super) fn is_wanted(record: &Record, own: &str, env: &Env) -> bool {
    marks(record, env).any(|mark| *mark.proxy != *own)
}

fn marks<'a>(record: &'a Record, env: &Env) -> impl Iterator<Item = &'a Wanted> {
    let now = env.now;
    record.wanted.iter().filter(move |mark| mark.until > now)
}
