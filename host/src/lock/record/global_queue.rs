//! Order between proxies: the line of a key, and turns where there is no line.
//!
//! A **line** is an order of waiters that holds over all proxies. It is part of the record, so that joining it,
//! being passed over and being granted are decided in the transaction that grants. A waiter has one order in
//! the lines of all its keys: its rank, the time at which it joined first, and its ticket. So two waiters for
//! the same keys never wait for each other, also where one of them lost its place in one of the lines. Places
//! end by themselves: a proxy that is gone holds up nobody for long.
//!
//! Where there is no line, each proxy has its own queue, and hands the key over in one step: another proxy
//! would never find it free. A proxy that is denied leaves a mark. Once the key was granted [`TURN_AFTER`]
//! times past the mark, it is the turn of the proxy that left it. Nothing is written where nobody else waits.

use super::decide::admits;
use super::{
    Claim, Denial, Env, GlobalPlace, GlobalQueueChange, GlobalTicket, MAX_GLOBAL_QUEUE, MAX_WANTED,
    NextWaiter, Outcome, PLACE_MS, Record, Records, TURN_AFTER, WANTED_MS, Wanted,
};
use crate::lock::{Key, Mode, ServerTime};

/// Why the claim has to let others have these keys first, if it does.
pub(super) fn ahead(records: &Records, keys: &[Key], claim: &Claim, env: &Env) -> Option<Denial> {
    match &claim.global {
        Some(own) => ahead_in_global_queue(records, keys, own, env),
        None => turn_of_others(records, keys, claim, env),
    }
}

/// The claim is denied: a waiter takes its places in line, or leaves its proxy's mark.
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

/// The claim is granted these keys: its places are free, and the other proxies have been passed over once more.
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
    // A place that its client may return to stays; the proxy that had it cannot be rung.
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
            Some(joined) => first.order() < (own.rank, joined, own.number),
            None => first.rank <= own.rank,
        };
        goes_first.then(|| Denial {
            key: key.clone(),
            holder: None,
            free_in_us: first.until.us_since(env.now),
            next_waiter: Some(turn_of(first)),
            joined: None,
        })
    })
}

/// When the waiter joined first. Known from its places, also where the answer to its first claim was lost or was
/// given to another proxy; and from the claim, also where all of its places have ended.
fn joined_before(records: &Records, keys: &[Key], own: &GlobalTicket, env: &Env) -> Option<ServerTime> {
    let places = keys.iter().flat_map(|key| live(records.read(key), env));
    let mine = places.filter(|place| place.ticket == own.number).map(|place| place.joined);
    // An earlier version of this program wrote no time.
    mine.filter(|joined| joined.0 > 0).chain(own.joined).min()
}

/// Takes a place in the line of every key, or keeps those that it has. `None` where a line is full.
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
        // Of those that the store hears of in one step the first is first, and a clock that is set back lets
        // nobody pass.
        let last =
            keys.iter().flat_map(|key| &records.read(key).global_queue).map(|place| place.joined).max();
        last.map_or(env.now, |last| env.now.max(last.plus_us(1)))
    });
    let place = GlobalPlace {
        ticket: own.number,
        proxy: claim.proxy.clone(),
        rank: own.rank,
        joined,
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

/// Another proxy's turn. A proxy whose own turn it is on another of the keys goes by which of the two marks is
/// older, so that two proxies do not wait for each other.
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
            holder: None,
            free_in_us: first.until.us_since(env.now).min(u64::from(PLACE_MS) * 1_000),
            next_waiter: Some(NextWaiter { proxy: first.proxy.clone(), ticket: None }),
            joined: None,
        })
    })
}

/// The key is free and kept for the proxy whose mark is the first one: for so long, and no longer.
fn begin_turn(records: &mut Records, key: &Key, env: &Env) {
    let until = env.now.plus_ms(PLACE_MS);
    if marks(records.read(key), env).next().is_some_and(|mark| mark.until > until) {
        let first = records.write(key).wanted.iter_mut().find(|mark| mark.until > env.now);
        first.into_iter().for_each(|mark| mark.until = until);
    }
}

fn mark(records: &mut Records, keys: &[Key], proxy: &std::sync::Arc<str>, env: &Env) {
    for key in keys {
        let mine = marks(records.read(key), env).find(|mark| mark.proxy == *proxy);
        // Not every poll is worth a write. A turn that has begun ends, also where another key keeps it from being
        // taken.
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
    // The mode of those who wait is not in the line: one that shares may be let in where this one is not.
    admits(record, key, Mode::Shared, env).is_ok().then_some(next)
}

/// Whether the waiter has a place; one that has ended is none.
fn has_place(record: &Record, own: &GlobalTicket, env: &Env) -> bool {
    live(record, env).any(|place| place.ticket == own.number)
}

fn live<'a>(record: &'a Record, env: &Env) -> impl Iterator<Item = &'a GlobalPlace> {
    let now = env.now;
    record.global_queue.iter().filter(move |place| place.until > now)
}

fn marks<'a>(record: &'a Record, env: &Env) -> impl Iterator<Item = &'a Wanted> {
    let now = env.now;
    record.wanted.iter().filter(move |mark| mark.until > now)
}
