//! The statements that a server receives, from its general log.

use std::fs;
use std::path::{Path, PathBuf};

/// The statements of a server that belongs to one test.
pub struct Statements {
    log: PathBuf,
    seen: usize,
}

impl Statements {
    /// Switches on the log of the server's statements.
    pub async fn of(url: &str, dir: &Path) -> Statements {
        let log = dir.join("general.log");
        let place = log.display();
        super::sql(url, &format!("SET GLOBAL general_log_file='{place}'")).await;
        super::sql(url, "SET GLOBAL log_output='FILE'").await;
        super::sql(url, "SET GLOBAL general_log=1").await;
        Statements { log, seen: 0 }
    }

    /// The statements since the last call. Statements that came in one packet may be one entry.
    pub fn next(&mut self) -> Vec<String> {
        let log = fs::read(&self.log).expect("the server's log");
        let new = &log[self.seen..];
        // An incomplete line is left for the next call. A policy's component is not text.
        let new = &new[..new.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1)];
        self.seen += new.len();
        let said = |line: &str| {
            let (_, rest) = line.split_once(" Query\t").or_else(|| line.split_once(" Execute\t"))?;
            Some(rest.to_owned())
        };
        String::from_utf8_lossy(new).lines().filter_map(said).collect()
    }
}
