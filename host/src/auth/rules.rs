//! The rules in the form in which requests look them up.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use sha2::{Digest as _, Sha256};

use super::jwt::{Claims, Issuers};
use super::limits::{Counted, Meter, OverLimit, Quota, Rate};
use super::token;
use super::unauthenticated::Unauthenticated;
use crate::config::{AuthRules, PrincipalLimits, Rule, Verb};
use crate::lock::maps::HashMap;

const A_DAY: Duration = Duration::from_secs(86_400);

/// The principals of a file.
#[derive(Debug, PartialEq)]
pub(super) struct Rules {
    /// The version number in the file.
    version: u64,
    /// See [`Rules::digest`].
    digest: String,
    principals: Vec<Principal>,
    /// The tokens, by id.
    tokens: HashMap<Arc<str>, Token>,
    /// The principals, by the names in their certificates.
    certificates: HashMap<Arc<str>, usize>,
    /// The principals, by their users.
    users: HashMap<u32, usize>,
    /// Whose signed tokens count, and which principals they identify.
    issuers: Issuers,
}

/// What has proved who a client is.
#[derive(Clone, Debug)]
pub(super) enum Credential {
    /// The id of a token.
    Token(Arc<str>),
    /// A name in a certificate.
    Certificate(Arc<str>),
    /// The user at the other end of a Unix socket.
    User(u32),
    /// A signed token.
    Jwt(Arc<Claims>),
}

impl fmt::Display for Credential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            // No id of a token has a colon.
            Credential::Token(id) => id.fmt(f),
            Credential::Certificate(name) => write!(f, "certificate:{name}"),
            Credential::User(uid) => write!(f, "uid:{uid}"),
            Credential::Jwt(claims) => write!(f, "jwt:{}", claims.id),
        }
    }
}

#[derive(Debug)]
struct Principal {
    name: Arc<str>,
    allow: Vec<Rule>,
    deny: Vec<Rule>,
    limits: PrincipalLimits,
    /// Kept when the rules are replaced.
    meter: Arc<Meter>,
}

impl PartialEq for Principal {
    fn eq(&self, other: &Principal) -> bool {
        let Principal { name, allow, deny, limits, meter: _ } = self;
        (name, allow, deny, limits) == (&other.name, &other.allow, &other.deny, &other.limits)
    }
}

#[derive(Debug, PartialEq)]
struct Token {
    sha256: [u8; 32],
    until_us: Option<u64>,
    principal: usize,
}

impl Token {
    fn has_ended(&self, now_us: u64) -> bool {
        self.until_us.is_some_and(|until_us| until_us <= now_us)
    }
}

impl Rules {
    /// The rules of a file. `before`: the rules that they replace.
    pub fn new(file: &AuthRules, before: Option<&Rules>) -> Rules {
        let known = |name: &str| before?.principals.iter().find(|principal| *principal.name == *name);
        let mut rules = Rules {
            version: file.version,
            digest: String::new(),
            principals: Vec::new(),
            tokens: HashMap::default(),
            certificates: HashMap::default(),
            users: HashMap::default(),
            issuers: Issuers::new(file),
        };
        for (index, principal) in file.principals.iter().enumerate() {
            let roles = || principal.roles.iter().filter_map(|role| file.roles.get(role));
            rules.principals.push(Principal {
                name: principal.name.as_str().into(),
                allow: roles().flat_map(|role| role.allow.clone()).collect(),
                deny: roles().flat_map(|role| role.deny.clone()).collect(),
                limits: principal.limits,
                meter: known(&principal.name).map_or_else(Arc::default, |known| known.meter.clone()),
            });
            for name in &principal.certificates {
                rules.certificates.insert(name.as_str().into(), index);
            }
            rules.users.extend(principal.uids.iter().map(|uid| (*uid, index)));
            for token in &principal.tokens {
                let (sha256, until_us) = (token.sha256, token.until_us);
                rules.tokens.insert(token.id.as_str().into(), Token { sha256, until_us, principal: index });
            }
        }
        rules.digest = rules.calculate_digest();
        rules
    }

