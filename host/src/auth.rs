//! Authentication: who sends a request, and what that client may do.
//!
//! A front reads the [`Credentials`] from its protocol, and [`Auth::identify`] finds their principal. The front asks
//! [`Identity::may`] for what concerns no lock; the service asks for the resource of a request and for the keys that its
//! policy names. A rule that denies wins over all rules that allow; what no rule allows is denied.
//!
//! | what | file |
//! | --- | --- |
//! | the tokens: form, generation, comparison | `token` |
//! | signed tokens (JWT): signatures, claims, the verified ones | `jwt` |
//! | what one principal may ask of a proxy at a time | `limits` |
//! | how many credentials from one address may be wrong | `guesses` |
//! | the rules in the form in which requests look them up | `rules` |

use std::any::Any;
use std::sync::Arc;

use arc_swap::ArcSwap;

use crate::clock;
use crate::config::{AuthRules, Verb};
use crate::latest;

mod guesses;
mod jwt;
mod limits;
mod rules;
#[cfg(test)]
mod tests;
mod token;
mod unauthenticated;

pub use guesses::Guesses;
pub use jwt::JwtFault;
pub use limits::{Counted, OverLimit, Quota, Rate};
pub use token::{NewToken, id as token_id, new_token};
pub use unauthenticated::Unauthenticated;

use rules::{Credential, Rules};

