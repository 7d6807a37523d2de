//! What one principal may ask of a proxy at a time: requests in a second, and so many of each [`Quota`].

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use crate::clock;
use crate::config::PrincipalLimits;
use crate::mutex::Mutex;

/// A principal has used up one of its limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OverLimit {
    /// Too many requests in a second.
    #[error("the client may send {limit} {}", rate.in_words())]
    Rate {
        /// What was sent too often.
        rate: Rate,
        /// The limit.
        limit: u32,
        /// When the next request is accepted, in milliseconds.
        retry_after_ms: u32,
    },
    /// Too many credentials from the client's address were refused, and these are not known to be valid.
    #[error("too many credentials from this address were refused; {limit} a second are looked at")]
    Guesses {
        /// The limit.
        limit: u32,
        /// When credentials may be looked at again, in milliseconds.
        retry_after_ms: u32,
    },
    /// Too many of something at the same time.
    #[error("the client may have {limit} {}", quota.in_words())]
    Count {
        /// What there are too many of.
        quota: Quota,
        /// The limit.
        limit: u32,
    },
}

/// What a principal can send so many of in a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rate {
    /// Requests in a second.
    Requests,
    /// Replacements of policies in a minute.
    Pushes,
}

/// What a principal can have several of at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quota {
    /// Requests that are not answered to their end.
    InProgress,
    /// Acquires that are not answered.
    Waiters,
    /// Streams of events.
    Watchers,
    /// Leases that this proxy granted and that it does not know to have ended, and acquires that may become one.
    Leases,
}

impl OverLimit {
    /// The name of the limit in the file of principals.
    pub fn name(self) -> &'static str {
        match self {
            OverLimit::Rate { rate, .. } => rate.name(),
            OverLimit::Guesses { .. } => "auth.max_refused_per_second",
            OverLimit::Count { quota, .. } => quota.name(),
        }
    }

    /// The value of the limit.
    pub fn limit(self) -> u32 {
        match self {
            OverLimit::Rate { limit, .. }
            | OverLimit::Guesses { limit, .. }
            | OverLimit::Count { limit, .. } => limit,
        }
    }
}

impl Rate {
    fn name(self) -> &'static str {
        match self {
            Rate::Requests => "per_second",
            Rate::Pushes => "pushes_per_minute",
        }
    }

    fn in_words(self) -> &'static str {
        match self {
            Rate::Requests => "requests a second",
            Rate::Pushes => "policies a minute",
        }
    }

    fn limit(self, limits: &PrincipalLimits) -> Option<u32> {
        match self {
            Rate::Requests => limits.per_second,
            Rate::Pushes => limits.pushes_per_minute,
        }
    }

    /// The time that the limit is for, in microseconds.
    fn period_us(self) -> u64 {
        match self {
            Rate::Requests => SECOND_US,
            Rate::Pushes => 60 * SECOND_US,
        }
    }
}

const SECOND_US: u64 = 1_000_000;

/// How much of a rate is left. What is allowed in a period may come at once, and each one moves the moment at which the
/// allowance is full by its share of the period (the generic cell rate algorithm).
#[derive(Debug, Default)]
pub(super) struct Allowance {
    /// When the allowance is full again, in microseconds of [`clock::now`].
    full_at: AtomicU64,
}

impl Allowance {
    /// Takes one of `limit` in a period. If none is left, returns after how many milliseconds there is one.
    pub fn take(&self, limit: u32, period_us: u64) -> Result<(), u32> {
        let now = clock::now().0;
        let next = |full_at: u64| {
            Some(after_one(full_at, now, limit, period_us)).filter(|next| *next <= now + period_us)
        };
        let taken = self.full_at.fetch_update(Relaxed, Relaxed, next);
        taken.map(drop).map_err(|full_at| wait_ms(full_at, now, limit, period_us))
    }

    /// As [`Allowance::take`] for a second, but takes nothing.
    pub fn has_room(&self, limit: u32) -> Result<(), u32> {
        let (now, full_at) = (clock::now().0, self.full_at.load(Relaxed));
        let has_room = after_one(full_at, now, limit, SECOND_US) <= now + SECOND_US;
        if has_room { Ok(()) } else { Err(wait_ms(full_at, now, limit, SECOND_US)) }
    }

    /// As [`Allowance::take`] for a second, even if none is left.
    pub fn take_in_any_case(&self, limit: u32) {
        if self.take(limit, SECOND_US).is_err() {
            self.full_at.store(clock::now().0 + SECOND_US, Relaxed);
        }
    }
}

/// When the allowance is full if one more is taken.
fn after_one(full_at: u64, now: u64, limit: u32, period_us: u64) -> u64 {
    full_at.max(now) + period_us / u64::from(limit)
}

fn wait_ms(full_at: u64, now: u64, limit: u32, period_us: u64) -> u32 {
    let wait_us = after_one(full_at, now, limit, period_us).saturating_sub(now + period_us);
    u32::try_from(wait_us / 1_000).unwrap_or(u32::MAX).max(1)
}

impl Quota {
    const ALL: [Quota; 4] = [Quota::InProgress, Quota::Waiters, Quota::Watchers, Quota::Leases];

    fn name(self) -> &'static str {
        match self {
            Quota::InProgress => "in_progress",
            Quota::Waiters => "waiters",
            Quota::Watchers => "watchers",
            Quota::Leases => "leases",
        }
    }

    fn in_words(self) -> &'static str {
        match self {
            Quota::InProgress => "requests in progress, which count while they wait or stream",
            Quota::Waiters => "acquires that are not answered",
            Quota::Watchers => "streams of events",
            Quota::Leases => "leases of this proxy, and an acquire that is not answered counts as one",
        }
    }

    fn limit(self, limits: &PrincipalLimits) -> Option<u32> {
        match self {
            Quota::InProgress => limits.in_progress,
            Quota::Waiters => limits.waiters,
            Quota::Watchers => limits.watchers,
            Quota::Leases => limits.leases,
        }
    }
}

