//! A connection's socket: remembers what arrived, and speaks for the HTTP library where that
//! would answer without a body.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::Stream;
use super::activity::Activity;
use super::problem::{Kind, Problem};

pub struct Socket {
    stream: Stream,
    /// Bytes that were read to find out which HTTP this is, and how many of them were passed on.
    sniffed: [u8; PREFACE.len()],
    sniffed_len: u8,
    passed_on: u8,
    http2: bool,
    end_seen: bool,
    activity: Arc<Activity>,
    /// The rest of an answer that replaces the library's own.
    instead: Option<Box<(Vec<u8>, usize)>>,
}

/// What every HTTP/2 client sends first.
const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

impl Socket {
    pub fn new(stream: Stream, activity: Arc<Activity>) -> Socket {
        Socket {
            stream,
            sniffed: [0; PREFACE.len()],
            sniffed_len: 0,
            passed_on: 0,
            http2: false,
            end_seen: false,
            activity,
            instead: None,
        }
    }

    /// Reads until it is clear whether the client speaks HTTP/2. Safe to drop and call again.
    pub async fn sniff(&mut self) -> io::Result<bool> {
        use tokio::io::AsyncReadExt;
        loop {
            let len = usize::from(self.sniffed_len);
            if self.sniffed[..len] != PREFACE[..len] {
                return Ok(false);
            }
            if len == PREFACE.len() {
                self.http2 = true;
                return Ok(true);
            }
            let read = self.stream.read(&mut self.sniffed[len..]).await?;
            if read == 0 {
                self.end_seen = true;
                return Ok(false);
            }
            self.activity.received();
            self.sniffed_len += read as u8;
        }
    }

    /// Whether the client has said that it sends no more.
    pub fn end_seen(&self) -> bool {
        self.end_seen
    }

    pub fn into_stream(self) -> Stream {
        self.stream
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let held = &this.sniffed[usize::from(this.passed_on)..usize::from(this.sniffed_len)];
        if !held.is_empty() {
            let part = &held[..held.len().min(buf.remaining())];
            buf.put_slice(part);
            this.passed_on += part.len() as u8;
            return Poll::Ready(Ok(()));
        }
        let before = buf.filled().len();
        ready!(Pin::new(&mut this.stream).poll_read(cx, buf))?;
        if buf.filled().len() == before {
            this.end_seen = true;
        } else if !this.http2 {
            this.activity.received();
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Socket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let this = &mut *self;
        if this.instead.is_none() && !this.http2 && this.activity.unasked() {
            this.instead = instead_of(buf).map(|answer| Box::new((answer, 0)));
        }
        let Some(instead) = &mut this.instead else {
            return Pin::new(&mut this.stream).poll_write(cx, buf);
        };
        while instead.1 < instead.0.len() {
            instead.1 += ready!(Pin::new(&mut this.stream).poll_write(cx, &instead.0[instead.1..]))?;
        }
        Poll::Ready(Ok(buf.len()))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(Pin::new(&mut self.stream).poll_flush(cx))?;
        self.activity.flushed();
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// The answer with a problem body that replaces the library's bare one to a request that it could
/// not read.
fn instead_of(answer: &[u8]) -> Option<Vec<u8>> {
    let status = answer.strip_prefix(b"HTTP/1.1 ").or_else(|| answer.strip_prefix(b"HTTP/1.0 "))?.get(..3)?;
    let problem = match status {
        b"431" => Problem::new(
            Kind::HeadersTooLarge,
            "the request line and headers are over the limit in bytes or in number".to_owned(),
        )
        .with("bound", "http.max_header_bytes"),
        b"414" => {
            Problem::new(Kind::HeadersTooLarge, "the request target is too long".to_owned()).status(414)
        }
        b"400" => Problem::new(Kind::Invalid, "this is not an HTTP/1.1 or HTTP/2 request".to_owned()),
        _ => return None,
    };
    Some(problem.to_http1())
}
