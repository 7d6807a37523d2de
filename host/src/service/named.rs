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
