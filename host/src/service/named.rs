//! Whether every lease in the store has the keys that the live generations name. A proxy that starts with the same
//! generations need not survey the leases then.

use super::context::Service;
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

    /// Notes that a lease which lacked keys is over.
    pub fn lease_over(&mut self, are_lacking: bool) {
        self.are_lacking = are_lacking;
    }
}

impl Service {
    /// Whether every lease in the store has the keys that the live generations of this proxy's policies name for it.
    /// The leases that this proxy cannot see, because a session of another proxy holds them, do not count.
    pub fn has_named_all(&self) -> bool {
        let named = self.shared.named.lock();
        let policies = &self.shared.policies;
        let mut all = policies.names().filter_map(|name| Some((name, policies.get(name)?.number())));
        !named.are_lacking && all.all(|(name, number)| named.surveyed.get(name) == Some(&number))
    }

    /// Takes over from another proxy that [`Service::has_named_all`] holds for the live generations.
    pub fn take_as_named(&self) {
        let mut named = self.shared.named.lock();
        for name in self.shared.policies.names() {
            if let Some(live) = self.shared.policies.get(name) {
                named.surveyed.insert(name.into(), live.number());
            }
        }
    }
}
