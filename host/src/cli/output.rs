//! Output on the terminal, for people and programs.

use std::borrow::Cow;
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;

use serde_json::Value;

/// Prints a line. A closed standard output is not an error.
pub fn line(text: &str) {
    let _ = writeln!(std::io::stdout(), "{}", harmless(text));
}

/// The text without characters that control a terminal, which names that other clients choose can have. They become escapes
/// as in JSON, so JSON stays JSON. Ends of lines stay.
fn harmless(text: &str) -> Cow<'_, str> {
    // Besides control characters, those that reverse the direction of the text after them.
    let is_harmful = |c: char| {
        (c.is_control() && c != '\n') || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    if !text.contains(is_harmful) {
        return Cow::Borrowed(text);
    }
    let escaped = |c: char| match is_harmful(c) {
        true => format!("\\u{:04x}", u32::from(c)),
        false => c.to_string(),
    };
    Cow::Owned(text.chars().map(escaped).collect())
}

/// Prints a message for people on standard error. A closed standard error is not an error.
pub fn complain(text: &str) {
    let _ = writeln!(std::io::stderr(), "lockkeeper: {}", harmless(text));
}

/// As [`complain`], but without waiting for a slow reader: for messages while a lock is held. The message is dropped
/// if the one before it is still being written.
pub fn aside(text: String) {
    static SPEAKS: AtomicBool = AtomicBool::new(false);
    if !SPEAKS.swap(true, Ordering::AcqRel) {
        tokio::task::spawn_blocking(move || {
            complain(&text);
            SPEAKS.store(false, Ordering::Release);
        });
    }
}

/// Prints lines from a separate thread, so that a slow reader does not block the caller.
pub struct Printer {
    lines: mpsc::SyncSender<String>,
    thread: thread::JoinHandle<()>,
}

/// The most lines that wait to be printed; further lines are dropped.
const MAX_UNREAD_LINES: usize = 1_000;

impl Printer {
    /// Starts the thread.
    pub fn start() -> Printer {
        let (lines, unread) = mpsc::sync_channel::<String>(MAX_UNREAD_LINES);
        let thread = thread::spawn(move || unread.iter().for_each(|text| line(&text)));
        Printer { lines, thread }
    }

    /// Queues a line.
    pub fn line(&self, text: String) {
        let _ = self.lines.try_send(text);
    }

    /// Waits until all lines are printed. Call this last, because the reader may be slow.
    pub fn finish(self) {
        drop(self.lines);
        let _ = self.thread.join();
    }
}

/// `sha256:` and 12 digits, as in leases and logs.
pub fn short_digest(digest: &Value) -> String {
    shown(digest).chars().take("sha256:".len() + 12).collect()
}

/// Prints one line of JSON.
pub fn json(value: &Value) {
    line(&value.to_string());
}

/// Prints names and values, aligned.
pub fn pairs(pairs: &[(&str, String)]) {
    let width = pairs.iter().map(|(name, _)| name.len()).max().unwrap_or_default();
    for (name, value) in pairs {
        line(format!("{name:<width$}  {value}").trim_end());
    }
}

/// Prints rows under headings, aligned. The last column is not padded.
pub fn table(headings: &[&str], rows: &[Vec<String>]) {
    for row in layout(headings, rows) {
        line(&row);
    }
}

/// Prints rows, aligned.
pub fn columns(rows: &[Vec<String>]) {
    aligned(&rows.iter().collect::<Vec<_>>()).iter().for_each(|row| line(row));
}

/// A JSON value as text for people.
pub fn shown(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        // A name must not look like the end of its line.
        Value::String(text) => text.replace('\n', "\\n"),
        other => other.to_string(),
    }
}

/// A mode in the syntax of the command line.
pub fn mode(value: &Value) -> String {
    match value["permits"].as_u64() {
        Some(count) => format!("permits={count}"),
        None => shown(value),
    }
}

/// A time in milliseconds, in the largest readable unit.
pub fn time(value: &Value) -> String {
    match value.as_u64() {
        None => "-".to_owned(),
        Some(ms @ ..1_000) => format!("{ms}ms"),
        Some(ms @ ..60_000) => format!("{}.{}s", ms / 1_000, ms % 1_000 / 100),
        Some(ms @ ..3_600_000) => format!("{}m{:02}s", ms / 60_000, ms / 1_000 % 60),
        Some(ms) => format!("{}h{:02}m", ms / 3_600_000, ms / 60_000 % 60),
    }
}

fn layout(headings: &[&str], rows: &[Vec<String>]) -> Vec<String> {
    let headings: Vec<String> = headings.iter().map(|&heading| heading.to_owned()).collect();
    aligned(&std::iter::once(&headings).chain(rows).collect::<Vec<_>>())
}

fn aligned(all: &[&Vec<String>]) -> Vec<String> {
    let width_of = |at: usize| all.iter().map(|row| row[at].chars().count()).max().unwrap_or_default();
    let widths: Vec<usize> = (0..all.first().map_or(0, |row| row.len())).map(width_of).collect();
    let format_row = |row: &&Vec<String>| {
        let cells = row.iter().zip(&widths).map(|(cell, &width)| format!("{cell:<width$}"));
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    all.iter().map(format_row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn columns_are_aligned() {
        let rows = [vec!["orders/42".to_owned(), "w".to_owned()], vec!["a".to_owned(), "w2".to_owned()]];
        assert_eq!(layout(&["KEY", "OWNER"], &rows), ["KEY        OWNER", "orders/42  w", "a          w2"]);
    }

    #[test]
    fn times_are_printed_in_short_form() {
        for (ms, text) in
            [(0, "0ms"), (999, "999ms"), (9_950, "9.9s"), (61_000, "1m01s"), (3_660_000, "1h01m")]
        {
            assert_eq!(time(&json!(ms)), text);
        }
    }

    #[test]
    fn names_cannot_control_the_terminal() {
        let name = json!("a\u{1b}[2J\u{9b}31m\u{202e}b\r\nc\td");
        assert_eq!(harmless(&shown(&name)), "a\\u001b[2J\\u009b31m\\u202eb\\u000d\\nc\\u0009d");
        let printed = harmless(&name.to_string()).into_owned();
        assert_eq!(serde_json::from_str::<Value>(&printed).unwrap(), name);
        assert!(matches!(harmless("orders/42 é 訂單\nnext"), Cow::Borrowed(_)));
    }
}
