//! The authenticated clients of a run.

use std::time::Duration;

use super::options::Options;
use crate::auth::{Auth, Credentials, NewToken, new_token};
use crate::config::{AuthRules, PrincipalConfig, Role, Rule, Verb, Wildcard};
use crate::service::Principal;

/// For how long a proxy with other rules than its store grants.
pub const GRACE: Duration = Duration::from_secs(3);

/// Rules with this version. Proxies compare the versions; the clients of a run are known to none of these rules.
pub fn rules(version: u64) -> AuthRules {
    AuthRules { version, ..AuthRules::default() }
}

/// The principal of client number `n`, and another one. Both may lock everything.
pub fn principals(n: usize, options: &Options) -> [Principal; 2] {
    if !options.authenticates {
        return [Principal::ANONYMOUS, Principal::ANONYMOUS];
    }
    let tokens = [new_token(), new_token()];
    let principal = |(name, token): (&str, &NewToken)| PrincipalConfig {
        name: name.to_owned(),
        tokens: vec![token.config()],
        roles: vec!["all".to_owned()],
        ..PrincipalConfig::default()
    };
    let everything = Rule { verbs: Verb::ALL.to_vec(), on: Wildcard::new("*") };
    let rules = AuthRules {
        version: 0,
        principals: ["one", "two"].into_iter().zip(&tokens).map(principal).collect(),
        roles: [("all".to_owned(), Role { allow: vec![everything], deny: Vec::new() })].into(),
        ..AuthRules::default()
    };
    let auth = Auth::new(&rules);
    let mut principals =
        tokens.each_ref().map(|token| match auth.identify(Credentials::Token(&token.token)) {
            Ok(Some(identity)) => Principal::Client(identity),
            other => panic!("{other:?}"),
        });
    principals.rotate_left(n % 2);
    principals
}
