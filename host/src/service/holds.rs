//! How long a key was held lately, and how long a wait for it may last.

use super::views::{Estimate, NoEstimate, Spread};

/// How many holds are kept for each key.
const KEPT: usize = 32;
/// The fewest holds that an estimate is made from.
const ENOUGH: usize = 10;
/// The fewest holds that were longer than a present one, for an estimate of how long that one still lasts.
const ENOUGH_LONGER: usize = 5;

/// The lengths of the last [`KEPT`] holds of a key, in milliseconds. They have a fixed size, so that the end of a lease
/// allocates nothing.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Holds {
    ms: [u32; KEPT],
    /// How many holds there were. Counting stops before it overflows.
    ended: u32,
}

impl Holds {
    pub fn add(&mut self, held_ms: u32) {
        self.ms[self.ended as usize % KEPT] = held_ms;
        // The next place stays the same.
        self.ended = if self.ended == u32::MAX { u32::MAX - KEPT as u32 + 1 } else { self.ended + 1 };
    }

    /// The holds that are kept, in no particular order.
    pub fn recent(&self) -> &[u32] {
        &self.ms[..KEPT.min(self.ended as usize)]
    }

    /// How long the key is held; `None` if there are too few holds to tell.
    pub fn spread(&self) -> Option<Spread> {
        spread(self.recent().to_vec(), ENOUGH, self.recent().len())
    }

    /// How long a waiter still waits behind holders that have had the key for `held_ms`, and behind `turns_ahead` later
    /// ones: what is left of the longest hold, and the sum of the later ones. The sums of the low and of the high values
    /// are wider than the spread of the sum.
    pub fn estimate(&self, held_ms: &[u32], turns_ahead: u32) -> Estimate {
        let holds = self.recent().len() as u32;
        let Some(each) = self.spread() else { return Estimate::None(NoEstimate::TooFewHolds { holds }) };
        let mut wait = Spread { low_ms: 0, median_ms: 0, high_ms: 0, holds };
        for held_ms in held_ms {
            let longer = self.recent().iter().filter(|ms| *ms > held_ms).map(|ms| ms - held_ms).collect();
            let Some(left) = spread(longer, ENOUGH_LONGER, self.recent().len()) else {
                return Estimate::None(NoEstimate::HeldLonger { holds });
            };
            wait.low_ms = wait.low_ms.max(left.low_ms);
            wait.median_ms = wait.median_ms.max(left.median_ms);
            wait.high_ms = wait.high_ms.max(left.high_ms);
        }
        let sum = |first: u32, each: u32| first.saturating_add(each.saturating_mul(turns_ahead));
        Estimate::Within(Spread {
            low_ms: sum(wait.low_ms, each.low_ms),
            median_ms: sum(wait.median_ms, each.median_ms),
            high_ms: sum(wait.high_ms, each.high_ms),
            holds,
        })
    }
}

/// The 10th, the 50th and the 90th percentile; `None` for fewer than `enough` times.
fn spread(mut ms: Vec<u32>, enough: usize, holds: usize) -> Option<Spread> {
    if ms.len() < enough {
        return None;
    }
    ms.sort_unstable();
    let last = ms.len() - 1;
    let (low_ms, median_ms) = (ms[last / 10], ms[last / 2]);
    Some(Spread { low_ms, median_ms, high_ms: ms[(last * 9).div_ceil(10)], holds: holds as u32 })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(ms: impl IntoIterator<Item = u32>) -> Holds {
        let mut holds = Holds::default();
        ms.into_iter().for_each(|ms| holds.add(ms));
        holds
    }

    #[test]
    fn the_oldest_hold_is_forgotten_first() {
        let mut recent = of(0..40).recent().to_vec();
        recent.sort_unstable();
        assert_eq!(recent, (8..40).collect::<Vec<_>>());
        let mut many = Holds { ended: u32::MAX - 1, ..of(0..40) };
        (100..140).for_each(|ms| many.add(ms));
        let mut recent = many.recent().to_vec();
        recent.sort_unstable();
        assert_eq!(recent, (108..140).collect::<Vec<_>>());
    }

    #[test]
    fn nothing_is_estimated_from_a_few_holds() {
        assert!(of(0..9).spread().is_none());
        assert_eq!(of(0..9).estimate(&[], 1), Estimate::None(NoEstimate::TooFewHolds { holds: 9 }));
        assert_eq!(of(0..10).spread().map(|spread| spread.holds), Some(10));
    }

    #[test]
    fn later_positions_wait_for_the_holds_of_the_waiters_ahead() {
        let holds = of((1..=11).map(|n| n * 100));
        let each = Spread { low_ms: 200, median_ms: 600, high_ms: 1_000, holds: 11 };
        assert_eq!(holds.spread(), Some(each));
        let twice = Spread { low_ms: 400, median_ms: 1_200, high_ms: 2_000, holds: 11 };
        assert_eq!(holds.estimate(&[], 2), Estimate::Within(twice));
        assert_eq!(holds.estimate(&[0], 1), Estimate::Within(twice));
    }

    #[test]
    fn only_longer_holds_tell_what_is_left_of_a_present_one() {
        let holds = of((1..=11).map(|n| n * 100));
        // 700 to 1,100 are longer than 600 by 100 to 500.
        let left = Spread { low_ms: 100, median_ms: 300, high_ms: 500, holds: 11 };
        assert_eq!(holds.estimate(&[600], 0), Estimate::Within(left));
        assert_eq!(holds.estimate(&[600, 100], 0), holds.estimate(&[100, 600], 0));
        assert_eq!(holds.estimate(&[700], 0), Estimate::None(NoEstimate::HeldLonger { holds: 11 }));
    }
}
