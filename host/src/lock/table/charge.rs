//! What an acquire occupies of the limits of its client.

use std::any::Any;
use std::sync::Arc;

/// What an acquire occupies of the limits of its client. The table does not look inside: it keeps each part as long as
/// the part counts, and then drops it.
#[derive(Clone, Debug, Default)]
pub struct Charge {
    /// Counts until the waiter has its answer. If nobody is left to receive the answer, it counts until the claim is undone.
    pub request: Option<Arc<dyn Any + Send + Sync>>,
    /// Counts as long, and until the lease has ended.
    pub lease: Option<Arc<dyn Any + Send + Sync>>,
}

impl Charge {
    /// The part that counts until the lease has ended.
    pub(super) fn of_lease(&self) -> Charge {
        Charge { request: None, lease: self.lease.clone() }
    }
}
