//! Reads a TOML document key by key and collects every fault, with its line.
//!
//! The known keys are those that were read: [`Section::finish`] reports all others. An environment variable can
//! replace a scalar of the file. The name of the variable is `LOCKKEEPER_` and the scalar's path, in upper case and
//! with `_` for the dots.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::fault::{Fault, Location, suggestion};
use super::setting::{self, Source};

/// The environment variables that may change a configuration.
pub type Env = BTreeMap<String, String>;

/// The prefix of these variables.
pub const ENV_PREFIX: &str = "LOCKKEEPER_";

/// State that all sections of one configuration share.
pub struct Document<'a> {
    file: &'a Path,
    text: &'a str,
    env: &'a Env,
    /// The paths of the scalars that were read, by the names of their variables.
    scalars: RefCell<BTreeMap<String, String>>,
    faults: RefCell<Vec<Fault>>,
}

/// A table of the file. If the table is absent, every key has its default.
pub struct Section<'a> {
    document: &'a Document<'a>,
    /// Empty at the top level.
    path: String,
    place: Location,
    table: Option<&'a DeTable<'a>>,
    known: RefCell<Vec<&'static str>>,
    /// False for elements of lists: they have no environment variables.
    takes_env: bool,
}

/// What `read` makes of a section that is absent: each key has its default.
pub fn defaults<T>(read: impl FnOnce(&Section<'_>) -> T) -> T {
    let env = Env::new();
    let document = Document::new(Path::new(""), "", &env);
    read(&document.absent())
}

/// A scalar and the place where it was given.
enum Given<'a> {
    File(&'a DeValue<'a>),
    Env(&'a str),
}

impl<'a> Document<'a> {
    /// A document whose faults name `file` and find their lines in `text`.
    pub fn new(file: &'a Path, text: &'a str, env: &'a Env) -> Document<'a> {
        Document { file, text, env, scalars: RefCell::default(), faults: RefCell::default() }
    }

    /// The top-level section.
    pub fn top(&'a self, table: &'a DeTable<'a>) -> Section<'a> {
        Section { table: Some(table), ..self.absent() }
    }

    fn absent(&'a self) -> Section<'a> {
        Section {
            document: self,
            path: String::new(),
            place: Location::File(self.file.to_owned()),
            table: None,
            known: RefCell::default(),
            takes_env: true,
        }
    }

    /// Records a fault.
    pub fn fault(&self, place: Location, what: impl Into<String>) {
        self.faults.borrow_mut().push(Fault { place, what: what.into() });
    }

    /// Records a syntax error of the file.
    pub fn syntax(&self, error: &toml::de::Error) {
        let at = error.span().map_or(0, |span| span.start);
        self.fault(self.line_of(at), error.message());
    }

    /// The faults in the order of the file, followed by the faults of environment variables.
    pub fn into_faults(self) -> Vec<Fault> {
        let mut faults = self.faults.into_inner();
        faults.sort_by(|a, b| a.place.cmp(&b.place));
        faults.dedup();
        faults
    }

    /// One warning for each variable that has our prefix and names no key.
    pub fn unknown_env(&self, others: &[&str]) -> Vec<String> {
        let known = self.scalars.borrow();
        let is_unknown = |name: &&String| {
            name.starts_with(ENV_PREFIX) && !known.contains_key(*name) && !others.contains(&name.as_str())
        };
        let names: Vec<&str> = known.keys().map(String::as_str).collect();
        let warn = |name: &String| {
            format!("the environment variable {name} is not known{}", suggestion(name, &names))
        };
        self.env.keys().filter(is_unknown).map(warn).collect()
    }

    /// The paths of all scalars that were read.
    #[cfg(test)]
    pub fn known_keys(&self) -> Vec<String> {
        self.scalars.borrow().values().cloned().collect()
    }

    fn line_of(&self, byte: usize) -> Location {
        setting::line_of(self.file, self.text, byte)
    }
}

impl<'a> Section<'a> {
    /// Reads a whole number in `range`.
    pub fn integer<T: TryFrom<u64>>(&self, key: &'static str, range: RangeInclusive<u64>, default: T) -> T {
        let Some((given, place)) = self.scalar(key) else { return default };
        let bound = format!("a whole number from {} to {}", range.start(), range.end());
        let (number, shown) = match &given {
            Given::Env(text) => (text.parse().ok(), format!("`{text}`")),
            Given::File(DeValue::Integer(integer)) => {
                (u64::from_str_radix(integer.as_str(), integer.radix()).ok(), integer.to_string())
            }
            Given::File(other) => (None, kind_of(other).to_owned()),
        };
        let fits = number.filter(|number| range.contains(number)).and_then(|number| T::try_from(number).ok());
        fits.unwrap_or_else(|| {
            self.fault(place, key, format!("is {shown}; must be {bound}"));
            default
        })
    }

    /// Reads a duration in milliseconds.
    pub fn milliseconds(&self, key: &'static str, range: RangeInclusive<u64>, default_ms: u64) -> Duration {
        Duration::from_millis(self.integer(key, range, default_ms))
    }

    /// Reads a duration in seconds.
    pub fn seconds(&self, key: &'static str, range: RangeInclusive<u64>, default_s: u64) -> Duration {
        Duration::from_secs(self.integer(key, range, default_s))
    }

    /// As [`Section::integer`], for a key that may be absent.
    pub fn optional<T: TryFrom<u64>>(&self, key: &'static str, range: RangeInclusive<u64>) -> Option<T> {
        self.scalar(key)?;
        let lowest = T::try_from(*range.start()).ok()?;
        Some(self.integer(key, range, lowest))
    }

    /// Reads `true` or `false`.
    pub fn boolean(&self, key: &'static str, default: bool) -> bool {
        let Some((given, place)) = self.scalar(key) else { return default };
        match given {
            Given::File(DeValue::Boolean(value)) => *value,
            Given::Env("true" | "1") => true,
            Given::Env("false" | "0") => false,
            Given::File(other) => {
                self.fault(place, key, format!("is {}; must be true or false", kind_of(other)));
                default
            }
            Given::Env(other) => {
                self.fault(place, key, format!("is `{other}`; must be true or false"));
                default
            }
        }
    }

    /// Reads text and converts it with `parse`, whose error says what the text must be.
    pub fn parsed<T>(
        &self,
        key: &'static str,
        default: T,
        parse: impl FnOnce(&str, &Location) -> Result<T, String>,
    ) -> T {
        self.text(key, parse).unwrap_or(default)
    }

    /// Reads a path, relative to the file. `None` if the text is empty.
    pub fn path(&self, key: &'static str) -> Option<PathBuf> {
        self.parsed(key, None, |text, place| {
            Ok(Some(text).filter(|text| !text.is_empty()).map(|text| resolve(text, place)))
        })
    }

    /// As [`Section::parsed`], for a key without a default.
    pub fn required<T>(
        &self,
        key: &'static str,
        parse: impl FnOnce(&str, &Location) -> Result<T, String>,
    ) -> Option<T> {
        if self.scalar(key).is_none() {
            self.fault(self.place.clone(), key, "is missing".to_owned());
        }
        self.text(key, parse)
    }

    /// Reads a text or a list of texts and converts it with `parse`, whose error says what the texts must be.
    pub fn texts<T>(&self, key: &'static str, parse: impl FnOnce(&[&str]) -> Result<T, String>) -> Option<T> {
        let (given, place) = self.scalar(key)?;
        let wrong = |other: &DeValue<'_>| format!("is {}; must be text, or a list of texts", kind_of(other));
        let texts = match given {
            Given::Env(text) => Ok(vec![text]),
            Given::File(DeValue::String(text)) => Ok(vec![&**text]),
            Given::File(DeValue::Array(items)) => {
                let text = |item: &'a Spanned<DeValue<'a>>| match item.get_ref() {
                    DeValue::String(text) => Ok(&**text),
                    other => Err(format!("holds {}; must be text, or a list of texts", kind_of(other))),
                };
                items.iter().map(text).collect()
            }
            Given::File(other) => Err(wrong(other)),
        };
        texts.and_then(|texts| parse(&texts)).map_err(|what| self.fault(place, key, what)).ok()
    }

    /// Reads a whole number in `range`, or a list of such numbers; empty without the key. Elements of lists have no
    /// environment variables.
    pub fn integers(&self, key: &'static str, range: RangeInclusive<u32>) -> Vec<u32> {
        let Some((given, place)) = self.scalar(key) else { return Vec::new() };
        let number = |value: &DeValue<'_>| match value {
            DeValue::Integer(integer) => u32::from_str_radix(integer.as_str(), integer.radix()).ok(),
            _ => None,
        };
        let numbers: Option<Vec<u32>> = match given {
            Given::Env(text) => text.parse().ok().map(|number| vec![number]),
            Given::File(DeValue::Array(items)) => items.iter().map(|item| number(item.get_ref())).collect(),
            Given::File(one) => number(one).map(|number| vec![number]),
        };
        numbers.filter(|numbers| numbers.iter().all(|number| range.contains(number))).unwrap_or_else(|| {
            let bound = format!("whole numbers from {} to {}", range.start(), range.end());
            self.fault(place, key, format!("must be {bound}, or one of them"));
            Vec::new()
        })
    }

    /// Declares a key that is only read under a condition, so that suggestions for misspelt keys include it.
    pub fn know(&self, key: &'static str) {
        self.known.borrow_mut().push(key);
    }

    /// Whether the file has the key.
    pub fn holds(&self, key: &str) -> bool {
        self.table.is_some_and(|table| table.contains_key(key))
    }

    /// Whether the file has the key and its value is `true` or `false`.
    pub fn is_boolean(&self, key: &str) -> bool {
        let value = self.table.and_then(|table| table.get(key));
        value.is_some_and(|value| matches!(value.get_ref(), DeValue::Boolean(_)))
    }

    /// Whether the file has the key and its value is a table.
    pub fn is_table(&self, key: &str) -> bool {
        let value = self.table.and_then(|table| table.get(key));
        value.is_some_and(|value| matches!(value.get_ref(), DeValue::Table(_)))
    }

    /// A table of texts whose keys are free to choose.
    pub fn pairs(&self, key: &'static str) -> Vec<(String, String)> {
        let holder = self.section(key);
        let mut pairs = Vec::new();
        for (name, value) in holder.table.into_iter().flat_map(|table| table.iter()) {
            match value.get_ref() {
                DeValue::String(text) => pairs.push((name.get_ref().to_string(), text.to_string())),
                other => {
                    let place = self.document.line_of(name.span().start);
                    holder.fault(place, name.get_ref(), format!("is {}; must be text", kind_of(other)));
                }
            }
        }
        pairs
    }

    /// A table inside this one.
    pub fn section(&self, key: &'static str) -> Section<'a> {
        self.known.borrow_mut().push(key);
        let entry = self.table.and_then(|table| table.get_key_value(key));
        let (place, value) = match entry {
            Some((name, value)) => (self.document.line_of(name.span().start), Some(value.get_ref())),
            None => (self.place.clone(), None),
        };
        self.inner(self.path_of(key), place, value, self.takes_env)
    }

    /// The tables in a list of tables.
    pub fn list(&self, key: &'static str) -> Vec<Section<'a>> {
        self.known.borrow_mut().push(key);
        let Some((name, value)) = self.table.and_then(|table| table.get_key_value(key)) else {
            return Vec::new();
        };
        let DeValue::Array(items) = value.get_ref() else {
            let place = self.document.line_of(name.span().start);
            self.fault(
                place,
                key,
                format!("is {}; must be tables, each under [[{key}]]", kind_of(value.get_ref())),
            );
            return Vec::new();
        };
        let items = items.iter().enumerate().map(|(at, item)| {
            let place = self.document.line_of(item.span().start);
            self.inner(format!("{}[{at}]", self.path_of(key)), place, Some(item.get_ref()), false)
        });
        items.collect()
    }

    /// The tables inside a table whose keys are names.
    pub fn named(&self, key: &'static str) -> Vec<(&'a str, Section<'a>)> {
        let holder = self.section(key);
        let entries = holder.table.into_iter().flat_map(|table| table.iter());
        let sections = entries.map(|(name, value)| {
            let place = self.document.line_of(name.span().start);
            let path = format!("{}.{}", holder.path, name.get_ref());
            (&**name.get_ref(), self.inner(path, place, Some(value.get_ref()), self.takes_env))
        });
        sections.collect()
    }

    /// A table that another component validates.
    pub fn free(&self, key: &'static str) -> Map<String, Value> {
        let section = self.section(key);
        section.table.map(to_json).unwrap_or_default()
    }

    /// The file that is read.
    pub(super) fn source(&self) -> Arc<Source> {
        Arc::new(Source { file: self.document.file.to_owned(), text: self.document.text.to_owned() })
    }

    /// Reports keys that were not read.
    pub fn finish(&self) {
        let known = self.known.borrow();
        for key in self.table.into_iter().flat_map(|table| table.keys()) {
            let name = key.get_ref();
            if !known.contains(&&**name) {
                let hint = suggestion(name, &known);
                let what = format!("unknown key `{}`{hint}", self.path_of(name));
                self.document.fault(self.document.line_of(key.span().start), what);
            }
        }
    }

    /// Reports a fault of the whole section.
    pub fn complain_of_it(&self, what: impl Into<String>) {
        self.document.fault(self.place.clone(), format!("{}: {}", self.path, what.into()));
    }

    /// Reports an additional fault of a key that was read.
    pub fn complain(&self, key: &'static str, what: impl Into<String>) {
        let place = self.scalar(key).map_or_else(|| self.place.clone(), |(_, place)| place);
        self.fault(place, key, what.into());
    }

    fn inner(
        &self,
        path: String,
        place: Location,
        value: Option<&'a DeValue<'a>>,
        takes_env: bool,
    ) -> Section<'a> {
        let table = match value {
            Some(DeValue::Table(table)) => Some(table),
            Some(other) => {
                self.document.fault(place.clone(), format!("{path}: is {}; must be a table", kind_of(other)));
                None
            }
            None => None,
        };
        Section { document: self.document, path, place, table, known: RefCell::default(), takes_env }
    }

    fn text<T>(
        &self,
        key: &'static str,
        parse: impl FnOnce(&str, &Location) -> Result<T, String>,
    ) -> Option<T> {
        let (given, place) = self.scalar(key)?;
        let text = match given {
            Given::Env(text) => text,
            Given::File(DeValue::String(text)) => text,
            Given::File(other) => {
                self.fault(place, key, format!("is {}; must be text", kind_of(other)));
                return None;
            }
        };
        parse(text, &place).map_err(|what| self.fault(place, key, what)).ok()
    }

    fn scalar(&self, key: &'static str) -> Option<(Given<'a>, Location)> {
        self.known.borrow_mut().push(key);
        if self.takes_env {
            let name = env_name(&self.path_of(key));
            let given = self.document.env.get(&name);
            self.document.scalars.borrow_mut().insert(name.clone(), self.path_of(key));
            if let Some(value) = given {
                return Some((Given::Env(value), Location::Env(name)));
            }
        }
        let (name, value) = self.table?.get_key_value(key)?;
        Some((Given::File(value.get_ref()), self.document.line_of(name.span().start)))
    }

    fn fault(&self, place: Location, key: &str, what: impl Into<String>) {
        let what = what.into();
        self.document.fault(place, format!("{}: {what}", self.path_of(key)));
    }

    fn path_of(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }
}

/// Resolves a path relative to the file, or relative to the working directory if an environment variable gave it.
pub fn resolve(path: &str, place: &Location) -> PathBuf {
    match place {
        Location::Line(file, _) | Location::File(file) => file.parent().unwrap_or(Path::new("")).join(path),
        Location::Env(_) => path.into(),
    }
}

fn env_name(path: &str) -> String {
    let upper = path.chars().map(|c| if c.is_ascii_alphanumeric() { c.to_ascii_uppercase() } else { '_' });
    ENV_PREFIX.chars().chain(upper).collect()
}

fn kind_of(value: &DeValue<'_>) -> &'static str {
    match value {
        DeValue::String(_) => "text",
        DeValue::Integer(_) => "a whole number",
        DeValue::Float(_) => "a number with a fraction",
        DeValue::Boolean(_) => "a boolean",
        DeValue::Datetime(_) => "a date",
        DeValue::Array(_) => "a list",
        DeValue::Table(_) => "a table",
    }
}

fn to_json(table: &DeTable<'_>) -> Map<String, Value> {
    table.iter().map(|(name, value)| (name.get_ref().to_string(), value_to_json(value))).collect()
}

/// Dates become text, and so do integers that JSON readers cannot hold.
fn value_to_json(value: &Spanned<DeValue<'_>>) -> Value {
    match value.get_ref() {
        DeValue::String(text) => text.as_ref().into(),
        DeValue::Integer(integer) => match i64::from_str_radix(integer.as_str(), integer.radix()) {
            Ok(number) => number.into(),
            Err(_) => integer.to_string().into(),
        },
        DeValue::Float(float) => {
            float.as_str().replace('_', "").parse::<f64>().map_or(Value::Null, Value::from)
        }
        DeValue::Boolean(boolean) => (*boolean).into(),
        DeValue::Datetime(date) => date.to_string().into(),
        DeValue::Array(items) => items.iter().map(value_to_json).collect(),
        DeValue::Table(table) => to_json(table).into(),
    }
}
