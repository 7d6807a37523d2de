//! One delegated key: its record in memory, and the decisions about it. Pure.

use super::Bounds;
use crate::lock::record::{
    self, Claim, Delegated, Env, Extend, GlobalQueueChange, Holder, Op, Outcome, Record, Records, Release,
    Restore, UNNOTICED_US, on_another_clock,
};
use crate::lock::{Instant, Key, ServerTime, Token};

/// How much longer a delegation lasts than the lease that it was extended for, at least, in milliseconds.
const EXTRA_MS: u32 = 2_000;
/// The same, at most.
const MOST_EXTRA_MS: u32 = 10_000;
/// Between these bounds, a delegation lasts longer by the lease divided by this. If this proxy dies, a long lease blocks its key for
/// a long time in any case, and a delegation that lasts longer needs fewer writes while its key is used.
const EXTRA_PART: u32 = 8;
/// A key without a lease goes back to the store if its delegation ends within this time, in microseconds.
const RETURN_US: u64 = 500_000;
/// How often a key is granted here once this proxy knows that another proxy waits for it. These are more grants than for a
/// key in the store ([`TURN_AFTER`](record::TURN_AFTER)), because each hand-over and return costs two writes.
/// [`PASSING_US`] limits their time as well.
const PASSES: u32 = 64;
/// How long a key is granted here while another proxy waits for it, in microseconds.
pub const PASSING_US: u64 = 5_000;

/// A delegated key.
#[derive(Debug)]
pub struct Held {
    key: Key,
    nonce: u64,
    rules: Box<str>,
    /// Its times are by this proxy's own clock, which is never set.
    record: Record,
    last_token: Token,
    /// How many tokens it had at first, and gets when they are used up.
    block: u64,
    /// Until when no other proxy grants the key.
    until: Instant,
    /// The membership of this proxy in which it got the key.
    pub life: u64,
    used_at: Instant,
    /// How long its leases blocked the key after the last grant or renewal, in milliseconds. The next lease is expected to need as
    /// much.
    ttl_ms: u32,
    /// How much longer the delegation should last than that.
    extra_ms: u32,
    /// How many groups granted or renewed a lease since the delegation was extended.
    uses: u32,
    wanted: Option<Wanted>,
}

/// Another proxy waits for the key.
#[derive(Clone, Copy, Debug)]
struct Wanted {
    since: Instant,
    passes: u32,
}

/// What becomes of a group of operations.
#[derive(Debug, PartialEq, Eq)]
pub enum Decision {
    /// The outcomes, one for each operation.
    Done(Vec<Outcome>),
    /// The delegation has to be extended first.
    Extend(Extend),
    /// The store has to decide.
    GoBack,
    /// The delegation has ended.
    Over,
}

impl Held {
    /// A key that was delegated. `asked_at`, `answered_at`: this proxy's clock before and after the store was asked.
    /// `now`: the store's clock at its decision.
    pub fn new(
        (key, nonce, rules): (Key, u64, Box<str>),
        delegated: &Delegated,
        now: ServerTime,
        (asked_at, answered_at): (Instant, Instant),
        life: u64,
        bounds: &Bounds,
    ) -> Held {
        // Leases count from the later moment, so that none ends early for others. The delegation counts from the earlier
        // one.
        let own = by_own_clock(answered_at);
        let record = on_another_clock(&delegated.record, now, own, own);
        let ttl_ms = left_ms(&record, answered_at);
        Held {
            key,
            nonce,
            rules,
            record,
            last_token: delegated.last_token,
            block: delegated.last_token.0.saturating_sub(delegated.record.token.0),
            until: asked_at.plus_us(delegated.left_us),
            life,
            used_at: answered_at,
            ttl_ms,
            extra_ms: extra_ms(ttl_ms, bounds),
            uses: 1,
            wanted: None,
        }
    }

