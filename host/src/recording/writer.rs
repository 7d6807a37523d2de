//! The thread that writes the files of a recording.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::Receiver;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::entry::{Asked, Counts, Entry, WAITING};
use super::line::{Ask, End, Header, LeaseName, Line, PlanLine, PolicyLine, VERSION};
use super::mask::Mask;
use crate::clock;
use crate::config::{Limits, RecordingConfig};
use crate::lock::{Instant, Key, Token};
use crate::policy::Generation;
use crate::random;
use crate::telemetry::{Metrics, Subject};

/// How often the writer writes what it has, and the times of the store, in microseconds. After a failure it pauses for as long.
const FLUSH_US: u64 = 1_000_000;
/// How often the writer looks for lines. The places for lines suffice for 800,000 in a second.
const PAUSE: Duration = Duration::from_millis(20);
/// How many bytes are written at once.
const BUFFER: usize = 256 * 1024;

/// Makes the folder, and starts the thread. The first line makes the first file.
pub fn start(
    dir: &Path,
    config: &RecordingConfig,
    limits: &Limits,
    entries: Receiver<Entry>,
    counts: Arc<Counts>,
    metrics: &Metrics,
) -> io::Result<JoinHandle<()>> {
    DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    if fs::metadata(dir)?.mode() & 0o022 != 0 {
        return Err(io::Error::other("other users can write to the folder"));
    }
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
    let writer = Writer {
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
        paused_until: Instant::default(),
        is_failing: false,
        has_written: false,
    };
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
    known: BTreeSet<String>,
    /// The text of the last line.
    text: Vec<u8>,
    counts: Arc<Counts>,
    metrics: Metrics,
    paused_until: Instant,
    /// Something could not be written, which was reported.
    is_failing: bool,
    /// A line about a request was written since then.
    has_written: bool,
}

struct Open {
    path: PathBuf,
    file: BufWriter<File>,
    bytes: u64,
    /// How many bytes are in the file for certain.
    flushed: u64,
    /// How many lines are not.
    lines: u64,
    /// How many of these are about requests.
    requests: u64,
}

impl Writer {
    fn run(mut self, entries: &Receiver<Entry>) {
        let mut flushed = clock::now();
        loop {
            // A pause costs less than a wake-up for each line.
            thread::sleep(PAUSE);
            let is_over = self.counts.is_over.load(Relaxed);
            // No more at a time than there are places, so that flushes are never late.
            for entry in entries.try_iter().take(WAITING) {
                if clock::now() < self.paused_until {
                    self.dropped(1);
                } else if let Err(error) = self.entry(&entry) {
                    self.dropped(1);
                    self.failed(&error);
                }
            }
            let now = clock::now();
            if is_over || now.us_since(flushed) >= FLUSH_US {
                flushed = now;
                match self.times().and_then(|()| self.flush()) {
                    // A failure with another file shows at the next line.
                    Ok(()) if self.has_written => self.report(None),
                    Ok(()) => {}
                    Err(error) => self.failed(&error),
                }
            }
            if is_over {
                return;
            }
        }
    }

    fn dropped(&self, lines: u64) {
        self.counts.dropped.fetch_add(lines, Relaxed);
        self.metrics.recording.dropped(lines);
    }

    /// Gives up what is not in the file for certain, and goes on after a pause.
    fn failed(&mut self, error: &io::Error) {
        self.paused_until = clock::now().plus_us(FLUSH_US);
        self.report(Some(error));
        self.known.clear();
        self.has_written = false;
        let Some(Open { path, file, flushed, requests, .. }) = self.file.take() else { return };
        self.dropped(requests);
        let (file, _lost) = file.into_parts();
        if flushed == 0 {
            // A file without its header cannot be read.
            let _ = fs::remove_file(path);
        } else if file.set_len(flushed).is_ok() {
            let file = BufWriter::with_capacity(BUFFER, file);
            self.file = Some(Open { path, file, bytes: flushed, flushed, lines: 0, requests: 0 });
        }
    }

    /// Reports a failure once, and that there is none any more.
    fn report(&mut self, error: Option<&io::Error>) {
        if let Some(error) = error.filter(|_| !self.is_failing) {
            tracing::error!(dir = %self.dir.display(), %error, "the recording cannot be written");
        }
        if error.is_some() || self.is_failing {
            let trouble = error.map(|_| "the recording cannot be written; the log says why".to_owned());
            self.is_failing = trouble.is_some();
            self.metrics.troubles.note(Subject::Recording, trouble);
        }
    }

    fn entry(&mut self, entry: &Entry) -> io::Result<()> {
        if self.file.as_ref().is_none_or(|open| open.bytes >= self.max_bytes) {
            self.next_file()?;
        }
        match entry {
            Entry::Asked(asked) => {
                self.policy(&asked.generation)?;
                self.write(|mask| Line::Ask(Box::new(ask(mask, asked))))?;
            }
            Entry::Ended { at_us, key, token, how, held_us } => self.write(|mask| {
                let (lease, how) = (lease(mask, key, *token), (*how).into());
                Line::End(End { at_us: *at_us, lease, how, held_us: *held_us })
            })?,
        }
        self.has_written = true;
        if let Some(open) = &mut self.file {
            open.requests += 1;
        }
        Ok(())
    }