    /// The version of the file.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// A digest of everything that decides. Files with the same effect have the same digest, however they are written. It
    /// tells nothing about the tokens: the file has only hashes of random secrets.
    pub fn digest(&self) -> &str {
        &self.digest
    }

    fn calculate_digest(&self) -> String {
        // A set of facts, so order and repetition make no difference. A fact that another version of the program adds
        // must be absent where its key is.
        let mut facts = BTreeSet::new();
        let mut add = |fact: &[&str]| {
            facts.insert(serde_json::to_string(fact).unwrap_or_default());
        };
        let Rules { version: _, digest: _, principals, tokens, certificates, users, issuers } = self;
        for Principal { name, allow, deny, limits, meter: _ } in principals {
            add(&["principal", name]);
            for (effect, rules) in [("allow", allow), ("deny", deny)] {
                for Rule { verbs, on } in rules {
                    verbs.iter().for_each(|verb| add(&[effect, name, verb.as_str(), on.as_str()]));
                }
            }
            let PrincipalLimits { per_second, pushes_per_minute, in_progress, waiters, watchers, leases } =
                limits;
            let limits = [
                ("per_second", per_second),
                ("pushes_per_minute", pushes_per_minute),
                ("in_progress", in_progress),
                ("waiters", waiters),
                ("watchers", watchers),
                ("leases", leases),
            ];
            for (limit, number) in limits {
                number.iter().for_each(|number| add(&["limit", name, limit, &number.to_string()]));
            }
        }
        for (id, Token { sha256, until_us, principal }) in tokens {
            let until = until_us.map(|until| until.to_string()).unwrap_or_default();
            add(&["token", self.name(*principal), id, &token::hex(sha256), &until]);
        }
        for (name, principal) in certificates {
            add(&["certificate", self.name(*principal), name]);
        }
        for (uid, principal) in users {
            add(&["uid", self.name(*principal), &uid.to_string()]);
        }
        // Without the keys, which are in files of their own and change by themselves.
        for (issuer, subjects) in issuers.each() {
            let name = &issuer.issuer;
            add(&["issuer", name, &issuer.claim]);
            issuer.audience.iter().for_each(|audience| add(&["audience", name, audience]));
            issuer
                .algorithms
                .iter()
                .for_each(|algorithm| add(&["algorithm", name, &format!("{algorithm:?}")]));
            for (subject, principal) in subjects {
                add(&["subject", name, subject, self.name(*principal)]);
            }
        }
        let mut hash = Sha256::new();
        facts.iter().for_each(|fact| hash.update(format!("{fact}\n")));
        token::hex(&hash.finalize())
    }

    /// Whether the token counts as a JWT.
    pub fn has_signature(&self, token: &str) -> bool {
        !token::is_ours(token) && !self.issuers.is_empty()
    }

    /// The principal of a token or of a JWT.
    pub fn bearer(&self, token: &str, now_us: u64) -> Result<(usize, Credential), Unauthenticated> {
        if !self.has_signature(token) {
            return self.token(token, now_us);
        }
        let claims = self.issuers.verified(token)?;
        Ok((self.issuers.principal(&claims, now_us)?, Credential::Jwt(claims)))
    }

    /// The principal of a token.
    fn token(&self, token: &str, now_us: u64) -> Result<(usize, Credential), Unauthenticated> {
        let id = token::id(token).ok_or(Unauthenticated::Unknown)?;
        let (id, known) = self.tokens.get_key_value(id).ok_or(Unauthenticated::Unknown)?;
        // Hashes of random secrets: the time of this comparison tells nothing about the secret.
        if known.sha256 != token::digest(token) {
            return Err(Unauthenticated::Unknown);
        }
        if known.has_ended(now_us) {
            return Err(Unauthenticated::Ended);
        }
        Ok((known.principal, Credential::Token(id.clone())))
    }

