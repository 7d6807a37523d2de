//! The line of a key: an order of waiters that holds over all proxies.
//!
//! It is part of the record, so that joining it, being passed over and being granted are decided in the
//! transaction that grants. Places end by themselves: a proxy that is gone holds up nobody for long.

use super::decide::admits;
use super::{
    Claim, Denial, Env, InLine, LineChange, MAX_LINE, Outcome, PLACE_MS, Place, Record, Records, Turn,
};
use crate::lock::{Key, Mode};

/// Why the claim has to let others go first, if it does.
pub(super) fn ahead(records: &Records, claim: &Claim, own: &InLine, env: &Env) -> Option<Denial> {
    claim.keys.iter().find_map(|key| {
        let record = records.read(key);
        let first = live(record, env).next()?;
        let goes_first = match is_in(record, own, env) {
            true => first.ticket != own.ticket,
            false => first.rank <= own.rank,
        };
        goes_first.then(|| Denial {
            key: key.clone(),
            holder: None,
            free_in_us: first.until.us_since(env.now),
            turn: Some(turn_of(first)),
        })
    })
}

/// Takes a place in the line of every key, behind all of the same rank, or keeps the one that it has. False
/// where a line is full.
pub(super) fn join(records: &mut Records, keys: &[Key], own: &InLine, env: &Env) -> bool {
    let has_room = |key: &Key| {
        let record = records.read(key);
        is_in(record, own, env) || live(record, env).count() < MAX_LINE
    };
    if !keys.iter().all(has_room) {
        return false;
    }
    let until = env.now.plus_ms(PLACE_MS);
    for key in keys {
        let place = records.read(key).line.iter().find(|place| place.ticket == own.ticket);
        // Not every poll is worth a write.
        if place.is_some_and(|place| place.until.us_since(env.now) > u64::from(PLACE_MS) * 500) {
            continue;
        }
        let line = &mut records.write(key).line;
        line.retain(|place| place.until > env.now);
        match line.iter_mut().find(|place| place.ticket == own.ticket) {
            Some(place) => place.until = until,
            None => {
                let at = line.iter().position(|place| place.rank > own.rank).unwrap_or(line.len());
                let (ticket, proxy, rank) = (own.ticket, own.proxy.clone(), own.rank);
                line.insert(at, Place { ticket, proxy, rank, until });
            }
        }
    }
    true
}

pub(super) fn leave(records: &mut Records, key: &Key, ticket: u64) {
    if records.read(key).line.iter().any(|place| place.ticket == ticket) {
        records.write(key).line.retain(|place| place.ticket != ticket);
    }
}

pub(super) fn change(records: &mut Records, key: &Key, change: &LineChange, env: &Env) -> Outcome {
    match change {
        LineChange::Look => {}
        LineChange::Leave { ticket } => leave(records, key, *ticket),
        LineChange::Keep { tickets } => {
            let kept = |place: &Place| tickets.contains(&place.ticket);
            if records.read(key).line.iter().any(kept) {
                for place in records.write(key).line.iter_mut().filter(|place| kept(place)) {
                    place.until = place.until.max(env.now.plus_ms(PLACE_MS));
                }
            }
        }
        LineChange::Evict { proxy } => {
            if records.read(key).line.iter().any(|place| place.proxy == *proxy) {
                records.write(key).line.retain(|place| place.proxy != *proxy);
            }
        }
    }
    Outcome::Line { turn: turn(records.read(key), key, env) }
}

fn turn_of(place: &Place) -> Turn {
    Turn { proxy: place.proxy.clone(), ticket: place.ticket }
}

fn turn(record: &Record, key: &Key, env: &Env) -> Option<Turn> {
    let first = live(record, env).next()?;
    // The mode of those who wait is not in the line: one that shares may be let in where this one is not.
    let free = admits(record, key, Mode::Shared, env).is_ok();
    free.then(|| turn_of(first))
}

/// Whether the claim has a place; one that has ended is none.
fn is_in(record: &Record, own: &InLine, env: &Env) -> bool {
    live(record, env).any(|place| place.ticket == own.ticket)
}

fn live<'a>(record: &'a Record, env: &Env) -> impl Iterator<Item = &'a Place> {
    let now = env.now;
    record.line.iter().filter(move |place| place.until > now)
}
