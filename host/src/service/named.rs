//! Whether every lease in the store has the keys that the live generations name. A proxy that starts with the same
//! generations need not survey the leases then.

use crate::lock::maps::HashMap;

/// What is known of the names of all leases.
#[derive(Default)]
pub(super) struct Named {
    /// The numbers of the generations by which the leases were surveyed, by policy.
    surveyed: HashMap<Box<str>, u64>,
    /// Some of the leases lack keys.
    are_lacking: bool,
}

impl Named {
    /// Notes a survey by a generation that is live from now on. `are_lacking`: whether a lease lacks keys, by this
    /// survey or an earlier one.
    pub fn surveyed(&mut self, policy: &str, generation: u64, are_lacking: bool) {
        self.surveyed.insert(policy.into(), generation);
        self.are_lacking = are_lacking;
    }

    /// Whether every lease has the keys that these generations name, each of them a policy and a number.
    pub fn has_all<'a>(&self, mut live: impl Iterator<Item = (&'a str, u64)>) -> bool {
        !self.are_lacking && live.all(|(name, number)| self.surveyed.get(name) == Some(&number))
    }

    /// Takes over that every lease has the keys that these generations name.
    pub fn take_over<'a>(&mut self, live: impl Iterator<Item = (&'a str, u64)>) {
        self.surveyed = live.map(|(name, number)| (name.into(), number)).collect();
    }

    /// Notes that a lease which lacked keys is over.
    pub fn lease_over(&mut self, are_lacking: bool) {
        self.are_lacking = are_lacking;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_leases_are_named_after_a_survey_by_each_live_generation_that_found_none_lacking() {
        let mut named = Named::default();
        let live = |orders: u64| [("orders", orders), ("jobs", 1)].into_iter();
        assert!(!named.has_all(live(1)), "nothing was surveyed");
        named.surveyed("orders", 1, false);
        assert!(!named.has_all(live(1)), "one policy was not");
        named.surveyed("jobs", 1, true);
        assert!(!named.has_all(live(1)), "a lease lacks keys");
        named.lease_over(false);
        assert!(named.has_all(live(1)));
        assert!(!named.has_all(live(2)), "the next generation was not");
        named.take_over(live(2));
        assert!(named.has_all(live(2)) && !named.has_all(live(1)));
    }
}
