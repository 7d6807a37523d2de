//! Requests under way that are named differently from now on.

use std::sync::Arc;

use super::core::Msg;
use super::transition::{Shadow, watch_shadows};
use super::{Request, Service, acquire};
use crate::lock::Key;

/// A lease whose request has other keys now.
pub struct Renamed {
    pub nonce: u64,
    /// The keys that the lease holds.
    pub held: Arc<[Key]>,
    /// The keys that its request would be granted now.
    pub named: Arc<[Key]>,
}

impl Service {
    /// The keys that a request would be locked by. `None` where its policy names none.
    pub fn keys_of(&self, request: &Request) -> Option<Arc<[Key]>> {
        let policy = self.shared.policy_for(request);
        let plan = self.shared.policies.get(policy)?.plan_again(&acquire::asked(request)).ok()?;
        self.shared.within_reach(policy, plan).ok().map(|plan| plan.keys)
    }

    /// Keeps the new keys of these leases from everybody until the leases end. What is asked for after this returns
    /// finds them taken.
    pub fn rename(&self, leases: Vec<Renamed>) {
        let lacks = |lease: &Renamed| lease.named.iter().any(|key| !lease.held.contains(key));
        let shadow = |lease: Renamed| Shadow { nonce: lease.nonce, old: lease.held, new: lease.named };
        let shadows: Vec<Shadow> = leases.into_iter().filter(lacks).map(shadow).collect();
        if !shadows.is_empty() {
            self.shared.tell(Msg::Shadows(shadows.clone()));
            watch_shadows(&self.shared, shadows);
        }
    }
}
