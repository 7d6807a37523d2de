//! The settings that a policy takes: a part of JSON Schema, in which each keyword that is understood is also enforced.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

use crate::config::{SettingPath, suggestion};
use crate::policy::hooks::shortened;

/// The most faults that are reported at once.
const MOST: usize = 20;
/// The most texts of an `enum` that a message lists.
const LISTED: usize = 10;

/// What a value must be. A keyword that is not listed here is refused, because it would promise a check that nobody makes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase", deny_unknown_fields)]
pub enum Schema {
    /// A table.
    Object(Table),
    /// A list.
    Array(List),
    /// Text.
    String(Text),
    /// A whole number.
    Integer(Range<i64>),
    /// A number.
    Number(Range<f64>),
    /// `true` or `false`.
    Boolean(Flag),
}

/// A table with known and other keys.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct Table {
    #[serde(skip_serializing_if = "Option::is_none")]
    description: Option<String>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty", deserialize_with = "properties")]
    properties: BTreeMap<String, Schema>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    required: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    additional_properties: Option<Others>,
    #[serde(skip_serializing_if = "Option::is_none")]
    default: Option<Value>,
}

/// What the keys of a table may be that are not listed. Without it, anything.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
enum Others {
    Allowed(bool),
    As(Box<Schema>),
}

/// Not derived, because what is wrong with the schema of the others would then not be said.
impl<'de> Deserialize<'de> for Others {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Others, D::Error> {
        match Value::deserialize(deserializer)? {
            Value::Bool(allowed) => Ok(Others::Allowed(allowed)),
            schema => Ok(Others::As(Box::new(within("additionalProperties", schema)?))),
        }
    }
}

fn properties<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeMap<String, Schema>, D::Error> {
    let schemas = Map::deserialize(deserializer)?;
    schemas.into_iter().map(|(key, schema)| Ok((key.clone(), within(&key, schema)?))).collect()
}

fn items<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Box<Schema>>, D::Error> {
    let schema = Option::<Value>::deserialize(deserializer)?;
    schema.map(|schema| within("items", schema).map(Box::new)).transpose()
}

/// A schema within another one. What is wrong with it is said with its place.
fn within<E: serde::de::Error>(place: &str, schema: Value) -> Result<Schema, E> {
    let place = || shortened(place.escape_debug().to_string());
    serde_json::from_value(schema).map_err(|error| E::custom(format!("in `{}`: {error}", place())))
}

/// A list of values that are alike.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct List {
    #[serde(skip_serializing_if = "Option::is_none")]
    description: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "items")]
    items: Option<Box<Schema>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    min_items: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_items: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    default: Option<Value>,
}

/// Text, whose length is counted in characters.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct Text {
    #[serde(skip_serializing_if = "Option::is_none")]
    description: Option<String>,
    #[serde(rename = "enum", skip_serializing_if = "Option::is_none")]
    one_of: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    min_length: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_length: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    default: Option<Value>,
}

/// A number between two others, which are allowed too.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Range<T> {
    #[serde(default = "none", skip_serializing_if = "Option::is_none")]
    description: Option<String>,
    #[serde(default = "none", skip_serializing_if = "Option::is_none")]
    minimum: Option<T>,
    #[serde(default = "none", skip_serializing_if = "Option::is_none")]
    maximum: Option<T>,
    #[serde(default = "none", skip_serializing_if = "Option::is_none")]
    default: Option<Value>,
}

/// `true` or `false`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Flag {
    #[serde(skip_serializing_if = "Option::is_none")]
    description: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    default: Option<Value>,
}

/// A setting that does not fit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SettingFault {
    /// The way to the setting.
    pub path: SettingPath,
    /// What is wrong, and what would be right.
    pub what: String,
}

impl fmt::Display for SettingFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path, self.what)
    }
}

/// The default of an optional keyword. `#[serde(default)]` alone would demand `T: Default`.
fn none<T>() -> Option<T> {
    None
}

impl Schema {
    /// Whether this is the schema of a table, as settings are.
    pub fn is_table(&self) -> bool {
        matches!(self, Schema::Object(_))
    }

    /// How settings differ from the schema.
    pub fn faults_of(&self, settings: &Value) -> Vec<SettingFault> {
        let mut faults = Faults(Vec::new());
        self.check(&SettingPath::default(), settings, &mut faults);
        faults.0
    }

    /// What is wrong with the schema itself: bounds that nothing meets, and default values that do not fit.
    pub fn faults(&self) -> Vec<SettingFault> {
        let mut faults = Faults(Vec::new());
        self.check_itself(&SettingPath::default(), &mut faults);
        faults.0
    }

