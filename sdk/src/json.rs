//! Reads a field of a JSON body that may be cut off.

use core::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

/// The field at `path` in a JSON text, of which `prefix` is the whole or the beginning.
///
/// `path` leads inwards from the outermost object or list. It consists of member names and list indexes (from 0),
/// separated by dots (`items.0.sku`), so a member with a dot in its name cannot be addressed. A text is returned
/// without quotes, a whole number in digits, and `true` and `false` as these words.
///
/// `None` if
/// - there is no such field in the prefix, or it is an object, a list or `null`;
/// - the field is a number that can be written in several ways (`1.0`, `1e0`, `-0`), because one value would have
///   several names;
/// - the prefix ends inside the field, or directly after a number, which may continue;
/// - the prefix has a name on the path twice, or beside a name that differs only in case, because readers differ:
///   some take the first and some the last, and some ignore case;
/// - the prefix is not the beginning of a JSON text in UTF-8, or the path is more than 127 levels deep.
///
/// ```
/// use lockkeeper_sdk::json_field;
///
/// let cut = br#"{"items": [{"sku": "A-7", "n": 2}], "note": "to be deliv"#;
/// assert_eq!(json_field(cut, "items.0.sku").as_deref(), Some("A-7"));
/// assert_eq!(json_field(cut, "items.0.n").as_deref(), Some("2"));
/// assert_eq!(json_field(cut, "note"), None);
/// ```
pub fn json_field(prefix: &[u8], path: &str) -> Option<String> {
    let text = whole(prefix)?;
    let mut found = None;
    let mut json = serde_json::Deserializer::from_str(text);
    let read = At { path, found: &mut found }.deserialize(&mut json).and_then(|()| json.end());
    match read {
        // The value is complete, but the text after it was cut off.
        Ok(()) if text.len() < prefix.len() => None,
        Err(error) if !error.is_eof() => None,
        _ => found,
    }
}

/// The prefix without the character or number at its end that the cut may have split.
fn whole(prefix: &[u8]) -> Option<&str> {
    let text = match core::str::from_utf8(prefix) {
        Ok(text) => text,
        Err(error) if error.error_len().is_some() => return None,
        Err(error) => core::str::from_utf8(&prefix[..error.valid_up_to()]).ok()?,
    };
    if text.ends_with("true") || text.ends_with("false") {
        return Some(text);
    }
    Some(text.trim_end_matches(|last: char| last.is_ascii_digit() || "+-.eE".contains(last)))
}

/// A visitor for the value in which `path` starts.
struct At<'a> {
    path: &'a str,
    found: &'a mut Option<String>,
}

/// The first step of a path, and the rest.
fn step(path: &str) -> (&str, Option<&str>) {
    path.split_once('.').map_or((path, None), |(first, rest)| (first, Some(rest)))
}

impl<'de> DeserializeSeed<'de> for At<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<(), D::Error> {
        json.deserialize_any(self)
    }
}

/// A visitor for the value after a step: either `rest` leads further, or this value is the field.
struct Behind<'a> {
    rest: Option<&'a str>,
    found: &'a mut Option<String>,
}

impl<'de> DeserializeSeed<'de> for Behind<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<(), D::Error> {
        match self.rest {
            Some(path) => At { path, found: self.found }.deserialize(json),
            None => {
                let field = <&RawValue as serde::Deserialize>::deserialize(json)?;
                *self.found = scalar(field.get());
                Ok(())
            }
        }
    }
}

fn scalar(json: &str) -> Option<String> {
    match json.as_bytes().first()? {
        b'{' | b'[' | b'n' => None,
        b'"' => serde_json::from_str(json).ok(),
        b't' | b'f' => Some(json.to_owned()),
        _ => Some(json.to_owned()).filter(|number| !number.contains(['.', 'e', 'E']) && number != "-0"),
    }
}

impl<'de> Visitor<'de> for At<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<(), A::Error> {
        let (name, rest) = step(self.path);
        let mut is_there = false;
        while let Some(likeness) = members.next_key_seed(Name(name))? {
            if likeness == Likeness::Other {
                members.next_value::<IgnoredAny>()?;
                continue;
            }
            if is_there || likeness == Likeness::ButForCase {
                return Err(A::Error::custom("the name is there twice"));
            }
            is_there = true;
            members.next_value_seed(Behind { rest, found: self.found })?;
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<(), A::Error> {
        let (index, rest) = step(self.path);
        let wanted = index.parse::<usize>().ok().filter(|wanted| wanted.to_string() == index);
        for n in 0.. {
            let more = if wanted == Some(n) {
                elements.next_element_seed(Behind { rest, found: self.found })?
            } else {
                elements.next_element::<IgnoredAny>()?.map(|_| ())
            };
            if more.is_none() {
                break;
            }
        }
        Ok(())
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_u64<E>(self, _: u64) -> Result<(), E> {
        Ok(())
    }

    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }

    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        Ok(())
    }

    fn visit_str<E>(self, _: &str) -> Result<(), E> {
        Ok(())
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }
}

/// Compares a member's name with this one, with escapes resolved.
struct Name<'a>(&'a str);

#[derive(PartialEq, Eq)]
enum Likeness {
    Same,
    /// Different for most readers, but the same for readers that ignore case.
    ButForCase,
    Other,
}

impl<'de> DeserializeSeed<'de> for Name<'_> {
    type Value = Likeness;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<Likeness, D::Error> {
        json.deserialize_str(self)
    }
}

impl Visitor<'_> for Name<'_> {
    type Value = Likeness;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a name")
    }

    fn visit_str<E>(self, name: &str) -> Result<Likeness, E> {
        Ok(if name == self.0 {
            Likeness::Same
        } else if folded(name).eq(folded(self.0)) {
            Likeness::ButForCase
        } else {
            Likeness::Other
        })
    }
}

/// The characters of a name without their case. Both steps are necessary: for some letters, only one of them maps all
/// variants to the same character.
fn folded(name: &str) -> impl Iterator<Item = char> {
    name.chars().flat_map(char::to_uppercase).flat_map(char::to_lowercase)
}

#[cfg(test)]
mod tests;
