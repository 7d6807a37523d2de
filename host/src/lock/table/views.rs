//! What a [`Table`](super::Table) shows of its waiters.

use super::events::WaiterId;
use crate::lock::record::{Cause, HeldBy, NextWaiter};
use crate::lock::{Key, Mode};

/// A waiter in a queue, for display.
#[derive(Clone, Debug)]
pub struct Queued {
    /// Identifies the waiter.
    pub waiter: WaiterId,
    /// How long the waiter has been waiting, in milliseconds.
    pub waited_ms: u32,
    /// How long the waiter may still wait, in milliseconds.
    pub wait_left_ms: u32,
    /// How many times the key is held before the waiter has it, after the present holders, if the order stays. Waiters
    /// that may be granted the key together count once.
    pub turns_ahead: u32,
    /// What decides which waiter is next.
    pub rule: Rule,
    /// Why the waiter has not been granted its keys.
    pub why: Why,
}

/// What decides which waiter of a key is next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// The lowest rank, and then the earliest arrival.
    RankThenArrival,
    /// The policy's `fairness` hook.
    Fairness,
    /// The global queue over all proxies: the lowest rank, and then the earliest arrival at the store.
    GlobalQueue,
}

/// Why a waiter has not been granted its keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Why {
    /// The key that is not free for the waiter: any one of its keys.
    pub key: Key,
    /// The reason.
    pub reason: Reason,
}

/// The reason why a key has not been granted to a waiter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The store is being asked.
    Asked,
    /// The key is free as far as this proxy knows, and the store is asked next.
    Free,
    /// The policy is being asked which waiter is next.
    Choosing,
    /// The policy's `fairness` hook chooses among the waiters of the key when the key is free.
    Fairness {
        /// How many waiters the key has.
        waiting: u32,
    },
    /// Another waiter goes first.
    Behind {
        /// That waiter: the nearest one ahead that is not granted the key together with this waiter.
        ahead: WaiterId,
        /// The owner that its client named.
        owner: Box<str>,
        /// How that waiter wants the key.
        mode: Mode,
        /// Why it goes first.
        by: Order,
    },
    /// The key is held, or blocked by another rule of the store.
    Blocked {
        /// The rule.
        cause: Cause,
        /// The lease that blocks the key the longest, if leases do.
        holder: Option<HeldBy>,
        /// When the key may be free, in milliseconds, unless it is given up earlier.
        free_in_ms: u32,
        /// The waiter, or the proxy, for which the key is reserved.
        next_waiter: Option<NextWaiter>,
    },
    /// The store did not answer, and is asked again.
    Unanswered {
        /// The cause.
        why: String,
    },
}

/// Why one waiter goes before another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// It has a lower rank.
    Rank,
    /// It has the same rank, and arrived earlier.
    Arrival,
    /// The global queue over all proxies orders the waiters.
    GlobalQueue,
}
