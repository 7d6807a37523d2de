//! Strict reading of request bodies: every error names its field.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;
use std::ops::RangeInclusive;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

use super::refusal::{Code, Refusal};
use crate::lock::record::{Origin, StoredValue};

/// The members of a JSON object that have not been read yet.
pub struct Fields<'a> {
    members: Vec<(Cow<'a, str>, Json<'a>)>,
    known: Vec<&'static str>,
}

/// A JSON value that borrows from the body and keeps duplicate members.
#[derive(Debug)]
pub enum Json<'a> {
    /// `null`.
    Null,
    /// `true` or `false`.
    Bool,
    /// A whole number of up to 64 bits.
    Integer(u64),
    /// A number that is negative, fractional, or larger than 64 bits.
    OtherNumber(f64),
    /// A text.
    Text(Cow<'a, str>),
    /// A list, whose members are not kept.
    List,
    /// An object, with its members in their order.
    Object(Vec<(Cow<'a, str>, Json<'a>)>),
}

impl<'a> Fields<'a> {
    /// Parses a body, which must be a JSON object without duplicate members.
    pub fn parse(body: &'a [u8]) -> Result<Fields<'a>, Refusal> {
        let members = match serde_json::from_slice(body) {
            Ok(Json::Object(members)) => members,
            Ok(other) => {
                let detail = format!("must be a JSON object, not {}", other.name());
                return Err(Refusal::invalid("body", detail));
            }
            Err(_) if body.trim_ascii().is_empty() => {
                return Err(Refusal::invalid("body", "must be a JSON object, and is empty"));
            }
            Err(error) => {
                return Err(Refusal::invalid("body", format!("not JSON: {error}"))
                    .with("line", error.line())
                    .with("column", error.column()));
            }
        };
        for (at, (name, _)) in members.iter().enumerate() {
            if members[..at].iter().any(|(before, _)| before == name) {
                return Err(Refusal::invalid(shown(name), "given twice"));
            }
        }
        Ok(Fields { members, known: Vec::with_capacity(8) })
    }

    /// Removes a member and returns it; `null` counts as absent.
    pub fn take(&mut self, name: &'static str) -> Option<Json<'a>> {
        self.known.push(name);
        let at = self.members.iter().position(|(member, _)| member == name)?;
        let (_, value) = self.members.swap_remove(at);
        (!matches!(value, Json::Null)).then_some(value)
    }

    /// An optional text whose length in bytes is within `bytes`.
    pub fn text(
        &mut self,
        name: &'static str,
        bytes: RangeInclusive<usize>,
    ) -> Result<Option<String>, Refusal> {
        self.take(name).map(|value| value.into_text(name, &bytes)).transpose()
    }

    /// As [`Fields::text`], for a field that must be present.
    pub fn required_text(
        &mut self,
        name: &'static str,
        bytes: RangeInclusive<usize>,
    ) -> Result<String, Refusal> {
        let bound = format!("{} to {} bytes", bytes.start(), bytes.end());
        self.text(name, bytes)?.ok_or_else(|| Refusal::invalid(name, "is required").with("bound", bound))
    }

    /// An optional whole number in `range`.
    pub fn integer(
        &mut self,
        name: &'static str,
        range: RangeInclusive<u32>,
    ) -> Result<Option<u32>, Refusal> {
        let range = u64::from(*range.start())..=u64::from(*range.end());
        let number = self.number(name, range)?;
        Ok(number.map(|number| u32::try_from(number).unwrap_or(u32::MAX)))
    }

    /// As [`Fields::integer`], for numbers of up to 64 bits.
    pub fn number(&mut self, name: &'static str, range: RangeInclusive<u64>) -> Result<Option<u64>, Refusal> {
        self.take(name).map(|value| value.into_integer(name, &range)).transpose()
    }

    /// Refuses members that were not read.
    pub fn finish(self) -> Result<(), Refusal> {
        let Some((name, _)) = self.members.first() else { return Ok(()) };
        let known = self.known.join(", ");
        Err(Refusal::new(Code::Invalid, format!("unknown field `{}`; known are {known}", shown(name)))
            .with("field", shown(name)))
    }
}

impl Json<'_> {
    /// The text, if its length in bytes is within `bytes`; otherwise a refusal that names `field`.
    pub fn into_text(self, field: &str, bytes: &RangeInclusive<usize>) -> Result<String, Refusal> {
        let Json::Text(text) = self else { return Err(self.not(field, "text")) };
        if bytes.contains(&text.len()) {
            return Ok(text.into_owned());
        }
        let bound = format!("{} to {} bytes", bytes.start(), bytes.end());
        Err(Refusal::invalid(field, format!("has {} bytes; must have {bound}", text.len()))
            .with("bound", bound))
    }

    /// The whole number, if it is in `range`; otherwise a refusal that names `field`.
    pub fn into_integer(self, field: &str, range: &RangeInclusive<u64>) -> Result<u64, Refusal> {
        let bound = format!("{} to {}", range.start(), range.end());
        let given = match self {
            Json::Integer(value) if range.contains(&value) => return Ok(value),
            Json::Integer(value) => value.to_string(),
            Json::OtherNumber(value) => value.to_string(),
            other => {
                return Err(other.not(field, &format!("a whole number from {bound}")).with("bound", bound));
            }
        };
        Err(Refusal::invalid(field, format!("is {given}; must be a whole number from {bound}"))
            .with("bound", bound))
    }

    /// The refusal of a value of the wrong type.
    pub fn not(&self, field: &str, expected: &str) -> Refusal {
        Refusal::invalid(field, format!("must be {expected}, not {}", self.name()))
    }

    fn name(&self) -> &'static str {
        match self {
            Json::Null => "null",
            Json::Bool => "a boolean",
            Json::Integer(_) | Json::OtherNumber(_) => "a number",
            Json::Text(_) => "text",
            Json::List => "a list",
            Json::Object(_) => "an object",
        }
    }
}

