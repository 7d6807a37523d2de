//! Any text is a configuration or has faults, and the same text has the same ones.

use std::path::Path;

use arbitrary::{Result, Unstructured};

use super::input::{joined, one_of};
use crate::config::{AuthRules, Config, Env, Fault};

/// The lines of the file that shows every key.
const EXAMPLE: &str = include_str!("../../../config.toml");

const WORDS: [&str; 40] = [
    "[store]\n",
    "[[guard]]\n",
    "[[guard.routes]]\n",
    "[[routes]]\n",
    "[policies.a]\n",
    "[auth]\n",
    "[stores.a]\n",
    "listen = \"127.0.0.1:0\"\n",
    "upstream = \"http://127.0.0.1:1\"\n",
    "policy = \"default\"\n",
    "match = { path = \"/{id}\" }\n",
    "match = { path = \"",
    "resource = \"",
    "{id}",
    "{*",
    "{header.",
    "}",
    "\"",
    "\n",
    "=",
    ".",
    "[",
    "]",
    "{",
    "\"\"\"",
    "\\u0000",
    "url = ",
    "mysql://a:b@c:1/d",
    "?",
    "1e400",
    "-1",
    "1_000",
    "true",
    "[1, \"a\"]",
    "2027-01-01",
    "[[principal]]\nname = \"a\"\n",
    "tokens = [{ id = \"a\", sha256 = \"",
    "[roles.a]\n",
    "allow = [{ do = [\"read\"], on = \"*\" }]\n",
    "#",
];

pub fn hold(u: &mut Unstructured<'_>) -> Result<()> {
    let text = text(u)?;
    let file = Path::new("config.toml");
    if u.ratio(1, 4)? {
        let rules = || AuthRules::parse(file, &text).map_err(|faults| shown(&faults));
        assert_eq!(rules(), rules());
        return Ok(());
    }
    let names =
        ["LOCKKEEPER_API_LISTEN", "LOCKKEEPER_STORE_URL", "LOCKKEEPER_LIMITS_MAX_KEYS", "LOCKKEEPER_X"];
    let value = one_of(u, &["", "a", "1", "true", "0.0.0.0:1"])?.to_owned();
    let env = Env::from([(one_of(u, &names)?.to_owned(), value)]);
    let parse = || {
        let parsed = Config::parse(file, &text, &env).map(|config| format!("{config:?}"));
        parsed.map_err(|faults| shown(&faults))
    };
    let parsed = parse();
    assert!(parsed.as_ref().err().is_none_or(|faults| !faults.is_empty()));
    assert_eq!(parsed, parse());
    Ok(())
}

fn shown(faults: &[Fault]) -> Vec<String> {
    faults.iter().map(ToString::to_string).collect()
}

/// Lines of the example, some of them without their comment signs, and other text.
fn text(u: &mut Unstructured<'_>) -> Result<String> {
    let lines: Vec<&str> = EXAMPLE.lines().collect();
    let mut text = String::new();
    for _ in 0..u.int_in_range(0..=8)? {
        if u.ratio(1, 3)? {
            text.push_str(&String::from_utf8_lossy(&joined(u, &WORDS, 8)?));
            continue;
        }
        let from = u.choose_index(lines.len())?;
        let count = u.int_in_range(1..=12)?;
        for line in lines.iter().skip(from).take(count) {
            let key = line.strip_prefix("# ").filter(|line| line.contains(['=', '[']));
            text.push_str(key.unwrap_or(line));
            text.push('\n');
        }
    }
    Ok(text)
}

#[test]
fn any_text_is_a_configuration_or_has_faults() {
    super::input::check(hold);
}
