//! A field of a JSON body of which only the beginning may be there.

use core::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

/// The field at `path` in a JSON text of which `prefix` is all or the beginning.
///
/// `path` leads from the outermost object or list inwards: names of members and, counted from 0, elements
/// of lists, with dots between them (`items.0.sku`). It cannot name a member with a dot in its name. A
/// text is given as it is, a whole number in digits, `true` and `false` as these words.
///
/// `None` where
/// - there is no such field in the prefix, or it is an object, a list or `null`;
/// - it is a number that can be written in several ways (`1.0`, `1e0`, `-0`): one thing would have several
///   names;
/// - the prefix ends inside the field, or directly behind a number, which may go on;
/// - a name on the path is there twice in the prefix, or beside one that differs from it in case alone: of two
///   readers, one may take the first and one the last, and one may ignore case;
/// - the prefix is not the beginning of a JSON text in UTF-8, or the path leads through more than 127
///   levels.
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
        // What was left off at the end stands behind a value that is complete.
        Ok(()) if text.len() < prefix.len() => None,
        Err(error) if !error.is_eof() => None,
        _ => found,
    }
}

/// The prefix without what the cut may have parted at its end: a character, or a number.
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

/// The place in the text from which `path` leads on.
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

/// A step on the path has been taken: the rest of it leads further, or this is the field.
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

/// Tells a member by its name, escapes resolved.
struct Name<'a>(&'a str);

#[derive(PartialEq, Eq)]
enum Likeness {
    Same,
    /// Another name for most readers, and the same for those that ignore case.
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

/// The characters of a name without their case. There are letters that only one of the two steps takes to the
/// others of their kind.
fn folded(name: &str) -> impl Iterator<Item = char> {
    name.chars().flat_map(char::to_uppercase).flat_map(char::to_lowercase)
}

#[cfg(test)]
mod tests;
