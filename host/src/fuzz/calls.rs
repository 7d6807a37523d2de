//! What clients and other proxies send is read without a panic, and what was read is what was sent.

use arbitrary::{Result, Unstructured};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hyper::header::{AUTHORIZATION, HeaderMap, HeaderValue};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::Value;

use super::input::{joined, one_of};
use crate::auth::Credentials;
use crate::fronts::admission::{Presented, presented};
use crate::fronts::{fields, lease_id};
use crate::http::{Query, decode_form, decode_path};
use crate::lock::{Key, LeaseRef, Space, Token};
use crate::peers::wire;
use crate::service::Principal;

pub fn hold(u: &mut Unstructured<'_>) -> Result<()> {
    match u.int_in_range(0..=5)? {
        0 => body(u),
        1 => written_lease_id(u),
        2 => read_lease_id(u),
        3 => frame(u),
        4 => target(u),
        _ => credentials(u),
    }
}

/// A body that is accepted is a JSON object whose members a JSON parser finds, too.
fn body(u: &mut Unstructured<'_>) -> Result<()> {
    const WORDS: [&str; 22] = [
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        "\"a\":",
        "\"b\":",
        "\"\\u0061\":",
        "1",
        "-1",
        "1.5",
        "1e400",
        "18446744073709551616",
        "\"x\"",
        "\"\\ud800\"",
        "null",
        "true",
        "{\"c\":{\"c\":1}}",
        " ",
        "\"a\"",
        "\u{e9}",
    ];
    let bytes = joined(u, &WORDS, 12)?;
    let Ok(mut fields) = fields::Fields::parse(&bytes) else { return Ok(()) };
    // A list may contain half of a pair of surrogates, which is no text.
    let Ok(value) = serde_json::from_slice::<Value>(&bytes) else { return Ok(()) };
    let text = fields.text("a", 1..=8);
    let number = fields.integer("b", 1..=9);
    let raw = fields::raw(&bytes, &mut fields, "c", 16);
    if let Ok(text) = text {
        assert_eq!(text.as_deref(), value["a"].as_str());
    }
    if let Ok(number) = number {
        assert_eq!(number.map(u64::from), value["b"].as_u64());
    }
    if let Ok(raw) = raw {
        let raw = raw.map(|raw| serde_json::from_str::<Value>(raw.get()).expect("JSON"));
        assert_eq!(raw.unwrap_or_default(), value["c"]);
    }
    if fields.finish().is_ok() {
        let members = value.as_object().expect("an object");
        assert!(members.keys().all(|name| ["a", "b", "c"].contains(&name.as_str())), "{members:?}");
    }
    Ok(())
}

fn key(u: &mut Unstructured<'_>) -> Result<Key> {
    let text: &str = u.arbitrary()?;
    let key = Key::new(text).or_else(|| Key::new("k"));
    Ok(key.expect("it is a key").within(*u.choose(&Space::ALL)?))
}

/// A lease id that a proxy writes means the same lease when it is read.
fn written_lease_id(u: &mut Unstructured<'_>) -> Result<()> {
    let mut keys = (0..u.int_in_range(1..=4)?).map(|_| key(u)).collect::<Result<Vec<_>>>()?;
    keys.sort();
    keys.dedup();
    let token = Some(Token(u.int_in_range(1..=(1 << 53) - 1)?));
    let lease = LeaseRef { keys: keys.into(), nonce: u.arbitrary()?, token, principal: None };
    let text = lease_id::encode(&lease);
    assert_eq!(lease_id::parse(&text, &Principal::Anonymous(None)).ok(), Some(lease), "{text}");
    Ok(())
}

