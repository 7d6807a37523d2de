//! The numbers of both times, side by side.

use std::fmt;

use serde_json::{Map, Value, json};

/// What came of a scene.
pub struct Numbers {
    pub rows: Vec<(&'static str, u64)>,
    /// How often went wrong what must not go wrong.
    pub fault: (&'static str, u64),
}

pub struct Report<'a> {
    pub name: &'a str,
    pub server: &'a str,
    pub without: Numbers,
    pub with: Numbers,
}

impl Report<'_> {
    fn is_shown(&self) -> bool {
        self.without.fault.1 > 0
    }

    fn is_cured(&self) -> bool {
        self.with.fault.1 == 0
    }

    pub fn is_good(&self) -> bool {
        self.is_shown() && self.is_cured()
    }

    pub fn json(&self) -> Value {
        json!({
            "example": self.name,
            "server": self.server,
            "without": self.without.json(),
            "with": self.with.json(),
            "fault": self.without.fault.0,
            "shown": self.is_shown(),
            "cured": self.is_cured(),
        })
    }
}

impl Numbers {
    fn all(&self) -> impl Iterator<Item = &(&'static str, u64)> {
        self.rows.iter().chain([&self.fault])
    }

    fn json(&self) -> Map<String, Value> {
        self.all().map(|(name, number)| ((*name).to_owned(), json!(number))).collect()
    }
}

impl fmt::Display for Report<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let title = format!("{} on {}", self.name, self.server);
        writeln!(f, "{title:<40} {:>17} {:>10}", "without the proxy", "with it")?;
        for ((name, without), (_, with)) in self.without.all().zip(self.with.all()) {
            writeln!(f, "  {name:<38} {without:>17} {with:>10}")?;
        }
        let (fault, without, with) = (self.without.fault.0, self.without.fault.1, self.with.fault.1);
        write!(f, "{fault}: {without} without the proxy, {with} with it.")?;
        if !self.is_shown() {
            f.write_str(" FAILED: the fault was not shown without the proxy.")?;
        }
        if !self.is_cured() {
            f.write_str(" FAILED: the fault is there with the proxy, too.")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(without: u64, with: u64) -> Report<'static> {
        let numbers = |lost| Numbers { rows: vec![("made", 9)], fault: ("lost", lost) };
        Report { name: "a", server: "b", without: numbers(without), with: numbers(with) }
    }

    #[test]
    fn a_fault_must_be_shown_and_cured() {
        let good = report(3, 0);
        assert!(good.is_good() && !good.to_string().contains("FAILED"));
        assert_eq!(good.json()["without"], json!({"made": 9, "lost": 3}));
        for (without, with, words) in
            [(0, 0, "not shown"), (3, 1, "with the proxy, too"), (0, 1, "not shown")]
        {
            let bad = report(without, with);
            assert!(!bad.is_good() && bad.to_string().contains(words), "{bad}");
        }
    }
}
