//! A recording, read again.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::line::{Ask, End, Header, LeaseName, Line, PolicyLine, StoreTimes, VERSION};
use super::writer;
use crate::config::Limits;
use crate::lock::Key;

/// The requests that a recording has of one policy.
#[derive(Debug)]
pub struct Recording {
    /// The name of the policy.
    pub policy: String,
    /// The generations that planned requests. The last one planned the last request.
    pub generations: Vec<RecordedPolicy>,
    /// The requests in the order in which they arrived.
    pub asks: Vec<Ask<'static>>,
    /// How the leases ended.
    pub ends: HashMap<LeaseName<'static>, End<'static>>,
    /// The last header.
    pub header: Header,
    /// How many times a proxy has begun to record.
    pub starts: usize,
    /// How many lines are missing.
    pub dropped: u64,
    /// How long the store took, in the order of time.
    pub store: Vec<StoreTimes>,
}

impl Recording {
    /// The limits of the proxy, for a policy that sees the recorded names. Masks make short names longer.
    pub fn limits(&self) -> Limits {
        Limits { max_key_bytes: Key::MAX_BYTES, ..self.header.limits.clone() }
    }
}

/// A generation of the policy.
#[derive(Debug)]
pub struct RecordedPolicy {
    /// See [`PolicyLine::id`].
    pub id: String,
    /// The settings.
    pub settings: Map<String, Value>,
    /// The file of the component.
    pub component: PathBuf,
}

/// Why a recording cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// A file or the folder cannot be read.
    #[error("cannot read {path}: {source}")]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The folder has no recorded request.
    #[error("{path} has no file recording-*.jsonl with a request")]
    Empty {
        /// The folder.
        path: PathBuf,
    },
    /// A line is not one of a recording.
    #[error("{path}, line {line}: {why}")]
    Line {
        /// The file.
        path: PathBuf,
        /// The number of the line, from 1.
        line: usize,
        /// What is wrong.
        why: String,
    },
    /// The recording has no request of the policy.
    #[error("the recording has no request of the policy {policy}; it has requests of {}", known.join(", "))]
    NoPolicy {
        /// The policy that was asked for.
        policy: String,
        /// The policies of the recording.
        known: Vec<String>,
    },
    /// The recording has several policies, and none was named.
    #[error("the recording has requests of {}; say which one with --policy NAME", known.join(", "))]
    SeveralPolicies {
        /// The policies of the recording.
        known: Vec<String>,
    },
}

/// Reads the requests of a policy: `policy`, or the only one that the recording has.
///
/// # Errors
/// A file cannot be read or is no recording, or it is not clear which policy is meant. The last line of a file may be cut off.
pub fn read(dir: &Path, policy: Option<&str>) -> Result<Recording, ReadError> {
    let fail = |path: &Path| {
        let path = path.to_owned();
        move |source| ReadError::Io { path, source }
    };
    let files = writer::files(dir).map_err(fail(dir))?;
    let mut all = All::default();
    for path in &files {
        let mut lines = BufReader::new(File::open(path).map_err(fail(path))?);
        let (mut text, mut line) = (Vec::new(), 0);
        while lines.read_until(b'\n', &mut text).map_err(fail(path))? > 0 {
            line += 1;
            let wrong = |why: String| ReadError::Line { path: path.clone(), line, why };
            match serde_json::from_slice(&text) {
                Ok(parsed) => all.line(parsed, line).map_err(wrong)?,
                // The proxy was killed while it wrote.
                Err(_) if !text.ends_with(b"\n") => {}
                Err(error) => return Err(wrong(format!("is no line of a recording: {error}"))),
            }
            text.clear();
        }
    }
    let Some(header) = all.header else { return Err(ReadError::Empty { path: dir.to_owned() }) };
    let known: Vec<String> = all.asks.keys().cloned().collect();
    let policy = match (policy, &known[..]) {
        (_, []) => return Err(ReadError::Empty { path: dir.to_owned() }),
        (Some(policy), _) => policy.to_owned(),
        (None, [only]) => only.clone(),
        (None, _) => return Err(ReadError::SeveralPolicies { known }),
    };
    let Some(mut asks) = all.asks.remove(&policy) else { return Err(ReadError::NoPolicy { policy, known }) };
    asks.sort_by_key(|ask| ask.at_us);
    let generations = all.policies.into_iter().filter(|line| line.name == policy);
    let generations = generations.map(|line| RecordedPolicy {
        id: line.id,
        settings: line.settings,
        component: dir.join(line.component),
    });
    all.times.sort_by_key(|times| times.at_us);
    let store = all.times;
    let mut generations: Vec<RecordedPolicy> = generations.collect();
    // A generation may have come back.
    let last = asks.last().and_then(|ask| generations.iter().position(|known| known.id == ask.by));
    if let Some(last) = last {
        let last = generations.remove(last);
        generations.push(last);
    }
    let (starts, dropped, ends) = (all.starts.len(), all.dropped, all.ends);
    Ok(Recording { policy, generations, asks, ends, header, starts, dropped, store })
}

#[derive(Default)]
struct All {
    header: Option<Header>,
    starts: BTreeSet<u64>,
    policies: Vec<PolicyLine>,
    /// By policy.
    asks: BTreeMap<String, Vec<Ask<'static>>>,
    ends: HashMap<LeaseName<'static>, End<'static>>,
    dropped: u64,
    times: Vec<StoreTimes>,
}

impl All {
    fn line(&mut self, line: Line<'static>, number: usize) -> Result<(), String> {
        match line {
            Line::Header(header) if header.version != VERSION => {
                return Err(format!(
                    "the recording has the format {}; this program reads {VERSION}",
                    header.version
                ));
            }
            Line::Header(header) => {
                self.starts.insert(header.at_us);
                self.header = Some(header);
            }
            _ if number == 1 => return Err("the first line is no header".to_owned()),
            Line::Policy(line) => {
                if self.policies.iter().all(|known| known.id != line.id) {
                    self.policies.push(line);
                }
            }
            Line::Ask(ask) => {
                let policy = ask.by.split('@').next().unwrap_or_default();
                match self.asks.get_mut(policy) {
                    Some(asks) => asks.push(*ask),
                    None => {
                        self.asks.insert(policy.to_owned(), vec![*ask]);
                    }
                }
            }
            Line::End(end) => {
                self.ends.insert(end.lease.clone(), end);
            }
            Line::Store(times) => self.times.push(times),
            Line::Gap { dropped } => self.dropped += dropped,
        }
        Ok(())
    }
}
