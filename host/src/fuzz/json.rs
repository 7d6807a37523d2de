//! A field of a body is what a JSON parser finds there.

use arbitrary::{Result, Unstructured};
use lockkeeper_sdk::json_field;
use serde::de::IgnoredAny;
use serde_json::{Map, Value};

use super::input::{joined, one_of};

const NAMES: [&str; 8] = ["id", "ID", "a", "items", "0", "", "\u{17f}ku", "sku"];

const WORDS: [&str; 40] = [
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    "\"",
    "\"id\"",
    "\"id\":",
    "\"ID\":",
    "\"a\":",
    "\"\\u0069d\":",
    "1",
    "-1",
    "0",
    "1.0",
    "1e2",
    "-0",
    "123456789012345678901234567890",
    "true",
    "false",
    "null",
    "\"x\"",
    "\"\\ud800\"",
    "\"\\ud83d\\ude00\"",
    "\\",
    "\\u0000",
    "\u{e9}",
    " ",
    "\n",
    "\u{feff}",
    "{\"id\":1}",
    "{\"a\":{\"id\":\"x\"}}",
    "[1,\"b\"]",
    "//",
    "NaN",
    "+1",
    "01",
    "\"\t\"",
    "\\\"",
];

pub fn hold(u: &mut Unstructured<'_>) -> Result<()> {
    let path = one_of(u, &["id", "a.id", "items.0", "0", "", "a.items.1.sku", "0.0.0.0"])?;
    if u.arbitrary()? {
        let text = joined(u, &WORDS, 12)?;
        agrees(&text, path);
        return Ok(());
    }
    let value = value(u, 0)?;
    let text = if u.arbitrary()? {
        serde_json::to_vec(&value).expect("JSON")
    } else {
        serde_json::to_vec_pretty(&value).expect("JSON")
    };
    agrees(&text, path);
    let found = json_field(&text, path);
    if is_alone(&value, path) {
        assert_eq!(found, scalar(&value, path), "{path} in {}", String::from_utf8_lossy(&text));
    }
    let cut = u.int_in_range(0..=text.len())?;
    if let (Some(whole), Some(part)) = (found, json_field(&text[..cut], path)) {
        assert_eq!(whole, part, "{path} in {cut} bytes of {}", String::from_utf8_lossy(&text));
    }
    Ok(())
}

/// Checks a field that was found in a text that may be no JSON.
fn agrees(text: &[u8], path: &str) {
    let Some(found) = json_field(text, path) else { return };
    match serde_json::from_slice::<Value>(text) {
        Ok(value) => {
            // A number with more than 64 bits is a fraction there.
            let at = at(&value, path);
            let is_large = at.is_some_and(Value::is_f64) && found.len() > 18;
            let is_same = scalar(&value, path).is_some_and(|expected| expected == found);
            assert!(is_same || is_large, "{path} in {} is {found}", String::from_utf8_lossy(text));
        }
        // Half of a pair of surrogates is JSON, as is a number of any size; and a text that was cut off may continue.
        Err(_) => assert!(is_beginning(text), "{path} in {}", String::from_utf8_lossy(text)),
    }
}

/// Whether the text is JSON, or its beginning.
fn is_beginning(text: &[u8]) -> bool {
    let is_cut_number = text.last().is_some_and(|last| last.is_ascii_digit() || b"+-.eE".contains(last));
    let is_cut_character = std::str::from_utf8(text).is_err_and(|error| error.error_len().is_none());
    is_cut_number
        || is_cut_character
        || serde_json::from_slice::<IgnoredAny>(text).err().is_none_or(|error| error.is_eof())
}

fn at<'a>(value: &'a Value, path: &str) -> Option<&'a Value> {
    path.split('.').try_fold(value, |value, step| match value {
        Value::Object(members) => members.get(step),
        Value::Array(elements) => {
            let index: usize = step.parse().ok()?;
            elements.get(index).filter(|_| index.to_string() == step)
        }
        _ => None,
    })
}

fn scalar(value: &Value, path: &str) -> Option<String> {
    match at(value, path)? {
        Value::Bool(flag) => Some(flag.to_string()),
        Value::String(text) => Some(text.clone()),
        Value::Number(number) if !number.is_f64() => Some(number.to_string()),
        _ => None,
    }
}

/// Whether no name on the path has another beside it that differs only in case.
fn is_alone(value: &Value, path: &str) -> bool {
    let fold = |name: &str| name.to_uppercase().to_lowercase();
    let mut value = value;
    for step in path.split('.') {
        if let Value::Object(members) = value
            && members.keys().filter(|name| fold(name) == fold(step)).count() > 1
        {
            return false;
        }
        let Some(next) = at(value, step) else { return true };
        value = next;
    }
    true
}

fn value(u: &mut Unstructured<'_>, depth: usize) -> Result<Value> {
    Ok(match u.int_in_range(0..=if depth < 4 { 7 } else { 5 })? {
        0 => Value::Null,
        1 => u.arbitrary::<bool>()?.into(),
        2 => u.arbitrary::<i64>()?.into(),
        3 => u.arbitrary::<u64>()?.into(),
        4 => u.arbitrary::<f32>()?.into(),
        5 => u.arbitrary::<&str>()?.into(),
        6 => (0..u.int_in_range(0..=3)?).map(|_| value(u, depth + 1)).collect::<Result<Vec<_>>>()?.into(),
        _ => {
            let mut members = Map::new();
            for _ in 0..u.int_in_range(0..=4)? {
                members.insert(one_of(u, &NAMES)?.to_owned(), value(u, depth + 1)?);
            }
            members.into()
        }
    })
}

#[test]
fn a_field_is_what_a_json_parser_finds() {
    super::input::check(hold);
}
