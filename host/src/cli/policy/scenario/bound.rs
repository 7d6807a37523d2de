//! Bounds of a scenario, such as `"<20ms"`, `">=99%"` or `3`.

use std::fmt;

use serde::Deserialize;
use serde::de::{self, Deserializer, Visitor};

use crate::cli::args;

/// A bound for a figure.
#[derive(Clone, Debug, PartialEq)]
pub struct Bound {
    relation: Relation,
    /// In milliseconds, in percent, or as it is.
    value: f64,
    pub unit: Unit,
    text: String,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Relation {
    Less,
    AtMost,
    Equal,
    AtLeast,
    Greater,
}

/// What a bound is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    Time,
    Percent,
    Number,
}

impl Bound {
    /// Parses a relation with a time, a percentage or a number. Without a relation, the figure must be equal.
    fn parse(text: &str) -> Result<Bound, String> {
        let relations = [
            ("<=", Relation::AtMost),
            (">=", Relation::AtLeast),
            ("<", Relation::Less),
            (">", Relation::Greater),
            ("=", Relation::Equal),
        ];
        let found = relations.iter().find_map(|(sign, relation)| Some((text.strip_prefix(sign)?, *relation)));
        let (rest, relation) = found.unwrap_or((text, Relation::Equal));
        let rest = rest.trim();
        let (value, unit) = match (rest.strip_suffix('%'), rest.parse::<f64>()) {
            (Some(percent), _) => (percent.parse().map_err(|_| wrong(text))?, Unit::Percent),
            (None, Ok(number)) => (number, Unit::Number),
            (None, Err(_)) => (args::exact_ms(rest).map_err(|_| wrong(text))?, Unit::Time),
        };
        let is_finite = f64::is_finite(value);
        is_finite.then(|| Bound { relation, value, unit, text: text.to_owned() }).ok_or_else(|| wrong(text))
    }

    /// Whether the figure is within the bound.
    pub fn holds(&self, figure: f64) -> bool {
        match self.relation {
            Relation::Less => figure < self.value,
            Relation::AtMost => figure <= self.value,
            Relation::Equal => (figure - self.value).abs() < 1e-9,
            Relation::AtLeast => figure >= self.value,
            Relation::Greater => figure > self.value,
        }
    }
}

impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

fn wrong(text: &str) -> String {
    format!("`{text}` is no bound: it must be like \"<20ms\", \">=99%\" or 3")
}

/// A bound of a time.
pub fn of_time<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Bound>, D::Error> {
    let is_time = |bound: &Bound| bound.unit == Unit::Time || bound.value == 0.0;
    read(from, is_time, "a time, like \"<20ms\"").map(Some)
}

/// A bound of a count: a number, or a percentage of all.
pub fn of_count<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Bound>, D::Error> {
    Bound::deserialize(from).map(Some)
}

/// A bound of a number.
pub fn of_number<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Bound>, D::Error> {
    read(from, |bound| bound.unit == Unit::Number, "a number, like \">0.9\"").map(Some)
}

/// A bound of a share.
pub fn of_percent<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Bound>, D::Error> {
    read(from, |bound| bound.unit == Unit::Percent, "a share, like \">=40%\"").map(Some)
}

impl<'de> Deserialize<'de> for Bound {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Bound, D::Error> {
        read(from, |bound| bound.unit != Unit::Time, "a number or a share, like \">=3\" or \"100%\"")
    }
}

fn read<'de, D: Deserializer<'de>>(
    from: D,
    fits: impl Fn(&Bound) -> bool,
    expected: &str,
) -> Result<Bound, D::Error> {
    let bound = from.deserialize_any(Reader)?;
    match fits(&bound) {
        true => Ok(bound),
        false => Err(de::Error::custom(format!("`{bound}` must be a bound of {expected}"))),
    }
}

struct Reader;

impl Visitor<'_> for Reader {
    type Value = Bound;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a bound like \"<20ms\", \">=99%\" or 3")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Bound, E> {
        Bound::parse(text).map_err(E::custom)
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<Bound, E> {
        Bound::parse(&number.to_string()).map_err(E::custom)
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<Bound, E> {
        Bound::parse(&number.to_string()).map_err(E::custom)
    }

    fn visit_f64<E: de::Error>(self, number: f64) -> Result<Bound, E> {
        Bound::parse(&number.to_string()).map_err(E::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_has_a_relation_and_a_unit() {
        let time = Bound::parse("<20ms").unwrap();
        assert!(time.holds(19.9) && !time.holds(20.0) && time.unit == Unit::Time);
        let share = Bound::parse(">= 99.5%").unwrap();
        assert!(share.holds(99.5) && !share.holds(99.4) && share.unit == Unit::Percent);
        let count = Bound::parse("3").unwrap();
        assert!(count.holds(3.0) && !count.holds(4.0) && count.unit == Unit::Number);
        for text in ["", "<", "x", "<20 parsecs", "%", "nan", "inf", "=<3"] {
            assert!(Bound::parse(text).unwrap_err().contains("no bound"), "{text}");
        }
    }
}
