//! Detects whether the server's clock was set.
//!
//! Leases end by the server's clock, but their holders count on their own clocks. If the server's clock is
//! set forward, running leases look expired. So this module follows the difference between the server's clock
//! and our own. Each answer of the server bounds the difference from both sides, whatever the network delay
//! was.
//!
//! This module covers what a process notices while it runs. [`clock_watch`](super::clock_watch) covers steps
//! while no process watches, and what a starting process must know.

use crate::lock::record::Doubt;
use crate::lock::{Instant, ServerTime};

/// How far the server's clock may run ahead without being noticed, in microseconds.
pub const MARGIN_US: u64 = crate::lock::record::UNNOTICED_US;

/// If a process did not read the clock for this long, in microseconds, the clock may have been set back and
/// forward again meanwhile, with only other proxies noticing.
const UNWATCHED_US: u64 = 10_000_000;

/// How long a step forward counts as noticed just now, in microseconds. Suppose that the clock is set
/// forward, back, and forward again. One proxy does not read it during the first two steps, another one not
/// during the last two, so neither notices the step back. Leases that the first proxy grants in between look
/// ended to the second, which has noticed only the first step.
pub const UNSEEN_US: u64 = 2 * UNWATCHED_US;

/// For this long, in microseconds, a clock that was set back is expected to be set forward again. By then
/// every other proxy has read the clock, or knows that it was away.
const SET_BACK_KEPT_US: u64 = 3 * UNWATCHED_US;

/// How long the record shows the clock as if it was not set back, in microseconds. Proxies that have noticed
/// the step back grant by the higher clock for longer than this.
const SET_BACK_SAID_US: u64 = 2 * UNWATCHED_US;

/// How much the rates of two clocks may differ. A clock that is being corrected runs up to 500 parts in a
/// million faster, and so may the other.
pub const DRIFT_PER_MILLION: u64 = 1_000;
const US_PER_US_OF_DRIFT: u64 = 1_000_000 / DRIFT_PER_MILLION;

/// The difference between the server's clock and our own, and the last steps of the server's clock.
#[derive(Clone, Debug, Default)]
pub struct ClockSteps {
    bounds: Option<Bounds>,
    /// The bounds of the previous server's clock, until this server's clock was read.
    earlier: Option<Bounds>,
    jump: Option<Jump>,
    peak: Option<Peak>,
    /// Whether other proxies' records are known, and the clock was read at least every [`UNWATCHED_US`] since.
    is_watched: bool,
    wait: Option<Wait>,
    /// The longest lease, in microseconds.
    longest_us: u64,
}

/// The server's clock was set forward, or may have been.
#[derive(Clone, Copy, Debug)]
struct Jump {
    by_us: u64,
    /// When it was noticed, by both clocks.
    since: ServerTime,
    at: Instant,
}

/// No lease is granted before `from`, which is `until` on our own clock. Our own clock is never set.
#[derive(Clone, Copy, Debug)]
struct Wait {
    from: ServerTime,
    until: Instant,
}

/// Server time minus own time, in microseconds: no less than `low` and no more than `high`.
#[derive(Clone, Copy, Debug)]
struct Bounds {
    low: i64,
    high: i64,
    at: Instant,
    /// When the clock was last read.
    seen: Instant,
}

/// The bounds from before the clock was set back, like [`Bounds`].
#[derive(Clone, Copy, Debug)]
struct Peak {
    low: i64,
    high: i64,
    /// When it was noticed.
    at: Instant,
    /// Whether this process noticed the step when it happened.
    is_seen: bool,
}

/// The record of a clock that was set back, for proxies that start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetBack {
    /// How many microseconds ahead the clock would be. It was set back by at least as much.
    By(u64),
    /// It is unknown when the clock was set back, so the record of other proxies stays.
    Unknown,
}

/// The result of one reading of the server's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClockStep {
    None,
    /// The clock was set forward by between `at_least_us` and `at_most_us` microseconds.
    Forward {
        at_least_us: u64,
        at_most_us: u64,
    },
    /// The clock was set back by at least this, in microseconds. Leases last longer than they should. See
    /// [`ClockSteps::set_back_us`].
    Back(u64),
}

impl ClockSteps {
    /// `longest_us` is the longest lease, in microseconds.
    pub fn new(longest_us: u64) -> ClockSteps {
        ClockSteps { longest_us, ..ClockSteps::default() }
    }