    /// The principal of a certificate: that of the first of its names that is known.
    pub fn certificate(&self, names: &[String]) -> Result<(usize, Credential), Unauthenticated> {
        let known = names.iter().find_map(|name| self.certificates.get_key_value(name.as_str()));
        let (name, principal) = known.ok_or(Unauthenticated::Unknown)?;
        Ok((*principal, Credential::Certificate(name.clone())))
    }

    /// The principal of a user of this machine.
    pub fn user(&self, uid: u32) -> Result<(usize, Credential), Unauthenticated> {
        let principal = self.users.get(&uid).ok_or(Unauthenticated::UnknownUser(uid))?;
        Ok((*principal, Credential::User(uid)))
    }

    /// The principal of a credential that was valid under the rules `before`, if it still is.
    pub fn credential(&self, credential: &Credential, before: &Rules, now_us: u64) -> Option<usize> {
        match credential {
            Credential::Token(id) => {
                // The id may have been given to another token.
                let is_same = |token: &&Token| {
                    before.tokens.get(id).is_some_and(|before| before.sha256 == token.sha256)
                };
                let known = self.tokens.get(id).filter(is_same)?;
                (!known.has_ended(now_us)).then_some(known.principal)
            }
            Credential::Certificate(name) => self.certificates.get(name).copied(),
            Credential::User(uid) => self.users.get(uid).copied(),
            Credential::Jwt(claims) => self.issuers.principal(claims, now_us).ok(),
        }
    }

    /// How long a credential is still valid, if that is less than a day.
    pub fn ends_in(&self, credential: &Credential, now_us: u64) -> Duration {
        let until_us = match credential {
            Credential::Token(id) => self.tokens.get(id).and_then(|token| token.until_us),
            Credential::Jwt(claims) => Some(claims.until_us),
            Credential::Certificate(_) | Credential::User(_) => None,
        };
        let left = until_us.map_or(A_DAY, |until_us| Duration::from_micros(until_us.saturating_sub(now_us)));
        left.min(A_DAY)
    }

    pub fn name(&self, principal: usize) -> &Arc<str> {
        &self.principals[principal].name
    }

    /// Counts a request of the principal against the limit on its rate.
    pub fn send(&self, principal: usize, rate: Rate) -> Result<(), OverLimit> {
        let Principal { limits, meter, .. } = &self.principals[principal];
        meter.send(rate, limits)
    }

    /// Counts one of the quota for the principal.
    pub fn take(&self, principal: usize, quota: Quota, marks: Vec<u64>) -> Result<Counted, OverLimit> {
        let Principal { limits, meter, .. } = &self.principals[principal];
        meter.take(quota, marks, limits)
    }

    pub fn may(&self, principal: usize, verb: Verb, on: &str) -> bool {
        let Principal { allow, deny, .. } = &self.principals[principal];
        let applies = |rule: &Rule| rule.verbs.contains(&verb) && rule.on.matches(on);
        allow.iter().any(applies) && !deny.iter().any(applies)
    }

    /// What the names begin with that the rules may allow, in byte order. None is the beginning of another one.
    pub fn beginnings(&self, principal: usize, verb: Verb) -> Vec<&str> {
        let rules = self.principals[principal].allow.iter().filter(|rule| rule.verbs.contains(&verb));
        let mut beginnings: Vec<&str> = rules.map(|rule| rule.on.beginning()).collect();
        beginnings.sort_unstable();
        beginnings.dedup_by(|next, kept| next.starts_with(&**kept));
        beginnings
    }

    pub fn may_somewhere(&self, principal: usize, verb: Verb) -> bool {
        // They are about no name, so a rule for some names does not mean them.
        if matches!(verb, Verb::Metrics | Verb::FleetRead) {
            return self.may(principal, verb, "");
        }
        let Principal { allow, deny, .. } = &self.principals[principal];
        let everywhere = |rule: &Rule| rule.verbs.contains(&verb) && rule.on.as_str() == "*";
        allow.iter().any(|rule| rule.verbs.contains(&verb)) && !deny.iter().any(everywhere)
    }
}
