//! The thread that writes the files of a recording.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::entry::{Asked, Counts, Entry};
use super::line::{Ask, End, Header, LeaseName, Line, PlanLine, PolicyLine, VERSION};
use super::mask::Mask;
use crate::clock;
use crate::config::{Limits, RecordingConfig};
use crate::lock::{Key, Token};
use crate::policy::Generation;
use crate::random;
use crate::telemetry::{Metrics, Subject};

/// How often the times of the store are written, in microseconds.
const TIMES_US: u64 = 10_000_000;
/// How often the writer writes what it has.
const FLUSH: Duration = Duration::from_secs(1);

/// Makes the folder and the first file, and starts the thread.
pub fn start(
    dir: &Path,
    config: &RecordingConfig,
    limits: &Limits,
    entries: Receiver<Entry>,
    counts: Arc<Counts>,
    metrics: &Metrics,
) -> io::Result<JoinHandle<()>> {
    DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    let mut key = [0; 32];
    key.iter_mut().for_each(|byte| *byte = random::number::<u8>());
    let mask = Mask::new(config, &key);
    let header = Header {
        version: VERSION,
        at_us: clock::wall_us(),
        share: config.share,
        limits: limits.clone(),
        masked: mask.masked(),
    };
    let mut writer = Writer {
        dir: dir.to_owned(),
        max_bytes: config.file_bytes,
        keep: config.files as usize,
        header,
        mask,
        file: None,
        number: 0,
        known: BTreeSet::new(),
        counts,
        metrics: metrics.clone(),
    };
    writer.next_file()?;
    thread::Builder::new().name("recording".to_owned()).spawn(move || writer.run(&entries))
}

struct Writer {
    dir: PathBuf,
    max_bytes: u64,
    keep: usize,
    header: Header,
    mask: Mask,
    file: Option<Open>,
    /// Of the file, counted from the start of the proxy.
    number: u32,
    /// The generations that the file has.
    known: BTreeSet<Arc<str>>,
    counts: Arc<Counts>,
    metrics: Metrics,
}

struct Open {
    file: BufWriter<File>,
    bytes: u64,
}

impl Writer {
    fn run(mut self, entries: &Receiver<Entry>) {
        let (mut flushed, mut timed) = (clock::now(), clock::now());
        let mut failing = false;
        loop {
            let entry = match entries.recv_timeout(FLUSH) {
                Ok(Entry::Close) | Err(RecvTimeoutError::Disconnected) => break,
                Ok(entry) => Some(entry),
                Err(RecvTimeoutError::Timeout) => None,
            };
            let mut written = entry.map_or(Ok(()), |entry| self.entry(entry));
            let now = clock::now();
            if now.us_since(timed) >= TIMES_US {
                timed = now;
                written = written.and_then(|()| self.times());
            }
            if now.us_since(flushed) >= FLUSH.as_micros() as u64 {
                flushed = now;
                written = written.and_then(|()| self.flush());
            }
            if let Err(error) = &written {
                self.file = None;
                self.counts.dropped.fetch_add(1, Relaxed);
                self.metrics.recording.dropped();
                if !failing {
                    tracing::error!(dir = %self.dir.display(), %error, "the recording cannot be written");
                }
            }
            if written.is_err() != failing {
                failing = written.is_err();
                let trouble = failing.then(|| "the recording cannot be written; the log says why".to_owned());
                self.metrics.troubles.note(Subject::Recording, trouble);
            }
        }
        let ended = self.times().and_then(|()| self.flush());
        if let Err(error) = ended {
            tracing::error!(dir = %self.dir.display(), %error, "the end of the recording cannot be written");
        }
    }

    fn entry(&mut self, entry: Entry) -> io::Result<()> {
        match entry {
            Entry::Asked(asked) => {
                self.policy(&asked.generation)?;
                let line = Line::Ask(Box::new(self.asked(*asked)));
                self.line(&line)
            }
            Entry::Ended { at_us, key, token, how, held_ms } => {
                let (lease, how) = (self.lease(&key, token), how.to_owned());
                self.line(&Line::End(End { at_us, lease, how, held_ms }))
            }
            Entry::Close => Ok(()),
        }
    }

