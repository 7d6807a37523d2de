//! The sender of a lock request.

use std::sync::Arc;

use crate::lock::record::HttpView;

/// The sender of a lock request, as far as the front knows. It determines the policy, and the policy plans for it.
#[derive(Clone, Debug)]
pub enum Principal {
    /// A client of the lock API. Nothing verifies its identity or the owner that its request names.
    Anonymous,
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
    /// The request of the application, if the application asks.
    pub fn routed(&self) -> Option<&RoutedRequest> {
        match self {
            Principal::Anonymous => None,
            Principal::Application(routed) => Some(routed),
        }
    }
}
