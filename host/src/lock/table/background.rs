//! Carries out the chores.
//!
//! After an outage there may be thousands of them. Only a few are in flight at a time. While the store does not
//! answer, the pause between them grows, so that they do not take capacity from calls that a client waits for.

use super::Table;
use super::chores::{Abandon, Chore};
use super::in_flight::BatchItem;
use super::timer::Timer;
use crate::lock::Instant;

/// The most chores that are in flight at a time.
const FLYING: usize = 64;
/// The most chores that wait. Beyond that, a claim is not undone but ends with its lease, and a lease that was
/// to be checked is forgotten.
const MAX_WAITING: usize = 65_536;
const SHORTEST_PAUSE_MS: u32 = 250;
const LONGEST_PAUSE_MS: u32 = 4_000;

impl Table {
    pub(super) fn chore(&mut self, chore: Chore) {
        self.chore_later(chore);
        self.work_off();
    }

    /// As [`Table::chore`], but begins when the timers are next processed.
    pub(super) fn chore_later(&mut self, chore: Chore) {
        if self.chores.waiting.len() < MAX_WAITING {
            self.chores.waiting.push_back(chore);
            if self.chores.pause_until.is_none() {
                self.timers.insert((Instant(0), Timer::Chores));
            }
        } else if let Chore::Look { nonce } = chore {
            let keys = self.lease_ended(nonce).map(|lease| lease.keys);
            self.remove_all_idle(keys.as_deref().unwrap_or_default());
        }
    }

    pub(super) fn work_off(&mut self) {
        while self.chores.pause_until.is_none() && self.chores.flying < FLYING {
            let Some(chore) = self.chores.waiting.pop_front() else { break };
            let Some(item) = self.item_of(chore) else { continue };
            self.chores.flying += 1;
            let mut items = vec![item];
            if let BatchItem::Abandon(Abandon { keys, .. }) = &items[0] {
                let looks: Vec<BatchItem> = Table::looks(keys).collect();
                items.extend(looks);
            }
            self.submit(items);
        }
    }

    /// The pause is over.
    pub(super) fn chores_go_on(&mut self, at: Instant) {
        if self.chores.pause_until.is_none_or(|until| until <= at) {
            self.chores.pause_until = None;
            self.work_off();
        }
    }

    pub(super) fn chore_done(&mut self) {
        self.chores.flying -= 1;
        self.chores.pause_ms = None;
        self.timers.insert((Instant(0), Timer::Chores));
    }

    /// The store did not answer. `None`: the chore is not repeated.
    pub(super) fn chore_failed(&mut self, chore: Option<Chore>, now: Instant) {
        self.chores.flying -= 1;
        if let Some(chore) = chore {
            self.chore_later(chore);
        }
        if self.chores.pause_until.is_none() {
            let last_ms = self.chores.pause_ms;
            let longest = last_ms.map_or(SHORTEST_PAUSE_MS, |ms| (ms * 2).min(LONGEST_PAUSE_MS));
            self.chores.pause_ms = Some(longest);
            // Spreads the retries of proxies that lost the same store.
            let spread = self.tickets.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40;
            let until = now.plus_ms(longest / 2 + spread as u32 % (longest / 2));
            self.chores.pause_until = Some(until);
            self.timers.insert((until, Timer::Chores));
        }
    }

    fn item_of(&self, chore: Chore) -> Option<BatchItem> {
        match chore {
            Chore::Abandon(abandon) => Some(BatchItem::Abandon(abandon)),
            Chore::Look { nonce } => Some(BatchItem::Look { lease: self.leases.named(nonce)? }),
        }
    }
}
