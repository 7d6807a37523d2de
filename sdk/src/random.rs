/// Pseudo-random numbers from the `seed` of a request or queue. The same seed gives the same numbers, so a decision
/// that uses them can be replayed.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// A generator that starts from `seed`.
    pub fn new(seed: u32) -> Random {
        Random(u64::from(seed))
    }

    /// The next number between `low` and `high`, both included. If `high` is less than `low`, the result is `low`.
    pub fn between(&mut self, low: u32, high: u32) -> u32 {
        let width = u64::from(high.saturating_sub(low)) + 1;
        // splitmix64
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let offset = (((mixed ^ (mixed >> 31)) >> 32) * width) >> 32;
        low + u32::try_from(offset).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_lie_inside_their_bounds_and_spread() {
        let drawn: Vec<u32> = (0..1000).map(|seed| Random::new(seed).between(10, 19)).collect();
        assert!(drawn.iter().all(|n| (10..=19).contains(n)));
        for n in 10..=19 {
            assert!(drawn.iter().filter(|&&m| m == n).count() > 50, "{n} is rare");
        }
        assert_eq!(Random::new(1).between(9, 3), 9);
        let mut random = Random::new(7);
        assert_ne!(random.between(0, u32::MAX), random.between(0, u32::MAX));
    }
}