    /// Whether no name or text has a control character, which could make two lines of one in a report.
    pub fn is_plain(&self) -> bool {
        let plain = |text: &String| !text.chars().any(char::is_control);
        match self {
            Schema::Object(table) => {
                let others = match &table.additional_properties {
                    Some(Others::As(schema)) => schema.is_plain(),
                    _ => true,
                };
                others
                    && table.required.iter().all(plain)
                    && table.properties.iter().all(|(key, schema)| plain(key) && schema.is_plain())
            }
            Schema::Array(list) => list.items.as_ref().is_none_or(|items| items.is_plain()),
            Schema::String(text) => text.one_of.iter().flatten().all(plain),
            Schema::Integer(_) | Schema::Number(_) | Schema::Boolean(_) => true,
        }
    }

    fn check_itself(&self, path: &SettingPath, faults: &mut Faults) {
        let is_crossed = match self {
            Schema::Object(_) | Schema::Boolean(_) => false,
            Schema::Array(List { min_items, max_items, .. }) => crossed(*min_items, *max_items),
            Schema::String(Text { min_length, max_length, .. }) => crossed(*min_length, *max_length),
            Schema::Integer(Range { minimum, maximum, .. }) => crossed(*minimum, *maximum),
            Schema::Number(Range { minimum, maximum, .. }) => crossed(*minimum, *maximum),
        };
        if is_crossed {
            faults.add(path, "the minimum is above the maximum".to_owned());
        }
        match self {
            Schema::Object(table) => {
                for (key, schema) in &table.properties {
                    schema.check_itself(&path.key(key), faults);
                }
                match &table.additional_properties {
                    Some(Others::As(schema)) => schema.check_itself(&path.key("*"), faults),
                    Some(Others::Allowed(false)) => {
                        for key in table.required.iter().filter(|key| !table.properties.contains_key(*key)) {
                            faults
                                .add(&path.key(key), "is required, and not among the properties".to_owned());
                        }
                    }
                    _ => {}
                }
            }
            Schema::Array(List { items: Some(items), .. }) => items.check_itself(&path.item(0), faults),
            Schema::String(Text { one_of: Some(texts), min_length, max_length, .. }) => {
                if texts.is_empty() {
                    faults.add(path, "`enum` is empty".to_owned());
                }
                if min_length.or(*max_length).is_some() {
                    faults.add(path, "`enum` and a length do not go together".to_owned());
                }
            }
            _ => {}
        }
        if let Some(default) = self.default() {
            self.check(path, default, faults);
        }
    }

    /// The default values of the settings that have one.
    #[cfg(test)]
    pub(in crate::policy) fn defaults(&self) -> Map<String, Value> {
        let Schema::Object(Table { properties, .. }) = self else { return Map::new() };
        let default = |(key, schema): (&String, &Schema)| Some((key.clone(), schema.default()?.clone()));
        properties.iter().filter_map(default).collect()
    }

    fn default(&self) -> Option<&Value> {
        match self {
            Schema::Object(Table { default, .. })
            | Schema::Array(List { default, .. })
            | Schema::String(Text { default, .. })
            | Schema::Integer(Range { default, .. })
            | Schema::Number(Range { default, .. })
            | Schema::Boolean(Flag { default, .. }) => default.as_ref(),
        }
    }

    fn check(&self, path: &SettingPath, value: &Value, faults: &mut Faults) {
        if faults.is_full() {
            return;
        }
        match (self, value) {
            (Schema::Object(table), Value::Object(members)) => table.check(path, members, faults),
            (Schema::Array(list), Value::Array(items)) if list.takes(items.len()) => {
                for (at, item) in items.iter().enumerate() {
                    if let Some(schema) = &list.items {
                        schema.check(&path.item(at), item, faults);
                    }
                }
            }
            (Schema::String(text), Value::String(given)) if text.takes(given) => {}
            (Schema::Integer(range), Value::Number(given))
                if given.as_i64().is_some_and(|given| range.takes(given)) => {}
            (Schema::Number(range), Value::Number(given))
                if given.as_f64().is_some_and(|given| range.takes(given)) => {}
            (Schema::Boolean(_), Value::Bool(_)) => {}
            _ => faults
                .add(path, format!("is {}; must be {}{}", shown(value), self.wanted(), self.meant(value))),
        }
    }

