//! Tests of the lock table: many seeds of its simulation, and scenes with a few waiters.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::simulation::*;
use super::*;
use crate::lock::record::{Claim, GlobalTicket, Op, Outcome, Record, Tag};
use crate::lock::{Instant, Key, Mode, ServerTime};

mod charges;
mod queues;
mod readers;
mod turns;
mod watching;
mod why;

/// Promises 1, 2, 6 and 8, as far as the lock core keeps them; and no waiter is stuck while its keys are free.
#[test]
fn promises_hold_under_random_events() {
    let (seeds, next) = (100_000, AtomicU64::new(0));
    let grants = AtomicU64::new(0);
    let threads = std::thread::available_parallelism().map_or(2, |n| n.get());
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds {
                        break;
                    }
                    let run = std::panic::catch_unwind(|| run(seed, false));
                    match run {
                        Ok(n) => grants.fetch_add(n, Ordering::Relaxed),
                        Err(_) => {
                            println!("seed {seed} fails:");
                            let _ = std::panic::catch_unwind(|| simulation::run(seed, true));
                            panic!("seed {seed} fails");
                        }
                    };
                }
            });
        }
    });
    let grants = grants.load(Ordering::Relaxed);
    println!("{seeds} seeds, {grants} grants");
    assert!(grants > seeds, "the simulation grants next to nothing: {grants} grants in {seeds} seeds");
}

#[test]
fn the_built_in_back_off_grows_to_a_ceiling() {
    let longest = |attempt| {
        let sleeps = (0..20_000).map(|seed| match built_in_backoff(attempt, seed) {
            Next::Poll { after_ms } => after_ms,
            other => panic!("{other:?}"),
        });
        sleeps.max().unwrap()
    };
    assert_eq!(longest(1), 59);
    assert_eq!(longest(3), 209);
    assert!((1_900..2_010).contains(&longest(u32::MAX)));
}
