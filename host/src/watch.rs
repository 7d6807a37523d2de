//! Reports changes of files: the components of policies, and the configuration.
//!
//! The parent folder of each file is watched, because a deployment may replace the file or a link to it.
//! Changed files are read after a short quiet period. All files are also read every two seconds, for file
//! systems that report no changes. Only contents count: the same contents are not reported twice in a row. A
//! file that is read half-written is reported, refused by the checks, and reported again when it is complete.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use notify::{RecommendedWatcher, RecursiveMode, Watcher as _};
use tokio::sync::mpsc;

use crate::clock;
use crate::vital;

use sha2::{Digest as _, Sha256};

const QUIET: Duration = Duration::from_millis(200);
/// A folder with constant changes, such as a log file, is read after this long without a quiet period, in
/// milliseconds.
const MOST_MS: u32 = 2_000;
const POLL: Duration = Duration::from_secs(2);
const MAX_UNREAD: usize = 16;

enum Signal {
    Event,
    /// All files are to be reported.
    Again,
    Stop,
}

/// The changed files: the name of each with its new contents; `None` if the file cannot be read, for example because it
/// is gone.
pub type Changes = mpsc::Receiver<(String, Option<Vec<u8>>)>;

/// The watch; it ends when this is dropped.
pub struct Watcher {
    signals: Sender<Signal>,
    _notify: Option<RecommendedWatcher>,
}

impl Watcher {
    /// Reports all files again soon, even if they have not changed. A caller that reads the files itself needs this: it may
    /// have read contents that were never reported. If the file then changes back, the watch sees no change.
    pub fn look_again(&self) {
        // Sending fails only if the receiver of the changes is gone.
        let _ = self.signals.send(Signal::Again);
    }
}

/// Watches files. Sends the name and the contents of each file, first as it is now and then after each change.
/// A file larger than `max_bytes` is cut to `max_bytes` + 1 bytes.
///
/// # Errors
/// If no thread can be started.
pub fn watch(files: BTreeMap<String, PathBuf>, max_bytes: usize) -> std::io::Result<(Watcher, Changes)> {
    let (signals, signalled) = channel();
    let (changes, changed) = mpsc::channel(MAX_UNREAD);
    let notify = notify_of(&files, signals.clone());
    let scan = Scan { files, seen: BTreeMap::new(), max_bytes, changes };
    std::thread::Builder::new()
        .name("file-watch".into())
        .spawn(move || vital::run("the file watch", || scan.run(&signalled)))?;
    Ok((Watcher { signals, _notify: notify }, changed))
}

/// Reads a file, but at most `max_bytes` + 1 bytes of it.
///
/// # Errors
/// If the file cannot be read.
pub fn read(path: &Path, max_bytes: usize) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(max_bytes as u64 + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The watcher of the parent folders; without one, the files are only polled.
fn notify_of(files: &BTreeMap<String, PathBuf>, signals: Sender<Signal>) -> Option<RecommendedWatcher> {
    let watcher = notify::recommended_watcher(move |_| {
        // Sending fails only while the watcher is being dropped.
        let _ = signals.send(Signal::Event);
    });
    let mut watcher = watcher.inspect_err(|error| tracing::warn!(%error, "files are only polled")).ok()?;
    let parents: BTreeSet<PathBuf> = files.values().map(|path| parent(path)).collect();
    for folder in parents {
        if let Err(error) = watcher.watch(&folder, RecursiveMode::NonRecursive) {
            tracing::warn!(folder = %folder.display(), %error, "files are only polled");
        }
    }
    Some(watcher)
}

fn parent(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    }
}

struct Scan {
    files: BTreeMap<String, PathBuf>,
    /// The digests of the contents that were reported last.
    seen: BTreeMap<String, Option<[u8; 32]>>,
    max_bytes: usize,
    changes: mpsc::Sender<(String, Option<Vec<u8>>)>,
}

impl Scan {
    fn run(mut self, signals: &Receiver<Signal>) {
        loop {
            if self.scan().is_err() {
                return;
            }
            match wait(signals) {
                None => return,
                Some(true) => self.seen.clear(),
                Some(false) => {}
            }
        }
    }

    /// Reports changed files. Fails if the receiver is gone.
    fn scan(&mut self) -> Result<(), ()> {
        for (name, path) in &self.files {
            let contents = read(path, self.max_bytes).ok();
            let digest = contents.as_ref().map(|contents| Sha256::digest(contents).into());
            if self.seen.get(name) == Some(&digest) {
                continue;
            }
            self.changes.blocking_send((name.clone(), contents)).map_err(|_| ())?;
            self.seen.insert(name.clone(), digest);
        }
        Ok(())
    }
}

/// Waits for a signal and a quiet period after it, or for the next poll. Returns whether all files are to be reported;
/// `None` when the watch ends.
fn wait(signals: &Receiver<Signal>) -> Option<bool> {
    let mut again = false;
    match signals.recv_timeout(POLL) {
        Ok(Signal::Event) => {}
        Ok(Signal::Again) => again = true,
        Err(RecvTimeoutError::Timeout) => return Some(false),
        Ok(Signal::Stop) | Err(RecvTimeoutError::Disconnected) => return None,
    }
    let latest = clock::now().plus_ms(MOST_MS);
    while clock::now() < latest {
        match signals.recv_timeout(QUIET) {
            Ok(Signal::Event) => {}
            Ok(Signal::Again) => again = true,
            Err(RecvTimeoutError::Timeout) => break,
            Ok(Signal::Stop) | Err(RecvTimeoutError::Disconnected) => return None,
        }
    }
    Some(again)
}

impl Drop for Watcher {
    fn drop(&mut self) {
        // The thread is not joined: it may be waiting for a receiver that is dropped later.
        let _ = self.signals.send(Signal::Stop);
    }
}

#[cfg(test)]
mod tests;
