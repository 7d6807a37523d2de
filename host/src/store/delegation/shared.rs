//! What is done for the keys of a proxy: the questions to the store, and what their answers change.

use std::sync::{Arc, OnceLock, Weak};

use super::super::{Done, Loss, Notify, Reply, Store, StoreError, Stored};
use super::held::Held;
use super::state::{Group, State, Waiting, Work, claim_of};
use super::{Bounds, Life, Lives};
use crate::clock;
use crate::coverage::{Branch, reached};
use crate::lock::record::{Delegate, Extend, Op, Outcome, Restore};
use crate::lock::{Instant, Key};
use crate::mutex::Mutex;
use crate::telemetry::Metrics;

/// The keys of a proxy, and the store beneath.
pub(super) struct Shared {
    pub this: Weak<Shared>,
    pub inner: Arc<dyn Store>,
    pub lives: Lives,
    pub bounds: Bounds,
    pub metrics: Metrics,
    pub state: Mutex<State>,
    /// The name of this proxy, and how it notifies others.
    pub peers: OnceLock<(Arc<str>, Notify)>,
    pub losses: Mutex<Option<Loss>>,
}

impl Shared {
    /// Changes the state, and does afterwards what follows from it.
    pub fn with(&self, change: impl FnOnce(&mut State, Instant, &mut Vec<Work>)) {
        let mut work = Vec::new();
        let keys = {
            let mut state = self.state.lock();
            state.life = (self.lives)();
            change(&mut state, clock::now(), &mut work);
            state.keys.len()
        };
        self.metrics.delegations.keys(keys);
        work.into_iter().for_each(|work| self.perform(work));
    }

    pub fn submit(&self, group: Group) {
        self.with(|state, now, work| state.submit(group, now, &self.bounds, work));
    }

    fn perform(&self, work: Work) {
        match work {
            Work::Forward(group) => self.forward(group),
            Work::Answer(done, result) => {
                self.metrics.delegations.decided(result.as_ref().map_or(0, |reply| reply.outcomes.len()));
                done(result);
            }
            Work::Delegate(group, key, asked, life) => self.delegate(group, key, asked, life),
            Work::Extend(asked) => self.extend(asked),
            Work::Restore(asked) => self.restore(asked),
            Work::Lost(nonces) => {
                self.metrics.delegations.event("lost");
                if let Some(tell) = self.losses.lock().as_ref().filter(|_| !nonces.is_empty()) {
                    tell(nonces);
                }
            }
        }
    }

    fn later(&self, then: impl FnOnce(&Shared, Result<Reply, StoreError>) + Send + 'static) -> Done {
        let this = self.this.clone();
        Box::new(move |result| {
            if let Some(shared) = this.upgrade() {
                then(&shared, result);
            }
        })
    }

    /// Until when the store has to answer.
    pub fn deadline(&self) -> Instant {
        clock::now().plus_us(self.bounds.timeout.as_micros() as u64)
    }

    fn certain_us(&self, left_us: u64) -> u64 {
        left_us - (left_us / 1_000 * u64::from(self.bounds.drift_per_mille)).min(left_us)
    }

    /// Asks for the delegation in place of the group's claim.
    fn delegate(&self, group: Group, key: Key, asked: Box<Delegate>, life: Life) {
        let Group { mut ops, deadline, done, .. } = group;
        let done = self.resolved(ops.clone(), false, deadline, done);
        let place = ops.iter().position(|op| claim_of(op).is_some()).unwrap_or_default();
        ops[place] = Op::Delegate(asked.clone());
        let answered =
            self.later(move |shared, result| shared.delegated(&key, &asked, (place, life), result, done));
        self.inner.submit(ops, deadline, answered);
    }

