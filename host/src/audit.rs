//! The audit log: who asked for what, and what became of it, as JSON lines in files of its own.
//!
//! One file has every action of an operator: one line before the action and one with its outcome. Another file has every
//! refusal for lack of credentials or rights, and for limits, so that a flood of refused requests cannot displace the
//! actions. A line never has a secret: no token, no lease id, no value.
//!
//! An action whose line cannot be written to the disk does not happen ([`Audit::begin`]). A refusal whose line cannot be
//! written is refused all the same.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use serde::Serialize;

use crate::clock;
use crate::config::AuditConfig;
use crate::mutex::Mutex;
use crate::telemetry::{Metrics, Subject};

/// The audit log. Cheap to clone.
#[derive(Clone)]
pub struct Audit(Option<Arc<Logs>>);

struct Logs {
    actions: Log,
    refusals: Log,
}

struct Log {
    path: PathBuf,
    max_bytes: u64,
    keep: u32,
    open: Mutex<Open>,
    /// Whether the last line could not be written, which is reported once.
    is_failing: AtomicBool,
    /// The subject of that report.
    about: Subject,
    metrics: Metrics,
}

struct Open {
    file: File,
    /// The device and the number of the file, by which it is recognised after its name was given to another file.
    id: (u64, u64),
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
    /// The id of a token that was not accepted. It proves nothing: ids are no secrets.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refused_credential: Option<String>,
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
    /// Why the client is not known, which the client is not told in full.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

#[derive(Serialize)]
struct Line<'a> {
    time: String,
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
    /// A file cannot be opened for writing.
    pub fn open(config: &AuditConfig, metrics: &Metrics) -> io::Result<Audit> {
        let Some(path) = config.file.clone() else { return Ok(Audit::off()) };
        let log = |path: PathBuf, about| {
            Ok::<_, io::Error>(Log {
                open: Mutex::new(Open::at(&path)?),
                path,
                max_bytes: config.max_bytes,
                keep: config.keep,
                is_failing: AtomicBool::new(false),
                about,
                metrics: metrics.clone(),
            })
        };
        let refusals = log(with_suffix(&path, "refusals"), Subject::AuditLogOfRefusals)?;
        Ok(Audit(Some(Arc::new(Logs { actions: log(path, Subject::AuditLog)?, refusals }))))
    }

    /// Whether there is an audit log.
    pub fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// Records that a request was refused. A failure is reported, and changes nothing else.
    pub fn refused(&self, entry: &Entry) {
        if let Some(logs) = &self.0 {
            let _ = logs.refusals.write(entry);
        }
    }

    /// Records how an action of an operator has ended. A failure is reported, and changes nothing else.
    pub fn ended(&self, entry: &Entry) {
        if let Some(logs) = &self.0 {
            let _ = logs.actions.write(entry);
        }
    }

    /// Writes the line that an action of an operator begins, and waits until it is on the disk.
    ///
    /// # Errors
    /// The line could not be written, so the action must not happen.
    pub async fn begin(&self, entry: Entry) -> io::Result<()> {
        let Some(logs) = self.0.clone() else { return Ok(()) };
        let write = move || {
            logs.actions.write(&entry)?;
            // Not under the lock: a slow disk must delay no other request.
            let file = logs.actions.open.lock().file.try_clone()?;
            file.sync_data()
        };
        tokio::task::spawn_blocking(write).await.unwrap_or_else(|error| Err(io::Error::other(error)))
    }
}

impl Log {
    fn write(&self, entry: &Entry) -> io::Result<()> {
        let time = clock::rfc3339_us(clock::wall_us());
        let mut line = serde_json::to_vec(&Line { time, entry }).map_err(io::Error::other)?;
        line.push(b'\n');
        let written = self.append(&line);
        match &written {
            Err(error) if !self.is_failing.swap(true, Relaxed) => {
                tracing::error!(file = %self.path.display(), %error, "the audit log cannot be written");
                let trouble = "the audit log cannot be written; the log of the proxy says why".to_owned();
                self.metrics.troubles.note(self.about, Some(trouble));
            }
            Ok(()) if self.is_failing.swap(false, Relaxed) => {
                tracing::info!(file = %self.path.display(), "the audit log can be written again");
                self.metrics.troubles.note(self.about, None);
            }
            _ => {}
        }
        written
    }

