//! `[auth]`, and the file of principals and roles that it names.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use toml::de::DeTable;

use super::fault::{Fault, Location};
use super::jwt::{JwtIssuer, JwtSubject};
use super::reader::{Document, Env, Section, defaults};
use super::values::{NAME_RULE, is_plain_name, moment};
use super::wildcard::Wildcard;

/// -1 is no user.
const MAX_UID: u32 = u32::MAX - 1;
/// The user that stands for every user without a number in the user namespace of the proxy.
const OVERFLOW_UID: u32 = 65_534;

/// Whether clients must authenticate.
#[derive(Clone, Debug)]
pub struct AuthConfig {
    /// The file of principals and roles. `None`: the proxy asks nobody for credentials.
    pub file: Option<PathBuf>,
    /// Whether every client may do everything, on listeners that other machines can reach, too.
    pub allow_anonymous: bool,
    /// How many wrong credentials from one address are looked at in a second; `None` if there is no limit.
    pub max_refused_per_second: Option<u32>,
    /// For how long a proxy with other rules than its store grants locks.
    pub grace: Duration,
}

impl Default for AuthConfig {
    fn default() -> AuthConfig {
        defaults(AuthConfig::read)
    }
}

/// The principals of the proxies of one store, and what they may do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AuthRules {
    /// Rises with each change that reaches one proxy after another.
    pub version: u64,
    /// In the order of the file.
    pub principals: Vec<PrincipalConfig>,
    /// Whose signed tokens count. No two have the same name.
    pub jwt: Vec<JwtIssuer>,
    /// The roles, by name.
    pub roles: BTreeMap<String, Role>,
}

/// A client, an operator, or a group of clients that need not be told apart.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PrincipalConfig {
    /// Its name in logs, in the records of its leases, and for policies.
    pub name: String,
    /// The tokens that identify it.
    pub tokens: Vec<TokenConfig>,
    /// The names in the client certificates that identify it: URIs and DNS names of the subject. No other principal has
    /// them.
    pub certificates: Vec<String>,
    /// The users of this machine that identify it when they connect to a Unix socket. No other principal has them.
    pub uids: Vec<u32>,
    /// The subjects of the signed tokens that identify it. No other principal has them.
    pub jwt: Vec<JwtSubject>,
    /// Its roles. Each of them is in the file.
    pub roles: Vec<String>,
    /// What it may ask of one proxy at a time.
    pub limits: PrincipalLimits,
}

/// Limits on what a principal asks of one proxy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrincipalLimits {
    /// Requests in a second; `None` if there is no limit.
    pub per_second: Option<u32>,
    /// Replacements of policies in a minute; `None` if there is no limit.
    pub pushes_per_minute: Option<u32>,
    /// Requests that wait or stream at the same time; `None` if there is no limit.
    pub in_progress: Option<u32>,
    /// Acquires that are not answered; `None` if there is no limit.
    pub waiters: Option<u32>,
    /// Streams of events; `None` if there is no limit.
    pub watchers: Option<u32>,
    /// Leases that the proxy granted and that have not ended as far as it knows, and acquires that are not answered; `None`
    /// if there is no limit.
    pub leases: Option<u32>,
}

impl PrincipalLimits {
    /// Reads `limits`. A limit that is not given has its value in `other`.
    fn read(section: &Section<'_>, other: &PrincipalLimits) -> PrincipalLimits {
        let limit = |key, other: Option<u32>| section.optional(key, 1..=1_000_000).or(other);
        let limits = PrincipalLimits {
            per_second: limit("per_second", other.per_second),
            pushes_per_minute: limit("pushes_per_minute", other.pushes_per_minute),
            in_progress: limit("in_progress", other.in_progress),
            waiters: limit("waiters", other.waiters),
            watchers: limit("watchers", other.watchers),
            leases: limit("leases", other.leases),
        };
        section.finish();
        limits
    }
}

/// A token, as the proxies know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenConfig {
    /// The public part of the token. No other token has it.
    pub id: String,
    /// The SHA-256 of the whole token.
    pub sha256: [u8; 32],
    /// When the token ends, in microseconds since 1970; `None` if it has no end.
    pub until_us: Option<u64>,
}

