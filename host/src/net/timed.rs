//! The bytes of a connection on a Unix socket.

use std::future::Future;
use std::io::{self, ErrorKind};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tokio::time::{Sleep, sleep};

/// A connection that ends when its client reads nothing for too long, as the kernel does it for TCP.
pub struct TimedStream {
    stream: UnixStream,
    /// How long the client may read nothing, in milliseconds.
    pub(super) patience_ms: Arc<AtomicU64>,
    /// When the client has read nothing for too long; `None` if it has room for more bytes.
    stalled: Option<Pin<Box<Sleep>>>,
}

impl TimedStream {
    /// `patience`: how long the client may read nothing.
    pub(super) fn new(stream: UnixStream, patience: Duration) -> TimedStream {
        let patience_ms = Arc::new(AtomicU64::new(patience.as_millis() as u64));
        TimedStream { stream, patience_ms, stalled: None }
    }

    pub(super) fn socket(&self) -> &UnixStream {
        &self.stream
    }
}

impl AsyncRead for TimedStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for TimedStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        if let Poll::Ready(written) = Pin::new(&mut this.stream).poll_write(cx, buf) {
            this.stalled = None;
            return Poll::Ready(written);
        }
        let limit = Duration::from_millis(this.patience_ms.load(Relaxed));
        let stalled = this.stalled.get_or_insert_with(|| Box::pin(sleep(limit)));
        ready!(stalled.as_mut().poll(cx));
        Poll::Ready(Err(ErrorKind::TimedOut.into()))
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_client_that_reads_nothing_is_given_up() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut ours = TimedStream::new(ours, Duration::from_secs(5));
        let bytes = vec![0; 1 << 24];
        let began = tokio::time::Instant::now();
        let error = ours.write_all(&bytes).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        assert_eq!(began.elapsed().as_secs(), 5);
        // A client that reads in between is not.
        ours.stalled = None;
        let reading = tokio::spawn(async move {
            let mut read = vec![0; 1 << 20];
            while theirs.read(&mut read).await.is_ok_and(|read| read > 0) {}
        });
        ours.write_all(&bytes).await.unwrap();
        drop(ours);
        reading.await.unwrap();
    }
}
