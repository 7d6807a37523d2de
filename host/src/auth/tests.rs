//! Who is recognised, and what the rules allow.

use std::path::Path;

use super::*;

fn rules(tokens: &str, roles: &str) -> AuthRules {
    let text = format!(
        "[[principal]]\nname = \"billing\"\nroles = [\"r\"]\ntokens = [{tokens}]\n[roles.r]\n{roles}"
    );
    AuthRules::parse(Path::new("auth.toml"), &text).unwrap()
}

fn entry(token: &NewToken, more: &str) -> String {
    format!("{{ id = \"{}\", sha256 = \"{}\"{more} }}", token.id, token.sha256)
}

fn identified(auth: &Auth, token: &str) -> Result<Identity, Unauthenticated> {
    auth.identify(Credentials::Token(token)).map(|identity| identity.expect("credentials are needed"))
}

#[test]
fn a_client_is_known_by_its_whole_token() {
    let (token, other) = (new_token(), new_token());
    let auth = Auth::new(&rules(&entry(&token, ""), ""));
    assert_eq!(&**identified(&auth, &token.token).unwrap().name(), "billing");
    let changed = format!("{}x", token.token);
    let id_alone = format!("lk_{}_", token.id);
    for unknown in [other.token.as_str(), &changed, &id_alone, "", "lk_", "lk__", &token.id, &token.sha256] {
        assert_eq!(identified(&auth, unknown).unwrap_err(), Unauthenticated::Unknown, "{unknown}");
    }
    assert_eq!(auth.identify(Credentials::None).unwrap_err(), Unauthenticated::Missing);
}

#[test]
fn a_token_ends_at_its_end() {
    let (old, current) = (new_token(), new_token());
    let tokens =
        [entry(&old, ", until = \"2020-01-01\""), entry(&current, ", until = \"2999-01-01\"")].join(", ");
    let auth = Auth::new(&rules(&tokens, ""));
    assert_eq!(identified(&auth, &old.token).unwrap_err(), Unauthenticated::Ended);
    assert_eq!(identified(&auth, &current.token).unwrap().credential(), current.id);
}

#[test]
fn nobody_is_asked_without_rules() {
    assert!(Auth::off().identify(Credentials::None).unwrap().is_none());
    assert!(!Auth::off().is_required());
}

#[test]
fn a_denial_wins_and_nothing_is_the_default() {
    let token = new_token();
    let roles = "allow = [{ do = [\"acquire\", \"read\"], on = \"orders/*\" }, { do = \"metrics\" }]\n\
                 deny = [{ do = \"acquire\", on = \"*/secret\" }]";
    let auth = Auth::new(&rules(&entry(&token, ""), roles));
    let billing = identified(&auth, &token.token).unwrap();
    assert!(billing.may(Verb::Acquire, "orders/42"));
    assert!(billing.may(Verb::Read, "orders/secret"));
    assert!(!billing.may(Verb::Acquire, "orders/secret"));
    assert!(!billing.may(Verb::Acquire, "invoices/42"));
    assert!(!billing.may(Verb::Force, "orders/42"));
    assert!(billing.may_somewhere(Verb::Metrics) && !billing.may_somewhere(Verb::Watch));
}

#[tokio::test]
async fn replaced_rules_apply_to_clients_that_are_connected() {
    let token = new_token();
    let with = |roles: &str| rules(&entry(&token, ""), roles);
    let auth = Auth::new(&with("allow = [{ do = \"*\" }]"));
    let billing = identified(&auth, &token.token).unwrap();
    assert!(!auth.replace(&with("allow = [{ do = \"*\" }]")), "nothing has changed");
    let withdrawn = billing.until_withdrawn(|now| now.may(Verb::Acquire, "orders/42"));
    let mut withdrawn = std::pin::pin!(withdrawn);
    let soon = std::time::Duration::from_millis(20);
    assert!(tokio::time::timeout(soon, withdrawn.as_mut()).await.is_err(), "nothing is withdrawn yet");
    assert!(auth.replace(&with("allow = [{ do = \"acquire\" }]")));
    assert!(tokio::time::timeout(soon, withdrawn.as_mut()).await.is_err(), "another right is withdrawn");
    assert!(auth.replace(&with("allow = [{ do = \"read\" }]")));
    withdrawn.await;
}

