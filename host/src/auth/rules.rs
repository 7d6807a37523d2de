//! The rules in the form in which requests look them up.

use std::sync::Arc;
use std::time::Duration;

use super::token::{self, Unauthenticated};
use crate::config::{AuthRules, Rule, Verb};
use crate::lock::maps::HashMap;

const A_DAY: Duration = Duration::from_secs(86_400);

/// The principals of a file.
#[derive(Debug, PartialEq)]
pub(super) struct Rules {
    principals: Vec<Principal>,
    /// The tokens, by id.
    tokens: HashMap<Arc<str>, Token>,
}

#[derive(Debug, PartialEq)]
struct Principal {
    name: Arc<str>,
    allow: Vec<Rule>,
    deny: Vec<Rule>,
}

#[derive(Debug, PartialEq)]
struct Token {
    sha256: [u8; 32],
    until_us: Option<u64>,
    principal: usize,
}

impl Rules {
    pub fn new(file: &AuthRules) -> Rules {
        let mut rules = Rules { principals: Vec::new(), tokens: HashMap::default() };
        for (index, principal) in file.principals.iter().enumerate() {
            let roles = || principal.roles.iter().filter_map(|role| file.roles.get(role));
            rules.principals.push(Principal {
                name: principal.name.as_str().into(),
                allow: roles().flat_map(|role| role.allow.clone()).collect(),
                deny: roles().flat_map(|role| role.deny.clone()).collect(),
            });
            for token in &principal.tokens {
                let (sha256, until_us) = (token.sha256, token.until_us);
                rules.tokens.insert(token.id.as_str().into(), Token { sha256, until_us, principal: index });
            }
        }
        rules
    }

    /// The principal of a token, and the token's id.
    pub fn token(&self, token: &str, now_us: u64) -> Result<(usize, Arc<str>), Unauthenticated> {
        let id = token::id(token).ok_or(Unauthenticated::Unknown)?;
        let (id, known) = self.tokens.get_key_value(id).ok_or(Unauthenticated::Unknown)?;
        // Hashes of random secrets: the time of this comparison tells nothing about the secret.
        if known.sha256 != token::digest(token) {
            return Err(Unauthenticated::Unknown);
        }
        if known.until_us.is_some_and(|until_us| until_us <= now_us) {
            return Err(Unauthenticated::Ended);
        }
        Ok((known.principal, id.clone()))
    }

    /// The principal of a credential that was valid before, if it still is.
    pub fn credential(&self, id: &str, now_us: u64) -> Option<usize> {
        let known = self.tokens.get(id)?;
        known.until_us.is_none_or(|until_us| now_us < until_us).then_some(known.principal)
    }

    /// How long a credential is still valid, if that is less than a day.
    pub fn ends_in(&self, id: &str, now_us: u64) -> Duration {
        let until_us = self.tokens.get(id).and_then(|token| token.until_us);
        let left = until_us.map_or(A_DAY, |until_us| Duration::from_micros(until_us.saturating_sub(now_us)));
        left.min(A_DAY)
    }

    pub fn name(&self, principal: usize) -> &Arc<str> {
        &self.principals[principal].name
    }

    pub fn may(&self, principal: usize, verb: Verb, on: &str) -> bool {
        let Principal { allow, deny, .. } = &self.principals[principal];
        let applies = |rule: &Rule| rule.verbs.contains(&verb) && rule.on.matches(on);
        allow.iter().any(applies) && !deny.iter().any(applies)
    }

    pub fn may_somewhere(&self, principal: usize, verb: Verb) -> bool {
        let Principal { allow, deny, .. } = &self.principals[principal];
        let everywhere = |rule: &Rule| rule.verbs.contains(&verb) && rule.on.as_str() == "*";
        allow.iter().any(|rule| rule.verbs.contains(&verb)) && !deny.iter().any(everywhere)
    }
}
