//! What is stored with a lease, for operators and for its policy.

use std::sync::Arc;

use crate::lock::Mode;

/// The first character of the names by which a store may keep the parts of a tag among its labels. The name of a
/// client's label never begins with it.
pub const RESERVED: char = ':';

/// What is stored with a lease: to display its holder, to plan it again when its policy is replaced, and to know whose
/// it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tag {
    /// The resource that the client named.
    pub resource: Arc<str>,
    /// `name@sha256:digest` of the policy generation that planned the lease.
    pub policy: Arc<str>,
    /// Names and values of the request's labels.
    pub labels: Vec<(Box<str>, Box<str>)>,
    /// The mode of the request, if the plan has another one.
    pub asked_mode: Option<Mode>,
    /// What the policy saw of a guarded request. `None` if the request came by a call of the API.
    pub http: Option<Arc<HttpView>>,
    /// The name of the authenticated client that asked; `None` without authentication. Unlike the rest of the tag, it
    /// decides: only this client renews, releases and re-enters its lease.
    pub principal: Option<Arc<str>>,
    /// Set if the lease is a delegation: the proxy that decides about the key.
    pub delegated_to: Option<Arc<str>>,
}

/// The part of a guarded HTTP request that its route lets a policy see.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct HttpView {
    /// The request's method, e.g. `POST`.
    pub method: String,
    /// Percent-decoded.
    pub path: String,
    /// The values of the `{name}` captures of the route's path.
    pub captures: Vec<(String, String)>,
    /// The query parameters, as names and values.
    pub query: Vec<(String, String)>,
    /// Names in lower case.
    pub headers: Vec<(String, String)>,
    /// The first bytes of the body.
    pub body: Vec<u8>,
}
