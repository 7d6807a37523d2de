//! The way to a setting of a policy, and its line in the configuration.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use toml::Spanned;
use toml::de::{DeString, DeTable, DeValue};

use super::fault::Location;

/// A step from a table or a list to something in it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Step {
    /// A key of a table.
    Key(String),
    /// An item of a list, from 0.
    Item(usize),
}

/// The steps from the settings of a policy to one of them. Its text is like `tenants.acme.rank` or `tiers[2]`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SettingPath(Vec<Step>);

impl SettingPath {
    /// The path to a key of what is here.
    #[must_use]
    pub fn key(&self, key: &str) -> SettingPath {
        SettingPath(self.0.iter().cloned().chain([Step::Key(key.to_owned())]).collect())
    }

    /// The path to an item of what is here.
    #[must_use]
    pub fn item(&self, at: usize) -> SettingPath {
        SettingPath(self.0.iter().cloned().chain([Step::Item(at)]).collect())
    }
}

/// A key that TOML has to quote is quoted.
impl fmt::Display for SettingPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_bare = |key: &str| {
            !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte))
        };
        for (at, step) in self.0.iter().enumerate() {
            match step {
                Step::Item(item) => write!(f, "[{item}]")?,
                Step::Key(key) => {
                    let dot = if at == 0 { "" } else { "." };
                    if is_bare(key) { write!(f, "{dot}{key}")? } else { write!(f, "{dot}{key:?}")? }
                }
            }
        }
        Ok(())
    }
}

/// A configuration file.
pub(super) struct Source {
    pub file: PathBuf,
    pub text: String,
}

/// Where the settings of a policy are in the configuration. The text of the file is parsed again only to find a place.
#[derive(Clone, Default)]
pub struct SettingPlaces(Option<(Arc<Source>, String)>);

/// Shows no places, so that configurations with the same values have the same debug text.
impl fmt::Debug for SettingPlaces {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SettingPlaces").finish_non_exhaustive()
    }
}

impl SettingPlaces {
    /// The places of the settings of `policy`.
    pub(super) fn new(source: &Arc<Source>, policy: &str) -> SettingPlaces {
        SettingPlaces(Some((Arc::clone(source), policy.to_owned())))
    }

    /// The place of a setting. A setting that is missing has the place of the table that should have it. `None` if the file
    /// does not have the policy.
    pub fn of(&self, path: &SettingPath) -> Option<Location> {
        let (source, policy) = self.0.as_ref()?;
        let (table, _) = DeTable::parse_recoverable(&source.text);
        let policy = table.get_ref().get("policies")?.get_ref().as_table()?.get_key_value(policy.as_str())?;
        let settings = Step::Key("settings".to_owned());
        let at = byte_of(policy, [&settings].into_iter().chain(&path.0));
        Some(line_of(&source.file, &source.text, at))
    }
}

/// Where the last of these steps is that a key's value has. Without one, where the key is.
fn byte_of<'a>(
    (key, value): (&Spanned<DeString<'_>>, &Spanned<DeValue<'_>>),
    steps: impl Iterator<Item = &'a Step>,
) -> usize {
    let (mut byte, mut here) = (key.span().start, value);
    for step in steps {
        let next = match (step, here.get_ref()) {
            (Step::Key(key), DeValue::Table(table)) => {
                table.get_key_value(key.as_str()).map(|(key, value)| (key.span().start, value))
            }
            (Step::Item(at), DeValue::Array(items)) => items.get(*at).map(|item| (item.span().start, item)),
            _ => None,
        };
        let Some((at, value)) = next else { break };
        (byte, here) = (at, value);
    }
    byte
}

/// The line of a byte of a file.
pub(super) fn line_of(file: &Path, text: &str, byte: usize) -> Location {
    let before = text.get(..byte).unwrap_or(text);
    Location::Line(file.to_owned(), 1 + before.matches('\n').count())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_of_a_setting_is_found_by_the_way_to_it() {
        let text = "[policies.a.settings]\nttl_ms = 1\n\"a.b\" = 1\ntiers = [\n 1,\n 2,\n]\n\
                    [policies.a.settings.tenants.acme]\nrank = 1\n\"a[0]\" = 1\n";
        let source = Arc::new(Source { file: "c.toml".into(), text: text.to_owned() });
        let line = |policy: &str, path: &SettingPath| match SettingPlaces::new(&source, policy).of(path) {
            Some(Location::Line(_, line)) => Some(line),
            _ => None,
        };
        let top = SettingPath::default();
        let acme = top.key("tenants").key("acme");
        for (path, shown, expected) in [
            (top.clone(), "", 1),
            (top.key("ttl_ms"), "ttl_ms", 2),
            (top.key("a.b"), "\"a.b\"", 3),
            (top.key("a").key("b"), "a.b", 1),
            (top.key("tiers").item(1), "tiers[1]", 6),
            (top.key("tiers").item(7), "tiers[7]", 4),
            (acme.key("rank"), "tenants.acme.rank", 9),
            (acme.key("a[0]"), "tenants.acme.\"a[0]\"", 10),
            (acme.key("missing"), "tenants.acme.missing", 8),
        ] {
            assert_eq!((path.to_string().as_str(), line("a", &path)), (shown, Some(expected)));
        }
        assert_eq!(line("b", &top), None);
    }
}
