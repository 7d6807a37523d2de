//! Passes the command's output on and keeps its beginning.
//!
//! Reading waits only for the command, and writing only for the reader of our output. A slow reader blocks the
//! command's output, as it would without this program, and nothing else.

use std::io::{self, Write as _};
use std::os::fd::OwnedFd;
use std::process::ChildStdout;

use tokio::io::AsyncReadExt as _;
use tokio::net::unix::pipe;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// How far reading may be ahead of writing.
const MAX_PENDING_BYTES: usize = 65_536;

/// The output of a command, in passing.
pub struct Passing {
    /// Cancelled when the command has ended. What is in the pipe then is the rest, even if another process keeps the
    /// pipe open.
    ended: CancellationToken,
    kept: oneshot::Receiver<StoredValue>,
    task: JoinHandle<()>,
}

/// The beginning of the output.
#[derive(Debug, Default)]
pub struct StoredValue {
    pub bytes: Vec<u8>,
    /// Whether there was more output.
    pub cut: bool,
}

impl Passing {
    /// Starts to copy the pipe to our standard output, and keeps the first `max` bytes.
    pub fn start(pipe: ChildStdout, max: usize) -> io::Result<Passing> {
        let pipe = pipe::Receiver::from_owned_fd(OwnedFd::from(pipe))?;
        let (tell, kept) = oneshot::channel();
        let ended = CancellationToken::new();
        let task = tokio::spawn(pass_on(pipe, max, ended.clone(), tell));
        Ok(Passing { ended, kept, task })
    }

    /// Ends reading: only what is already in the pipe still counts.
    pub fn end(&self) {
        self.ended.cancel();
    }

    /// Waits until everything is read, and returns what was kept.
    pub async fn kept(&mut self) -> StoredValue {
        self.end();
        (&mut self.kept).await.unwrap_or_default()
    }

    /// Returns when everything has been written.
    pub async fn passed(self) {
        let _ = self.task.await;
    }
}

async fn pass_on(
    mut pipe: pipe::Receiver,
    max: usize,
    ended: CancellationToken,
    tell: oneshot::Sender<StoredValue>,
) {
    let mut kept = StoredValue::default();
    let mut tell = Some(tell);
    let mut pending = Vec::new();
    let mut writing: Option<JoinHandle<()>> = None;
    let mut buffer = [0; 8_192];
    loop {
        if writing.is_none() && !pending.is_empty() {
            let bytes = std::mem::take(&mut pending);
            writing = Some(tokio::task::spawn_blocking(move || write(&bytes)));
        }
        if tell.is_none() && writing.is_none() {
            return;
        }
        tokio::select! {
            () = written(&mut writing), if writing.is_some() => writing = None,
            read = pipe.read(&mut buffer), if tell.is_some() && pending.len() < MAX_PENDING_BYTES => match read {
                Ok(read @ 1..) => kept.take(&buffer[..read], max, &mut pending),
                Ok(0) | Err(_) => tell_kept(&mut tell, &mut kept),
            },
            () = ended.cancelled(), if tell.is_some() => {
                // Read what the kernel has now, not only what the runtime was notified of. A pipe is bounded.
                while let Ok(read @ 1..) = rustix::io::read(&pipe, &mut buffer) {
                    kept.take(&buffer[..read], max, &mut pending);
                }
                tell_kept(&mut tell, &mut kept);
            }
        }
    }
}

fn tell_kept(tell: &mut Option<oneshot::Sender<StoredValue>>, kept: &mut StoredValue) {
    if let Some(tell) = tell.take() {
        let _ = tell.send(std::mem::take(kept));
    }
}

impl StoredValue {
    fn take(&mut self, read: &[u8], max: usize, pending: &mut Vec<u8>) {
        let room = (max - self.bytes.len()).min(read.len());
        self.bytes.extend_from_slice(&read[..room]);
        self.cut |= room < read.len();
        pending.extend_from_slice(read);
    }
}

async fn written(writing: &mut Option<JoinHandle<()>>) {
    if let Some(writing) = writing {
        let _ = writing.await;
    }
}

/// Writes to standard output. A closed output does not stop the command.
fn write(bytes: &[u8]) {
    let mut stdout = io::stdout();
    let _ = stdout.write_all(bytes).and_then(|()| stdout.flush());
}