    /// Whether every step of the clock is known: other proxies' records were read, and the clock was read
    /// at least every [`UNWATCHED_US`] since.
    pub fn is_watched(&self) -> bool {
        self.is_watched
    }

    /// Notes that other proxies' records are known now.
    pub fn begin(&mut self) {
        self.is_watched = true;
    }

    /// By how much the server's clock was set back recently, at most. Another proxy may have read it before
    /// the step back, and next after it was set forward by as much; it notices nothing. So until every proxy
    /// has read the clock, grants and answers must also hold for a clock that is ahead by this much.
    pub fn set_back_us(&self, now: Instant) -> u64 {
        self.below_peak(now).map_or(0, |(peak, bounds)| saturating(peak.high - bounds.low))
    }

    /// The record of a clock that was set back.
    pub fn recorded(&self, now: Instant) -> SetBack {
        match self.below_peak(now) {
            Some((peak, bounds)) if peak.is_seen => match now.us_since(peak.at) <= SET_BACK_SAID_US {
                true => SetBack::By(saturating(peak.low - bounds.high)),
                false => SetBack::By(0),
            },
            Some(_) => SetBack::Unknown,
            None => SetBack::By(0),
        }
    }

    fn below_peak(&self, now: Instant) -> Option<(Peak, Bounds)> {
        let peak = self.peak.filter(|peak| now.us_since(peak.at) <= SET_BACK_KEPT_US)?;
        Some((peak, self.bounds.or(self.earlier)?.drifted(now)))
    }

    /// Notes that the server's clock has shown `seen` before. It shows `now` at some moment between `before`
    /// and `after` on our own clock.
    pub fn note_seen(&mut self, seen: ServerTime, now: ServerTime, before: Instant, after: Instant) {
        // Another proxy may have recorded it a moment after this reading.
        if seen <= now.plus_us(MARGIN_US) {
            return;
        }
        let low = seen.0.cast_signed() - after.0.cast_signed();
        // The clock ran on from there until it was set back.
        let high = (seen.0 + UNWATCHED_US).cast_signed() - before.0.cast_signed();
        self.set_back_from(Peak { low, high, at: after, is_seen: false });
    }

    fn set_back_from(&mut self, from: Peak) {
        let known = self.peak.filter(|peak| from.at.us_since(peak.at) <= SET_BACK_KEPT_US).unwrap_or(from);
        let (low, high) = (known.low.max(from.low), known.high.max(from.high));
        self.peak = Some(Peak { low, high, is_seen: known.is_seen && from.is_seen, ..from });
    }

    /// Takes over the records of other proxies: by how much the clock may have been set forward, and the time
    /// that it showed then. The clock shows `now` after `before` on our own clock.
    pub fn inherit(&mut self, by_us: u64, since: ServerTime, now: ServerTime, before: Instant) {
        if by_us == 0 {
            return;
        }
        let at = Instant(before.0.saturating_sub(now.us_since(since)));
        let own = self.jump.filter(|_| self.doubt(before).by_us > 0).unwrap_or(Jump { by_us, since, at });
        self.jump =
            Some(Jump { by_us: by_us.max(own.by_us), since: since.max(own.since), at: at.max(own.at) });
    }

    /// Takes a reading: the server's clock showed `server` at some moment between `before` and `after` on our
    /// own clock.
    pub fn observe(&mut self, server: ServerTime, before: Instant, after: Instant) -> ClockStep {
        let seen = Bounds {
            low: server.0.cast_signed() - after.0.cast_signed(),
            high: server.0.cast_signed() - before.0.cast_signed(),
            at: after,
            seen: before,
        };
        let Some(known) = self.bounds.or(self.earlier) else {
            self.bounds = Some(seen);
            return ClockStep::None;
        };
        let is_missed = after.us_since(known.seen) > UNWATCHED_US;
        self.is_watched &= !is_missed;
        let known = known.drifted(after);
        let margin = MARGIN_US.cast_signed();
        let step = if seen.low > known.high + margin {
            let at_least_us = (seen.low - known.high).cast_unsigned();
            let at_most_us = (seen.high - known.low).cast_unsigned();
            let by_us = self.doubt(after).by_us + at_most_us;
            self.jump = Some(Jump { by_us, since: server, at: after });
            ClockStep::Forward { at_least_us, at_most_us }
        } else if seen.high < known.low - margin {
            let Bounds { low, high, .. } = known;
            self.set_back_from(Peak { low, high, at: after, is_seen: !is_missed });
            ClockStep::Back((known.low - seen.high).cast_unsigned())
        } else {
            ClockStep::None
        };
        // The upper bound only falls, except for drift, so that many small steps add up.
        let high = known.high.min(seen.high);
        let both = Bounds { low: known.low.max(seen.low).min(high), high, at: known.at, seen: before };
        let is_new = step != ClockStep::None || self.earlier.take().is_some();
        self.bounds = Some(if is_new { seen } else { both });
        step
    }