    fn lease(&self, key: &Key, token: Token) -> LeaseName {
        LeaseName { key: self.mask.name(key.as_str()), token: token.0 }
    }

    fn asked(&self, asked: Asked) -> Ask {
        let Asked { at_us, request, generation, plan, outcome, reason, waited_us, lease } = asked;
        let mask = &self.mask;
        let plan = plan.map(|plan| {
            let line = PlanLine::of(&plan);
            let keys = line.keys.iter().map(|key| mask.name(key)).collect();
            PlanLine { keys, group: mask.label("group", &line.group), ..line }
        });
        Ask {
            at_us,
            by: generation.id().to_string(),
            resource: mask.name(&request.resource),
            owner: mask.word(&request.owner),
            mode: request.mode,
            ttl_ms: request.ttl_ms,
            wait_ms: request.wait_ms,
            labels: mask.labels(&request.labels),
            http: request.http.as_deref().map(|view| mask.http(view)),
            seed: request.seed,
            plan,
            outcome: outcome.to_owned(),
            reason: reason.filter(|_| mask.is_plain()),
            waited_us,
            lease: lease.map(|(key, token)| self.lease(&key, token)),
        }
    }

    /// Writes which generation has planned the next request, if the file does not have it.
    fn policy(&mut self, generation: &Arc<Generation>) -> io::Result<()> {
        if self.known.contains(generation.id()) && self.file.is_some() {
            return Ok(());
        }
        let component = format!("{}.wasm", generation.digest().short().replace(':', "-"));
        let path = self.dir.join(&component);
        if !path.exists() {
            // Whole or not at all.
            let part = path.with_extension("part");
            private(&part)?.write_all(&generation.component())?;
            fs::rename(&part, &path)?;
        }
        let line = PolicyLine {
            name: generation.name().to_owned(),
            id: generation.id().to_string(),
            settings: generation.settings().clone(),
            component,
        };
        self.line(&Line::Policy(line))?;
        self.known.insert(generation.id().clone());
        Ok(())
    }

    fn times(&mut self) -> io::Result<()> {
        self.counts.times.take().map_or(Ok(()), |times| self.line(&Line::Store(times)))
    }

    fn flush(&mut self) -> io::Result<()> {
        let dropped = self.counts.dropped.swap(0, Relaxed);
        if dropped > 0 {
            self.line(&Line::Gap { dropped })?;
        }
        self.file.as_mut().map_or(Ok(()), |open| open.file.flush())
    }

    fn line(&mut self, line: &Line) -> io::Result<()> {
        let mut text = serde_json::to_vec(line).map_err(io::Error::other)?;
        text.push(b'\n');
        if self.file.as_ref().is_none_or(|open| open.bytes + text.len() as u64 > self.max_bytes) {
            self.next_file()?;
        }
        let Some(open) = &mut self.file else { return Ok(()) };
        open.bytes += text.len() as u64;
        open.file.write_all(&text)?;
        self.metrics.recording.written();
        Ok(())
    }

    fn next_file(&mut self) -> io::Result<()> {
        if let Some(mut open) = self.file.take() {
            open.file.flush()?;
        }
        self.known.clear();
        self.number += 1;
        let name = format!("recording-{}-{:06}.jsonl", self.header.at_us, self.number);
        let mut text = serde_json::to_vec(&Line::Header(self.header.clone())).map_err(io::Error::other)?;
        text.push(b'\n');
        let mut file = BufWriter::new(private(&self.dir.join(name))?);
        file.write_all(&text)?;
        self.file = Some(Open { file, bytes: text.len() as u64 });
        self.remove_old()
    }

    /// Removes the oldest files, so that the folder has no more than it may have.
    fn remove_old(&self) -> io::Result<()> {
        let mut files = files(&self.dir)?;
        let over = files.len().saturating_sub(self.keep);
        files.drain(..over).try_for_each(fs::remove_file)
    }
}

/// The files of a recording, the oldest first.
pub fn files(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with("recording-") && name.ends_with(".jsonl") {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

fn private(path: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).truncate(true).write(true).mode(0o600).open(path)
}