/// A lease id that is accepted has one spelling.
fn read_lease_id(u: &mut Unstructured<'_>) -> Result<()> {
    const WORDS: [&str; 16] = [
        "17",
        "0",
        "-",
        "00000000000000ab",
        "aw",
        "YQ",
        "Yg",
        ".",
        "r~",
        "a~",
        "q~",
        "~",
        "=",
        "_",
        "A",
        "+",
    ];
    let text = match u.arbitrary()? {
        true => String::from_utf8_lossy(&joined(u, &WORDS, 10)?).into_owned(),
        false => format!("17-00000000000000ab-{}", String::from_utf8_lossy(&joined(u, &WORDS, 8)?)),
    };
    if let Ok(lease) = lease_id::parse(&text, &Principal::Anonymous(None)) {
        assert_eq!(lease_id::encode(&lease), text);
    }
    Ok(())
}

/// A frame between proxies names one key, and a key has one frame.
fn frame(u: &mut Unstructured<'_>) -> Result<()> {
    let key = key(u)?;
    assert_eq!(wire::key_of(&wire::frame(&key)[2..]), Some(key));
    let bytes: &[u8] = u.arbitrary()?;
    if let Some(key) = wire::key_of(bytes) {
        let frame = wire::frame(&key);
        assert!(frame.len() <= wire::MAX_FRAME + 2);
        assert_eq!(&frame[2..], bytes);
    }
    Ok(())
}

/// Decoding takes back the encoding, and a query that is accepted is that of a form.
fn target(u: &mut Unstructured<'_>) -> Result<()> {
    let text: &str = u.arbitrary()?;
    let encoded = utf8_percent_encode(text, NON_ALPHANUMERIC).to_string();
    assert_eq!(decode_path(&encoded).as_deref(), Some(text));
    assert_eq!(decode_form(&encoded).as_deref(), Some(text));
    const WORDS: [&str; 14] =
        ["a", "b", "=", "&", "+", "%20", "%", "%c3%a9", "%ff", "%61", ";", "x", "1", "%2b"];
    let query = String::from_utf8_lossy(&joined(u, &WORDS, 10)?).into_owned();
    if let Ok(found) = Query::parse(Some(&query), &["a", "b"]) {
        let pairs: Vec<(String, String)> = form_urlencoded::parse(query.as_bytes()).into_owned().collect();
        for name in ["a", "b"] {
            let expected: Vec<&str> =
                pairs.iter().filter(|(known, _)| known == name).map(|(_, value)| value.as_str()).collect();
            assert_eq!(found.text(name).into_iter().collect::<Vec<_>>(), expected, "{query}");
        }
        let _ = found.count("a", 1, 100);
    }
    Ok(())
}

/// The header `Authorization` gives the credentials that a client put into it, and never two.
fn credentials(u: &mut Unstructured<'_>) -> Result<()> {
    let mut headers = HeaderMap::new();
    for _ in 0..u.int_in_range(0..=2)? {
        let scheme = one_of(u, &["Bearer ", "bearer  ", "Basic ", "BASIC\t", "Digest ", ""])?;
        let rest = match u.arbitrary()? {
            true => STANDARD.encode(u.arbitrary::<&[u8]>()?),
            false => u.arbitrary::<&str>()?.to_owned(),
        };
        if let Ok(value) = HeaderValue::from_bytes(format!("{scheme}{rest}").as_bytes()) {
            headers.append(AUTHORIZATION, value);
        }
    }
    let names = ["spiffe://a/b".to_owned()];
    if let Ok(presented) = presented(&headers, Presented::Names(&names)) {
        let mut values = headers.get_all(AUTHORIZATION).iter();
        assert_eq!(values.next().is_none(), presented.credentials() == Credentials::Certificate(&names));
        assert!(values.next().is_none(), "{headers:?}");
    }
    let (user, token) = (one_of(u, &["a", "", "b c"])?, u.arbitrary::<&str>()?);
    let basic = format!("basic {}", STANDARD.encode(format!("{user}:{token}")));
    let headers = HeaderMap::from_iter([(AUTHORIZATION, HeaderValue::try_from(basic).expect("a value"))]);
    let presented = presented(&headers, Presented::Names(&[])).ok();
    assert_eq!(
        presented.as_ref().map(|presented| presented.credentials()),
        Some(Credentials::Password(user, token))
    );
    Ok(())
}

#[test]
fn what_was_sent_is_what_is_read() {
    super::input::check(hold);
}
