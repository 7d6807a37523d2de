//! The text form of a [`LeaseRef`]: `<token>-<nonce>-<key>[.<key>…]`.
//!
//! The token is decimal and the nonce has 16 hexadecimal digits. Each key is base64url; a key outside the lease table
//! has the letter of its key space and a tilde in front (`a~…`). The text holds all that the store needs to find the
//! grant, so any proxy can renew and release the lease. It is no proof of ownership: the store compares the nonce
//! with the holder's.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

use super::fields::Fields;
use super::refusal::Refusal;
use crate::lock::{Key, LeaseRef, Space, Token};
use crate::service::{LeaseError, Principal};

/// The longest lease id that a client may send. All issued ids are shorter.
const MAX_BYTES: usize = 32 * 1024;

/// The text form of `lease`.
pub fn encode(lease: &LeaseRef) -> String {
    use std::fmt::Write;
    let mut text =
        String::with_capacity(40 + lease.keys.iter().map(|key| key.as_str().len() * 2).sum::<usize>());
    let _ = write!(text, "{}-{:016x}-", lease.token.unwrap_or_default(), lease.nonce);
    for (at, key) in lease.keys.iter().enumerate() {
        if at > 0 {
            text.push('.');
        }
        text.push_str(key.space().id_prefix());
        URL_SAFE_NO_PAD.encode_string(key.as_str(), &mut text);
    }
    text
}

/// Takes the field `lease_id` from a request.
///
/// # Errors
/// If the id is longer than any id.
pub fn take(fields: &mut Fields<'_>) -> Result<Option<String>, Refusal> {
    fields.text("lease_id", 1..=MAX_BYTES)
}

/// As [`take`], for a request that must have the field.
///
/// # Errors
/// If there is no id, or it is longer than any id.
pub fn take_required(fields: &mut Fields<'_>) -> Result<String, Refusal> {
    fields.required_text("lease_id", 1..=MAX_BYTES)
}

/// Parses a lease id that a client sent.
///
/// # Errors
/// [`LeaseError::Lost`] for an id that no proxy issued.
pub fn parse(text: &str, principal: &Principal) -> Result<LeaseRef, LeaseError> {
    let lease = decode(text).ok_or(LeaseError::Lost)?;
    Ok(LeaseRef { principal: principal.name(), ..lease })
}

/// `None` unless the text is exactly what [`encode`] makes of some lease.
fn decode(text: &str) -> Option<LeaseRef> {
    if text.len() > MAX_BYTES {
        return None;
    }
    let (token, rest) = text.split_once('-')?;
    let (nonce, keys) = rest.split_once('-')?;
    let keys = keys.split('.').map(decode_key).collect::<Option<Vec<Key>>>()?;
    if !keys.is_sorted_by(|a, b| a < b) {
        return None;
    }
    let token = Some(decode_token(token)?).filter(|token| token.0 > 0);
    Some(LeaseRef { keys: keys.into(), nonce: decode_nonce(nonce)?, token, principal: None })
}

fn decode_key(text: &str) -> Option<Key> {
    let (space, text) = match text.find('~') {
        None => (Space::Table, text),
        Some(at) => {
            let (head, rest) = text.split_at(at + 1);
            (Space::ALL.into_iter().find(|space| space.id_prefix() == head)?, rest)
        }
    };
    let bytes = URL_SAFE_NO_PAD.decode(text).ok()?;
    Some(Key::new(std::str::from_utf8(&bytes).ok()?)?.within(space))
}

fn decode_nonce(text: &str) -> Option<u64> {
    let is_hex = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    (text.len() == 16 && text.bytes().all(is_hex)).then(|| u64::from_str_radix(text, 16).ok()).flatten()
}

fn decode_token(text: &str) -> Option<Token> {
    let is_plain = text.bytes().all(|byte| byte.is_ascii_digit()) && !text.starts_with('0');
    is_plain.then(|| text.parse().ok().map(Token)).flatten().filter(|token| token.0 < 1 << 53)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lease(keys: &[&str]) -> LeaseRef {
        let keys: Vec<Key> = keys.iter().map(|key| Key::new(key).unwrap()).collect();
        LeaseRef { keys: keys.into(), nonce: 0xab, token: Some(Token(17)), principal: None }
    }

    #[test]
    fn a_lease_id_survives_encoding_and_decoding() {
        for keys in [&["orders/42"][..], &["a", "b", "ü-.~"], &["x".repeat(1024).as_str()]] {
            let lease = lease(keys);
            let text = encode(&lease);
            assert_eq!(decode(&text).as_ref(), Some(&lease), "{text}");
        }
        assert_eq!(encode(&lease(&["k"])), "17-00000000000000ab-aw");
    }

    #[test]
    fn each_space_has_ids_of_its_own() {
        let mut ids = Vec::new();
        for space in Space::ALL {
            let key = Key::new("k").unwrap().within(space);
            let lease = LeaseRef { keys: [key].into(), nonce: 0xab, token: Some(Token(17)), principal: None };
            let text = encode(&lease);
            assert_eq!(decode(&text), Some(lease), "{text}");
            ids.push(text);
        }
        ids.sort();
        ids.dedup();
        assert_eq!(ids.len(), Space::ALL.len());
        for text in ["17-00000000000000ab-x~aw", "17-00000000000000ab-~aw", "17-00000000000000ab-a~a~aw"] {
            assert_eq!(decode(text), None, "{text}");
        }
    }

    #[test]
    fn a_lease_id_fits_sixteen_of_the_longest_keys() {
        let keys: Vec<String> = (0..16).map(|n| format!("{n:x}{}", "k".repeat(1023))).collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        let text = encode(&lease(&keys));
        assert!(text.len() <= MAX_BYTES, "{}", text.len());
        assert!(decode(&text).is_some());
    }

    #[test]
    fn malformed_lease_ids_are_refused() {
        let hostile = [
            "",
            "-",
            "--",
            "17",
            "17-00000000000000ab",
            "17-00000000000000ab-",
            "17-00000000000000ab-aw.",
            "17-00000000000000ab-.aw",
            "17-00000000000000ab-aw=",
            "17-00000000000000ab-a",
            "17-00000000000000ab-ax",
            "17-00000000000000ab-Yg.YQ",
            "17-00000000000000ab-YQ.YQ",
            "17-00000000000000ab-_w",
            "17-00000000000000AB-aw",
            "17-000000000000ab-aw",
            "17-+0000000000000ab-aw",
            "017-00000000000000ab-aw",
            "+17-00000000000000ab-aw",
            "0-00000000000000ab-aw",
            "99999999999999999999999-00000000000000ab-aw",
            "9007199254740992-00000000000000ab-aw",
            " 17-00000000000000ab-aw",
            "17-00000000000000ab-aw\n",
            "17-00000000000000ab-aw-aw",
            "٣-00000000000000ab-aw",
        ];
        for text in hostile {
            assert_eq!(decode(text), None, "{text:?}");
        }
        let too_long = format!("17-00000000000000ab-{}", URL_SAFE_NO_PAD.encode("k".repeat(1025)));
        assert_eq!(decode(&too_long), None);
        assert_eq!(decode(&"1".repeat(MAX_BYTES + 1)), None);
    }
}