    /// Decides a group, all of it or nothing.
    pub fn decide(&mut self, group: &[Op], now: Instant, bounds: &Bounds) -> Decision {
        if self.is_over(now) {
            return Decision::Over;
        }
        if !group.iter().all(|op| self.is_local(op, bounds)) {
            return Decision::GoBack;
        }
        let env = Env::certain(by_own_clock(now));
        let mut records = Records::default();
        records.insert(self.key.clone(), Some(self.record.clone()));
        let mut outcomes = Vec::with_capacity(group.len());
        for op in group {
            outcomes.push(match op {
                // The other proxies that wait are noted in the store, and tell this proxy.
                Op::GlobalQueue { .. } => Outcome::GlobalQueue { next_waiter: None },
                op => record::apply(&mut records, op, &env),
            });
        }
        let Some(record) = records.take(&self.key) else { return Decision::GoBack };
        if let Some(extend) = self.lacks(&record, now, bounds) {
            return Decision::Extend(extend);
        }
        let is_new = |outcome: &&Outcome| matches!(outcome, Outcome::Granted(grant) if !grant.repeated);
        let grants = outcomes.iter().filter(is_new).count() as u32;
        if let Some(wanted) = &mut self.wanted {
            wanted.passes += grants;
        }
        let is_lease = |outcome: &Outcome| matches!(outcome, Outcome::Granted(_) | Outcome::Renewed { .. });
        if outcomes.iter().any(is_lease) {
            self.ttl_ms = left_ms(&record, now);
            self.extra_ms = extra_ms(self.ttl_ms, bounds);
            self.uses = self.uses.saturating_add(1);
        }
        self.record = record;
        self.used_at = now;
        Decision::Done(outcomes)
    }

    /// Whether the operation can be decided here.
    fn is_local(&self, op: &Op, bounds: &Bounds) -> bool {
        match op {
            Op::Acquire(claim) | Op::Rejoin(claim) => {
                claim.delegable.as_ref().is_some_and(|delegable| *delegable.rules == *self.rules)
                    && can_be_delegated(claim, bounds)
            }
            Op::Renew { lease, ttl_ms } => {
                let own = |holder: &&Holder| holder.nonce == lease.nonce;
                let holder = self.record.holders.iter().find(own);
                let ttl_ms = ttl_ms.or_else(|| holder.map(|holder| holder.ttl_ms)).unwrap_or_default();
                let delay_ms = holder.map_or(0, |holder| holder.delay_ms);
                lease.keys.len() == 1 && fits(ttl_ms.saturating_add(delay_ms), bounds)
            }
            Op::Raise { lease, tokens } => lease.keys.len() == 1 && tokens.is_none(),
            Op::Release(Release { lease, outcome, .. }) => lease.keys.len() == 1 && outcome.is_none(),
            Op::Abandon { keys, .. } => keys.len() == 1,
            Op::GlobalQueue { change, .. } => {
                matches!(change, GlobalQueueChange::Look | GlobalQueueChange::Leave { ticket: None, .. })
            }
            _ => false,
        }
    }

    /// The extension without which this record would outlast the delegation, or its tokens.
    fn lacks(&self, record: &Record, now: Instant, bounds: &Bounds) -> Option<Extend> {
        let fits = ends(record) <= by_own_clock(self.until) && record.token <= self.last_token;
        (!fits).then(|| {
            let ttl_ms = left_ms(record, now);
            self.extension(ttl_ms.saturating_add(extra_ms(ttl_ms, bounds)), record.token)
        })
    }

    fn extension(&self, ttl_ms: u32, token: Token) -> Extend {
        let used_up = token.0 + self.block / 2 > self.last_token.0;
        let last_token = if used_up { Token(token.0 + self.block) } else { self.last_token };
        Extend { key: self.key.clone(), nonce: self.nonce, ttl_ms, last_token }
    }

