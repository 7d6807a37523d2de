//! The numbers of both times, side by side.

use std::fmt;

use serde_json::{Map, Value, json};

/// What came of a scene.
pub struct Numbers {
    pub rows: Vec<(&'static str, u64)>,
    /// How often went wrong what must not go wrong.
    pub faults: Vec<(&'static str, u64)>,
}

pub struct Report<'a> {
    pub name: &'a str,
    pub server: &'a str,
    pub without: Numbers,
    pub with: Numbers,
}

impl Report<'_> {
    fn is_shown(&self) -> bool {
        there(&self.without.faults) == self.without.faults.len()
    }

    fn is_cured(&self) -> bool {
        there(&self.with.faults) == 0
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
            "faults": self.without.faults.iter().map(|(name, _)| name).collect::<Vec<_>>(),
            "shown": self.is_shown(),
            "cured": self.is_cured(),
        })
    }
}

impl Numbers {
    fn all(&self) -> impl Iterator<Item = &(&'static str, u64)> {
        self.rows.iter().chain(&self.faults)
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
        match (&self.without.faults[..], &self.with.faults[..]) {
            ([(fault, without)], [(_, with)]) => {
                write!(f, "{fault}: {without} without the proxy, {with} with it.")?;
            }
            (without, with) => {
                let (all, without, with) = (without.len(), there(without), there(with));
                write!(f, "{without} of {all} faults without the proxy, {with} with it.")?;
            }
        }
        for ((fault, without), (_, with)) in self.without.faults.iter().zip(&self.with.faults) {
            if *without == 0 {
                write!(f, " FAILED: not shown without the proxy: {fault}.")?;
            }
            if *with > 0 {
                write!(f, " FAILED: there with the proxy, too: {fault}.")?;
            }
        }
        Ok(())
    }
}

/// How many of these faults there are.
fn there(faults: &[(&str, u64)]) -> usize {
    faults.iter().filter(|(_, times)| *times > 0).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(without: &[u64], with: &[u64]) -> Report<'static> {
        let numbers = |lost: &[u64]| {
            let faults = ["lost", "made again"].into_iter().zip(lost.iter().copied()).collect();
            Numbers { rows: vec![("made", 9)], faults }
        };
        Report { name: "a", server: "b", without: numbers(without), with: numbers(with) }
    }

    #[test]
    fn a_report_is_good_only_if_its_fault_is_shown_and_cured() {
        let good = report(&[3], &[0]);
        assert!(good.is_good() && !good.to_string().contains("FAILED"));
        assert_eq!(good.json()["without"], json!({"made": 9, "lost": 3}));
        for (without, with, words) in
            [(0, 0, "not shown"), (3, 1, "with the proxy, too"), (0, 1, "not shown")]
        {
            let bad = report(&[without], &[with]);
            assert!(!bad.is_good() && bad.to_string().contains(words), "{bad}");
        }
    }

    #[test]
    fn a_report_is_good_only_if_each_of_its_faults_is_shown_and_cured() {
        let good = report(&[3, 1], &[0, 0]);
        assert!(good.is_good() && good.to_string().ends_with("2 of 2 faults without the proxy, 0 with it."));
        for (without, with, words) in [
            ([3, 0], [0, 0], "not shown without the proxy: made again"),
            ([3, 1], [0, 1], "with the proxy, too: made again"),
        ] {
            let bad = report(&without, &with);
            assert!(!bad.is_good() && bad.to_string().contains(words), "{bad}");
        }
    }
}