/// A member that is kept as raw JSON of at most `max` bytes. `null` counts as absent.
pub fn raw<'b>(
    body: &'b [u8],
    fields: &mut Fields<'_>,
    name: &'static str,
    max: usize,
) -> Result<Option<&'b RawValue>, Refusal> {
    if fields.take(name).is_none() {
        return Ok(None);
    }
    let members: Result<HashMap<String, &'b RawValue>, _> = serde_json::from_slice(body);
    let value = members.ok().and_then(|mut members| members.remove(name));
    let value = value.ok_or_else(|| Refusal::invalid(name, "must be JSON"))?;
    let bytes = value.get().len();
    if bytes > max {
        let detail = format!("has {bytes} bytes; may have {max}");
        return Err(Refusal::invalid(name, detail).with("bound", max));
    }
    Ok(Some(value))
}

/// Parses a value that came in through [`raw`] and was read back from the store.
///
/// # Errors
/// If the value is the answer to a guarded request: only clients of that route may see it. Also if the stored value
/// is not JSON.
pub fn kept_value<'a, T: Deserialize<'a>>(kept: &'a StoredValue) -> Result<T, Refusal> {
    if kept.origin != Origin::Api {
        let detail = "it was done by a guarded request, and the answer is for the clients of its route";
        return Err(Refusal::new(Code::Conflict, detail).with("state", "done"));
    }
    serde_json::from_str(&kept.value)
        .map_err(|error| Refusal::new(Code::StoreUnavailable, format!("the store keeps no JSON: {error}")))
}

/// A client's own name for something, shortened to 64 characters for an error message.
pub fn shown(name: &str) -> String {
    name.chars().take(64).collect()
}

impl<'de: 'a, 'a> Deserialize<'de> for Json<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Json<'a>, D::Error> {
        deserializer.deserialize_any(JsonVisitor(std::marker::PhantomData))
    }
}

struct JsonVisitor<'a>(std::marker::PhantomData<&'a ()>);

