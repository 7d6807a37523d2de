//! Who asks for a lock.

use std::sync::Arc;

use crate::lock::record::HttpView;

/// Who asks for a lock, as far as the front knows. A policy is chosen by it, and plans for it.
#[derive(Clone, Debug)]
pub enum Principal {
    /// A client of the lock API. Nothing verifies who it is, so the owner of its request is its own word.
    Anonymous,
    /// The application behind a guarded route, for one of its requests. The application authenticates its clients.
    Application(RoutedRequest),
}

/// What came with a request through a guarded route.
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
