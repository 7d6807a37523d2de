//! The thread that writes the files of a recording.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Receiver, TryRecvError};
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

/// How often the writer writes what it has, and the times of the store, in microseconds.
const FLUSH_US: u64 = 1_000_000;
/// How often the writer looks for lines. The places for lines suffice for 800,000 in a second.
const PAUSE: Duration = Duration::from_millis(20);
/// How many bytes are written at once.
const BUFFER: usize = 256 * 1024;

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
        text: Vec::new(),
        counts,
        metrics: metrics.clone(),
        is_failing: false,
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
    /// The text of the last line.
    text: Vec<u8>,
    counts: Arc<Counts>,
    metrics: Metrics,
    /// The last line could not be written, which was reported.
    is_failing: bool,
}

struct Open {
    file: BufWriter<File>,
    bytes: u64,
}

impl Writer {
    fn run(mut self, entries: &Receiver<Entry>) {
        let (mut flushed, mut is_over) = (clock::now(), false);
        while !is_over {
            // A thread that waits for each line would have to be woken for each line.
            thread::sleep(PAUSE);
            let mut written = Ok(());
            loop {
                let entry = match entries.try_recv() {
                    Ok(entry) => entry,
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) => {
                        is_over = true;
                        break;
                    }
                };
                is_over |= matches!(entry, Entry::Close);
                let done = self.entry(&entry);
                written = self.noted(done).and(written);
            }
            if is_over || clock::now().us_since(flushed) >= FLUSH_US {
                flushed = clock::now();
                let done = self.times().and_then(|()| self.flush());
                written = self.noted(done).and(written);
            }
            self.report(written.err().as_ref());
        }
    }

    /// Counts a line that could not be written, and begins a new file for the next one.
    fn noted(&mut self, written: io::Result<()>) -> io::Result<()> {
        if written.is_err() {
            self.file = None;
            self.counts.dropped.fetch_add(1, Relaxed);
            self.metrics.recording.dropped();
        }
        written
    }

    /// Reports a failure once, and that there is none any more.
    fn report(&mut self, error: Option<&io::Error>) {
        if let Some(error) = error.filter(|_| !self.is_failing) {
            tracing::error!(dir = %self.dir.display(), %error, "the recording cannot be written");
        }
        if error.is_some() != self.is_failing {
            self.is_failing = error.is_some();
            let trouble =
                self.is_failing.then(|| "the recording cannot be written; the log says why".to_owned());
            self.metrics.troubles.note(Subject::Recording, trouble);
        }
    }

    fn entry(&mut self, entry: &Entry) -> io::Result<()> {
        match entry {
            Entry::Asked(asked) => {
                self.policy(&asked.generation)?;
                self.write(|mask| Line::Ask(Box::new(ask(mask, asked))))
            }
            Entry::Ended { at_us, key, token, how, held_ms } => self.write(|mask| {
                let (lease, how) = (lease(mask, key, *token), (*how).into());
                Line::End(End { at_us: *at_us, lease, how, held_ms: *held_ms })
            }),
            Entry::Close => Ok(()),
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
        self.write(|_| Line::Policy(line))?;
        self.known.insert(generation.id().clone());
        Ok(())
    }

    fn times(&mut self) -> io::Result<()> {
        let times = self.counts.times.take(clock::wall_us());
        times.map_or(Ok(()), |times| self.write(|_| Line::Store(times)))
    }

    fn flush(&mut self) -> io::Result<()> {
        let dropped = self.counts.dropped.swap(0, Relaxed);
        if dropped > 0 {
            self.write(|_| Line::Gap { dropped })?;
        }
        self.file.as_mut().map_or(Ok(()), |open| open.file.flush())
    }

    fn write<'a>(&mut self, line: impl FnOnce(&Mask) -> Line<'a>) -> io::Result<()> {
        self.text.clear();
        serde_json::to_writer(&mut self.text, &line(&self.mask)).map_err(io::Error::other)?;
        self.text.push(b'\n');
        let bytes = self.text.len() as u64;
        if self.file.as_ref().is_none_or(|open| open.bytes + bytes > self.max_bytes) {
            self.next_file()?;
        }
        let Some(open) = &mut self.file else { return Ok(()) };
        open.bytes += bytes;
        open.file.write_all(&self.text)?;
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
        let mut file = BufWriter::with_capacity(BUFFER, private(&self.dir.join(name))?);
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

fn lease<'a>(mask: &Mask, key: &'a Key, token: Token) -> LeaseName<'a> {
    LeaseName { key: mask.name(key.as_str()), token: token.0 }
}

fn ask<'a>(mask: &Mask, asked: &'a Asked) -> Ask<'a> {
    let Asked { at_us, request, generation, plan, outcome, reason, waited_us, lease: granted } = asked;
    let plan = plan.as_ref().map(|plan| PlanLine {
        keys: plan.keys.iter().map(|key| mask.name(key.as_str())).collect(),
        primitive: plan.primitive.as_str().into(),
        mode: plan.mode,
        ttl_ms: plan.ttl_ms,
        wait_ms: plan.wait_ms,
        group: mask.label("group", &plan.group),
    });
    Ask {
        at_us: *at_us,
        by: (&**generation.id()).into(),
        resource: mask.name(&request.resource),
        owner: mask.word(&request.owner),
        mode: request.mode,
        ttl_ms: request.ttl_ms,
        wait_ms: request.wait_ms,
        labels: mask.labels(&request.labels),
        http: request.http.as_deref().map(|view| mask.http(view)),
        seed: request.seed,
        plan,
        outcome: (*outcome).into(),
        reason: reason.as_deref().filter(|_| mask.is_plain()).map(Into::into),
        waited_us: *waited_us,
        lease: granted.as_ref().map(|(key, token)| lease(mask, key, *token)),
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
