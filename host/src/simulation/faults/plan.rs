//! Plans the faults of a run.

use std::time::Duration;

use rand::Rng;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;

use super::{Failing, Fault, Kind, Planned, Settings, Succession};

/// The faults of a run, in order of time.
pub fn plan(random: &mut StdRng, lasts: Duration, what: &Failing<'_>) -> Vec<Planned> {
    let Some(longest_pause_ms) =
        *[None, Some(10_000), Some(3_000), Some(1_000)].choose(random).unwrap_or(&None)
    else {
        return Vec::new();
    };
    let kinds = Kind::of_a_run(random, what);
    // In these runs, policies change every second, clocks are set, and sessions end. Nothing else goes wrong as
    // often.
    let are_often = kinds == Kind::OF_CLOCKS
        || kinds == Kind::OF_SESSIONS
        || kinds.iter().all(|kind| matches!(kind, Kind::Replace | Kind::RollBack));
    let longest_pause_ms = if are_often { longest_pause_ms } else { longest_pause_ms.max(3_000) };
    let (mut planned, mut at_ms) = (Vec::new(), 0);
    loop {
        at_ms += random.random_range(100..longest_pause_ms);
        if u128::from(at_ms) >= lasts.as_millis() {
            break;
        }
        let kind = kinds.choose(random).copied().unwrap_or(Kind::Pause);
        let fault = Fault::any(random, kind, what);
        planned.extend(companions(random, at_ms, &fault, what));
        planned.push(Planned { at_ms, fault });
    }
    // The run would only wait for faults after the end.
    planned.retain(|planned| u128::from(planned.at_ms) < lasts.as_millis());
    planned.sort_by_key(|planned| planned.at_ms);
    planned
}

/// Faults that make a fault more likely to show a mistake. They seldom coincide by chance.
fn companions(random: &mut StdRng, at_ms: u32, fault: &Fault, what: &Failing<'_>) -> Vec<Planned> {
    let may_replace = Kind::Replace.is_possible(what);
    let mut planned = Vec::new();
    let mut add = |at_ms, fault| planned.push(Planned { at_ms, fault });
    match *fault {
        // A policy changes and changes back while a proxy is not a member. When the proxy returns, leases with other
        // keys exist.
        Fault::Silence { proxy, ms: ms @ 25_000.. } if may_replace && random.random_bool(0.3) => {
            let by = proxy + 1;
            let policy = what.policies.choose(random).copied().unwrap_or_default();
            let back_ms = at_ms + ms - random.random_range(100..2_000);
            let settings = Settings::any(random, policy, what);
            let changed_ms = back_ms - random.random_range(1_000..6_000);
            add(changed_ms, Fault::Replace { proxy: by, policy, settings });
            add(back_ms, Fault::RollBack { proxy: by, policy });
        }
        // A change that waits for a member that will soon count as gone.
        Fault::Silence { .. } | Fault::CutOff { .. } | Fault::Pause { .. }
            if may_replace && random.random_bool(0.3) =>
        {
            let at_ms = at_ms + random.random_range(0..16_000);
            add(at_ms, Fault::any(random, Kind::Replace, what));
        }
        // A policy changes while a proxy is away: another proxy is alone, or waits for it.
        Fault::Kill { down_ms, .. } | Fault::Restart { down_ms, .. }
            if may_replace && random.random_bool(0.2) =>
        {
            let at_ms = at_ms + random.random_range(0..=down_ms);
            add(at_ms, Fault::any(random, Kind::Replace, what));
        }
        // A proxy that finds no other proxy uses its own file.
        Fault::Kill { down_ms, .. } | Fault::Restart { down_ms, .. }
            if may_replace && random.random_bool(0.2) =>
        {
            add(at_ms, own_file(random, what));
            // Or it takes the other proxies for gone, because the clock is ahead.
            if random.random_bool(0.3) {
                let at_ms = at_ms + down_ms + random.random_range(0..2_000);
                add(at_ms, Fault::SetClock { server: 0, by_ms: 60_000 });
            }
        }
        // A change that waits for members whose last heartbeats look old.
        Fault::SetClock { by_ms: 20_000.., .. } if may_replace && random.random_bool(0.4) => {
            let at_ms = at_ms + random.random_range(0..2_000);
            add(at_ms, Fault::any(random, Kind::Replace, what));
        }
        // Keys are renamed, and the fail-over loses the tokens that were issued under the new names.
        Fault::FailOver { how: Succession::Sudden | Succession::Split, .. }
            if may_replace && random.random_bool(0.4) =>
        {
            let at_ms = at_ms.saturating_sub(random.random_range(300..3_000));
            add(at_ms, Fault::any(random, Kind::Replace, what));
        }
        // Members of a quorum are away in turn, so each of three leases is missing on another member.
        Fault::PauseServer { server: server @ 1.., ms } if what.servers > 3 && random.random_bool(0.4) => {
            let next = |server| 1 + server % (what.servers - 1);
            for (n, server) in [(1, next(server)), (2, next(next(server)))] {
                add(at_ms + n * (ms + random.random_range(0..30)), Fault::PauseServer { server, ms });
            }
        }
        // Keys are renamed while claims take long.
        Fault::Replace { .. } if random.random_bool(0.15) => {
            let at_ms = at_ms.saturating_sub(random.random_range(5..200));
            let ms = random.random_range(100..1_500);
            let proxy = random.random_range(0..what.proxies);
            let delay = match random.random_range(0..4_u32) {
                0 => Fault::CutOff { proxy, ms },
                1 => Fault::SlowSessions { proxy, ms },
                2 => Fault::StallCommits { server: 0, ms },
                _ => Fault::PauseServer { server: 0, ms },
            };
            add(at_ms, delay);
        }
        // One proxy still uses the keys of both policies when the others use only those of the next one.
        Fault::Replace { .. } if random.random_bool(0.15) => {
            let proxy = random.random_range(0..what.proxies);
            let at_ms = at_ms + random.random_range(10..1_500);
            add(at_ms, Fault::Pause { proxy, ms: random.random_range(200..3_000) });
        }
        // A clock that is set right again, before and after other proxies have read it.
        Fault::SetClock { server, by_ms } if random.random_bool(0.5) => {
            let after_ms = random.random_range(50..4_000);
            add(at_ms + after_ms, Fault::SetClock { server, by_ms: -by_ms });
            if random.random_bool(0.5) {
                let away = random.random_range(0..what.proxies);
                add(at_ms.saturating_sub(20), Fault::Pause { proxy: away, ms: after_ms + 40 });
                // The proxies that noticed the first step cannot tell the proxy that noticed neither step.
                let others = (0..what.proxies).filter(|proxy| *proxy != away && random.random_bool(0.5));
                others.for_each(|proxy| add(at_ms + after_ms - 10, Fault::Pause { proxy, ms: 3_000 }));
            }
        }
        _ => {}
    }
    planned
}

/// A policy in the file of starting proxies that differs from the policy that the other proxies use.
fn own_file(random: &mut StdRng, what: &Failing<'_>) -> Fault {
    let policy = what.policies.choose(random).copied().unwrap_or_default();
    // A proxy does not start with invalid settings.
    let any = Settings::any(random, policy, what);
    let primitive = if any.pool.is_some() { "lease" } else { any.primitive };
    let refuses = any.refuses || (!what.asks_for_several && any.pool.is_none() && random.random_bool(0.5));
    Fault::Edit {
        policy,
        settings: Settings { primitive, second_primitive: None, global_order: false, refuses, ..any },
    }
}
