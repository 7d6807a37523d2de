//! Checks whether a client waits for a lock that nobody has, or that it has itself.

use super::{Checks, Held, Violation, is_of, parts};
use crate::lock::Instant;
use crate::service::Request;
use crate::simulation::faults::POOL;

/// The longest time until a waiter is granted a free lock, if nothing goes wrong: waiters that poll sleep for at most
/// 2 s.
const TAKEN_WITHIN_MS: u32 = 2_500;

/// The longest time from the start of a run until each primitive is granted.
const BEGINS_MS: u32 = 3_000;

impl Checks {
    /// A lease of the resource has just begun or ended.
    pub(super) fn moves(&mut self, resource: &str, now: Instant) {
        for part in parts(resource) {
            self.moved.insert(part.to_owned(), now);
        }
    }

    /// A client asked at `asked_at`, has waited since then, and is now told that the resource is held. `by_itself`:
    /// the answer names a lease of the client itself.
    pub fn told_held(
        &self,
        request: &Request,
        by_itself: bool,
        asked_at: Instant,
        now: Instant,
    ) -> Result<(), Violation> {
        let resource = &request.resource;
        // If the keys were renamed, the client's lease is another one.
        let has_it = by_itself || self.has_lease_of(request, asked_at, now);
        if has_it && self.keeps_names(resource) && !self.has_lost_writes {
            return Err(Violation(format!("{} is refused {resource} for a lease of its own", request.owner)));
        }
        let waited_since = Instant(now.0.saturating_sub(u64::from(TAKEN_WITHIN_MS) * 1_000));
        // In the first seconds after its start, a server issues no tokens for `advisory` and `row`. This check does
        // not know which keys of a pool are free.
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

    /// Whether an earlier call of the request was granted a lease by then, of which the client is certain now. Any
    /// proxy finds this lease, because it does not depend on a session.
    fn has_lease_of(&self, request: &Request, asked_at: Instant, now: Instant) -> bool {
        let asked = request.request_id.as_ref().and_then(|id| self.requests.get(id));
        let held = asked.and_then(|(resource, nonce)| self.known(resource, *nonce));
        let is_certain = |held: &Held| held.session.is_none() && held.from <= asked_at && now < held.until;
        held.is_some_and(is_certain)
    }
}
