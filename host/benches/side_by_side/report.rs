//! What was measured, beside what was to be reached.

use serde_json::{Value, json};

pub struct Report {
    machine: Value,
    rows: Vec<Row>,
}

/// One measurement.
pub struct Row {
    pub name: &'static str,
    /// What is to be reached; empty for a figure that is only told.
    pub target: &'static str,
    /// The figure that is compared with the target.
    pub figure: String,
    /// The two sides, or whatever explains the figure.
    pub note: String,
    /// None where there is no target, or nothing could be measured.
    pub met: Option<bool>,
    /// Every number behind it.
    pub details: Value,
}

impl Report {
    pub fn new(machine: Value) -> Report {
        Report { machine, rows: Vec::new() }
    }

    pub fn add(&mut self, row: Row) {
        eprintln!("  {}: {} ({})", row.name, row.figure, row.note);
        self.rows.push(row);
    }

    /// Whether no target was missed.
    pub fn met(&self) -> bool {
        self.rows.iter().all(|row| row.met != Some(false))
    }

    /// A Markdown table, as the README quotes it.
    pub fn table(&self) -> String {
        let machine = |field: &str| self.machine[field].as_str().unwrap_or("?").to_owned();
        let mut text = format!(
            "\n{}, {} cores, Linux {}, {}, fsync {} µs, {}\n\n| measurement | target | measured | | sides |\n\
             | --- | --- | --- | --- | --- |\n",
            machine("cpu"),
            self.machine["cores"],
            machine("kernel"),
            machine("server"),
            self.machine["fsync_us"],
            machine("date"),
        );
        for row in &self.rows {
            let met = match row.met {
                Some(true) => "met",
                Some(false) => "**missed**",
                None if row.target.is_empty() => "",
                None => "not measured",
            };
            text += &format!("| {} | {} | {} | {met} | {} |\n", row.name, row.target, row.figure, row.note);
        }
        text
    }

    pub fn json(&self) -> Value {
        let rows: Vec<Value> = self.rows.iter().map(Row::json).collect();
        json!({ "machine": self.machine, "measurements": rows })
    }
}

impl Row {
    fn json(&self) -> Value {
        json!({
            "name": self.name,
            "target": self.target,
            "figure": self.figure,
            "note": self.note,
            "met": self.met,
            "details": self.details,
        })
    }
}