    /// The extension that the next lease will need soon. Extensions of many keys at once cost less than those that
    /// [`Held::decide`] asks for, and a client seldom waits for them. A lease that ends just before its delegation needs one, too:
    /// the key could not go back after it.
    pub fn due(&self, now: Instant) -> Option<Extend> {
        let left_us = self.until.us_since(now.plus_ms(self.ttl_ms));
        let is_near = left_us < u64::from(self.extra_ms) * 500;
        let is_short = self.record.token.0 + self.block / 4 > self.last_token.0;
        let ends = ends(&self.record);
        let ends_late = ends > by_own_clock(now) && by_own_clock(self.until).us_since(ends) < RETURN_US;
        // A key that was used once may not be used again.
        let is_used = !self.is_unused(now) && self.uses > u32::from(!ends_late);
        let extension = || self.extension(self.ttl_ms.saturating_add(self.extra_ms), self.record.token);
        (is_used && (is_near || is_short)).then(extension)
    }

    /// Whether the key was not used for as long as its delegation is extended beyond a lease. By then, the next lease needs a
    /// write, or soon will.
    fn is_unused(&self, now: Instant) -> bool {
        now.us_since(self.used_at) >= u64::from(self.extra_ms) * 1_000
    }

    /// Notes an extension that the store has confirmed.
    pub fn extended(&mut self, asked: &Extend, asked_at: Instant, left_us: u64) {
        self.uses = 0;
        self.until = self.until.max(asked_at.plus_us(left_us));
        self.last_token = self.last_token.max(asked.last_token);
    }

    /// Another proxy waits for the key.
    pub fn want(&mut self, now: Instant) {
        self.wanted.get_or_insert(Wanted { since: now, passes: 0 });
    }

    /// Whether the key should go back to the store.
    pub fn is_due_back(&self, now: Instant) -> bool {
        let is_idle = self.record.until() <= by_own_clock(now);
        match &self.wanted {
            Some(wanted) => is_idle || wanted.passes >= PASSES || now.us_since(wanted.since) >= PASSING_US,
            None => is_idle && (self.is_unused(now) || self.until.us_since(now) < RETURN_US),
        }
    }

    /// Whether other proxies may grant the key by now.
    pub fn is_over(&self, now: Instant) -> bool {
        now >= self.until
    }

    /// The operation that puts the record back.
    pub fn restore(&self, now: Instant) -> Restore {
        Restore {
            key: self.key.clone(),
            nonce: self.nonce,
            record: self.record.clone(),
            at: by_own_clock(now),
            passed: self.wanted.map_or(0, |wanted| wanted.passes),
        }
    }

    /// The nonce of the delegation.
    pub fn nonce(&self) -> u64 {
        self.nonce
    }

    /// The record at `now`, by the store's clock, which shows `at`.
    pub fn record(&self, now: Instant, at: ServerTime) -> Record {
        on_another_clock(&self.record, by_own_clock(now), at, at)
    }

    /// The running leases.
    pub fn leases(&self, now: Instant) -> impl Iterator<Item = u64> {
        let running = move |holder: &&Holder| holder.until > by_own_clock(now);
        self.record.holders.iter().filter(running).map(|holder| holder.nonce)
    }
}

/// Whether the key of the claim may be delegated, as far as the claim says.
pub fn can_be_delegated(claim: &Claim, bounds: &Bounds) -> bool {
    claim.keys.len() == 1
        && !claim.any
        && claim.global.is_none()
        && claim.keep_ms.is_none()
        && fits(blocks_ms(claim), bounds)
}

/// How long the claim blocks its key, in milliseconds.
pub fn blocks_ms(claim: &Claim) -> u32 {
    claim.ttl_ms.saturating_add(claim.delay_ms).max(claim.at_least_ms)
}

