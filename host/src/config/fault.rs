//! Faults of a configuration, with their places.

use std::fmt;
use std::path::PathBuf;

/// One fault. Its text is like `config.toml:12: store.lanes: is 0; must be from 1 to 64`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Where the fault is.
    pub place: Location,
    /// What is wrong, with the key if the fault belongs to a key.
    pub what: String,
}

/// The place of a fault.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Location {
    /// The whole file, for a fault that belongs to no line.
    File(PathBuf),
    /// Lines count from 1.
    Line(PathBuf, usize),
    /// An environment variable.
    Env(String),
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.place {
            Location::File(file) => write!(f, "{}: {}", file.display(), self.what),
            Location::Line(file, line) => write!(f, "{}:{line}: {}", file.display(), self.what),
            Location::Env(name) => write!(f, "{name}: {}", self.what),
        }
    }
}

/// The longest text that is suggested, or compared with one that could be.
const MAX_SUGGESTED_BYTES: usize = 64;

/// `; did you mean …?` if a known name is similar, otherwise empty.
pub fn suggestion(given: &str, known: &[&str]) -> String {
    // The distance of long texts takes long, and nobody mistypes one of those.
    let is_short = |name: &str| name.len() <= MAX_SUGGESTED_BYTES;
    let names = known.iter().filter(|name| is_short(name) && is_short(given));
    let near = names.map(|name| (distance(given, name), name)).min();
    match near {
        Some((steps, name)) if steps <= 1 + name.len() / 4 => format!("; did you mean `{name}`?"),
        _ => String::new(),
    }
}

/// The edit distance: how many characters must be changed, added, removed, or swapped with their neighbour.
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut rows = vec![(0..=b.len()).collect::<Vec<usize>>()];
    for (i, x) in a.iter().enumerate() {
        let mut row = vec![i + 1];
        for (j, y) in b.iter().enumerate() {
            let mut least = (rows[i][j] + usize::from(x != y)).min(row[j] + 1).min(rows[i][j + 1] + 1);
            if i > 0 && j > 0 && *x == b[j - 1] && a[i - 1] == *y {
                least = least.min(rows[i - 1][j - 1] + 1);
            }
            row.push(least);
        }
        rows.push(row);
    }
    rows[a.len()][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_similar_name_is_suggested() {
        let known = ["lanes", "renewal_lanes", "timeout_ms"];
        assert_eq!(suggestion("lane", &known), "; did you mean `lanes`?");
        assert_eq!(suggestion("timeuot_ms", &known), "; did you mean `timeout_ms`?");
        assert_eq!(suggestion("timeout", &known), "; did you mean `timeout_ms`?");
        assert_eq!(suggestion("colour", &known), "");
        assert_eq!(suggestion("x", &[]), "");
    }
}