    /// What a value must be, in words.
    fn wanted(&self) -> String {
        match self {
            Schema::Object(_) => "a table".to_owned(),
            Schema::Array(List { min_items, max_items, .. }) => {
                format!("a list{}", bounds(" of ", " items", min_items.as_ref(), max_items.as_ref()))
            }
            Schema::String(Text { one_of: Some(texts), .. }) => {
                let names: Vec<_> = texts.iter().take(LISTED).map(|name| format!("`{name}`")).collect();
                let more = if texts.len() > LISTED { ", …" } else { "" };
                format!("one of {}{more}", names.join(", "))
            }
            Schema::String(Text { min_length, max_length, .. }) => {
                format!("text{}", bounds(" of ", " characters", min_length.as_ref(), max_length.as_ref()))
            }
            Schema::Integer(Range { minimum, maximum, .. }) => {
                format!("a whole number{}", range(minimum.as_ref(), maximum.as_ref()))
            }
            Schema::Number(Range { minimum, maximum, .. }) => {
                format!("a number{}", range(minimum.as_ref(), maximum.as_ref()))
            }
            Schema::Boolean(_) => "true or false".to_owned(),
        }
    }

    /// `; did you mean …?`, if a listed text is similar.
    fn meant(&self, value: &Value) -> String {
        match (self, value) {
            (Schema::String(Text { one_of: Some(texts), .. }), Value::String(given)) => {
                suggestion(given, &texts.iter().map(String::as_str).collect::<Vec<_>>())
            }
            _ => String::new(),
        }
    }
}

impl Table {
    fn check(&self, path: &SettingPath, members: &Map<String, Value>, faults: &mut Faults) {
        for (key, value) in members {
            // JSON has `null` for a setting that is not given.
            if faults.is_full() || (value.is_null() && !self.required.contains(key)) {
                continue;
            }
            let path = path.key(key);
            match (self.properties.get(key), &self.additional_properties) {
                (Some(schema), _) => schema.check(&path, value, faults),
                (None, Some(Others::As(schema))) => schema.check(&path, value, faults),
                (None, Some(Others::Allowed(false))) => {
                    let known: Vec<_> = self.properties.keys().map(String::as_str).collect();
                    faults.add(&path, format!("unknown key{}", suggestion(key, &known)));
                }
                (None, _) => {}
            }
        }
        for key in self.required.iter().filter(|key| !members.contains_key(*key)) {
            faults.add(&path.key(key), "is missing".to_owned());
        }
    }
}

impl List {
    fn takes(&self, len: usize) -> bool {
        self.min_items.is_none_or(|min| len >= min) && self.max_items.is_none_or(|max| len <= max)
    }
}

impl Text {
    fn takes(&self, given: &str) -> bool {
        let len = given.chars().count();
        self.one_of.as_ref().is_none_or(|texts| texts.iter().any(|name| name == given))
            && self.min_length.is_none_or(|min| len >= min)
            && self.max_length.is_none_or(|max| len <= max)
    }
}

impl<T: PartialOrd + Copy> Range<T> {
    fn takes(&self, given: T) -> bool {
        self.minimum.is_none_or(|min| given >= min) && self.maximum.is_none_or(|max| given <= max)
    }
}

struct Faults(Vec<SettingFault>);

impl Faults {
    fn is_full(&self) -> bool {
        self.0.len() >= MOST
    }

    fn add(&mut self, path: &SettingPath, what: String) {
        if !self.is_full() {
            self.0.push(SettingFault { path: path.clone(), what: shortened(what) });
        }
    }
}

fn crossed<T: PartialOrd>(min: Option<T>, max: Option<T>) -> bool {
    min.zip(max).is_some_and(|(min, max)| min > max)
}

/// A value as its writer knows it; a long one by its kind.
fn shown(value: &Value) -> String {
    const LONGEST: usize = 40;
    match value {
        // JSON has no number for TOML's `nan` and `inf`.
        Value::Null => "empty, or no finite number".to_owned(),
        Value::Object(_) => "a table".to_owned(),
        Value::Array(items) => format!("a list of {}", items.len()),
        Value::String(text) if text.len() > LONGEST => format!("text of {} characters", text.chars().count()),
        value => value.to_string(),
    }
}

fn range<T: fmt::Display>(min: Option<&T>, max: Option<&T>) -> String {
    match (min, max) {
        (Some(min), Some(max)) => format!(" from {min} to {max}"),
        (Some(min), None) => format!(", {min} or more"),
        (None, Some(max)) => format!(", {max} or less"),
        (None, None) => String::new(),
    }
}

