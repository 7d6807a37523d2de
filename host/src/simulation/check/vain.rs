//! Whether a client waits for what nobody has.

use super::{Checks, Violation, is_of, parts};
use crate::lock::Instant;
use crate::simulation::faults::POOL;

/// How long a waiter may take at most until it is granted what is free, where nothing goes wrong: waiters that poll sleep for
/// 2 s at most.
const TAKEN_WITHIN_MS: u32 = 2_500;

/// How long a run takes at most until each primitive is granted.
const BEGINS_MS: u32 = 3_000;

impl Checks {
    /// A lease of the resource has just begun or ended.
    pub(super) fn moves(&mut self, resource: &str, now: Instant) {
        for part in parts(resource) {
            self.moved.insert(part.to_owned(), now);
        }
    }

    /// A client that asked for the resource at `asked_at`, and waited since then, is told that it is held.
    pub fn told_held(&self, resource: &str, asked_at: Instant, now: Instant) -> Result<(), Violation> {
        let waited_since = Instant(now.0.saturating_sub(u64::from(TAKEN_WITHIN_MS) * 1_000));
        // In the first seconds after its start a server counts no tokens of `advisory` and `row`. Which of the keys of a pool
        // are free is not known here.
        let has_begun = self.history.first().is_some_and(|(began, _)| began.plus_ms(BEGINS_MS) < asked_at);
        if !self.is_plain || !has_begun || asked_at > waited_since || is_of(resource, POOL) {
            return Ok(());
        }
        let is_lively = |part: &str| {
            let moved = self.moved.get(part).is_some_and(|at| *at > waited_since);
            let held = self.held.get(part);
            moved || held.is_some_and(|held| held.values().any(|held| held.until > waited_since))
        };
        match parts(resource).any(is_lively) {
            true => Ok(()),
            false => Err(Violation(format!(
                "in vain: {resource} was waited for until it was told to be held, and nobody has had it for {TAKEN_WITHIN_MS} ms"
            ))),
        }
    }
}
