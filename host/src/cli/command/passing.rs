//! The output of a command whose beginning is kept.
//!
//! Reading it waits for nothing but the command, and writing it for nothing but who reads on: a reader
//! that pauses holds up the command's output, as it would without this program, and nothing else.

use std::io::{self, Write as _};
use std::os::fd::OwnedFd;
use std::process::ChildStdout;

use tokio::io::AsyncReadExt as _;
use tokio::net::unix::pipe;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// So much is read ahead of who reads on.
const MAX_PENDING_BYTES: usize = 65_536;

pub struct Passing {
    /// The command has ended: what is in the pipe is all there is, whoever holds it open.
    ended: CancellationToken,
    kept: oneshot::Receiver<StoredValue>,
    task: JoinHandle<()>,
}

/// The beginning of the output.
#[derive(Debug, Default)]
pub struct StoredValue {
    pub bytes: Vec<u8>,
    /// There was more.
    pub cut: bool,
}

impl Passing {
    /// Copies the pipe to our own output, and keeps the first `max` bytes.
    pub fn start(pipe: ChildStdout, max: usize) -> io::Result<Passing> {
        let pipe = pipe::Receiver::from_owned_fd(OwnedFd::from(pipe))?;
        let (tell, kept) = oneshot::channel();
        let ended = CancellationToken::new();
        let task = tokio::spawn(pass_on(pipe, max, ended.clone(), tell));
        Ok(Passing { ended, kept, task })
    }

    /// Nothing more is written to the pipe that matters.
    pub fn end(&self) {
        self.ended.cancel();
    }

    /// What was kept, when all has been read.
    pub async fn kept(&mut self) -> StoredValue {
        self.end();
        (&mut self.kept).await.unwrap_or_default()
    }

    /// Returns when all has been passed on.
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
                // What the kernel has now, not what the runtime has heard of; a pipe is bounded.
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

/// That nobody reads on is no reason to stop the command.
fn write(bytes: &[u8]) {
    let mut stdout = io::stdout();
    let _ = stdout.write_all(bytes).and_then(|()| stdout.flush());
}
