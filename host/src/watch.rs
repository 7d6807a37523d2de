//! Tells when a file has changed: a policy's component, or the configuration.
//!
//! The parent folder is watched, because a deploy may replace the file or a link to it; changes are
//! read after things have been quiet for a moment; and every two seconds the files are read in any
//! case, for file systems that tell nothing. Only contents count: what was told once is not told
//! again. A file that is caught half-written is told, refused by the checks, and told again when it
//! is whole.

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
/// A folder that never is quiet, for somebody writes a log there, is read after this long all the same.
const MOST_MS: u32 = 2_000;
const POLL: Duration = Duration::from_secs(2);
const MAX_UNREAD: usize = 16;

enum Signal {
    Event,
    Stop,
}

/// Names of files, each with its new contents.
pub type Changes = mpsc::Receiver<(String, Vec<u8>)>;

/// Watches until it is dropped.
pub struct Watcher {
    signals: Sender<Signal>,
    _notify: Option<RecommendedWatcher>,
}

/// Watches files, and sends the name of each with its contents whenever they change; at first with
/// what the file holds now. A file over `max_bytes` is sent cut one byte above.
///
/// # Errors
/// Where no thread can be started.
pub fn watch(files: BTreeMap<String, PathBuf>, max_bytes: usize) -> std::io::Result<(Watcher, Changes)> {
    let (signals, signalled) = channel();
    let (changes, changed) = mpsc::channel(MAX_UNREAD);
    let notify = notify_of(&files, signals.clone());
    let scan = Scan { files, seen: BTreeMap::new(), max_bytes, changes };
    std::thread::Builder::new()
        .name("file-watch".into())
        .spawn(move || vital::run("the watch over files", || scan.run(&signalled)))?;
    Ok((Watcher { signals, _notify: notify }, changed))
}

/// Reads a file, and not more than one byte above `max_bytes` of it.
pub fn read(path: &Path, max_bytes: usize) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(max_bytes as u64 + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The poll goes on where there is none.
fn notify_of(files: &BTreeMap<String, PathBuf>, signals: Sender<Signal>) -> Option<RecommendedWatcher> {
    let watcher = notify::recommended_watcher(move |_| {
        // Nobody listens only while the watcher is being dropped.
        let _ = signals.send(Signal::Event);
    });
    let mut watcher = watcher.inspect_err(|error| tracing::warn!(%error, "files are polled only")).ok()?;
    let parents: BTreeSet<PathBuf> = files.values().map(|path| parent(path)).collect();
    for folder in parents {
        if let Err(error) = watcher.watch(&folder, RecursiveMode::NonRecursive) {
            tracing::warn!(folder = %folder.display(), %error, "files are polled only");
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
    seen: BTreeMap<String, [u8; 32]>,
    max_bytes: usize,
    changes: mpsc::Sender<(String, Vec<u8>)>,
}

impl Scan {
    fn run(mut self, signals: &Receiver<Signal>) {
        loop {
            if self.scan().is_err() || !wait(signals) {
                return;
            }
        }
    }

    /// An error where nobody listens any more.
    fn scan(&mut self) -> Result<(), ()> {
        for (name, path) in &self.files {
            // A file that is gone, or not there yet, changes nothing.
            let Ok(contents) = read(path, self.max_bytes) else { continue };
            let digest = Sha256::digest(&contents).into();
            if self.seen.get(name) == Some(&digest) {
                continue;
            }
            self.changes.blocking_send((name.clone(), contents)).map_err(|_| ())?;
            self.seen.insert(name.clone(), digest);
        }
        Ok(())
    }
}

/// Waits for events and the quiet after them, or for the next poll; false at the end.
fn wait(signals: &Receiver<Signal>) -> bool {
    match signals.recv_timeout(POLL) {
        Ok(Signal::Event) => {}
        Err(RecvTimeoutError::Timeout) => return true,
        Ok(Signal::Stop) | Err(RecvTimeoutError::Disconnected) => return false,
    }
    let latest = clock::now().plus_ms(MOST_MS);
    while clock::now() < latest {
        match signals.recv_timeout(QUIET) {
            Ok(Signal::Event) => {}
            Err(RecvTimeoutError::Timeout) => break,
            Ok(Signal::Stop) | Err(RecvTimeoutError::Disconnected) => return false,
        }
    }
    true
}

impl Drop for Watcher {
    fn drop(&mut self) {
        // The thread is not joined: it may wait for a receiver that is dropped after this.
        let _ = self.signals.send(Signal::Stop);
    }
}

#[cfg(test)]
mod tests;
