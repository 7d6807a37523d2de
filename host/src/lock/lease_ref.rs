//! The identity of a lease.

use std::sync::Arc;

use super::{Key, Token};

/// Identifies one grant to the store. Operations on the lease succeed only if the reference matches a holder of
/// every key.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LeaseRef {
    /// The keys of the grant in the order of the store: sorted, without duplicates.
    pub keys: Arc<[Key]>,
    /// The random number of the grant: the `attempt` of its claim.
    pub nonce: u64,
    /// The token of the lease. If an earlier version of the program gave the keys different tokens, this is the
    /// token of the first key. `None`: the nonce alone identifies the grant.
    pub token: Option<Token>,
    /// The authenticated client that refers to the lease: it cannot use the lease of another one. See
    /// [`LeaseRef::is_allowed`].
    pub principal: Option<Arc<str>>,
}

impl LeaseRef {
    /// Whether a lease of the client `owner` can be used with this reference. A lease that was granted without
    /// authentication belongs to every client that knows its id. A reference without a principal is that of a proxy, or
    /// of a client of a proxy that asks nobody for credentials.
    pub fn is_allowed(&self, owner: &Option<Arc<str>>) -> bool {
        self.principal.is_none() || owner.is_none() || *owner == self.principal
    }
}