/// Counts what a principal has.
#[derive(Debug, Default)]
pub(super) struct Meter {
    requests: Allowance,
    pushes: Allowance,
    counts: [AtomicU32; Quota::ALL.len()],
    /// The marks of the leases that are counted, and how many leases have each of them.
    marks: Mutex<HashMap<u64, u32>>,
}

/// One of a [`Quota`]. It counts until this is dropped.
#[derive(Debug)]
pub struct Counted {
    meter: Arc<Meter>,
    quota: Quota,
    marks: Vec<u64>,
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.meter.counts[self.quota as usize].fetch_sub(1, Relaxed);
        if self.marks.is_empty() {
            return;
        }
        let mut known = self.meter.marks.lock();
        for mark in &self.marks {
            if let Some(count) = known.get_mut(mark) {
                *count -= 1;
                if *count == 0 {
                    known.remove(mark);
                }
            }
        }
    }
}

impl Meter {
    /// Counts a request, if the limit on the rate allows it.
    pub fn send(&self, rate: Rate, limits: &PrincipalLimits) -> Result<(), OverLimit> {
        let Some(limit) = rate.limit(limits) else { return Ok(()) };
        let allowance = match rate {
            Rate::Requests => &self.requests,
            Rate::Pushes => &self.pushes,
        };
        let taken = allowance.take(limit, rate.period_us());
        taken.map_err(|retry_after_ms| OverLimit::Rate { rate, limit, retry_after_ms })
    }

    /// Counts one of the quota, if the limits allow it. `marks`: what a lease has in common with an acquire that can get
    /// this lease and no other. Such an acquire is allowed at the limit as well.
    pub fn take(
        self: &Arc<Meter>,
        quota: Quota,
        marks: Vec<u64>,
        limits: &PrincipalLimits,
    ) -> Result<Counted, OverLimit> {
        let mut known = (!marks.is_empty()).then(|| self.marks.lock());
        let is_known = known.as_ref().is_some_and(|known| marks.iter().any(|mark| known.contains_key(mark)));
        let before = self.counts[quota as usize].fetch_add(1, Relaxed);
        if let Some(limit) = quota.limit(limits)
            && before >= limit
            && !is_known
        {
            self.counts[quota as usize].fetch_sub(1, Relaxed);
            return Err(OverLimit::Count { quota, limit });
        }
        for mark in &marks {
            if let Some(known) = &mut known {
                *known.entry(*mark).or_default() += 1;
            }
        }
        Ok(Counted { meter: Arc::clone(self), quota, marks })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_requests_of_a_second_may_come_at_once_and_no_more() {
        let meter = Meter::default();
        let limits = PrincipalLimits { per_second: Some(5), ..PrincipalLimits::default() };
        for _ in 0..5 {
            meter.send(Rate::Requests, &limits).unwrap();
        }
        let Err(OverLimit::Rate { limit: 5, retry_after_ms, .. }) = meter.send(Rate::Requests, &limits)
        else {
            panic!("the sixth")
        };
        assert!((1..=200).contains(&retry_after_ms), "{retry_after_ms}");
        meter.send(Rate::Pushes, &limits).unwrap();
        let limits = PrincipalLimits { pushes_per_minute: Some(1), ..PrincipalLimits::default() };
        meter.send(Rate::Requests, &limits).unwrap();
        meter.send(Rate::Pushes, &limits).unwrap();
        let Err(OverLimit::Rate { rate: Rate::Pushes, retry_after_ms, .. }) =
            meter.send(Rate::Pushes, &limits)
        else {
            panic!("the second in a minute")
        };
        assert!((50_000..=60_000).contains(&retry_after_ms), "{retry_after_ms}");
    }

    #[test]
    fn each_quota_counts_for_itself_until_its_end() {
        let meter = Arc::new(Meter::default());
        let limits = PrincipalLimits { in_progress: Some(2), leases: Some(1), ..PrincipalLimits::default() };
        let take = |quota| meter.take(quota, Vec::new(), &limits);
        let first = take(Quota::InProgress).unwrap();
        let _second = take(Quota::InProgress).unwrap();
        let over = OverLimit::Count { quota: Quota::InProgress, limit: 2 };
        assert_eq!(take(Quota::InProgress).unwrap_err(), over);
        assert_eq!((over.name(), over.limit()), ("in_progress", 2));
        let _lease = take(Quota::Leases).unwrap();
        assert_eq!(take(Quota::Leases).unwrap_err(), OverLimit::Count { quota: Quota::Leases, limit: 1 });
        let _unlimited = [take(Quota::Waiters).unwrap(), take(Quota::Watchers).unwrap()];
        drop(first);
        take(Quota::InProgress).unwrap();
    }

    #[test]
    fn an_acquire_for_a_lease_that_the_client_has_is_allowed_at_the_limit() {
        let meter = Arc::new(Meter::default());
        let limits = PrincipalLimits { leases: Some(1), ..PrincipalLimits::default() };
        let take = |marks: &[u64]| meter.take(Quota::Leases, marks.to_vec(), &limits);
        let lease = take(&[1, 2]).unwrap();
        assert!(take(&[3]).is_err());
        let again = take(&[4, 2]).unwrap();
        drop(lease);
        assert!(take(&[3]).is_err(), "the other one counts");
        assert!(take(&[2]).is_ok());
        drop(again);
        assert!(meter.marks.lock().is_empty());
        assert!(take(&[3]).is_ok());
    }
}
