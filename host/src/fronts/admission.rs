//! Which HTTP requests the proxy itself answers, and who sent them.

use hyper::header::AUTHORIZATION;

use super::refusal::{Code, Refusal};
use super::routes::{Route, find};
use crate::auth::{Auth, Credentials};
use crate::config::HttpLimits;
use crate::http::{Problem, Request, check_origin};
use crate::service::Principal;

/// A request that a front serves.
pub struct Admitted<Call> {
    /// What serves the request.
    pub call: Call,
    /// The text in place of the path's `{name}`.
    pub name: String,
    /// The sender.
    pub principal: Principal,
}

/// Refuses a request that a web page makes a browser send, and a request of a client that may not make this call. The
/// API and the admin API send each request through this function first.
///
/// # Errors
/// Those of [`check_origin`] and [`find`]; 401 without valid credentials; 403 if the client has no right to this call
/// on any resource.
pub fn admit<Call: Copy>(
    request: &Request,
    limits: &HttpLimits,
    auth: &Auth,
    routes: &[Route<Call>],
) -> Result<Admitted<Call>, Problem> {
    check_origin(request, &limits.hosts)?;
    let found = find(routes, request);
    if let Ok((Route { call, verbs: [], .. }, name)) = found {
        return Ok(Admitted { call, name, principal: Principal::Anonymous });
    }
    // A client without credentials does not learn which paths there are.
    let identity = auth.identify(credentials(request)?).map_err(Refusal::from)?;
    let (Route { call, verbs, .. }, name) = found?;
    let Some(identity) = identity else {
        return Ok(Admitted { call, name, principal: Principal::Anonymous });
    };
    if !verbs.iter().any(|verb| identity.may_somewhere(*verb)) {
        let verb = verbs[0].as_str();
        let detail = format!("{} may not {verb} anything", identity.name());
        return Err(Refusal::new(Code::Forbidden, detail).with("verb", verb).into());
    }
    Ok(Admitted { call, name, principal: Principal::Client(identity) })
}

/// The credentials of a request.
fn credentials(request: &Request) -> Result<Credentials<'_>, Refusal> {
    let mut values = request.headers().get_all(AUTHORIZATION).iter();
    let (Some(value), None) = (values.next(), values.next()) else {
        return match request.headers().contains_key(AUTHORIZATION) {
            true => Err(Refusal::new(Code::Unauthenticated, "there are two headers `Authorization`")),
            false => Ok(Credentials::None),
        };
    };
    let token = value.to_str().ok().and_then(|value| {
        let (scheme, token) = value.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then_some(token.trim())
    });
    let detail = "the header `Authorization` must be `Bearer` and a token";
    token.map(Credentials::Token).ok_or_else(|| Refusal::new(Code::Unauthenticated, detail))
}
