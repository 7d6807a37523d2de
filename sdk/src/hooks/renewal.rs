//! `renewal`: decides whether a lease that the proxy keeps alive is extended.

use crate::Policy;
use crate::bindings::renewal::exports::lockkeeper::policy::renewal;
pub use renewal::{Decision, Expiring};

/// Extends the lease by its ttl while the client is alive, until the longest hold.
pub fn renewal_due(expiring: &Expiring) -> Decision {
    match expiring.max_hold.saturating_sub(expiring.held) {
        left if left > 0 && expiring.client_alive => Decision::Extend(expiring.ttl.min(left)),
        _ => Decision::Lapse,
    }
}

impl<P: Policy> renewal::Guest for P {
    fn due(settings: Vec<u8>, expiring: Expiring) -> Decision {
        P::renewal_due(&super::settings::decode::<P::Settings>(&settings), &expiring)
    }
}
