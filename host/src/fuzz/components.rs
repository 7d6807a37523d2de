//! Any bytes are a policy or are refused: the checks before a component is compiled do not panic, nor does its manifest.

use arbitrary::{Result, Unstructured};
use serde_json::json;

use crate::config::EngineLimits;
use crate::policy::{Manifest, builtin, form};

pub fn hold(u: &mut Unstructured<'_>) -> Result<()> {
    let name = *u.choose(&["default", "fair-groups", "backoff"])?;
    let mut bytes = builtin(name).expect("a shipped policy").to_vec();
    for _ in 0..u.int_in_range(0..=6)? {
        change(u, &mut bytes)?;
    }
    let check = || form::check(&bytes, &EngineLimits::default()).map_err(|rejection| rejection.to_string());
    assert_eq!(check(), check());
    let faults = || {
        let manifest = Manifest::of(&bytes).map_err(|error| error.to_string())?;
        let settings = json!({"ttl_ms": 5, "weights": {"a": 0}, "label": "", "min_ms": "x"});
        Ok::<_, String>(manifest.map(|manifest| manifest.faults_of(&settings)))
    };
    assert_eq!(faults(), faults());
    Ok(())
}

/// Changes a few of the bytes.
fn change(u: &mut Unstructured<'_>, bytes: &mut Vec<u8>) -> Result<()> {
    if bytes.is_empty() {
        return Ok(());
    }
    // The types, the exports and the manifest are at the end.
    let from = if u.arbitrary()? { bytes.len().saturating_sub(8_192) } else { 0 };
    let at = u.int_in_range(from..=bytes.len() - 1)?;
    let end = (at + u.int_in_range(1..=16)?).min(bytes.len());
    match u.int_in_range(0..=4)? {
        0 => bytes[at] = u.arbitrary()?,
        1 => bytes[at] ^= 1 << u.int_in_range(0..=7)?,
        2 => drop(bytes.drain(at..end)),
        3 => {
            let copied = bytes[at..end].to_vec();
            let to = u.int_in_range(0..=bytes.len())?;
            drop(bytes.splice(to..to, copied));
        }
        _ => bytes.truncate(at),
    }
    Ok(())
}

#[test]
fn any_bytes_are_a_policy_or_are_refused() {
    super::input::check(hold);
}
