//! Any bytes are a policy or are refused: the checks before a component is compiled do not panic.

use arbitrary::{Result, Unstructured};

use crate::config::EngineLimits;
use crate::policy::{builtin, form};

pub fn hold(u: &mut Unstructured<'_>) -> Result<()> {
    let name = *u.choose(&["default", "fair-groups", "backoff"])?;
    let mut bytes = builtin(name).expect("a shipped policy").to_vec();
    for _ in 0..u.int_in_range(0..=6)? {
        change(u, &mut bytes)?;
    }
    let check = || form::check(&bytes, &EngineLimits::default()).map_err(|rejection| rejection.to_string());
    assert_eq!(check(), check());
    Ok(())
}

/// Changes a few of the bytes.
fn change(u: &mut Unstructured<'_>, bytes: &mut Vec<u8>) -> Result<()> {
    if bytes.is_empty() {
        return Ok(());
    }
    // The types and the exports are at the end.
    let from = if u.arbitrary()? { bytes.len().saturating_sub(4_096) } else { 0 };
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
