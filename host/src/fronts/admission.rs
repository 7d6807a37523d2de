//! Which HTTP requests the proxy itself answers, and who sent them.

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hyper::header::{AUTHORIZATION, HeaderMap};

use super::refusal::{Code, Refusal};
use super::routes::{Needs, Route, find};
use crate::audit::{Audit, Entry};
use crate::auth::{Auth, Credentials, Guesses, Identity, Unauthenticated, token_id};
use crate::config::{HttpLimits, Verb};
use crate::http::{Peer, Problem, Request, RequestId, Response, check_origin};
use crate::net::{Origin, PeerAddress};
use crate::service::Principal;
use crate::telemetry::Metrics;

/// How long a refusal for a limit of the client takes.
const PAUSE: Duration = Duration::from_millis(250);
/// The most characters of a path in the audit log.
const MAX_PATH: usize = 500;

/// What the API and the admin API need to decide who may make a call. Cheap to clone, apart from the limits.
#[derive(Clone)]
pub struct Access {
    /// Limits on requests, and the host names of the proxy.
    pub http: HttpLimits,
    /// Who may make which call.
    pub auth: Auth,
    /// How many credentials from one address may be wrong.
    pub guesses: Guesses<Origin>,
    /// Where refusals and operators' actions are recorded.
    pub audit: Audit,
    /// Where refusals for the limits of clients are counted.
    pub metrics: Metrics,
}

/// A request that a front serves.
pub struct Admitted<Call> {
    /// What serves the request.
    pub call: Call,
    /// The text in place of the path's `{name}`.
    pub name: String,
    /// The sender.
    pub principal: Principal,
    /// What the audit log has of the request; `None` without an audit log.
    pub entry: Option<Entry>,
}

impl Access {
    /// Refuses a request that a web page makes a browser send, and a request of a client that may not make this call.
    /// The API and the admin API send each request through this function first.
    ///
    /// # Errors
    /// Those of [`check_origin`] and [`find`]; 401 without valid credentials; 403 if the client has no right to this
    /// call on any resource; 429 if the client is over one of its limits.
    pub async fn admit<Call: Copy>(
        &self,
        front: &'static str,
        request: &Request,
        peer: &Peer,
        routes: &[Route<Call>],
    ) -> Result<Admitted<Call>, Problem> {
        let mut entry = self.audit.is_on().then(|| entry(front, request, peer));
        let admitted = self.identified(request, peer, routes, &mut entry);
        match admitted {
            Ok((call, name, principal)) => Ok(Admitted { call, name, principal, entry }),
            Err(problem) => {
                self.refused(entry, &problem).await;
                Err(problem)
            }
        }
    }

    fn identified<Call: Copy>(
        &self,
        request: &Request,
        peer: &Peer,
        routes: &[Route<Call>],
        entry: &mut Option<Entry>,
    ) -> Result<(Call, String, Principal), Problem> {
        check_origin(request, &self.http.hosts)?;
        let found = find(routes, request);
        if let Ok((Route { call, needs: Needs::Nothing, .. }, name)) = found {
            return Ok((call, name, Principal::ANONYMOUS));
        }
        // A client without credentials does not learn which paths there are.
        let identity = match self.auth.is_required() {
            true => {
                let presented = presented(request.headers(), of_connection(peer))?;
                let identified = self.identify(presented.credentials(), peer);
                if let (Err(_), Some(entry)) = (&identified, &mut *entry) {
                    entry.refused_credential = presented.token_id().map(str::to_owned);
                }
                identified?
            }
            // The header may be meant for a proxy in between.
            false => None,
        };
        let place = peer.place.clone().map(|place| place as Arc<dyn Any + Send + Sync>);
        let Some(identity) = identity else {
            let (Route { call, .. }, name) = found?;
            return Ok((call, name, Principal::Anonymous(place)));
        };
        if let Some(entry) = entry {
            entry.principal = Some(identity.name().to_string());
            entry.credential = Some(identity.credential());
        }
        // Before anything else is answered, so that refused requests count as well.
        let counts = !matches!(found, Ok((Route { counts: false, .. }, _)));
        let identity = if counts { identity.in_progress(place).map_err(Refusal::from)? } else { identity };
        let (Route { call, needs, .. }, name) = found?;
        if let Needs::OneOf(verbs) = needs
            && !verbs.iter().any(|verb| identity.may_somewhere(*verb))
        {
            let verb = verbs[0].as_str();
            let detail = format!("{} may not {verb} anything", identity.name());
            return Err(Refusal::new(Code::Forbidden, detail).with("verb", verb).into());
        }
        Ok((call, name, Principal::Client(identity)))
    }

    fn identify(&self, credentials: Credentials<'_>, peer: &Peer) -> Result<Option<Identity>, Problem> {
        // A client is told less than the logs.
        let refused = |error: Unauthenticated| {
            let why = error.why();
            tracing::debug!(why, "the client is not known");
            Problem::from(Refusal::from(error)).inside(why)
        };
        // A client without credentials guesses nothing.
        if matches!(credentials, Credentials::None | Credentials::User(_)) {
            return self.auth.identify(credentials).map_err(refused);
        }
        let from = peer.address.origin();
        let check = || self.guesses.check(from, &credentials).map_err(Refusal::from);
        // To look a token up costs little, so a valid one is served in any case. To verify a signature costs time.
        let signed = self.auth.has_signature(credentials);
        if signed {
            check()?;
        }
        let identified = self.auth.identify(credentials);
        match &identified {
            Ok(_) if signed => self.guesses.accepted(from, &credentials),
            Ok(_) => {}
            Err(_) => {
                check()?;
                self.guesses.refused(from);
            }
        }
        identified.map_err(refused)
    }

