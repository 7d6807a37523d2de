//! What makes a version go back by itself after it went live.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::{Plan, PlanError};
use crate::config::PushGuard;

/// How many requests each version must have answered before the shares that they refuse are compared.
const ENOUGH: u64 = 200;
/// How many plans must have failed: one odd request does not make a version go back.
const FEW: u64 = 10;
/// If the version before has answered fewer requests here, only a version that fails for most of its requests goes back.
const KNOWN: u64 = 20;

/// The answers of a version to the requests of clients.
#[derive(Debug, Default)]
pub(super) struct Answers {
    planned: AtomicU64,
    refused: AtomicU64,
    failed: AtomicU64,
}

/// [`Answers`] at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Answered {
    pub planned: u64,
    pub refused: u64,
    pub failed: u64,
}

impl Answers {
    pub fn count(&self, answer: &Result<Plan, PlanError>) {
        let counter = match answer {
            Ok(_) => &self.planned,
            Err(PlanError::Refused { .. }) => &self.refused,
            Err(PlanError::Fault(_)) => &self.failed,
        };
        counter.fetch_add(1, Relaxed);
    }

    pub fn now(&self) -> Answered {
        Answered {
            planned: self.planned.load(Relaxed),
            refused: self.refused.load(Relaxed),
            failed: self.failed.load(Relaxed),
        }
    }
}

impl Answered {
    fn total(&self) -> u64 {
        self.planned + self.refused + self.failed
    }

    /// The share of `count`, in percent.
    fn share(&self, count: u64) -> f64 {
        count as f64 * 100.0 / self.total().max(1) as f64
    }

    /// Why a version with these answers goes back to the version with the answers `before`.
    pub fn exceeds(&self, before: &Answered, guard: &PushGuard) -> Option<String> {
        let (failed, failed_before) = (self.share(self.failed), before.share(before.failed));
        let bound = if before.total() >= KNOWN { failed_before + guard.failed_points } else { 50.0 };
        if self.failed >= FEW && failed > bound && guard.failed_points < 100.0 {
            return Some(format!(
                "it failed to plan {} of {} requests, and the version before {} of {}",
                self.failed,
                self.total(),
                before.failed,
                before.total()
            ));
        }
        let (refused, refused_before) = (self.share(self.refused), before.share(before.refused));
        let is_known = self.total() >= ENOUGH && before.total() >= ENOUGH;
        (is_known && refused > refused_before + guard.refused_points).then(|| {
            format!(
                "it refuses {refused:.1} % of {} requests, and the version before refused {refused_before:.1} %; {} \
                 percentage points more are allowed",
                self.total(),
                guard.refused_points
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answered(planned: u64, refused: u64, failed: u64) -> Answered {
        Answered { planned, refused, failed }
    }

    #[test]
    fn a_version_that_fails_more_often_than_the_one_before_goes_back() {
        let guard = PushGuard::default();
        let good = answered(1_000, 0, 0);
        let why = answered(0, 0, 10).exceeds(&good, &guard).unwrap();
        assert_eq!(why, "it failed to plan 10 of 10 requests, and the version before 0 of 1000");
        assert_eq!(answered(0, 0, 9).exceeds(&good, &guard), None, "too few to tell");
        assert_eq!(answered(10_000, 0, 50).exceeds(&good, &guard), None, "a small share");
        assert!(answered(10_000, 0, 150).exceeds(&good, &guard).is_some());
        assert_eq!(
            answered(50, 0, 50).exceeds(&answered(40, 0, 60), &guard),
            None,
            "the one before was no better"
        );
        let tolerant = PushGuard { failed_points: 100.0, ..guard };
        assert_eq!(answered(0, 0, 500).exceeds(&good, &tolerant), None);
    }

    #[test]
    fn a_version_goes_back_to_an_unknown_one_only_if_it_fails_for_most_requests() {
        let (guard, unknown) = (PushGuard::default(), answered(19, 0, 0));
        assert!(answered(5, 0, 10).exceeds(&unknown, &guard).is_some());
        assert_eq!(answered(15, 0, 15).exceeds(&unknown, &guard), None);
    }

    #[test]
    fn a_version_that_refuses_more_goes_back_if_the_policy_says_so() {
        let guard = PushGuard { refused_points: 5.0, ..PushGuard::default() };
        let before = answered(900, 100, 0);
        assert_eq!(answered(170, 30, 0).exceeds(&before, &guard), None);
        assert!(answered(168, 32, 0).exceeds(&before, &guard).unwrap().contains("refuses 16.0 % of 200"));
        assert_eq!(answered(100, 99, 0).exceeds(&before, &guard), None, "too few to tell");
        assert_eq!(answered(0, 500, 0).exceeds(&answered(100, 0, 0), &guard), None, "too few before");
        assert_eq!(answered(0, 500, 0).exceeds(&before, &PushGuard::default()), None, "off by default");
    }
}