    /// Writes which generation has planned the next request, if the file does not have it.
    fn policy(&mut self, generation: &Generation) -> io::Result<()> {
        if self.known.contains(generation.rules()) {
            return Ok(());
        }
        let (component, bytes) = (format!("{}.wasm", generation.digest().short()), generation.component());
        let path = self.dir.join(&component);
        if fs::metadata(&path).map_or(0, |file| file.len()) != bytes.len() as u64 {
            // Whole or not at all.
            let part = path.with_extension(format!("{}.part", self.header.at_us));
            // It may be left of a failure.
            let _ = fs::remove_file(&part);
            let mut file = private(&part)?;
            file.write_all(&bytes)?;
            file.sync_data()?;
            fs::rename(&part, &path)?;
        }
        let line = PolicyLine {
            name: generation.name().to_owned(),
            id: generation.rules().to_owned(),
            settings: generation.settings().clone(),
            component,
        };
        self.write(|_| Line::Policy(line))?;
        self.known.insert(generation.rules().to_owned());
        Ok(())
    }

    fn times(&mut self) -> io::Result<()> {
        let times = self.counts.times.take(clock::wall_us()).filter(|_| self.file.is_some());
        times.map_or(Ok(()), |times| self.write(|_| Line::Store(times)))
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.file.is_none() {
            return Ok(());
        }
        let dropped = self.counts.dropped.load(Relaxed);
        if dropped > 0 {
            self.write(|_| Line::Gap { dropped })?;
        }
        let Some(open) = &mut self.file else { return Ok(()) };
        open.file.flush()?;
        self.metrics.recording.written(open.lines);
        (open.flushed, open.lines, open.requests) = (open.bytes, 0, 0);
        // Not before the line is in the file.
        self.counts.dropped.fetch_sub(dropped, Relaxed);
        Ok(())
    }

    fn write<'a>(&mut self, line: impl FnOnce(&Mask) -> Line<'a>) -> io::Result<()> {
        self.text.clear();
        serde_json::to_writer(&mut self.text, &line(&self.mask)).map_err(io::Error::other)?;
        self.text.push(b'\n');
        let Some(open) = &mut self.file else { return Ok(()) };
        open.file.write_all(&self.text)?;
        (open.bytes, open.lines) = (open.bytes + self.text.len() as u64, open.lines + 1);
        Ok(())
    }

    fn next_file(&mut self) -> io::Result<()> {
        self.flush()?;
        self.known.clear();
        self.number += 1;
        let path = self.dir.join(format!("recording-{:020}-{:06}.jsonl", self.header.at_us, self.number));
        let file = BufWriter::with_capacity(BUFFER, private(&path)?);
        self.file = Some(Open { path, file, bytes: 0, flushed: 0, lines: 0, requests: 0 });
        let header = self.header.clone();
        self.write(|_| Line::Header(header))?;
        self.flush()?;
        if let Err(error) = self.remove_old() {
            tracing::warn!(dir = %self.dir.display(), %error, "an old file of the recording cannot be removed");
        }
        Ok(())
    }

    /// Removes the oldest files, so that the folder has no more than it may have.
    fn remove_old(&self) -> io::Result<()> {
        let mut files = files(&self.dir)?;
        // If the clock was set back, the name of the new file is not the last one.
        files.retain(|file| self.file.as_ref().is_none_or(|open| open.path != *file));
        let over = (files.len() + 1).saturating_sub(self.keep);
        files.drain(..over).try_for_each(fs::remove_file)
    }
}

fn lease<'a>(mask: &Mask, key: &'a Key, token: Token) -> LeaseName<'a> {
    LeaseName { key: mask.name(key.as_str()), token: token.0 }
}

fn ask<'a>(mask: &Mask, asked: &'a Asked) -> Ask<'a> {
    let Asked { at_us, call, request, generation, plan, outcome, reason, waited_us, lease: granted } = asked;
    let plan = plan.as_ref().map(|plan| PlanLine {
        keys: plan.keys.iter().map(|key| mask.name(key.as_str())).collect(),
        primitive: plan.primitive.as_str().into(),
        mode: plan.mode,
        ttl_ms: plan.ttl_ms,
        wait_ms: plan.wait_ms,
        group: mask.group(&plan.group, &request.labels),
    });
    Ask {
        at_us: *at_us,
        call: call.as_str().into(),
        by: generation.rules().into(),
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

/// A new file that its owner alone can read. A link in its place is not followed.
fn private(path: &Path) -> io::Result<File> {
    OpenOptions::new().create_new(true).append(true).mode(0o600).open(path)
}
