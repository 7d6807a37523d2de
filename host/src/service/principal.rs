//! The sender of a lock request.

use std::sync::Arc;

use super::errors::LeaseError;
use crate::auth::{Counted, Identity, OverLimit, Place, Quota};
use crate::config::Verb;
use crate::lock::LeaseRef;
use crate::lock::record::HttpView;

/// The name of the label that tells a policy which authenticated client asks. Clients cannot send it.
pub const PRINCIPAL: &str = "lockkeeper.principal";

/// The label that tells a policy who asks.
pub(super) fn label(name: &str) -> (String, String) {
    (PRINCIPAL.to_owned(), name.to_owned())
}

/// The sender of a lock request, as far as the front knows. It determines the policy, and the policy plans for it.
#[derive(Clone, Debug)]
pub enum Principal {
    /// A client of the lock API. Nothing verifies its identity or the owner that its request names.
    Anonymous(Place),
    /// An authenticated client.
    Client(Identity),
    /// The application behind a guarded route, for one of its requests. The application authenticates its clients.
    Application(RoutedRequest),
}

/// The data of a request through a guarded route.
#[derive(Clone, Debug)]
pub struct RoutedRequest {
    /// The policy of the route.
    pub policy: Arc<str>,
    /// The HTTP request, as the policy sees it.
    pub http: Arc<HttpView>,
}

impl Principal {
    /// A client that nothing is known of.
    pub const ANONYMOUS: Principal = Principal::Anonymous(None);

    /// The request of the application, if the application asks.
    pub fn routed(&self) -> Option<&RoutedRequest> {
        match self {
            Principal::Application(routed) => Some(routed),
            Principal::Anonymous(_) | Principal::Client(_) => None,
        }
    }

    /// The authenticated client, if there is one.
    pub fn identity(&self) -> Option<&Identity> {
        match self {
            Principal::Client(identity) => Some(identity),
            Principal::Anonymous(_) | Principal::Application(_) => None,
        }
    }

    /// The name of the authenticated client, if there is one.
    pub fn name(&self) -> Option<Arc<str>> {
        self.identity().map(|identity| identity.name().clone())
    }

    /// Whether the sender may do this to the resource or key `on`. Without authentication, everybody may do everything.
    pub fn may(&self, verb: Verb, on: &str) -> bool {
        self.identity().is_none_or(|identity| identity.may(verb, on))
    }

    /// Counts one of the quota for the sender, until the returned value is dropped. `None` without authentication.
    ///
    /// # Errors
    /// The sender is over its limit.
    pub fn take(&self, quota: Quota) -> Result<Option<Counted>, OverLimit> {
        self.identity().map(|identity| identity.take(quota)).transpose()
    }

    /// Checks that the sender may still lock a key of its lease. Not each key: while a policy changes the names of keys,
    /// the proxy adds keys to a lease to which its client needs no right.
    ///
    /// # Errors
    /// [`LeaseError::Forbidden`].
    pub fn check_lease(&self, lease: &LeaseRef) -> Result<(), LeaseError> {
        let may = lease.keys.iter().any(|key| self.may(Verb::Acquire, key.as_str()));
        if may { Ok(()) } else { Err(LeaseError::Forbidden) }
    }

    /// Waits until the rights of the sender may have changed, and returns the sender with its rights of then; `None` if
    /// it is no longer known. Never ends without authentication.
    pub async fn changed(&self) -> Option<Principal> {
        match self.identity() {
            Some(identity) => identity.changed().await.map(Principal::Client),
            None => std::future::pending().await,
        }
    }

    /// The sender with its rights of now; `None` if it is no longer known.
    pub fn refreshed(self) -> Option<Principal> {
        match &self {
            Principal::Client(identity) => identity.refreshed().map(Principal::Client),
            Principal::Anonymous(_) | Principal::Application(_) => Some(self),
        }
    }

    /// Waits until the sender no longer `has` a right. Never ends without authentication.
    pub async fn until_withdrawn(&self, has: impl Fn(&Identity) -> bool) {
        match self.identity() {
            Some(identity) => identity.until_withdrawn(has).await,
            None => std::future::pending().await,
        }
    }
}
