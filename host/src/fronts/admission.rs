//! Which HTTP requests the proxy itself answers, and who sends them.

use crate::config::HttpLimits;
use crate::http::{Problem, Request, check_origin};
use crate::service::Principal;

/// Refuses a request that a web page made a browser send, and says who sent any other request. The API and the admin
/// API go through here first, so a check of credentials belongs here.
///
/// # Errors
/// Those of [`check_origin`].
pub fn admit(request: &Request, limits: &HttpLimits) -> Result<Principal, Problem> {
    check_origin(request, &limits.hosts)?;
    Ok(Principal::Anonymous)
}