    /// How far to doubt that leases that look ended have ended.
    pub fn doubt(&self, now: Instant) -> Doubt {
        let Some(Jump { by_us, since, at }) = self.jump else { return Doubt::default() };
        let ago_us = now.us_since(at).saturating_sub(UNSEEN_US);
        if ago_us > self.longest_us.saturating_add(MARGIN_US) {
            return Doubt::default();
        }
        Doubt { by_us, since: since.plus_us(UNSEEN_US), ago_us, longest_us: self.longest_us }
    }

    /// Whether no step forward is known in the last `us` microseconds.
    pub fn is_steady(&self, now: Instant, us: u64) -> bool {
        self.jump.is_none_or(|jump| now.us_since(jump.at) > us)
    }

    /// Notes that no lease is granted before `from` on the server's clock, which showed `now` after `before`
    /// on our own clock. The wait does not get shorter if the server's clock is set later.
    pub fn note_wait(&mut self, from: ServerTime, now: ServerTime, before: Instant) {
        if self.wait.is_none_or(|wait| wait.from != from) {
            let until = before.plus_us(from.us_since(now)).max(self.waits_until());
            self.wait = Some(Wait { from, until });
        }
    }

    /// Until when no lease is granted, on our own clock.
    pub fn waits_until(&self) -> Instant {
        self.wait.map_or(Instant(0), |wait| wait.until)
    }

    /// The earliest and the latest time that the server's clock can show at `own`, unless it is set; `None`
    /// before the first reading.
    pub fn server_time(&self, own: Instant) -> Option<(ServerTime, ServerTime)> {
        let bounds = self.bounds?.drifted(own);
        let at = |offset: i64| ServerTime(own.0.saturating_add_signed(offset));
        Some((at(bounds.low - 1), at(bounds.high + 1)))
    }

    /// Begins to follow another server's clock. If it is ahead of the previous server's clock, leases look
    /// expired too early, as after a step.
    pub fn change_server(&mut self) {
        self.earlier = self.bounds.take().or(self.earlier);
        self.wait = None;
    }
}

fn saturating(us: i64) -> u64 {
    u64::try_from(us).unwrap_or(0)
}