/// What the principals with this role may do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Role {
    /// What they may do.
    pub allow: Vec<Rule>,
    /// What they may not do, whatever any role allows.
    pub deny: Vec<Rule>,
}

/// Actions on resources.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// What is done.
    pub verbs: Vec<Verb>,
    /// The resources, keys or policies to which the rule applies.
    pub on: Wildcard,
}

/// What a principal can be allowed to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// Take, renew and release locks of a resource, do work once, and commit versions.
    Acquire,
    /// See who holds a key and who waits for it.
    Read,
    /// Read the stored values of a key: versions, and outcomes of work that is done once.
    ReadValue,
    /// Watch the changes of keys.
    Watch,
    /// Take a key away from its holders.
    Force,
    /// List the policies.
    PolicyRead,
    /// Replace a policy.
    PolicyPush,
    /// Return to the previous generation of a policy.
    PolicyRollback,
    /// See the proxies of the store.
    FleetRead,
    /// Read the metrics.
    Metrics,
}

impl Verb {
    /// All verbs.
    pub const ALL: [Verb; 10] = [
        Verb::Acquire,
        Verb::Read,
        Verb::ReadValue,
        Verb::Watch,
        Verb::Force,
        Verb::PolicyRead,
        Verb::PolicyPush,
        Verb::PolicyRollback,
        Verb::FleetRead,
        Verb::Metrics,
    ];

    /// The name of the verb in the file.
    pub fn as_str(self) -> &'static str {
        match self {
            Verb::Acquire => "acquire",
            Verb::Read => "read",
            Verb::ReadValue => "read-value",
            Verb::Watch => "watch",
            Verb::Force => "force",
            Verb::PolicyRead => "policy.read",
            Verb::PolicyPush => "policy.push",
            Verb::PolicyRollback => "policy.rollback",
            Verb::FleetRead => "fleet.read",
            Verb::Metrics => "metrics",
        }
    }
}

impl AuthConfig {
    /// Reads `[auth]`.
    pub(super) fn read(section: &Section<'_>) -> AuthConfig {
        let file = section.path("file");
        let allow_anonymous = section.boolean("allow_anonymous", false);
        let max_refused = section.integer("max_refused_per_second", 0..=1_000_000, 100);
        let grace = section.seconds("grace_s", 0..=86_400, 60);
        section.finish();
        let max_refused_per_second = Some(max_refused).filter(|max| *max > 0);
        AuthConfig { file, allow_anonymous, max_refused_per_second, grace }
    }
}

impl AuthRules {
    /// Reads a file of principals and roles, and the files of keys that it names. Every fault is reported.
    ///
    /// # Errors
    /// The faults, each with its place. A file that other users of this machine can read or change is one.
    pub fn load(path: &Path) -> Result<AuthRules, Vec<Fault>> {
        let fault = |what| vec![Fault { place: Location::File(path.to_owned()), what }];
        let text =
            std::fs::read_to_string(path).map_err(|error| fault(format!("cannot be read: {error}")))?;
        let mode = std::fs::metadata(path).map_err(|error| fault(format!("cannot be read: {error}")))?.mode();
        if mode & 0o027 != 0 {
            let what = format!(
                "has the mode {:o}: other users can read or change it; run `chmod 600 {}`",
                mode & 0o777,
                path.display()
            );
            return Err(fault(what));
        }
        AuthRules::parse(path, &text)
    }

    /// The files that the rules of the file `path` were read from.
    pub fn files(&self, path: &Path) -> BTreeSet<PathBuf> {
        self.jwt.iter().map(|issuer| issuer.jwks.clone()).chain([path.to_owned()]).collect()
    }

    /// Parses and checks the text of the file `path`, and the files that it names.
    pub(crate) fn parse(path: &Path, text: &str) -> Result<AuthRules, Vec<Fault>> {
        let (table, errors) = DeTable::parse_recoverable(text);
        let env = Env::new();
        let document = Document::new(path, text, &env);
        errors.iter().for_each(|error| document.syntax(error));
        let rules = AuthRules::read(&document.top(table.get_ref()));
        match document.into_faults() {
            faults if faults.is_empty() => Ok(rules),
            faults => Err(faults),
        }
    }