    fn delegated(
        &self,
        key: &Key,
        asked: &Delegate,
        (place, life): (usize, Life),
        result: Result<Reply, StoreError>,
        done: Done,
    ) {
        let result = match result {
            Err(error) if error.was_sent() => {
                reached(Branch::DelegationUndone);
                // It may have been delegated. If it cannot be undone, the key is taken until the delegation ends.
                let undo = Op::Abandon { keys: asked.claim.keys.clone(), attempt: asked.nonce };
                let undone = key.clone();
                let answered = self.later(move |shared, _| shared.ended(&undone));
                self.inner.submit(vec![undo], self.deadline(), answered);
                return done(Err(error));
            }
            Err(error) => Err(error),
            Ok(mut reply) => {
                let outcome = std::mem::replace(&mut reply.outcomes[place], Outcome::Absent);
                if let Outcome::Delegated(mut delegated) = outcome {
                    reached(Branch::Delegated);
                    self.metrics.delegations.event("begun");
                    delegated.left_us = self.certain_us(delegated.left_us);
                    let names = (key.clone(), asked.nonce, asked.rules.clone());
                    reply.outcomes[place] = Outcome::Granted(delegated.grant.clone());
                    self.with(|state, now, work| {
                        state.ahead_us = reply.now.0.saturating_sub(now.0);
                        let (times, bounds) = ((reply.asked_at, now), &self.bounds);
                        let held = Held::new(names, &delegated, reply.now, times, life.number, bounds);
                        state.begin(key, Box::new(held), now, work);
                        if delegated.is_wanted {
                            state.want(key, now, work);
                        }
                    });
                    done(Ok(reply));
                    return self.resume(key);
                }
                reply.outcomes[place] = outcome;
                Ok(reply)
            }
        };
        done(result);
        self.ended(key);
    }

    /// Lets the groups that have waited for the key go on.
    pub fn resume(&self, key: &Key) {
        self.with(|state, now, work| {
            let Some(entry) = state.keys.get_mut(key) else { return };
            for waiting in std::mem::take(&mut entry.waiting) {
                match waiting {
                    Waiting::Group(group) => state.submit_one(key, group, now, &self.bounds, work),
                    several @ Waiting::Several(_) => state.wait_for_return(key, several, now, work),
                }
            }
        });
    }

    fn ended(&self, key: &Key) {
        self.with(|state, _, work| state.end(key, None, work));
    }

    fn extend(&self, asked: Extend) {
        let (key, op) = (asked.key.clone(), Op::Extend(asked.clone()));
        let answered = self.later(move |shared, result| {
            let outcome = result.map(|mut reply| (reply.outcomes.pop(), reply.asked_at));
            shared.with(|state, now, work| match outcome {
                Ok((Some(Outcome::Extended { left_us, is_wanted }), asked_at)) => {
                    reached(Branch::DelegationExtended);
                    shared.metrics.delegations.event("extended");
                    state.extended(&key, Some((&asked, asked_at, shared.certain_us(left_us))));
                    if is_wanted {
                        state.want(&key, now, work);
                    }
                    // After a fail-over, leases are not made longer for a while.
                    if left_us / 1_000 + 1 < u64::from(asked.ttl_ms) {
                        state.mark_to_return(&key);
                    }
                }
                // Others may have it after what is certain so far; until then this proxy has it.
                Ok(_) => {
                    state.extended(&key, None);
                    state.refuse_waiting(&key, "the delegation of the key has ended", work);
                }
                Err(error) => {
                    state.extended(&key, None);
                    state.refuse_waiting(&key, &error.why(), work);
                }
            });
            shared.resume(&key);
        });
        self.inner.submit_renewal(op, self.deadline(), answered);
    }

    fn restore(&self, asked: Box<Restore>) {
        let key = asked.key.clone();
        let answered = self.later(move |shared, result| match result.map(|mut reply| reply.outcomes.pop()) {
            Ok(Some(Outcome::Restored { next_waiter })) => {
                reached(Branch::DelegationRestored);
                shared.metrics.delegations.event("returned");
                if let Some(next_waiter) = next_waiter {
                    shared.notify(&next_waiter.proxy, &key);
                }
                shared.ended(&key);
            }
            Ok(Some(Outcome::Lost)) => {
                reached(Branch::DelegationLost);
                shared.metrics.delegations.event("lost");
                shared.ended(&key);
            }
            // It may be back, or not: the sweep asks again.
            _ => shared.with(|state, _, _| state.not_returned(&key)),
        });
        self.inner.submit(vec![Op::Restore(asked)], self.deadline(), answered);
    }
}

impl Shared {
    /// Shows the record that this proxy has in memory, and returns whether it has one. Of another proxy's delegation, only
    /// the delegation is shown.
    pub fn overlay(&self, stored: &mut Stored) -> bool {
        let Some(nonce) = stored.delegation().map(|delegation| delegation.nonce) else { return false };
        let life = (self.lives)();
        let state = self.state.lock();
        let held = state.held(&stored.key);
        match held.filter(|held| held.nonce() == nonce && held.life == life.number) {
            Some(held) => {
                stored.record = held.record(clock::now(), stored.now);
                true
            }
            None => {
                stored.record.holders.retain(|holder| holder.nonce == nonce);
                false
            }
        }
    }
}
