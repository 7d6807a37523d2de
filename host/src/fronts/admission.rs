//! Which HTTP requests the proxy itself answers, and who sent them.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hyper::header::AUTHORIZATION;

use super::refusal::{Code, Refusal};
use super::routes::{Route, find};
use crate::auth::{Auth, Credentials};
use crate::config::HttpLimits;
use crate::http::{Peer, Problem, Request, check_origin};
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
    peer: &Peer,
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
    let identity = auth.identify(presented(request, peer)?.credentials()).map_err(Refusal::from)?;
    let (Route { call, verbs, .. }, name) = found?;
    let Some(identity) = identity else {
        return Ok(Admitted { call, name, principal: Principal::Anonymous });
    };
    if !verbs.iter().any(|verb| identity.may_somewhere(*verb)) {
        let verb = verbs[0].as_str();
        let detail = format!("{} may not {verb} anything", identity.name());
        return Err(Refusal::new(Code::Forbidden, detail).with("verb", verb).into());
    }
    let identity = identity.in_progress().map_err(Refusal::from)?;
    Ok(Admitted { call, name, principal: Principal::Client(identity) })
}

/// What a request has as credentials.
enum Presented<'a> {
    Token(&'a str),
    Basic(String),
    Names(&'a [String]),
}

impl Presented<'_> {
    fn credentials(&self) -> Credentials<'_> {
        match self {
            Presented::Token(token) => Credentials::Token(token),
            Presented::Basic(pair) => match pair.split_once(':') {
                Some((user, token)) => Credentials::Password(user, token),
                None => Credentials::Password(pair, ""),
            },
            Presented::Names([]) => Credentials::None,
            Presented::Names(names) => Credentials::Certificate(names),
        }
    }
}

/// The credentials of a request. A header counts more than the certificate of the connection.
fn presented<'a>(request: &'a Request, peer: &'a Peer) -> Result<Presented<'a>, Refusal> {
    let refused = |detail| Err(Refusal::new(Code::Unauthenticated, detail));
    let mut values = request.headers().get_all(AUTHORIZATION).iter();
    let value = match (values.next(), values.next()) {
        (None, _) => return Ok(Presented::Names(&peer.names)),
        (Some(value), None) => value.to_str().unwrap_or_default(),
        (Some(_), Some(_)) => return refused("there are two headers `Authorization`"),
    };
    match value.split_once(' ') {
        Some((scheme, token)) if scheme.eq_ignore_ascii_case("bearer") => Ok(Presented::Token(token.trim())),
        Some((scheme, pair)) if scheme.eq_ignore_ascii_case("basic") => {
            let pair = STANDARD.decode(pair.trim()).ok().and_then(|pair| String::from_utf8(pair).ok());
            Ok(Presented::Basic(pair.unwrap_or_default()))
        }
        _ => refused("the header `Authorization` must be `Bearer` with a token, or `Basic`"),
    }
}