    /// Records an answer if it refuses the client for lack of credentials or rights, or for its limits. A refusal for a limit
    /// takes a moment, so that a client that asks again at once takes no time from others.
    pub async fn refused(&self, entry: Option<Entry>, problem: &Problem) {
        self.note(entry, problem);
        if problem.slug() == Code::TooManyRequests.slug() {
            self.metrics.limits.refused(problem.member("limit").unwrap_or_default());
            tokio::time::sleep(PAUSE).await;
        }
    }

    fn note(&self, entry: Option<Entry>, problem: &Problem) {
        let kinds = [Code::Unauthenticated, Code::Forbidden, Code::TooManyRequests].map(Code::slug);
        let Some(mut entry) = entry else { return };
        if kinds.contains(&problem.slug()) {
            entry.on = problem.member("resource").or_else(|| problem.member("on")).map(str::to_owned);
            entry.verdict = format!("{} {}", problem.status_code(), problem.slug());
            if problem.slug() == Code::Unauthenticated.slug() {
                entry.why = Some(problem.why().unwrap_or_else(|| problem.detail()).to_owned());
            }
            self.audit.refused(&entry);
        }
    }

    /// Records that an action of an operator begins. What is returned records the end.
    ///
    /// # Errors
    /// 503 if the record cannot be written: then the action must not happen.
    pub async fn begins(&self, entry: Option<Entry>, verb: Verb, on: &str) -> Result<Acting, Problem> {
        let audit = self.audit.clone();
        let Some(entry) = entry else { return Ok(Acting { audit, entry: None }) };
        let (verb, on) = (Some(verb.as_str()), Some(on.to_owned()));
        let entry = Entry { verb, on, verdict: "begins".to_owned(), ..entry };
        audit.begin(entry.clone()).await.map_err(|error| {
            let detail =
                "the audit log cannot be written, so nothing was done; the log of the proxy says why";
            let inside = format!("the audit log cannot be written: {error}");
            Problem::from(Refusal::new(Code::AuditUnavailable, detail)).inside(inside)
        })?;
        Ok(Acting { audit, entry: Some(entry) })
    }
}

/// An action of an operator that has begun. If it is dropped before its end, the client has left, and the record says
/// that the outcome is not known.
pub struct Acting {
    audit: Audit,
    entry: Option<Entry>,
}

impl Acting {
    /// Records how the action has ended.
    pub fn ended(mut self, answer: &Result<Response, Problem>) {
        let verdict = match answer {
            Ok(response) => response.status().as_u16().to_string(),
            Err(problem) => format!("{} {}", problem.status_code(), problem.slug()),
        };
        self.note(verdict);
    }

    fn note(&mut self, verdict: String) {
        if let Some(entry) = self.entry.take() {
            self.audit.ended(&Entry { verdict, ..entry });
        }
    }
}

impl Drop for Acting {
    fn drop(&mut self) {
        self.note("unknown: the client left before the answer".to_owned());
    }
}

fn entry(front: &'static str, request: &Request, peer: &Peer) -> Entry {
    let id = request.extensions().get::<RequestId>();
    // The client chooses the path, which may be long; its beginning is enough to recognise it.
    let path: String = request.uri().path().chars().take(MAX_PATH).collect();
    Entry {
        front,
        request_id: id.and_then(|id| id.0.to_str().ok()).unwrap_or_default().to_owned(),
        peer: peer.address.to_string(),
        principal: None,
        credential: None,
        refused_credential: None,
        request: format!("{} {path}", request.method()),
        verb: None,
        on: None,
        verdict: String::new(),
        why: None,
    }
}

/// What a request has as credentials.
#[derive(Debug, PartialEq, Eq)]
pub enum Presented<'a> {
    /// A token.
    Token(&'a str),
    /// The pair of a name and a password, as sent.
    Basic(String),
    /// The names in the certificate of the connection.
    Names(&'a [String]),
    /// The user at the other end of a Unix socket.
    User(u32),
}

impl Presented<'_> {
    /// What identifies the sender.
    pub fn credentials(&self) -> Credentials<'_> {
        match self {
            Presented::Token(token) => Credentials::Token(token),
            Presented::Basic(pair) => match pair.split_once(':') {
                Some((user, token)) => Credentials::Password(user, token),
                None => Credentials::Password(pair, ""),
            },
            Presented::Names([]) => Credentials::None,
            Presented::Names(names) => Credentials::Certificate(names),
            Presented::User(uid) => Credentials::User(*uid),
        }
    }

    /// The id of the token, if there is one.
    fn token_id(&self) -> Option<&str> {
        match self.credentials() {
            Credentials::Token(token) | Credentials::Password(_, token) => token_id(token),
            Credentials::None | Credentials::Certificate(_) | Credentials::User(_) => None,
        }
    }
}

fn of_connection(peer: &Peer) -> Presented<'_> {
    match peer.address {
        PeerAddress::Unix { uid, .. } => Presented::User(uid),
        PeerAddress::Tcp(_) => Presented::Names(&peer.names),
    }
}

/// The credentials of a request with these headers. A header counts more than `of_connection`, what the connection says
/// of its client.
///
/// # Errors
/// The header is given twice, or is not understood.
pub fn presented<'a>(headers: &'a HeaderMap, of_connection: Presented<'a>) -> Result<Presented<'a>, Refusal> {
    let refused = |detail| Err(Refusal::new(Code::Unauthenticated, detail));
    let mut values = headers.get_all(AUTHORIZATION).iter();
    let value = match (values.next(), values.next()) {
        (None, _) => return Ok(of_connection),
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