/// Whether a delegation can last so much longer than a lease as it has to. A fail-over waits for the longest lease, and the
/// longer a delegation lasts, the more this proxy has to allow for the speed of its clock.
fn fits(ttl_ms: u32, bounds: &Bounds) -> bool {
    let drift_ms = u64::from(ttl_ms) * u64::from(bounds.drift_per_mille) / 1_000;
    ttl_ms.saturating_add(EXTRA_MS) <= bounds.longest_ms && drift_ms <= u64::from(EXTRA_MS) / 4
}

/// How much longer than a lease of `ttl_ms` a delegation should last. It never lasts longer than the longest lease.
pub fn extra_ms(ttl_ms: u32, bounds: &Bounds) -> u32 {
    // The store counts a little more for a lease.
    let most_ms = bounds.longest_ms.saturating_sub(ttl_ms).saturating_sub((UNNOTICED_US / 1_000) as u32);
    let most_ms = MOST_EXTRA_MS.min(most_ms).max(EXTRA_MS);
    (ttl_ms / EXTRA_PART).clamp(EXTRA_MS, most_ms)
}

/// How long the record blocks the key from now on, in milliseconds.
fn left_ms(record: &Record, now: Instant) -> u32 {
    let left_ms = ends(record).us_since(by_own_clock(now)).div_ceil(1_000);
    u32::try_from(left_ms).unwrap_or(u32::MAX)
}

/// When nothing of the record blocks the key any more.
fn ends(record: &Record) -> ServerTime {
    record
        .holders
        .iter()
        .map(|holder| holder.until.plus_ms(holder.delay_ms).max(holder.at_least_until))
        .fold(record.not_before, ServerTime::max)
}