impl Bounds {
    /// The bounds at `now`, widened by drift.
    fn drifted(self, now: Instant) -> Bounds {
        // In whole microseconds of drift; the rest of the time is left for the next call.
        let drift = now.us_since(self.at) / US_PER_US_OF_DRIFT;
        let at = self.at.plus_us(drift * US_PER_US_OF_DRIFT);
        let drift = drift.cast_signed();
        Bounds { low: self.low - drift, high: self.high + drift, at, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: u64 = 1_700_000_000_000_000;
    const SECOND: u64 = 1_000_000;

    fn look(steps: &mut ClockSteps, own: u64, server: u64, delay: u64) -> ClockStep {
        steps.observe(ServerTime(START + server), Instant(own), Instant(own + delay))
    }

    #[test]
    fn delays_are_not_taken_for_clock_steps() {
        let mut steps = ClockSteps::default();
        assert_eq!(look(&mut steps, 0, 0, 100), ClockStep::None);
        assert_eq!(look(&mut steps, SECOND, 3 * SECOND, 2 * SECOND + 50), ClockStep::None);
        assert_eq!(look(&mut steps, 4 * SECOND, 4 * SECOND, 2 * SECOND), ClockStep::None);
        assert_eq!(steps.doubt(Instant(6 * SECOND)), Doubt::default());
    }

    #[test]
    fn a_step_forward_leaves_leases_in_doubt_for_the_longest_ttl() {
        let mut steps = ClockSteps::new(10 * SECOND);
        look(&mut steps, 0, 0, 100);
        let step = look(&mut steps, SECOND, 31 * SECOND, 100);
        assert!(
            matches!(step, ClockStep::Forward { at_least_us: 29_900_000.., at_most_us: ..30_100_000 }),
            "{step:?}"
        );
        let doubt = steps.doubt(Instant(11 * SECOND));
        assert!((30 * SECOND..31 * SECOND).contains(&doubt.by_us), "{doubt:?}");
        assert_eq!(doubt.since, ServerTime(START + 51 * SECOND));
        assert_eq!(steps.doubt(Instant(32 * SECOND)), Doubt::default());
        assert!(
            !steps.is_steady(Instant(12 * SECOND), 20 * SECOND),
            "longer ago than any lease, and of late"
        );
        assert!(steps.is_steady(Instant(22 * SECOND), 20 * SECOND));
        assert_eq!(look(&mut steps, 2 * SECOND, 32 * SECOND, 100), ClockStep::None);
        look(&mut steps, 3 * SECOND, 43 * SECOND, 100);
        let both = steps.doubt(Instant(3 * SECOND));
        assert!((40 * SECOND..41 * SECOND).contains(&both.by_us), "two steps add up: {both:?}");
    }

    #[test]
    fn a_change_to_a_server_whose_clock_is_ahead_counts_as_a_step() {
        let mut steps = ClockSteps::new(100 * SECOND);
        look(&mut steps, 0, 0, 100);
        steps.change_server();
        assert!(steps.server_time(Instant(SECOND)).is_none(), "of the clock of this one nothing is known");
        assert!(matches!(look(&mut steps, SECOND, 61 * SECOND, 100), ClockStep::Forward { .. }));
        assert!(steps.doubt(Instant(SECOND)).by_us >= 59 * SECOND);
        steps.change_server();
        assert!(matches!(look(&mut steps, 2 * SECOND, SECOND, 100), ClockStep::Back(_)));
        assert!(steps.doubt(Instant(2 * SECOND)).by_us >= 59 * SECOND, "the first step counts still");
        steps.change_server();
        assert_eq!(look(&mut steps, 3 * SECOND, 2 * SECOND + 50_000, 100), ClockStep::None);
        let (earliest, _) = steps.server_time(Instant(3 * SECOND)).expect("it was looked at");
        assert!(
            earliest.0 > START + 2 * SECOND + 40_000,
            "what the other clock said says nothing of this one"
        );
    }

    #[test]
    fn an_inherited_step_does_not_reduce_an_existing_doubt() {
        let mut steps = ClockSteps::new(60 * SECOND);
        look(&mut steps, 0, 0, 100);
        look(&mut steps, SECOND, 41 * SECOND, 100);
        steps.inherit(
            5 * SECOND,
            ServerTime(START + 42 * SECOND),
            ServerTime(START + 42 * SECOND),
            Instant(2 * SECOND),
        );
        let doubt = steps.doubt(Instant(2 * SECOND));
        assert!(doubt.by_us >= 39 * SECOND && doubt.since == ServerTime(START + 62 * SECOND), "{doubt:?}");
    }

    #[test]
    fn a_step_noticed_by_another_proxy_is_inherited() {
        let mut steps = ClockSteps::new(60 * SECOND);
        steps.inherit(5 * SECOND, ServerTime(START), ServerTime(START + 20 * SECOND), Instant(100 * SECOND));
        let doubt = steps.doubt(Instant(110 * SECOND));
        assert_eq!(
            (doubt.by_us, doubt.since, doubt.ago_us),
            (5 * SECOND, ServerTime(START + 20 * SECOND), 10 * SECOND)
        );
        assert_eq!(steps.doubt(Instant(161 * SECOND)), Doubt::default());
    }

    #[test]
    fn a_wait_keeps_its_length_however_the_clock_is_set() {
        let mut steps = ClockSteps::new(60 * SECOND);
        let from = ServerTime(START + 10 * SECOND);
        steps.note_wait(from, ServerTime(START), Instant(SECOND));
        steps.note_wait(from, ServerTime(START + 3_600 * SECOND), Instant(2 * SECOND));
        assert_eq!(steps.waits_until(), Instant(11 * SECOND));
        steps.note_wait(ServerTime(START + SECOND), ServerTime(START), Instant(3 * SECOND));
        assert_eq!(steps.waits_until(), Instant(11 * SECOND), "another wait does not end the first one");
        steps.note_wait(ServerTime(START + 20 * SECOND), ServerTime(START), Instant(2 * SECOND));
        assert_eq!(steps.waits_until(), Instant(22 * SECOND));
    }

    #[test]
    fn more_observations_narrow_the_estimate_of_the_server_time() {
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
        assert!(seen.into_iter().any(|step| matches!(step, ClockStep::Forward { .. })));
    }

    #[test]
    fn a_step_back_leaves_no_expiry_in_doubt() {
        let mut steps = ClockSteps::default();
        look(&mut steps, 60 * SECOND, 60 * SECOND, 100);
        assert!(matches!(look(&mut steps, 61 * SECOND, 31 * SECOND, 100), ClockStep::Back(_)));
        assert_eq!(steps.doubt(Instant(61 * SECOND)), Doubt::default());
    }

    #[test]
    fn a_step_back_counts_for_a_limited_time() {
        let mut steps = ClockSteps::default();
        look(&mut steps, 60 * SECOND, 60 * SECOND, 100);
        assert_eq!(steps.set_back_us(Instant(60 * SECOND)), 0);
        look(&mut steps, 61 * SECOND, 56 * SECOND, 100);
        let by = 5 * SECOND..5 * SECOND + 2_000;
        assert!(by.contains(&steps.set_back_us(Instant(61 * SECOND))));
        assert!(matches!(steps.recorded(Instant(61 * SECOND)), SetBack::By(4_900_000..5_000_000)));
        look(&mut steps, 62 * SECOND, 54 * SECOND, 100);
        assert!(steps.set_back_us(Instant(62 * SECOND)) >= 8 * SECOND, "two steps add up");
        look(&mut steps, 63 * SECOND, 63 * SECOND, 100);
        assert!(steps.set_back_us(Instant(63 * SECOND)) < 3_000, "it is where it was");
        look(&mut steps, 64 * SECOND, 59 * SECOND, 100);
        assert!(steps.set_back_us(Instant(93 * SECOND)) >= 5 * SECOND);
        assert_eq!(
            steps.recorded(Instant(93 * SECOND)),
            SetBack::By(0),
            "who starts now begins when that is over"
        );
        assert_eq!(steps.set_back_us(Instant(95 * SECOND)), 0);
    }

    #[test]
    fn a_recorded_time_ahead_of_the_clock_shows_that_the_clock_was_set_back() {
        let mut steps = ClockSteps::default();
        look(&mut steps, SECOND, SECOND, 100);
        let note = |steps: &mut ClockSteps, seen: u64| {
            let (seen, now) = (ServerTime(START + seen), ServerTime(START + SECOND));
            steps.note_seen(seen, now, Instant(SECOND), Instant(SECOND + 100));
        };
        for said_by_another_one in [SECOND / 2, SECOND + 50_000] {
            note(&mut steps, said_by_another_one);
            assert_eq!(steps.set_back_us(Instant(SECOND)), 0);
        }
        note(&mut steps, 6 * SECOND);
        assert!(steps.set_back_us(Instant(SECOND)) >= 15 * SECOND, "it went on before it was set back");
        assert_eq!(steps.recorded(Instant(SECOND)), SetBack::Unknown);
    }

    #[test]
    fn a_clock_that_was_not_read_for_a_while_is_not_watched_until_the_watch_begins_again() {
        let mut steps = ClockSteps::default();
        assert!(!steps.is_watched());
        steps.begin();
        look(&mut steps, 0, 0, 100);
        look(&mut steps, 9 * SECOND, 9 * SECOND, 100);
        assert!(steps.is_watched());
        look(&mut steps, 20 * SECOND, 20 * SECOND, 100);
        look(&mut steps, 21 * SECOND, 21 * SECOND, 100);
        assert!(!steps.is_watched());
        steps.begin();
        assert!(steps.is_watched());
    }

    #[test]
    fn frequent_observations_do_not_turn_drift_into_a_step() {
        let mut steps = ClockSteps::default();
        for n in 0..2_000_000 {
            assert_eq!(look(&mut steps, n * 400, n * 400 + n * 400 / 2_000, 100), ClockStep::None);
        }
    }

    #[test]
    fn a_slow_correction_of_the_clock_is_no_step() {
        let mut steps = ClockSteps::default();
        for n in 0..10_000 {
            assert_eq!(look(&mut steps, n * SECOND, n * (SECOND + 400), 100), ClockStep::None);
        }
    }
}
