//! `[policies.NAME]`: the policies, their components and their settings.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use super::fault::{Location, suggestion};
use super::reader::{Section, defaults};
use super::setting::SettingPlaces;
use super::values::{self, NAME_RULE, is_plain_name};

/// The name that no policy has: a guarded route with it takes no lock.
pub(super) const NO_LOCK: &str = "none";
const BUILTINS: [&str; 3] = ["default", "fair-groups", "backoff"];

/// A policy: its component and its settings.
#[derive(Clone, Debug)]
pub struct PolicyConfig {
    /// The policy's name: 1 to 64 characters of `a-z`, `0-9`, `-` and `_`.
    pub name: String,
    /// Where the component comes from.
    pub source: PolicySource,
    /// The policy's settings table, which the component checks.
    pub settings: serde_json::Map<String, serde_json::Value>,
    /// Where the settings are in the configuration.
    pub setting_places: SettingPlaces,
    /// When a version goes back by itself.
    pub guard: PushGuard,
    /// Who must have signed its components.
    pub signers: PolicySigners,
}

/// Who must have signed the components of a policy. Without keys, anybody may write them.
#[derive(Clone, Debug)]
pub struct PolicySigners {
    /// The keys of the signers.
    pub keys: Vec<Signer>,
    /// How many of them must have signed.
    pub approvals: usize,
}

/// A key that signs components.
#[derive(Clone, Debug)]
pub struct Signer {
    /// A public key of minisign.
    pub key: minisign_verify::PublicKey,
}

impl Signer {
    /// The key with this text, which is the second line of a file of minisign.
    ///
    /// # Errors
    /// The text is not a public key.
    pub fn parse(text: &str) -> Result<Signer, String> {
        let key = minisign_verify::PublicKey::from_base64(text).map_err(|_| {
            format!("`{text}` is not a public key of minisign: it must be the second line of minisign.pub")
        })?;
        Ok(Signer { key })
    }
}

impl Default for PolicySigners {
    fn default() -> PolicySigners {
        PolicySigners { keys: Vec::new(), approvals: 1 }
    }
}

impl PolicySigners {
    fn read(section: &Section<'_>) -> PolicySigners {
        let parse = |texts: &[&str]| {
            if texts.iter().collect::<BTreeSet<_>>().len() < texts.len() {
                return Err("a key is listed twice".to_owned());
            }
            texts.iter().map(|text| Signer::parse(text)).collect()
        };
        let keys: Vec<Signer> = section.texts("signers", parse).unwrap_or_default();
        let approvals = section.integer("approvals", 1..=16, 1);
        if approvals > keys.len().max(1) {
            let what = format!("is {approvals}, and there are {} signers", keys.len());
            section.complain("approvals", what);
        }
        PolicySigners { keys, approvals }
    }
}

/// When a version that has gone live goes back to the version before by itself.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PushGuard {
    /// How long the version is watched. Zero: not at all.
    pub watch: Duration,
    /// By how many percentage points the share of failed plans may exceed that of the version before. 100: by any number.
    pub failed_points: f64,
    /// By how many percentage points the share of refused requests may exceed that of the version before.
    pub refused_points: f64,
}

impl PushGuard {
    /// Reads `[policies.NAME.guard]`.
    fn read(section: &Section<'_>) -> PushGuard {
        let guard = PushGuard {
            watch: section.seconds("watch_s", 0..=86_400, 300),
            failed_points: f64::from(section.integer("failed_points", 0..=100, 1_u32)),
            refused_points: f64::from(section.integer("refused_points", 0..=100, 100_u32)),
        };
        section.finish();
        guard
    }
}

impl Default for PushGuard {
    fn default() -> PushGuard {
        defaults(PushGuard::read)
    }
}

/// The source of a policy's component.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PolicySource {
    /// `builtin:default`, `builtin:fair-groups`, `builtin:backoff`.
    Builtin(String),
    /// A file that is watched, and loaded again when it changes.
    File(PathBuf),
}

/// Reads `[policies.NAME]`, sorted by name. If the file has no policy named `default`, the built-in one is added.
pub(super) fn read(top: &Section<'_>) -> Vec<PolicyConfig> {
    let builtin = || PolicySource::Builtin("default".into());
    let mut policies = Vec::new();
    let file = top.source();
    for (name, section) in top.named("policies") {
        if !is_plain_name(name) {
            section.complain_of_it(NAME_RULE);
        }
        if name == NO_LOCK {
            section.complain_of_it("has the name that stands for a guarded route without a lock");
        }
        let source = section.required("path", source);
        let settings = section.free("settings");
        let setting_places = SettingPlaces::new(&file, name);
        let guard = PushGuard::read(&section.section("guard"));
        let signers = PolicySigners::read(&section);
        section.finish();
        // If the source is invalid, the name still counts, because routes may use it.
        policies.push(PolicyConfig {
            name: name.to_owned(),
            source: source.unwrap_or_else(builtin),
            settings,
            setting_places,
            guard,
            signers,
        });
    }
    if !policies.iter().any(|policy| policy.name == "default") {
        let settings = serde_json::Map::new();
        let guard = PushGuard::default();
        policies.push(PolicyConfig {
            name: "default".into(),
            source: builtin(),
            settings,
            setting_places: SettingPlaces::default(),
            guard,
            signers: PolicySigners::default(),
        });
    }
    policies.sort_by(|a, b| a.name.cmp(&b.name));
    policies
}

/// Checks that the file has a policy of this name.
pub(super) fn named(policies: &[PolicyConfig], name: &str) -> Result<String, String> {
    let names: Vec<&str> = policies.iter().map(|policy| policy.name.as_str()).collect();
    if names.contains(&name) {
        return Ok(name.to_owned());
    }
    let hint = suggestion(name, &names);
    Err(format!("no policy is named `{name}`; there are {}{hint}", names.join(", ")))
}

fn source(text: &str, place: &Location) -> Result<PolicySource, String> {
    let Some(name) = text.strip_prefix("builtin:") else {
        return values::file(text, place).map(PolicySource::File);
    };
    if BUILTINS.contains(&name) {
        return Ok(PolicySource::Builtin(name.to_owned()));
    }
    let hint = suggestion(name, &BUILTINS);
    Err(format!("`{name}` is not built in; there are {}{hint}", BUILTINS.join(", ")))
}