    fn append(&self, line: &[u8]) -> io::Result<()> {
        let mut open = self.open.lock();
        if !open.is_at(&self.path) {
            *open = Open::at(&self.path)?;
        }
        // Another program may have cut the file.
        let bytes = open.file.metadata()?.len();
        if bytes > 0 && bytes + line.len() as u64 > self.max_bytes {
            set_aside(&self.path, self.keep)?;
            *open = Open::at(&self.path)?;
        }
        if open.is_torn {
            open.file.write_all(b"\n")?;
        }
        open.is_torn = true;
        open.file.write_all(line)?;
        open.is_torn = false;
        Ok(())
    }
}

impl Open {
    fn at(path: &Path) -> io::Result<Open> {
        let file = OpenOptions::new().create(true).append(true).mode(0o600).open(path)?;
        let there = file.metadata()?;
        Ok(Open { file, id: (there.dev(), there.ino()), is_torn: false })
    }

    /// Whether the path still leads to this file: a program that rotates logs may have moved the file.
    fn is_at(&self, path: &Path) -> bool {
        fs::metadata(path).is_ok_and(|there| (there.dev(), there.ino()) == self.id)
    }
}

/// Renames the file to `<file>.1`, after each older one has moved on by one. The oldest one is deleted.
fn set_aside(path: &Path, keep: u32) -> io::Result<()> {
    let numbered = |n: u32| with_suffix(path, &n.to_string());
    for n in (1..keep).rev() {
        match fs::rename(numbered(n), numbered(n + 1)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    fs::rename(path, numbered(1))
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".");
    name.push(suffix);
    name.into()
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
            refused_credential: None,
            request: "DELETE /v1/locks/a".to_owned(),
            verb: Some("force"),
            on: Some("a\nb".to_owned()),
            verdict: "200".to_owned(),
            why: None,
        }
    }

    #[test]
    fn lines_are_json_and_files_are_set_aside_and_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("audit");
        let config = AuditConfig { file: Some(file), max_bytes: 500, keep: 2 };
        let audit = Audit::open(&config, &Metrics::default()).unwrap();
        for n in 0..10 {
            audit.ended(&entry(n));
        }
        let read = |name: &str| fs::read_to_string(dir.path().join(name)).unwrap();
        let all = read("audit.2") + &read("audit.1") + &read("audit");
        let lines: Vec<serde_json::Value> =
            all.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert!(lines.len() < 10, "the oldest lines are gone: {lines:?}");
        assert_eq!(lines.last().unwrap()["request_id"], "r9");
        assert_eq!(lines[0]["on"], "a\nb");
        assert!(!dir.path().join("audit.3").exists());
        let again = Audit::open(&config, &Metrics::default()).unwrap();
        again.ended(&entry(10));
        assert!(read("audit").contains("r10"), "an existing file goes on");
    }

    #[test]
    fn a_file_that_another_program_moves_or_cuts_goes_on() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("audit");
        let config = AuditConfig { file: Some(file.clone()), max_bytes: 500, keep: 1 };
        let audit = Audit::open(&config, &Metrics::default()).unwrap();
        audit.ended(&entry(1));
        fs::rename(&file, dir.path().join("moved")).unwrap();
        audit.ended(&entry(2));
        let read = |name: &str| fs::read_to_string(dir.path().join(name)).unwrap();
        assert!(read("moved").contains("r1") && !read("moved").contains("r2"));
        assert!(read("audit").contains("r2") && !read("audit").contains("r1"));
        OpenOptions::new().write(true).open(&file).unwrap().set_len(0).unwrap();
        audit.ended(&entry(3));
        audit.ended(&entry(4));
        assert!(read("audit").contains("r3") && read("audit").contains("r4"), "the file had room again");
    }

    #[tokio::test]
    async fn an_action_does_not_begin_if_its_line_cannot_be_written() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("audit");
        std::os::unix::fs::symlink("/dev/full", &file).unwrap();
        let config = AuditConfig { file: Some(file.clone()), max_bytes: 1 << 20, keep: 1 };
        let metrics = Metrics::default();
        let audit = Audit::open(&config, &metrics).unwrap();
        assert!(audit.begin(entry(1)).await.is_err());
        assert_eq!(metrics.troubles.now().len(), 1);
        fs::remove_file(&file).unwrap();
        assert!(audit.begin(entry(2)).await.is_ok());
        assert_eq!(metrics.troubles.now(), [""; 0]);
        assert!(Audit::off().begin(entry(1)).await.is_ok());
    }
}
