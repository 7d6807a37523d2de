//! Which HTTP requests the proxy itself answers, and who sends them.

use crate::http::{Problem, Request, check_origin};
use crate::service::Principal;

/// Refuses a request that a web page made a browser send, and says who sent any other request. The API and the admin
/// API go through here first, so a check of credentials belongs here.
///
/// # Errors
/// Those of [`check_origin`].
pub fn admit(request: &Request, hosts: &[String]) -> Result<Principal, Problem> {
    check_origin(request, hosts)?;
    Ok(Principal::Anonymous)
}
