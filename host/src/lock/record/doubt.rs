//! Whether a lease has ended, if the store's clock says so but may have been set forward.

use super::{Holder, UNNOTICED_US};
use crate::lock::ServerTime;

/// A step of the store's clock. A lease from before the step may appear to end too early: by the size of the
/// step, but by no more than the lease time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Doubt {
    /// How far the clock may have been set forward, in microseconds; by nothing, if nothing is in doubt.
    pub by_us: u64,
    /// The store's clock when the step was noticed. Leases that were granted later are not affected.
    pub since: ServerTime,
    /// How long ago that was, in microseconds, by a clock that is never set.
    pub ago_us: u64,
    /// The longest possible lease time, in microseconds.
    pub longest_us: u64,
}

impl Doubt {
    /// Whether the holder no longer blocks the key at `now`, if it does nothing more.
    pub fn has_ended(&self, holder: &Holder, now: ServerTime) -> bool {
        let free_at = holder.free_at();
        if free_at > now || self.by_us == 0 || holder.since > self.since {
            return free_at <= now;
        }
        let span = holder.until.us_since(holder.since).min(self.longest_us);
        let after = free_at.us_since(holder.until).max(UNNOTICED_US);
        free_at.plus_us(self.by_us) <= now || self.ago_us > span + after
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lock::record::{Holder, Tag};
    use crate::lock::{Mode, Token};

    const SECOND: u64 = 1_000_000;

    fn holder(since: u64, until: u64) -> Holder {
        Holder {
            nonce: 1,
            owner: "me".into(),
            mode: Mode::Exclusive,
            token: Token(1),
            lowest_token: Token(1),
            keys: 1,
            since: ServerTime(since * SECOND),
            until: ServerTime(until * SECOND),
            ttl_ms: 10_000,
            at_least_until: ServerTime(0),
            delay_ms: 0,
            keep_ms: None,
            released_by: None,
            levels: Vec::new(),
            tag: Tag::default(),
        }
    }

    fn ended(by: u64, ago: u64, holder: &Holder, now: u64) -> bool {
        let (by_us, since, ago_us) = (by * SECOND, ServerTime(1_000 * SECOND), ago * SECOND);
        let doubt = Doubt { by_us, since, ago_us, longest_us: 60 * SECOND };
        doubt.has_ended(holder, ServerTime(now * SECOND))
    }

    #[test]
    fn a_lease_counts_as_ended_a_margin_after_its_end() {
        let lease = holder(990, 1_000);
        assert!(!Doubt::default().has_ended(&lease, lease.until));
        assert!(Doubt::default().has_ended(&lease, lease.free_at()));
    }

    #[test]
    fn a_lease_from_before_a_clock_step_goes_on_for_the_length_of_the_step() {
        let lease = holder(990, 1_000);
        assert!(!ended(5, 4, &lease, 1_004));
        assert!(ended(5, 6, &lease, 1_006));
    }

    #[test]
    fn a_clock_step_extends_a_lease_by_at_most_its_ttl() {
        assert!(!ended(3_600, 10, &holder(990, 1_000), 1_010));
        assert!(ended(3_600, 11, &holder(990, 1_000), 1_011));
        let renewed_for_long = holder(100, 1_000);
        assert!(!ended(3_600, 60, &renewed_for_long, 1_060));
        assert!(ended(3_600, 61, &renewed_for_long, 1_061), "no lease is set for longer");
    }

    #[test]
    fn a_lease_from_after_a_clock_step_is_not_extended() {
        assert!(ended(3_600, 3, &holder(1_001, 1_004), 1_005));
        assert!(!ended(3_600, 3, &holder(1_000, 1_004), 1_005));
    }
}
