//! The connection to an upstream. It is closed if no data moves in either direction for too long.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::idle::Idle;

/// How long an upstream may neither take nor send any data.
#[derive(Clone, Default)]
pub struct Patience(Arc<AtomicU64>);

/// A stream to an upstream whose writes fail after [`Patience`].
pub struct Socket<S> {
    stream: S,
    idle: Idle,
    patience: Patience,
}

impl Patience {
    /// Sets the limit.
    pub fn set(&self, limit: Duration) {
        self.0.store(limit.as_micros() as u64, Relaxed);
    }

    fn limit(&self) -> Duration {
        Duration::from_micros(self.0.load(Relaxed))
    }
}

impl<S> Socket<S> {
    /// Wraps a stream.
    pub fn new(stream: S, patience: Patience) -> Socket<S> {
        Socket { stream, idle: Idle::new(patience.limit()), patience }
    }

    /// Returns `written`, or an error if nothing could be written for too long.
    fn in_time(&mut self, cx: &mut Context<'_>, written: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if written.is_ready() {
            self.idle.moved();
            return written;
        }
        self.idle.set_limit(self.patience.limit());
        self.idle.poll(cx).map(|limit| {
            let why = format!("the upstream took nothing for {} ms", limit.as_millis());
            Err(io::Error::new(io::ErrorKind::TimedOut, why))
        })
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Socket<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let read = Pin::new(&mut self.stream).poll_read(cx, buf);
        if read.is_ready() {
            self.idle.moved();
        }
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Socket<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.in_time(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.in_time(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