/// What a client presents to prove who it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Credentials<'a> {
    /// Nothing.
    None,
    /// A token: one of the file of principals, or a JWT.
    Token(&'a str),
    /// The name of a principal and its token, as basic authentication sends them.
    Password(&'a str, &'a str),
    /// The names in a certificate that was verified.
    Certificate(&'a [String]),
    /// The user of the process that has connected to a Unix socket.
    User(u32),
}

/// The digest of rules by which nobody is asked for credentials.
pub const OFF: &str = "off";

/// The principals, and what they may do. Cheap to clone.
#[derive(Clone)]
pub struct Auth {
    /// `None`: nobody is asked for credentials.
    current: Option<Arc<Current>>,
}

struct Current {
    rules: ArcSwap<Rules>,
    /// How often the rules were replaced.
    replaced: latest::Sender<u64>,
}

/// What a request occupies at the address of its client, for as long as the request is in progress. `None` if nothing
/// is counted there.
pub type Place = Option<Arc<dyn Any + Send + Sync>>;

/// An authenticated client, with the rights that it had when it was identified.
#[derive(Clone)]
pub struct Identity {
    current: Arc<Current>,
    rules: Arc<Rules>,
    /// The index of the principal in the rules.
    principal: usize,
    credential: Credential,
    /// The request that the client sent, which counts as in progress as long as any copy of this exists.
    request: Option<Arc<(Counted, Place)>>,
}

impl Auth {
    /// Asks nobody for credentials.
    pub fn off() -> Auth {
        Auth { current: None }
    }

    /// Applies these rules.
    pub fn new(rules: &AuthRules) -> Auth {
        let rules = ArcSwap::from_pointee(Rules::new(rules, None));
        Auth { current: Some(Arc::new(Current { rules, replaced: latest::Sender::new(0) })) }
    }

    /// The version of the rules, and a digest of what they decide; [`OFF`] if nobody is asked for credentials.
    pub fn version(&self) -> (u64, String) {
        match &self.current {
            None => (0, OFF.to_owned()),
            Some(current) => {
                let rules = current.rules.load();
                (rules.version(), rules.digest().to_owned())
            }
        }
    }

    /// Whether clients need credentials.
    pub fn is_required(&self) -> bool {
        self.current.is_some()
    }

    /// Applies other rules from now on. Returns whether they differ from the rules before. Has no effect if nobody is
    /// asked for credentials.
    pub fn replace(&self, rules: &AuthRules) -> bool {
        let Some(current) = &self.current else { return false };
        let rules = Rules::new(rules, Some(&current.rules.load()));
        if *current.rules.load().as_ref() == rules {
            return false;
        }
        current.rules.store(Arc::new(rules));
        current.replaced.send_modify(|times| *times += 1);
        true
    }

    /// Whether the credentials have a signature to verify.
    pub fn has_signature(&self, credentials: Credentials<'_>) -> bool {
        match (&self.current, credentials) {
            (Some(current), Credentials::Token(token) | Credentials::Password(_, token)) => {
                current.rules.load().has_signature(token)
            }
            _ => false,
        }
    }

    /// The client that sent a request; `None` if nobody is asked for credentials.
    ///
    /// # Errors
    /// [`Unauthenticated`]: the credentials are missing or not valid.
    pub fn identify(&self, credentials: Credentials<'_>) -> Result<Option<Identity>, Unauthenticated> {
        let Some(current) = &self.current else { return Ok(None) };
        let rules = current.rules.load_full();
        let (principal, credential) = match credentials {
            Credentials::None => return Err(Unauthenticated::Missing),
            Credentials::Token(token) => rules.bearer(token, clock::wall_us())?,
            Credentials::Password(user, token) => {
                let found = rules.bearer(token, clock::wall_us())?;
                if **rules.name(found.0) != *user {
                    return Err(Unauthenticated::Unknown);
                }
                found
            }
            Credentials::Certificate(names) => rules.certificate(names)?,
            Credentials::User(uid) => rules.user(uid)?,
        };
        Ok(Some(Identity { current: current.clone(), rules, principal, credential, request: None }))
    }
}

impl Identity {
    /// The name of the principal.
    pub fn name(&self) -> &Arc<str> {
        self.rules.name(self.principal)
    }

    /// The id of the credential that the client presented, for logs.
    pub fn credential(&self) -> String {
        self.credential.to_string()
    }

    /// Counts a request of the client. It is in progress until the last copy of the returned value is dropped, and `place`
    /// with it.
    ///
    /// # Errors
    /// The client is over one of its limits.
    pub fn in_progress(self, place: Place) -> Result<Identity, OverLimit> {
        self.send(Rate::Requests)?;
        let request = self.rules.take(self.principal, Quota::InProgress, Vec::new())?;
        Ok(Identity { request: Some(Arc::new((request, place))), ..self })
    }

    /// What counts the request as in progress until it is dropped.
    pub fn request(&self) -> Place {
        self.request.clone().map(|request| request as Arc<dyn Any + Send + Sync>)
    }

    /// Counts a request of the client against the limit on its rate.
    ///
    /// # Errors
    /// The client is over its limit.
    pub fn send(&self, rate: Rate) -> Result<(), OverLimit> {
        self.rules.send(self.principal, rate)
    }

    /// Counts one of the quota for the client. It counts until the returned value is dropped.
    ///
    /// # Errors
    /// The client is over its limit.
    pub fn take(&self, quota: Quota) -> Result<Counted, OverLimit> {
        self.rules.take(self.principal, quota, Vec::new())
    }

    /// Counts an acquire as the lease that it may become. `marks`: numbers that this acquire has in common with the
    /// acquires that get the same lease. If the client has this lease, its limit does not refuse the acquire.
    ///
    /// # Errors
    /// The client is over its limit.
    pub fn take_lease(&self, marks: Vec<u64>) -> Result<Counted, OverLimit> {
        self.rules.take(self.principal, Quota::Leases, marks)
    }

    /// Whether the client may do this to the resource, key or policy `on`.
    pub fn may(&self, verb: Verb, on: &str) -> bool {
        self.rules.may(self.principal, verb, on)
    }

    /// What the names begin with to which the client may do this, in byte order, disjoint. Of the names with these
    /// beginnings, [`Identity::may`] tells to which.
    pub fn beginnings(&self, verb: Verb) -> Vec<&str> {
        self.rules.beginnings(self.principal, verb)
    }

    /// Whether the client may do this to anything at all.
    pub fn may_somewhere(&self, verb: Verb) -> bool {
        self.rules.may_somewhere(self.principal, verb)
    }

    /// Waits until the client no longer `has` a right, because the rules were replaced or its credential has ended.
    pub async fn until_withdrawn(&self, has: impl Fn(&Identity) -> bool) {
        let mut now = self.refreshed();
        while let Some(identity) = now.filter(&has) {
            now = identity.changed().await;
        }
    }

    /// Waits until the rules are replaced, or until the credential ends. Returns the client with its rights of then;
    /// `None` if its credential is no longer valid.
    pub async fn changed(&self) -> Option<Identity> {
        let mut replaced = self.current.replaced.subscribe();
        if Arc::ptr_eq(&self.current.rules.load(), &self.rules) {
            let ends = self.rules.ends_in(&self.credential, clock::wall_us());
            tokio::select! {
                biased;
                _ = replaced.changed() => {}
                () = tokio::time::sleep(ends) => {}
            }
        }
        self.refreshed()
    }

    /// The same client with its rights of now; `None` if its credential is no longer valid.
    pub fn refreshed(&self) -> Option<Identity> {
        let rules = self.current.rules.load_full();
        let principal = rules.credential(&self.credential, &self.rules, clock::wall_us())?;
        let is_same = rules.name(principal) == self.name();
        is_same.then(|| Identity { rules, principal, ..self.clone() })
    }
}

impl std::fmt::Debug for Identity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Identity").field("name", self.name()).field("credential", &self.credential()).finish()
    }
}
