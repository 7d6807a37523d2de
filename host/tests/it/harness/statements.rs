//! What a server is told, statement by statement: its general log.

use std::fs;
use std::path::{Path, PathBuf};

/// The statements of a server of the test's own.
pub struct Statements {
    log: PathBuf,
    seen: usize,
}

impl Statements {
    /// Has the server write down what it is told from now on.
    pub async fn of(url: &str, dir: &Path) -> Statements {
        let log = dir.join("general.log");
        let place = log.display();
        super::sql(url, &format!("SET GLOBAL general_log_file='{place}'")).await;
        super::sql(url, "SET GLOBAL log_output='FILE'").await;
        super::sql(url, "SET GLOBAL general_log=1").await;
        Statements { log, seen: 0 }
    }

    /// Those since the last look. Several that came in one packet may be one.
    pub fn next(&mut self) -> Vec<String> {
        let log = fs::read(&self.log).expect("the server's log");
        let new = &log[self.seen..];
        // A line that is not whole yet is for the next look. A policy's component is not text.
        let new = &new[..new.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1)];
        self.seen += new.len();
        let said = |line: &str| {
            let (_, rest) = line.split_once(" Query\t").or_else(|| line.split_once(" Execute\t"))?;
            Some(rest.to_owned())
        };
        String::from_utf8_lossy(new).lines().filter_map(said).collect()
    }
}
