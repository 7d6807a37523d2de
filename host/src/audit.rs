//! The audit log: who asked for what, and what became of it, as JSON lines in a file of its own.
//!
//! It has every refusal for lack of credentials or rights, and every action of an operator: one line before the action
//! and one with its outcome. It never has a secret: no token, no lease id, no value.
//!
//! An action whose line cannot be written to the disk does not happen ([`Audit::begin`]). A refusal whose line cannot be
//! written is refused all the same.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use serde::Serialize;

use crate::clock;
use crate::config::AuditConfig;
use crate::mutex::Mutex;

/// The audit log. Cheap to clone.
#[derive(Clone)]
pub struct Audit(Option<Arc<Log>>);

struct Log {
    path: PathBuf,
    max_bytes: u64,
    keep: u32,
    open: Mutex<Open>,
    /// Whether the last line could not be written, which is reported once.
    is_failing: AtomicBool,
}

struct Open {
    file: File,
    bytes: u64,
    /// Whether a part of a line was written.
    is_torn: bool,
}

/// One line of the audit log.
#[derive(Clone, Debug, Serialize)]
pub struct Entry {
    /// The listener, such as `api` or `admin`.
    pub front: &'static str,
    /// The id of the request, which the answer has in `X-Request-Id`.
    pub request_id: String,
    /// The address of the client.
    pub peer: String,
    /// The principal; `None` if the client has not proved who it is, or if nobody is asked for credentials.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub principal: Option<String>,
    /// The id of the credential.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub credential: Option<String>,
    /// The method and the path of the request.
    pub request: String,
    /// What the client wanted to do, if that is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub verb: Option<&'static str>,
    /// The resource, key or policy, if that is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub on: Option<String>,
    /// `begins` before an action of an operator; afterwards, and for refusals, the status of the answer and its reason.
    pub verdict: String,
}

#[derive(Serialize)]
struct Line<'a> {
    time_us: u64,
    #[serde(flatten)]
    entry: &'a Entry,
}

impl Audit {
    /// No audit log.
    pub fn off() -> Audit {
        Audit(None)
    }

    /// Opens the log, or creates it.
    ///
    /// # Errors
    /// The file cannot be opened for writing.
    pub fn open(config: &AuditConfig) -> io::Result<Audit> {
        let Some(path) = config.file.clone() else { return Ok(Audit::off()) };
        let open = Mutex::new(Open::at(&path)?);
        let (max_bytes, keep) = (config.max_bytes, config.keep);
        Ok(Audit(Some(Arc::new(Log { path, max_bytes, keep, open, is_failing: AtomicBool::new(false) }))))
    }

    /// Whether there is an audit log.
    pub fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// Writes a line. A failure is logged, and changes nothing else.
    pub fn note(&self, entry: &Entry) {
        if let Some(log) = &self.0 {
            let _ = log.write(entry);
        }
    }

    /// Writes the line that an action of an operator begins, and waits until it is on the disk.
    ///
    /// # Errors
    /// The line could not be written, so the action must not happen.
    pub async fn begin(&self, entry: Entry) -> io::Result<()> {
        let Some(log) = self.0.clone() else { return Ok(()) };
        let write = move || {
            log.write(&entry)?;
            // Not under the lock: a slow disk must delay no other request.
            let file = log.open.lock().file.try_clone()?;
            file.sync_data()
        };
        tokio::task::spawn_blocking(write).await.unwrap_or_else(|error| Err(io::Error::other(error)))
    }
}

impl Log {
    fn write(&self, entry: &Entry) -> io::Result<()> {
        let mut line =
            serde_json::to_vec(&Line { time_us: clock::wall_us(), entry }).map_err(io::Error::other)?;
        line.push(b'\n');
        let written = self.append(&line);
        match &written {
            Err(error) if !self.is_failing.swap(true, Relaxed) => {
                tracing::error!(file = %self.path.display(), %error, "the audit log cannot be written");
            }
            Ok(()) if self.is_failing.swap(false, Relaxed) => {
                tracing::info!(file = %self.path.display(), "the audit log can be written again");
            }
            _ => {}
        }
        written
    }

    fn append(&self, line: &[u8]) -> io::Result<()> {
        let mut open = self.open.lock();
        if open.bytes > 0 && open.bytes + line.len() as u64 > self.max_bytes {
            set_aside(&self.path, self.keep)?;
            *open = Open::at(&self.path)?;
        }
        if open.is_torn {
            open.file.write_all(b"\n")?;
        }
        open.is_torn = true;
        open.file.write_all(line)?;
        open.is_torn = false;
        open.bytes += line.len() as u64;
        Ok(())
    }
}

impl Open {
    fn at(path: &Path) -> io::Result<Open> {
        let file = OpenOptions::new().create(true).append(true).mode(0o600).open(path)?;
        let bytes = file.metadata()?.len();
        Ok(Open { file, bytes, is_torn: false })
    }
}

/// Renames the file to `<file>.1`, after each older one has moved on by one. The oldest one is deleted.
fn set_aside(path: &Path, keep: u32) -> io::Result<()> {
    if !path.exists() {
        // It was set aside before, and a new one could not be opened.
        return Ok(());
    }
    let numbered = |n: u32| {
        let mut name = path.as_os_str().to_owned();
        name.push(format!(".{n}"));
        PathBuf::from(name)
    };
    for n in (1..keep).rev() {
        match fs::rename(numbered(n), numbered(n + 1)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    fs::rename(path, numbered(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(n: u32) -> Entry {
        Entry {
            front: "admin",
            request_id: format!("r{n}"),
            peer: "127.0.0.1:1".to_owned(),
            principal: Some("operator".to_owned()),
            credential: None,
            request: "DELETE /v1/locks/a".to_owned(),
            verb: Some("force"),
            on: Some("a\nb".to_owned()),
            verdict: "200".to_owned(),
        }
    }

    #[test]
    fn lines_are_json_and_files_are_set_aside_and_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("audit");
        let config = AuditConfig { file: Some(file), max_bytes: 500, keep: 2 };
        let audit = Audit::open(&config).unwrap();
        for n in 0..10 {
            audit.note(&entry(n));
        }
        let read = |name: &str| fs::read_to_string(dir.path().join(name)).unwrap();
        let all = read("audit.2") + &read("audit.1") + &read("audit");
        let lines: Vec<serde_json::Value> =
            all.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert!(lines.len() < 10, "the oldest lines are gone: {lines:?}");
        assert_eq!(lines.last().unwrap()["request_id"], "r9");
        assert_eq!(lines[0]["on"], "a\nb");
        assert!(!dir.path().join("audit.3").exists());
        let again = Audit::open(&config).unwrap();
        again.note(&entry(10));
        assert!(read("audit").contains("r10"), "an existing file goes on");
    }

    #[tokio::test]
    async fn an_action_does_not_begin_if_its_line_cannot_be_written() {
        let full = AuditConfig { file: Some("/dev/full".into()), max_bytes: 1 << 20, keep: 1 };
        let audit = Audit::open(&full).unwrap();
        assert!(audit.begin(entry(1)).await.is_err());
        assert!(Audit::off().begin(entry(1)).await.is_ok());
    }
}
