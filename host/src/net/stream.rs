//! The bytes of a connection.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::server::TlsStream;

use super::timed::TimedStream;

/// A client's connection.
pub enum Stream {
    /// A connection without TLS.
    Plain(TcpStream),
    /// Boxed: the TLS state is large, and plain connections would otherwise reserve memory for it.
    Tls(Box<TlsStream<TcpStream>>),
    /// A connection on a Unix socket.
    Unix(Box<TimedStream>),
}

/// How long the server waits for a client to read the last answer of a connection that is closed early.
const LINGER: Duration = Duration::from_secs(1);
/// How many more bytes of such a client are read and discarded.
const LINGER_BYTES: usize = 1 << 20;

impl Stream {
    /// The protocol that the client negotiated in its TLS handshake, if it did.
    pub fn alpn(&self) -> Option<&[u8]> {
        match self {
            Stream::Plain(_) | Stream::Unix(_) => None,
            Stream::Tls(stream) => stream.get_ref().1.alpn_protocol(),
        }
    }

    /// The socket of the connection.
    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        match self {
            Stream::Plain(stream) => stream.as_fd(),
            Stream::Tls(stream) => stream.get_ref().0.as_fd(),
            Stream::Unix(stream) => stream.socket().as_fd(),
        }
    }

    /// Ends the connection with a reset, so that the client's system reports an error. On a Unix socket, there are no
    /// resets: the client sees the end of the bytes.
    pub fn reset(self) {
        let _ = socket2::SockRef::from(&self.socket()).set_linger(Some(Duration::ZERO));
    }

    /// Sends the last bytes of a connection that is closed early, and [lingers](Stream::linger).
    pub async fn close_with(mut self, last_words: &[u8]) {
        let written = tokio::time::timeout(LINGER, self.write_all(last_words)).await;
        if matches!(written, Ok(Ok(()))) {
            self.linger().await;
        }
    }

    /// Ends a connection whose client may still be sending. If unread bytes were left, the kernel would reset the
    /// connection, and the client might never see the answer.
    pub async fn linger(mut self) {
        let drain = async {
            if self.shutdown().await.is_err() {
                return;
            }
            let mut scratch = [0; 2048];
            let mut left = LINGER_BYTES;
            while let Ok(read @ 1..) = self.read(&mut scratch).await {
                left = left.saturating_sub(read);
                if left == 0 {
                    return;
                }
            }
        };
        let _ = tokio::time::timeout(LINGER, drain).await;
    }
}

impl AsyncRead for Stream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Stream::Plain(stream) => Pin::new(stream).poll_read(cx, buf),
            Stream::Tls(stream) => Pin::new(stream).poll_read(cx, buf),
            Stream::Unix(stream) => Pin::new(stream).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Stream::Plain(stream) => Pin::new(stream).poll_write(cx, buf),
            Stream::Tls(stream) => Pin::new(stream).poll_write(cx, buf),
            Stream::Unix(stream) => Pin::new(stream).poll_write(cx, buf),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Stream::Plain(stream) => Pin::new(stream).poll_flush(cx),
            Stream::Tls(stream) => Pin::new(stream).poll_flush(cx),
            Stream::Unix(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Stream::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            Stream::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
            Stream::Unix(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}
