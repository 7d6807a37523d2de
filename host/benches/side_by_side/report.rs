//! The report: measured figures and their targets.

use serde_json::{Value, json};

/// The machine and the rows of the report.
pub struct Report {
    machine: Value,
    rows: Vec<Row>,
}

/// A measurement.
pub struct Row {
    pub name: &'static str,
    /// The target; empty if there is none.
    pub target: &'static str,
    /// The figure to compare with the target.
    pub figure: String,
    /// The figures of the two sides, or another explanation.
    pub note: String,
    /// Whether the target is met. `None` if there is no target or nothing could be measured.
    pub met: Option<bool>,
    /// All numbers behind the figure.
    pub details: Value,
}

impl Report {
    /// A report without rows.
    pub fn new(machine: Value) -> Report {
        Report { machine, rows: Vec::new() }
    }

    /// Adds a row, and prints it.
    pub fn add(&mut self, row: Row) {
        eprintln!("  {}: {} ({})", row.name, row.figure, row.note);
        self.rows.push(row);
    }

    /// Whether all measured targets are met.
    pub fn met(&self) -> bool {
        self.rows.iter().all(|row| row.met != Some(false))
    }

    /// The report as a Markdown table, as README quotes it.
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

    /// The report as JSON.
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