fn bounds(before: &str, after: &str, min: Option<&usize>, max: Option<&usize>) -> String {
    match (min, max) {
        (Some(min), Some(max)) if min == max => format!("{before}exactly {min}{after}"),
        (Some(min), Some(max)) => format!("{before}{min} to {max}{after}"),
        (Some(min), None) => format!("{before}{min} or more{after}"),
        (None, Some(max)) => format!("{before}{max} or fewer{after}"),
        (None, None) => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn faults(schema: Value, settings: &Value) -> Vec<String> {
        let schema: Schema = serde_json::from_value(schema).unwrap();
        schema.faults_of(settings).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn each_fault_names_its_setting_and_what_would_be_right() {
        let schema = json!({
            "type": "object",
            "additionalProperties": false,
            "required": ["guard"],
            "properties": {
                "guard": {"type": "string", "enum": ["lease", "row"]},
                "stripes": {"type": "integer", "minimum": 0, "maximum": 100},
                "share": {"type": "number", "maximum": 0.5},
                "name": {"type": "string", "minLength": 1, "maxLength": 3},
                "on": {"type": "boolean"},
                "tiers": {"type": "array", "maxItems": 2, "items": {"type": "string"}},
                "tenants": {
                    "type": "object",
                    "additionalProperties": {"type": "object", "properties": {"rank": {"type": "integer"}}}
                }
            }
        });
        let fine = json!({"guard": "row", "stripes": 100, "share": 0.5, "name": "äöü", "on": true, "tiers": ["a"],
                          "tenants": {"acme": {"rank": -1, "more": "anything"}}});
        assert_eq!(faults(schema.clone(), &fine), Vec::<String>::new());
        let wrong = [
            (json!({}), "guard: is missing"),
            (
                json!({"guard": "leese"}),
                "guard: is \"leese\"; must be one of `lease`, `row`; did you mean `lease`?",
            ),
            (json!({"guard": "row", "stripe": 1}), "stripe: unknown key; did you mean `stripes`?"),
            (
                json!({"guard": "row", "stripes": 101}),
                "stripes: is 101; must be a whole number from 0 to 100",
            ),
            (
                json!({"guard": "row", "stripes": 1.5}),
                "stripes: is 1.5; must be a whole number from 0 to 100",
            ),
            (json!({"guard": "row", "share": 0.6}), "share: is 0.6; must be a number, 0.5 or less"),
            (json!({"guard": "row", "name": ""}), "name: is \"\"; must be text of 1 to 3 characters"),
            (json!({"guard": "row", "on": "yes"}), "on: is \"yes\"; must be true or false"),
            (json!({"guard": "row", "tiers": ["a", 1]}), "tiers[1]: is 1; must be text"),
            (
                json!({"guard": "row", "tiers": ["a", "b", "c"]}),
                "tiers: is a list of 3; must be a list of 2 or fewer items",
            ),
            (json!({"guard": "row", "tenants": {"acme": 1}}), "tenants.acme: is 1; must be a table"),
            (
                json!({"guard": "row", "tenants": {"acme": {"rank": "1"}}}),
                "tenants.acme.rank: is \"1\"; must be a whole number",
            ),
        ];
        for (settings, expected) in wrong {
            assert_eq!(faults(schema.clone(), &settings), [expected]);
        }
    }

    #[test]
    fn no_more_than_twenty_faults_are_reported() {
        let many: Map<String, Value> = (0..100).map(|n| (format!("k{n}"), json!(1))).collect();
        let schema = json!({"type": "object", "additionalProperties": {"type": "string"}});
        assert_eq!(faults(schema, &many.into()).len(), MOST);
    }

    #[test]
    fn a_long_text_of_a_component_makes_no_long_message() {
        let texts: Vec<String> = (0..40).map(|n| format!("{n}{}", "x".repeat(1_500))).collect();
        let schema = json!({"type": "object", "properties": {"n": {"type": "string", "enum": texts}}});
        let found = faults(schema, &json!({"n": "x".repeat(4_000)}));
        assert!(found.len() == 1 && found[0].len() < 1_100, "{}", found[0].len());
    }

    #[test]
    fn a_setting_that_need_not_be_given_may_be_null() {
        let schema = json!({"type": "object", "required": ["a"], "additionalProperties": false, "properties": {
            "a": {"type": "integer"}, "b": {"type": "integer"}
        }});
        assert_eq!(faults(schema.clone(), &json!({"a": 1, "b": null, "c": null})), Vec::<String>::new());
        assert_eq!(
            faults(schema, &json!({"a": null})),
            ["a: is empty, or no finite number; must be a whole number"]
        );
    }
}