    fn read(top: &Section<'_>) -> AuthRules {
        let mut roles = BTreeMap::new();
        for (name, section) in top.named("roles") {
            if !is_plain_name(name) {
                section.complain_of_it(NAME_RULE);
            }
            roles.insert(name.to_owned(), Role::read(&section));
        }
        let limits = PrincipalLimits::read(&top.section("limits"), &PrincipalLimits::default());
        let mut jwt: Vec<JwtIssuer> = Vec::new();
        for section in top.list("jwt") {
            let Some(issuer) = JwtIssuer::read(&section) else { continue };
            if jwt.iter().any(|other| other.issuer == issuer.issuer) {
                section.complain("issuer", format!("`{}` is that of another [[jwt]]", issuer.issuer));
            }
            jwt.push(issuer);
        }
        let mut principals: Vec<PrincipalConfig> = Vec::new();
        let entries = top.list("principal");
        if entries.is_empty() {
            top.complain("principal", "has no entry, so nobody could use the proxy");
        }
        for section in entries {
            let Some(principal) = PrincipalConfig::read(&section, &roles, &limits, &jwt) else { continue };
            if principals.iter().any(|other| other.name == principal.name) {
                section.complain("name", format!("`{}` is the name of another principal", principal.name));
            }
            let known =
                |id: &str| principals.iter().flat_map(|other| &other.tokens).any(|token| token.id == id);
            if let Some(token) = principal.tokens.iter().find(|token| known(&token.id)) {
                section.complain_of_it(format!("the token id `{}` is that of another principal", token.id));
            }
            let known = |name: &String| principals.iter().any(|other| other.certificates.contains(name));
            if let Some(name) = principal.certificates.iter().find(|name| known(name)) {
                section.complain("certificates", format!("has `{name}`, which another principal has"));
            }
            let known = |uid: &u32| principals.iter().any(|other| other.uids.contains(uid));
            if let Some(uid) = principal.uids.iter().find(|uid| known(uid)) {
                section.complain("uids", format!("has {uid}, which another principal has"));
            }
            let known = |subject: &JwtSubject| principals.iter().any(|other| other.jwt.contains(subject));
            if let Some(JwtSubject { subject, .. }) = principal.jwt.iter().find(|subject| known(subject)) {
                section
                    .complain_of_it(format!("the subject `{subject}` in jwt is that of another principal"));
            }
            principals.push(principal);
        }
        let version = top.integer("version", 0..=1_000_000_000_000_000, 0);
        top.finish();
        AuthRules { version, principals, jwt, roles }
    }
}

impl PrincipalConfig {
    fn read(
        section: &Section<'_>,
        roles: &BTreeMap<String, Role>,
        limits: &PrincipalLimits,
        issuers: &[JwtIssuer],
    ) -> Option<PrincipalConfig> {
        let name = section.required("name", |text, _| {
            if is_plain_name(text) { Ok(text.to_owned()) } else { Err(format!("is `{text}`; {NAME_RULE}")) }
        });
        let role = |name: &&str| match roles.contains_key(*name) {
            true => Ok((*name).to_owned()),
            false => Err(format!("names `{name}`, but there is no [roles.{name}]")),
        };
        let roles = section.texts("roles", |names| names.iter().map(role).collect()).unwrap_or_default();
        let tokens: Vec<TokenConfig> = section.list("tokens").iter().filter_map(TokenConfig::read).collect();
        let mut ids: Vec<&str> = tokens.iter().map(|token| token.id.as_str()).collect();
        ids.sort_unstable();
        if let Some(twice) = ids.windows(2).find(|pair| pair[0] == pair[1]) {
            section.complain_of_it(format!("two of its tokens have the id `{}`", twice[0]));
        }
        let certificates = section.texts("certificates", |names| match names.contains(&"") {
            true => Err("has an empty name; must have URIs or DNS names of certificates".to_owned()),
            false => Ok(names.iter().map(|&name| name.to_owned()).collect()),
        });
        let uids = section.integers("uids", 0..=MAX_UID);
        if uids.contains(&OVERFLOW_UID) {
            let what = "the kernel shows all users as that whom it cannot tell apart (user namespaces)";
            section.complain("uids", format!("has {OVERFLOW_UID}, but {what}"));
        }
        let subjects = section.list("jwt");
        let jwt = subjects.iter().filter_map(|subject| JwtSubject::read(subject, issuers)).collect();
        let limits = PrincipalLimits::read(&section.section("limits"), limits);
        section.finish();
        let certificates = certificates.unwrap_or_default();
        Some(PrincipalConfig { name: name?, tokens, certificates, uids, jwt, roles, limits })
    }
}