impl<'de: 'a, 'a> Visitor<'de> for JsonVisitor<'a> {
    type Value = Json<'a>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E: Error>(self) -> Result<Json<'a>, E> {
        Ok(Json::Null)
    }

    fn visit_bool<E: Error>(self, _value: bool) -> Result<Json<'a>, E> {
        Ok(Json::Bool)
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Json<'a>, E> {
        Ok(Json::Integer(value))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Json<'a>, E> {
        Ok(u64::try_from(value).map_or(Json::OtherNumber(value as f64), Json::Integer))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Json<'a>, E> {
        Ok(Json::OtherNumber(value))
    }

    fn visit_borrowed_str<E: Error>(self, value: &'de str) -> Result<Json<'a>, E> {
        Ok(Json::Text(Cow::Borrowed(value)))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Json<'a>, E> {
        Ok(Json::Text(Cow::Owned(value.to_owned())))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Json<'a>, A::Error> {
        while list.next_element::<Json<'_>>()?.is_some() {}
        Ok(Json::List)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Json<'a>, A::Error> {
        let mut members = Vec::with_capacity(8);
        while let Some(Name(name)) = map.next_key()? {
            // The search for duplicates is quadratic. No valid object has nearly this many members.
            if members.len() == 1024 {
                return Err(Error::custom("over 1024 members in an object"));
            }
            members.push((name, map.next_value()?));
        }
        Ok(Json::Object(members))
    }
}

/// A member's name: borrowed unless it has escapes.
struct Name<'a>(Cow<'a, str>);

impl<'de: 'a, 'a> Deserialize<'de> for Name<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Name<'a>, D::Error> {
        match deserializer.deserialize_str(JsonVisitor(std::marker::PhantomData))? {
            Json::Text(text) => Ok(Name(text)),
            _ => Err(Error::custom("a name must be text")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn detail(body: &str) -> String {
        let read = |body| -> Result<(), Refusal> {
            let mut fields = Fields::parse(body)?;
            fields.required_text("resource", 1..=8)?;
            fields.integer("ttl_ms", 100..=5000)?;
            fields.finish()
        };
        read(body.as_bytes()).map_or_else(|refusal| refusal.detail, |()| "fine".to_owned())
    }

    #[test]
    fn every_fault_names_its_field() {
        assert_eq!(detail(r#"{"resource": "r", "ttl_ms": null}"#), "fine");
        assert_eq!(detail(r#"{"resource": "r\u0041", "ttl_ms": 100}"#), "fine");
        let faults = [
            (r#"{}"#, "resource: is required"),
            (r#"{"resource": ""}"#, "resource: has 0 bytes; must have 1 to 8 bytes"),
            (r#"{"resource": "123456789"}"#, "resource: has 9 bytes; must have 1 to 8 bytes"),
            (r#"{"resource": 7}"#, "resource: must be text, not a number"),
            (r#"{"resource": ["r"]}"#, "resource: must be text, not a list"),
            (r#"{"resource": "r", "ttl_ms": 99}"#, "ttl_ms: is 99; must be a whole number from 100 to 5000"),
            (r#"{"resource": "r", "ttl_ms": -1}"#, "ttl_ms: is -1; must be a whole number from 100 to 5000"),
            (
                r#"{"resource": "r", "ttl_ms": 0.5}"#,
                "ttl_ms: is 0.5; must be a whole number from 100 to 5000",
            ),
            (
                r#"{"resource": "r", "ttl_ms": "5"}"#,
                "ttl_ms: must be a whole number from 100 to 5000, not text",
            ),
            (
                r#"{"resource": "r", "ttl_ms": 99999999999}"#,
                "ttl_ms: is 99999999999; must be a whole number from 100 to 5000",
            ),
            (r#"{"resource": "r", "colour": 1}"#, "unknown field `colour`; known are resource, ttl_ms"),
            (r#"{"resource": "r", "resource": "s"}"#, "resource: given twice"),
            (r#"[]"#, "body: must be a JSON object, not a list"),
            (r#"  "#, "body: must be a JSON object, and is empty"),
        ];
        for (body, expected) in faults {
            assert_eq!(detail(body), expected, "{body}");
        }
    }

    #[test]
    fn broken_json_is_located() {
        assert!(detail("{\n  \"resource\": }").contains("line 2 column 15"));
        assert!(detail(r#"{"resource": "r"} x"#).contains("trailing characters at line 1"));
        assert!(detail(&"[".repeat(5000)).contains("recursion limit"));
        let invalid = Fields::parse(b"{\"resource\": \"\xff\"}").err().unwrap();
        assert!(invalid.detail.starts_with("body: not JSON"), "{}", invalid.detail);
    }
}
