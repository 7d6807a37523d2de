//! A connection's socket: buffers what arrived, passes on what the gate clears, and replaces answers that the HTTP
//! library would send without a body.

use std::future::poll_fn;
use std::io;
use std::mem::MaybeUninit;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::activity::Activity;
use super::gate::{Gate, Refusal};
use super::peer::Peer;
use super::problem::{Kind, Problem};
use crate::net::Stream;

/// The socket that the HTTP library reads from and writes to.
pub struct Socket {
    stream: Stream,
    /// Checks HTTP/1.
    gate: Gate,
    /// Bytes that were read but not passed on; the first `cleared` of them may be passed on.
    held: Vec<u8>,
    cleared: usize,
    http2: bool,
    end_seen: bool,
    activity: Arc<Activity>,
    peer: Arc<Peer>,
    /// An answer that replaces the library's own, and how much of it has been written.
    instead: Option<Box<(Vec<u8>, usize)>>,
}

/// The protocols that a client may negotiate in the TLS handshake.
pub const HTTP1: &[u8] = b"http/1.1";
pub const HTTP2: &[u8] = b"h2";
/// The bytes that every HTTP/2 client sends first.
const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// How much is read at once while bytes may have to be held.
const PART: usize = 1024;

impl Socket {
    /// Wraps a connection. `max_head` limits the head of an HTTP/1 request, in bytes.
    pub fn new(stream: Stream, max_head: usize, activity: Arc<Activity>, peer: Arc<Peer>) -> Socket {
        Socket {
            http2: stream.alpn() == Some(HTTP2),
            stream,
            gate: Gate::new(max_head),
            held: Vec::new(),
            cleared: 0,
            end_seen: false,
            activity,
            peer,
            instead: None,
        }
    }

    /// Reads until it is clear whether the client speaks HTTP/2, unless the TLS handshake has determined it.
    pub async fn sniff(&mut self) -> io::Result<bool> {
        if self.http2 {
            return Ok(true);
        }
        loop {
            let len = self.held.len().min(PREFACE.len());
            if self.held[..len] != PREFACE[..len] {
                break;
            }
            if len == PREFACE.len() {
                self.http2 = true;
                self.cleared = self.held.len();
                return Ok(true);
            }
            if poll_fn(|cx| self.poll_hold(cx)).await? == 0 {
                break;
            }
            self.activity.received();
        }
        self.cleared = self.gate.judge(&self.held);
        Ok(false)
    }

    /// Whether the client has closed its sending side.
    pub fn end_seen(&self) -> bool {
        self.end_seen
    }

    /// Whether bytes arrived that were not passed on.
    pub fn holds_bytes(&self) -> bool {
        !self.held.is_empty()
    }

    /// Why the client's next request will not be read.
    pub fn refusal(&self) -> Option<Refusal> {
        self.gate.refusal()
    }

    /// The stream; bytes that were not passed on are dropped.
    pub fn into_stream(self) -> Stream {
        self.stream
    }

    /// The stream, and the bytes that were read but not passed on.
    pub fn into_parts(self) -> (Stream, Vec<u8>) {
        (self.stream, self.held)
    }

    fn note_end(&mut self, is_end: bool) {
        if is_end {
            self.end_seen = true;
            self.peer.closed();
        }
    }

    /// Reads more bytes into `held`. Returns their number; 0 at the end.
    fn poll_hold(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let mut part = [MaybeUninit::uninit(); PART];
        let mut part = ReadBuf::uninit(&mut part);
        ready!(Pin::new(&mut self.stream).poll_read(cx, &mut part))?;
        self.held.extend_from_slice(part.filled());
        self.note_end(part.filled().is_empty());
        Poll::Ready(Ok(part.filled().len()))
    }

    /// Passes on the cleared bytes. Returns whether there were any.
    fn pass_on(&mut self, buf: &mut ReadBuf<'_>) -> bool {
        let len = self.cleared.min(buf.remaining());
        if len == 0 {
            return false;
        }
        buf.put_slice(&self.held[..len]);
        self.cleared -= len;
        if len == self.held.len() {
            // Idle connections hold no buffer.
            self.held = Vec::new();
        } else {
            self.held.drain(..len);
        }
        true
    }

    /// Reads HTTP/1. Ready with bytes that may pass, or at the end.
    fn poll_read_judged(&mut self, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        while !self.pass_on(buf) {
            if let Some(refusal) = self.gate.refusal() {
                return self.poll_refused(cx, refusal);
            }
            if !self.held.is_empty() {
                if ready!(self.poll_hold(cx))? == 0 {
                    break;
                }
                self.activity.received();
                self.cleared = self.gate.judge(&self.held);
                continue;
            }
            let before = buf.filled().len();
            ready!(Pin::new(&mut self.stream).poll_read(cx, buf))?;
            let fresh = &buf.filled()[before..];
            if fresh.is_empty() {
                self.note_end(true);
                break;
            }
            self.activity.received();
            let pass = self.gate.judge(fresh);
            if pass < fresh.len() {
                self.held.extend_from_slice(&fresh[pass..]);
                buf.set_filled(before + pass);
            }
            if pass > 0 {
                break;
            }
        }
        Poll::Ready(Ok(()))
    }

    /// Handles a refusal when no more bytes may pass. A message that has begun breaks off. A request that has not
    /// begun is answered by the connection's task, after the requests before it.
    fn poll_refused(&mut self, cx: &mut Context<'_>, refusal: Refusal) -> Poll<io::Result<()>> {
        if self.gate.is_within_message() {
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, refusal)));
        }
        self.activity.refuse_after(self.gate.heads());
        // Reading on detects a client that goes away while it waits for an answer.
        while self.activity.is_busy() {
            self.held.clear();
            if ready!(self.poll_hold(cx))? == 0 {
                return Poll::Ready(Ok(()));
            }
        }
        Poll::Pending
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if buf.remaining() == 0 {
            return Poll::Ready(Ok(()));
        }
        if !this.http2 {
            return this.poll_read_judged(cx, buf);
        }
        if !this.pass_on(buf) {
            let before = buf.filled().len();
            ready!(Pin::new(&mut this.stream).poll_read(cx, buf))?;
            this.note_end(buf.filled().len() == before);
            this.peer.heard();
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

/// The answer with a problem body that replaces the HTTP library's bare answer to a request that it could not read.
fn instead_of(answer: &[u8]) -> Option<Vec<u8>> {
    let status = answer.strip_prefix(b"HTTP/1.1 ").or_else(|| answer.strip_prefix(b"HTTP/1.0 "))?.get(..3)?;
    let problem = match status {
        b"431" => Problem::new(
            Kind::HEADERS_TOO_LARGE,
            "the request line and headers are over the limit in bytes or in number".to_owned(),
        )
        .with("bound", "http.max_header_bytes"),
        b"414" => {
            Problem::new(Kind::HEADERS_TOO_LARGE, "the request target is too long".to_owned()).status(414)
        }
        b"400" => Problem::new(Kind::INVALID, "this is not an HTTP/1.1 or HTTP/2 request".to_owned()),
        _ => return None,
    };
    Some(problem.to_http1())
}
