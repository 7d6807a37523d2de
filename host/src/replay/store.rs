//! How long the store of a run takes: as the recorded store did.

use super::draw::drawn;
use crate::recording::StoreTimes;

/// How long the store takes if the recording does not say, in microseconds.
const ASSUMED_US: u64 = 1_000;

/// The times of a store.
#[derive(Debug)]
pub struct StoreModel {
    /// In the order of time, since the first request of the recording.
    periods: Vec<Period>,
}

#[derive(Debug)]
struct Period {
    until_us: u64,
    /// The times at evenly spread parts of all answers.
    times_us: Vec<u64>,
}

/// How many times a period has.
const TIMES: usize = 64;

impl StoreModel {
    /// A store that always takes as long.
    pub fn constant(us: u64) -> StoreModel {
        StoreModel { periods: vec![Period { until_us: u64::MAX, times_us: vec![us] }] }
    }

    /// A store that takes as long as the recorded one did. `began_us`: the time of the first request.
    pub fn recorded(times: &[StoreTimes], began_us: u64) -> StoreModel {
        if times.is_empty() {
            return StoreModel::constant(ASSUMED_US);
        }
        let period = |times: &StoreTimes| Period {
            until_us: times.at_us.saturating_sub(began_us),
            times_us: spread(times),
        };
        StoreModel { periods: times.iter().map(period).collect() }
    }

    /// How long the store takes for the question `n` that is asked at `at_us`. After the end of the recording, the store
    /// takes as long as before it.
    pub fn takes_us(&self, at_us: u64, n: u64) -> u64 {
        let at = self.periods.partition_point(|period| period.until_us < at_us);
        let Some(period) = self.periods.get(at).or(self.periods.last()) else { return ASSUMED_US };
        drawn(&period.times_us, n).copied().unwrap_or(ASSUMED_US)
    }
}

/// Times with nearly the recorded quantiles. What the mean has more than these is in the longest time: some answers took much
/// longer than all others.
fn spread(times: &StoreTimes) -> Vec<u64> {
    let quantiles: Vec<(f64, f64)> =
        StoreTimes::PARTS.into_iter().zip(times.quantiles_us.map(|us| us as f64)).collect();
    let at = |part: f64| {
        let after = quantiles.iter().position(|(known, _)| *known >= part);
        match after {
            Some(0) => quantiles[0].1,
            None => quantiles[quantiles.len() - 1].1,
            Some(n) => {
                let ((from, low), (to, high)) = (quantiles[n - 1], quantiles[n]);
                low + (high - low) * (part - from) / (to - from)
            }
        }
    };
    let mut drawn: Vec<u64> = (0..TIMES).map(|n| at((n as f64 + 0.5) / TIMES as f64) as u64).collect();
    let excess_us = (times.mean_us * TIMES as u64).saturating_sub(drawn.iter().sum());
    if let Some(longest) = drawn.last_mut() {
        *longest += excess_us;
    }
    drawn
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(at_us: u64, us: u64) -> StoreTimes {
        StoreTimes { at_us, mean_us: us * 2, quantiles_us: [us / 2, us, us, us, us, us] }
    }

    #[test]
    fn the_store_takes_as_long_as_it_did_at_that_time() {
        let store = StoreModel::recorded(&[times(11_000, 1_000), times(21_000, 10_000)], 1_000);
        let mean = |at_us| (0..10_000).map(|n| store.takes_us(at_us, n)).sum::<u64>() / 10_000;
        let near = |mean: u64, us: u64| mean.abs_diff(us) < us / 20;
        assert!(near(mean(0), 2_000) && near(mean(10_000), 2_000), "{}", mean(0));
        assert!(near(mean(10_001), 20_000) && near(mean(99_000_000), 20_000), "{}", mean(10_001));
        assert_eq!(store.takes_us(5, 3), store.takes_us(5, 3));
    }

    #[test]
    fn a_recording_without_times_has_a_store_that_takes_a_millisecond() {
        assert_eq!(StoreModel::recorded(&[], 0).takes_us(7, 7), ASSUMED_US);
    }
}