impl TokenConfig {
    fn read(section: &Section<'_>) -> Option<TokenConfig> {
        let id = section.required("id", |text, _| {
            let is_plain = text.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit());
            match text.len() {
                1..=32 if is_plain => Ok(text.to_owned()),
                // Not shown: it may be a whole token.
                _ => Err("must have 1 to 32 characters, each one of a-z and 0-9".to_owned()),
            }
        });
        let sha256 = section.required("sha256", |text, _| {
            digest(text).ok_or_else(|| {
                "must have 64 hexadecimal digits, as `lockkeeper token new` prints them".to_owned()
            })
        });
        let until_us = section.parsed("until", None, |text, place| moment(text, place).map(Some));
        section.finish();
        Some(TokenConfig { id: id?, sha256: sha256?, until_us })
    }
}

impl Role {
    fn read(section: &Section<'_>) -> Role {
        let rules = |key| section.list(key).iter().filter_map(Rule::read).collect();
        let role = Role { allow: rules("allow"), deny: rules("deny") };
        section.finish();
        role
    }
}

impl Rule {
    fn read(section: &Section<'_>) -> Option<Rule> {
        if !section.holds("do") {
            section.complain("do", "is missing");
        }
        let verbs = section.texts("do", |names| {
            let mut verbs = Vec::new();
            for name in names {
                match Verb::ALL.into_iter().find(|verb| verb.as_str() == *name) {
                    Some(verb) => verbs.push(verb),
                    None if *name == "*" => verbs.extend(Verb::ALL),
                    None => {
                        let all: Vec<&str> = Verb::ALL.into_iter().map(Verb::as_str).collect();
                        return Err(format!("has `{name}`; must be `*` or some of {}", all.join(", ")));
                    }
                }
            }
            if verbs.is_empty() {
                return Err("is empty; must be `*` or some verbs".to_owned());
            }
            Ok(verbs)
        });
        let on = section.parsed("on", Wildcard::new("*"), |text, _| match text {
            "" => Err("is empty; must be a name, with `*` for any text".to_owned()),
            text => Ok(Wildcard::new(text)),
        });
        section.finish();
        Some(Rule { verbs: verbs?, on })
    }
}

