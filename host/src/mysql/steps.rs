//! Whether the server's clock has been set.
//!
//! Leases end by the server's clock, and their holders count on their own. Where the server's is
//! set forward, leases look expired that are not. So the difference between the two clocks is
//! followed: each answer bounds it from both sides, whatever the network's delay was.

use crate::lock::{Instant, ServerTime};

/// How far the server's clock may run ahead unnoticed, in microseconds.
pub const MARGIN_US: u64 = crate::lock::record::UNNOTICED_US;

/// How much the rates of two clocks may differ: a clock that is being corrected runs up to 500
/// parts in a million faster, and so may the other.
pub const DRIFT_PER_MILLION: u64 = 1_000;
const US_PER_US_OF_DRIFT: u64 = 1_000_000 / DRIFT_PER_MILLION;

/// The difference between the server's clock and our own, and when it last jumped forward.
#[derive(Debug, Default)]
pub struct ClockSteps {
    bounds: Option<Bounds>,
    stepped_at: Option<Instant>,
}

/// Server time minus own time, in microseconds: no less than `low` and no more than `high`.
#[derive(Clone, Copy, Debug)]
struct Bounds {
    low: i64,
    high: i64,
    at: Instant,
}

/// What one look at the server's clock has shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    None,
    /// The clock was set forward by at least this many microseconds.
    Forward(u64),
    /// Set back: leases last longer than they should, and no two holders come of it.
    Back(u64),
}

impl ClockSteps {
    /// The server's clock said `server` at some moment between `before` and `after` on our own.
    pub fn observe(&mut self, server: ServerTime, before: Instant, after: Instant) -> Step {
        let seen = Bounds {
            low: server.0.cast_signed() - after.0.cast_signed(),
            high: server.0.cast_signed() - before.0.cast_signed(),
            at: after,
        };
        let Some(known) = self.bounds else {
            self.bounds = Some(seen);
            return Step::None;
        };
        let known = known.drifted(after);
        let margin = MARGIN_US.cast_signed();
        if seen.low > known.high + margin {
            self.bounds = Some(seen);
            self.stepped_at = Some(after);
            return Step::Forward((seen.low - known.high).cast_unsigned());
        }
        if seen.high < known.low - margin {
            self.bounds = Some(seen);
            return Step::Back((known.low - seen.high).cast_unsigned());
        }
        // The upper bound only ever falls (but for drift), so that many small steps add up to one.
        let high = known.high.min(seen.high);
        self.bounds = Some(Bounds { low: known.low.max(seen.low).min(high), high, at: known.at });
        Step::None
    }

    /// Whether a lease may be believed expired, whose end was at most `span_us` away when it was
    /// last set: true unless the clock was set forward within that time.
    pub fn trusts_expiry(&self, span_us: u64, now: Instant) -> bool {
        self.stepped_at.is_none_or(|stepped| now.us_since(stepped) > span_us.saturating_add(MARGIN_US))
    }

    /// The earliest and the latest that the server's clock can say at `own`, unless it is set; `None`
    /// before it was looked at.
    pub fn server_time(&self, own: Instant) -> Option<(ServerTime, ServerTime)> {
        let bounds = self.bounds?.drifted(own);
        let at = |offset: i64| ServerTime(own.0.saturating_add_signed(offset));
        Some((at(bounds.low - 1), at(bounds.high + 1)))
    }

    /// Another server: its clock has nothing to do with the last one's.
    pub fn forget(&mut self) {
        *self = ClockSteps::default();
    }
}

impl Bounds {
    /// What the bounds may have become by `now`.
    fn drifted(self, now: Instant) -> Bounds {
        // In whole microseconds of drift: the rest of the time is left for the next look.
        let drift = now.us_since(self.at) / US_PER_US_OF_DRIFT;
        let at = self.at.plus_us(drift * US_PER_US_OF_DRIFT);
        let drift = drift.cast_signed();
        Bounds { low: self.low - drift, high: self.high + drift, at }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: u64 = 1_700_000_000_000_000;
    const SECOND: u64 = 1_000_000;

    fn look(steps: &mut ClockSteps, own: u64, server: u64, delay: u64) -> Step {
        steps.observe(ServerTime(START + server), Instant(own), Instant(own + delay))
    }

    #[test]
    fn delays_are_not_steps() {
        let mut steps = ClockSteps::default();
        assert_eq!(look(&mut steps, 0, 0, 100), Step::None);
        assert_eq!(look(&mut steps, SECOND, 3 * SECOND, 2 * SECOND + 50), Step::None);
        assert_eq!(look(&mut steps, 4 * SECOND, 4 * SECOND, 2 * SECOND), Step::None);
        assert!(steps.trusts_expiry(SECOND, Instant(6 * SECOND)));
    }

    #[test]
    fn a_step_forward_is_in_doubt_for_the_span_of_a_lease() {
        let mut steps = ClockSteps::default();
        look(&mut steps, 0, 0, 100);
        assert!(matches!(look(&mut steps, SECOND, 31 * SECOND, 100), Step::Forward(29_900_000..)));
        assert!(!steps.trusts_expiry(10 * SECOND, Instant(11 * SECOND)));
        assert!(steps.trusts_expiry(10 * SECOND, Instant(12 * SECOND)));
        assert_eq!(look(&mut steps, 2 * SECOND, 32 * SECOND, 100), Step::None);
    }

    #[test]
    fn many_looks_narrow_the_time_down() {
        let mut steps = ClockSteps::default();
        assert!(steps.server_time(Instant(0)).is_none());
        look(&mut steps, 0, 5_000, 5_100);
        look(&mut steps, 10_000, 10_050, 9_000);
        let (earliest, latest) = steps.server_time(Instant(20_000)).expect("it was looked at");
        assert!(earliest.0 <= START + 20_000 && START + 20_000 <= latest.0);
        assert!(latest.0 - earliest.0 < 300);
    }

    #[test]
    fn small_steps_add_up() {
        let mut steps = ClockSteps::default();
        look(&mut steps, 0, 0, 100);
        let seen = (1..10).map(|n| look(&mut steps, n * SECOND, n * (SECOND + 40_000), 100));
        assert!(seen.into_iter().any(|step| matches!(step, Step::Forward(_))));
    }

    #[test]
    fn a_step_back_leaves_expiry_trusted() {
        let mut steps = ClockSteps::default();
        look(&mut steps, 60 * SECOND, 60 * SECOND, 100);
        assert!(matches!(look(&mut steps, 61 * SECOND, 31 * SECOND, 100), Step::Back(_)));
        assert!(steps.trusts_expiry(10 * SECOND, Instant(61 * SECOND)));
    }

    #[test]
    fn looking_often_does_not_forbid_drift() {
        let mut steps = ClockSteps::default();
        for n in 0..2_000_000 {
            assert_eq!(look(&mut steps, n * 400, n * 400 + n * 400 / 2_000, 100), Step::None);
        }
    }

    #[test]
    fn slow_correction_is_followed() {
        let mut steps = ClockSteps::default();
        for n in 0..10_000 {
            assert_eq!(look(&mut steps, n * SECOND, n * (SECOND + 400), 100), Step::None);
        }
    }
}
