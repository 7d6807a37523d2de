//! `[policies.NAME]`: the policies, their components and their settings.

use std::path::PathBuf;

use super::fault::{Location, suggestion};
use super::reader::Section;
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
    for (name, section) in top.named("policies") {
        if !is_plain_name(name) {
            section.complain_of_it(NAME_RULE);
        }
        if name == NO_LOCK {
            section.complain_of_it("has the name that stands for a guarded route without a lock");
        }
        let source = section.required("path", source);
        let settings = section.free("settings");
        section.finish();
        // If the source is invalid, the name still counts, because routes may use it.
        policies.push(PolicyConfig {
            name: name.to_owned(),
            source: source.unwrap_or_else(builtin),
            settings,
        });
    }
    if !policies.iter().any(|policy| policy.name == "default") {
        let settings = serde_json::Map::new();
        policies.push(PolicyConfig { name: "default".into(), source: builtin(), settings });
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