/// A SHA-256 in hexadecimal digits.
fn digest(text: &str) -> Option<[u8; 32]> {
    let mut digest = [0; 32];
    if text.len() != 64 || !text.is_ascii() {
        return None;
    }
    for (byte, at) in digest.iter_mut().zip((0..64).step_by(2)) {
        *byte = u8::from_str_radix(&text[at..at + 2], 16).ok()?;
    }
    Some(digest)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ZEROS: &str = "0000000000000000000000000000000000000000000000000000000000000000";

    fn faults(text: &str) -> Vec<String> {
        let faults = AuthRules::parse(Path::new("auth.toml"), text).expect_err("it is refused");
        faults.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_file_of_principals_and_roles_is_read() {
        let text = format!(
            "[[principal]]\nname = \"billing\"\nroles = [\"orders\"]\n\
             tokens = [{{ id = \"a1\", sha256 = \"{ZEROS}\", until = \"2027-01-01\" }}]\n\
             [roles.orders]\nallow = [{{ do = [\"acquire\", \"read\"], on = \"orders/*\" }}]\n\
             deny = [{{ do = \"*\", on = \"orders/secret/*\" }}]\n"
        );
        let rules = AuthRules::parse(Path::new("auth.toml"), &text).unwrap();
        let [billing] = &rules.principals[..] else { panic!("{rules:?}") };
        assert_eq!(billing.name, "billing");
        assert_eq!(billing.tokens[0].until_us, Some(1_798_761_600_000_000));
        let role = &rules.roles["orders"];
        assert_eq!(role.allow[0].verbs, [Verb::Acquire, Verb::Read]);
        assert_eq!(role.deny[0].verbs, Verb::ALL);
        assert!(role.deny[0].on.matches("orders/secret/1"));
    }

    #[test]
    fn every_fault_is_reported_with_its_line() {
        let text = format!(
            "[[principal]]\nname = \"Billing\"\nroles = [\"orders\"]\n\
             tokens = [{{ id = \"a_1\", sha256 = \"{ZEROS}\" }}, {{ id = \"b\", sha256 = \"00\" }}]\n\
             [roles.reader]\nallow = [{{ do = [\"look\"], on = \"\" }}, {{ on = \"a\" }}]\nalow = 1\n"
        );
        let faults = faults(&text);
        for part in [
            "auth.toml:2: principal[0].name: is `Billing`",
            "auth.toml:3: principal[0].roles: names `orders`, but there is no [roles.orders]",
            "auth.toml:4: principal[0].tokens[0].id: must have 1 to 32 characters",
            "auth.toml:4: principal[0].tokens[1].sha256: must have 64 hexadecimal digits",
            "auth.toml:6: roles.reader.allow[0].do: has `look`; must be `*` or some of acquire, read",
            "auth.toml:6: roles.reader.allow[0].on: is empty",
            "auth.toml:6: roles.reader.allow[1].do: is missing",
            "auth.toml:7: unknown key `roles.reader.alow`; did you mean `allow`?",
        ] {
            assert!(faults.iter().any(|fault| fault.starts_with(part)), "{part}: {faults:#?}");
        }
        assert_eq!(faults.len(), 8, "{faults:#?}");
    }

    #[test]
    fn token_ids_and_names_belong_to_one_principal() {
        let principal =
            format!("[[principal]]\nname = \"a\"\ntokens = [{{ id = \"1\", sha256 = \"{ZEROS}\" }}]\n");
        let faults = faults(&format!("{principal}{principal}"));
        assert_eq!(
            faults,
            [
                "auth.toml:4: principal[1]: the token id `1` is that of another principal",
                "auth.toml:5: principal[1].name: `a` is the name of another principal",
            ]
        );
    }

    #[test]
    fn users_of_the_machine_belong_to_one_principal() {
        let principal = |name: &str, uids: &str| format!("[[principal]]\nname = \"{name}\"\nuids = {uids}\n");
        let rules = principal("a", "[0, 1000]") + &principal("b", "1001");
        let rules = AuthRules::parse(Path::new("auth.toml"), &rules).unwrap();
        assert_eq!([&rules.principals[0].uids[..], &rules.principals[1].uids], [&[0, 1000][..], &[1001]]);
        for (uids, what) in [
            ("[1, 1000]", "auth.toml:6: principal[1].uids: has 1000, which another principal has"),
            ("[-1]", "auth.toml:6: principal[1].uids: must be whole numbers from 0 to 4294967294"),
            ("4294967295", "auth.toml:6: principal[1].uids: must be whole numbers from 0 to 4294967294"),
            ("[\"root\"]", "auth.toml:6: principal[1].uids: must be whole numbers from 0 to 4294967294"),
            ("[65534]", "auth.toml:6: principal[1].uids: has 65534, but the kernel shows all users as that"),
        ] {
            let faults = faults(&(principal("a", "1000") + &principal("b", uids)));
            assert!(faults.len() == 1 && faults[0].starts_with(what), "{uids}: {faults:#?}");
        }
    }

    #[test]
    fn a_file_that_others_can_read_is_refused() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("auth.toml");
        std::fs::write(&path, "[[principal]]\nname = \"a\"\n").unwrap();
        for (mode, is_refused) in [(0o600, false), (0o640, false), (0o644, true), (0o660, true)] {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(AuthRules::load(&path).is_err(), is_refused, "{mode:o}");
        }
    }
}