#[tokio::test]
async fn a_removed_token_withdraws_all_rights_of_its_clients() {
    let (token, other) = (new_token(), new_token());
    let auth = Auth::new(&rules(&entry(&token, ""), "allow = [{ do = \"*\" }]"));
    let billing = identified(&auth, &token.token).unwrap();
    auth.replace(&rules(&entry(&other, ""), "allow = [{ do = \"*\" }]"));
    billing.until_withdrawn(|_| true).await;
    assert!(billing.changed().await.is_none());
    assert_eq!(identified(&auth, &token.token).unwrap_err(), Unauthenticated::Unknown);
}

#[test]
fn the_beginnings_of_names_cover_all_rules_once() {
    let token = new_token();
    let roles = "allow = [{ do = \"read\", on = \"b/*\" }, { do = \"read\", on = \"a/*/x\" }, { do = \"read\", on = \"b/c/*\" }, \
                 { do = \"read\", on = \"b\" }, { do = \"watch\", on = \"w/*\" }, { do = \"acquire\" }]";
    let auth = Auth::new(&rules(&entry(&token, ""), roles));
    let billing = identified(&auth, &token.token).unwrap();
    assert_eq!(billing.beginnings(Verb::Read), ["a/", "b"]);
    assert_eq!(billing.beginnings(Verb::Watch), ["w/"]);
    assert_eq!(billing.beginnings(Verb::Acquire), [""]);
    assert_eq!(billing.beginnings(Verb::Force), [""; 0]);
}

/// Two proxies compare their digests: what decides is in it, and nothing else is.
#[test]
fn the_digest_of_the_rules_follows_what_they_decide() {
    let digest = |text: &str| Auth::new(&AuthRules::parse(Path::new("auth.toml"), text).unwrap()).version();
    let sha256 = |digit: &str| digit.repeat(64);
    let token = |id: &str, digit: &str, more: &str| {
        format!("{{ id = \"{id}\", sha256 = \"{}\"{more} }}", sha256(digit))
    };
    let text = |tokens: &[String], limits: &str, roles: &str| {
        let tokens = tokens.join(", ");
        let billing =
            format!("[[principal]]\nname = \"billing\"\nroles = [\"r\"]\ntokens = [{tokens}]\n{limits}");
        let shipping =
            "[[principal]]\nname = \"shipping\"\ncertificates = [\"spiffe://s\"]\nroles = [\"r\"]\n";
        (
            format!("{billing}{shipping}[roles.r]\n{roles}\n"),
            format!("# other\n{shipping}{billing}[roles.r]\n{roles}\n"),
        )
    };
    let tokens = [token("a", "1", ""), token("b", "2", ", until = \"2999-01-01\"")];
    let allow = "allow = [{ do = [\"acquire\", \"read\"], on = \"a*\" }]";
    let (one, other) = text(&tokens, "", allow);
    assert_eq!(digest(&one).0, 0);
    let same = [
        other,
        text(&[tokens[1].clone(), tokens[0].clone()], "", allow).0,
        text(&tokens, "", "allow = [{ do = [\"read\"], on = \"a*\" }, { do = [\"acquire\"], on = \"a*\" }]")
            .0,
        format!("{one}[roles.unused]\nallow = [{{ do = \"*\" }}]\n"),
    ];
    for same in same {
        assert_eq!(digest(&one), digest(&same), "{same}");
    }
    let differ = [
        text(&tokens[..1], "", allow).0,
        text(&[tokens[0].clone(), token("b", "2", "")], "", allow).0,
        text(&[token("a", "3", ""), tokens[1].clone()], "", allow).0,
        text(&[token("c", "1", ""), tokens[1].clone()], "", allow).0,
        text(&tokens, "limits = { per_second = 1 }\n", allow).0,
        text(&tokens, "limits = { in_progress = 1 }\n", allow).0,
        text(&tokens, "", "allow = [{ do = [\"acquire\", \"read\"], on = \"b*\" }]").0,
        text(&tokens, "", "allow = [{ do = [\"acquire\"], on = \"a*\" }]").0,
        text(&tokens, "", &allow.replace("allow", "deny")).0,
        one.replace("spiffe://s", "spiffe://t"),
        one.replace("shipping", "sales"),
        one.replace("name = \"billing\"", "name = \"bill\""),
    ];
    let mut seen = vec![digest(&one).1, OFF.to_owned()];
    for other in differ {
        let (_, digest) = digest(&other);
        assert!(!seen.contains(&digest), "{other}");
        seen.push(digest);
    }
    let raised = digest(&format!("version = 7\n{one}"));
    assert_eq!(raised, (7, seen[0].clone()));
    assert_eq!(Auth::off().version(), (0, OFF.to_owned()));
}
