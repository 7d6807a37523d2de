//! Whether a key has room for a claim, apart from the order of waiters.

use super::{Cause, Denial, Env, HeldBy, Holder, MAX_HOLDERS, Record};
use crate::lock::{Key, Mode, ServerTime};

/// A retry time for a claim whose key has an expired holder, in microseconds. While the store's clock is in
/// doubt, it is unknown when such a holder no longer blocks the key.
const DOUBT_US: u64 = 250_000;

/// Whether the record has room for another holder of this mode. The error is the denial, or `None` if the
/// record is full of holders.
pub(super) fn admits(record: &Record, key: &Key, mode: Mode, env: &Env) -> Result<(), Option<Denial>> {
    let from = record.not_before.max(env.grants_from);
    let mut used: u64 = 0;
    let mut holders = 0;
    let mut frees: Vec<(ServerTime, u64)> = Vec::new();
    let mut blocker: Option<&Holder> = None;
    for holder in &record.holders {
        if env.is_past(holder) {
            continue;
        }
        holders += 1;
        let weight = weight_against(holder.mode, mode);
        if weight > 0 {
            used = used.saturating_add(weight);
            frees.push((holder.free_at(), weight));
            if blocker.is_none_or(|seen| seen.until < holder.until) {
                blocker = Some(holder);
            }
        }
    }
    if holders >= MAX_HOLDERS {
        return Err(None);
    }
    let (wanted, room) = match mode {
        Mode::Exclusive | Mode::Shared => (1, 1),
        Mode::Permits { count, limit } => (u64::from(count), u64::from(limit)),
    };
    let used_now = used;
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
        if !env.takeover {
            free_in_us = free_in_us.max(DOUBT_US);
        }
    }
    let cause = match blocker.filter(|_| !fits) {
        Some(blocker) => cause_of(blocker, mode, used_now, env),
        None if env.grants_from > env.now && env.grants_from >= record.not_before => Cause::FailOver,
        None => Cause::Delay,
    };
    let holder = blocker.map(HeldBy::from);
    Err(Some(Denial { key: key.clone(), cause, holder, free_in_us, next_waiter: None, joined: None }))
}

/// Why the holder that blocks the key the longest does so. `used`: what the holders use of the room.
fn cause_of(blocker: &Holder, mode: Mode, used: u64, env: &Env) -> Cause {
    match (blocker.mode, mode) {
        _ if blocker.over_at() <= env.now && !env.takeover => Cause::ClockInDoubt,
        _ if blocker.over_at() <= env.now => Cause::Delay,
        (Mode::Permits { .. }, Mode::Permits { limit, .. }) => {
            Cause::Permits { used: u32::try_from(used).unwrap_or(u32::MAX), limit }
        }
        _ => Cause::Held,
    }
}

/// How much of the room that a claim counts in a holder takes: all of it, nothing, or its permits.
fn weight_against(held: Mode, claimed: Mode) -> u64 {
    match (held, claimed) {
        (Mode::Shared, Mode::Shared) => 0,
        (Mode::Permits { count, .. }, Mode::Permits { .. }) => u64::from(count),
        _ => u64::from(u32::MAX),
    }
}