/// The records in memory have times by this proxy's own clock.
fn by_own_clock(own: Instant) -> ServerTime {
    ServerTime(own.0)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::lock::LeaseRef;
    use crate::lock::record::{Delegable, Grant, When};
    use crate::store::contract;

    const SECOND: u64 = 1_000_000;

    fn key() -> Key {
        Key::new("k").expect("a key")
    }

    fn at(s: u64) -> Instant {
        Instant(s * SECOND)
    }

    /// A delegation of 3 s, for which the store was asked at 10 s, and which it confirmed at 11 s.
    fn held() -> Held {
        let grant = Grant {
            nonce: 1,
            chosen: None,
            tokens: vec![Token(1)],
            left_us: SECOND,
            levels: 1,
            repeated: false,
        };
        let delegated = Delegated {
            grant,
            record: Record { token: Token(1), ..Record::default() },
            last_token: Token(9),
            left_us: 3 * SECOND,
            is_wanted: false,
        };
        Held::new((key(), 7, "p@1".into()), &delegated, ServerTime(99), (at(10), at(11)), 0, &BOUNDS)
    }

    #[test]
    fn a_delegation_counts_from_the_question_to_the_store() {
        let mut held = held();
        assert!(!held.is_over(Instant(at(13).0 - 1)) && held.is_over(at(13)));
        let asked = Extend { key: key(), nonce: 7, ttl_ms: 5_000, last_token: Token(20) };
        held.extended(&asked, at(12), 5 * SECOND);
        assert!(!held.is_over(Instant(at(17).0 - 1)) && held.is_over(at(17)));
        held.extended(&asked, at(11), SECOND);
        assert!(!held.is_over(Instant(at(17).0 - 1)), "an answer that comes late does not shorten it");
    }

    const BOUNDS: Bounds =
        Bounds { longest_ms: 3_600_000, drift_per_mille: 1, timeout: Duration::ZERO, tokens: 1 };

    #[test]
    fn a_delegation_outlasts_long_leases_by_more_and_never_lasts_longer_than_the_longest_lease() {
        let extra = |ttl_ms| extra_ms(ttl_ms, &BOUNDS);
        assert_eq!([1, 16_000, 60_000, 80_000, 3_000_000].map(extra), [2_000, 2_000, 7_500, 10_000, 10_000]);
        let near = |longest_ms| extra_ms(60_000, &Bounds { longest_ms, ..BOUNDS });
        assert_eq!([62_000, 65_000, 70_000].map(near), [2_000, 4_900, 7_500]);
    }

    /// A delegation until 82 s.
    fn lasting() -> Held {
        let mut held = held();
        let asked = Extend { key: key(), nonce: 7, ttl_ms: 70_000, last_token: Token(90) };
        held.extended(&asked, at(12), 70 * SECOND);
        held
    }

    fn delegable() -> Delegable {
        Delegable { rules: "p@1".into(), when: When::Always }
    }

    /// Grants a lease of a minute.
    fn grant(held: &mut Held, now: Instant) -> LeaseRef {
        let claim = Claim { ttl_ms: 60_000, delegable: Some(delegable()), ..contract::claim(&["k"], "a") };
        let keys = claim.keys.clone();
        let decision = held.decide(&[Op::Acquire(claim)], now, &BOUNDS);
        let Decision::Done(outcomes) = &decision else { panic!("{decision:?}") };
        let [Outcome::Granted(grant)] = &outcomes[..] else { panic!("{outcomes:?}") };
        LeaseRef { keys, nonce: grant.nonce, token: Some(grant.tokens[0]), principal: None }
    }

    /// Grants a lease of a minute, and takes it back.
    fn use_once(held: &mut Held, now: Instant) {
        let lease = grant(held, now);
        let release = Release { attempt: lease.nonce, lease, outcome: None };
        assert!(matches!(held.decide(&[Op::Release(release)], now, &BOUNDS), Decision::Done(_)));
    }

    #[test]
    fn a_key_goes_back_when_it_is_unused_for_as_long_as_its_delegation_is_extended() {
        let mut held = lasting();
        use_once(&mut held, at(13));
        assert!(!held.is_due_back(Instant(at(13).0 + 7_499_999)));
        assert!(held.is_due_back(Instant(at(13).0 + 7_500_000)));
    }

    #[test]
    fn a_key_goes_back_before_its_delegation_ends() {
        let mut held = lasting();
        use_once(&mut held, at(21));
        // The last lease could have been released only now.
        held.used_at = at(80);
        assert!(!held.is_due_back(Instant(at(82).0 - RETURN_US)));
        assert!(held.is_due_back(Instant(at(82).0 - RETURN_US + 1)));
    }

    #[test]
    fn a_lease_that_ends_just_before_its_delegation_extends_it_once() {
        let mut held = lasting();
        grant(&mut held, Instant(at(22).0 - RETURN_US + 1));
        let extension = held.due(at(22)).expect("the key could not go back after the lease");
        held.extended(&extension, at(22), 67_500_000);
        assert_eq!(held.due(at(23)), None);
    }

    #[test]
    fn what_grants_no_lease_does_not_change_what_the_next_one_needs() {
        let mut held = lasting();
        grant(&mut held, at(13));
        let claim = Claim { delegable: Some(delegable()), ..contract::claim(&["k"], "b") };
        let denied = held.decide(&[Op::Acquire(claim)], at(60), &BOUNDS);
        assert!(
            matches!(&denied, Decision::Done(outcomes) if matches!(outcomes[..], [Outcome::Held(_)])),
            "{denied:?}"
        );
        assert_eq!((held.ttl_ms, held.extra_ms, held.uses), (60_000, 7_500, 1));
    }

    #[test]
    fn a_delegation_is_extended_before_the_next_lease_of_a_key_in_use_needs_it() {
        let mut held = lasting();
        use_once(&mut held, at(13));
        assert_eq!(held.due(at(20)), None, "one use may be the last one");
        use_once(&mut held, at(14));
        assert_eq!(held.due(at(18)), None, "another lease of a minute fits for 4 s");
        let extension = held.due(at(19)).expect("it fits for 3 s");
        assert_eq!(extension.ttl_ms, 67_500);
        held.extended(&extension, at(19), 67_500_000);
        assert_eq!(held.due(at(25)), None, "it was not used since");
    }
}
