//! The body of a request on its way to the upstream.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_util::task::AtomicWaker;
use http_body_util::BodyExt;
use hyper::body::{Body, Frame, Incoming, SizeHint};

use super::headers;
use super::idle::Idle;
use crate::clock::{self, AtomicInstant};
use crate::config::GuardRoute;
use crate::http::{BodyError, BrokenBody};
use crate::lock::Instant;
use crate::route::Seen;

/// The part of the body that was already read, followed by the rest as it arrives. Fails if the client sends nothing
/// for too long.
pub struct Upload {
    first: VecDeque<Frame<Bytes>>,
    rest: Incoming,
    route: Arc<GuardRoute>,
    idle: Idle,
    sending: Arc<Sending>,
}

/// How much of the request has been sent to the upstream.
pub struct Sending {
    /// When the whole request had been sent, by the proxy's clock.
    ended_at: AtomicInstant,
    failed: AtomicBool,
    stopped: AtomicBool,
    waker: AtomicWaker,
}

impl Sending {
    fn ended(&self) {
        self.ended_at.set_once(clock::now());
    }

    /// When the whole request had been passed on, if it has been.
    pub fn ended_at(&self) -> Option<Instant> {
        self.ended_at.get()
    }

    /// Stops sending the request if it has not ended, because its answer has.
    pub fn stop(&self) {
        if self.ended_at().is_none() {
            self.stopped.store(true, Relaxed);
            self.waker.wake();
        }
    }

    /// Whether the client failed to send the whole request.
    pub fn failed(&self) -> bool {
        self.failed.load(Relaxed)
    }
}

impl Upload {
    /// Creates the body from its beginning and its rest, with the state of sending it.
    pub fn new(prefix: Prefix, rest: Incoming, route: Arc<GuardRoute>) -> (Upload, Arc<Sending>) {
        let is_empty = prefix.frames.is_empty() && rest.is_end_stream();
        let sending = Arc::new(Sending {
            ended_at: AtomicInstant::new(is_empty.then(clock::now)),
            failed: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
            waker: AtomicWaker::new(),
        });
        let idle = Idle::new(route.idle_timeout);
        (Upload { first: prefix.frames, rest, route, idle, sending: sending.clone() }, sending)
    }

    fn broken(&self, what: String) -> Poll<Option<Result<Frame<Bytes>, BrokenBody>>> {
        self.sending.failed.store(true, Relaxed);
        Poll::Ready(Some(Err(BrokenBody::new(what))))
    }
}

impl Body for Upload {
    type Data = Bytes;
    type Error = BrokenBody;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BrokenBody>>> {
        let this = &mut *self;
        let next = match this.first.pop_front() {
            Some(frame) => Poll::Ready(Some(Ok(frame))),
            None => Pin::new(&mut this.rest).poll_frame(cx),
        };
        this.sending.waker.register(cx.waker());
        if this.sending.stopped.load(Relaxed) {
            return this.broken("the upstream has answered before the request had ended".to_owned());
        }
        match next {
            Poll::Ready(Some(Ok(mut frame))) => {
                this.idle.moved();
                if let Some(trailers) = frame.trailers_mut() {
                    headers::strip_trailers(trailers, this.route.reads_headers());
                }
                // The HTTP library passes on only the announced length; the end of an HTTP/2 stream may follow in a
                // frame of its own.
                if this.is_end_stream() || this.size_hint().exact() == Some(0) {
                    this.sending.ended();
                }
                Poll::Ready(Some(Ok(frame)))
            }
            Poll::Ready(Some(Err(error))) => this.broken(format!("the request broke off: {error}")),
            Poll::Ready(None) => {
                this.sending.ended();
                Poll::Ready(None)
            }
            Poll::Pending => match this.idle.poll(cx) {
                Poll::Ready(limit) => {
                    this.broken(format!("the client sent nothing for {} ms", limit.as_millis()))
                }
                Poll::Pending => Poll::Pending,
            },
        }
    }

    fn is_end_stream(&self) -> bool {
        self.first.is_empty() && self.rest.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let first = self.first.iter().filter_map(Frame::data_ref).map(|data| data.len() as u64);
        with_more(self.rest.size_hint(), first.sum())
    }
}

impl Drop for Upload {
    /// The HTTP library drops a body when it has written the announced length, or when the connection broke. Nothing
    /// more of the request reaches the upstream.
    fn drop(&mut self) {
        self.sending.ended();
    }
}

/// The length of a body that is preceded by `bytes` more.
pub fn with_more(rest: SizeHint, bytes: u64) -> SizeHint {
    let mut hint = SizeHint::new();
    hint.set_lower(bytes + rest.lower());
    if let Some(upper) = rest.upper() {
        hint.set_upper(bytes + upper);
    }
    hint
}

/// The beginning of a body, which is read before the rest is passed on.
#[derive(Default)]
pub struct Prefix {
    frames: VecDeque<Frame<Bytes>>,
    ended: bool,
}

impl Prefix {
    /// Reads until more than `bytes` bytes or the whole body has been read.
    ///
    /// # Errors
    /// The read did not complete within `timeout`, or the client went away.
    pub async fn read(
        &mut self,
        body: &mut Incoming,
        bytes: usize,
        timeout: Duration,
    ) -> Result<(), BodyError> {
        if bytes == 0 || self.ended || body.is_end_stream() {
            return Ok(());
        }
        let read = async {
            let mut len: usize = self.frames.iter().filter_map(Frame::data_ref).map(Bytes::len).sum();
            // One more byte tells whether the body is longer.
            while len <= bytes {
                let Some(frame) = body.frame().await else {
                    self.ended = true;
                    break;
                };
                let frame = frame.map_err(BodyError::Broken)?;
                match frame.data_ref().map(Bytes::len) {
                    // HTTP/2 may send any number of empty pieces.
                    Some(0) => continue,
                    some => len += some.unwrap_or(0),
                }
                self.frames.push_back(frame);
            }
            Ok(())
        };
        let in_time = tokio::time::timeout(timeout, read).await;
        in_time.unwrap_or(Err(BodyError::Slow { limit: timeout }))
    }

    /// The first `bytes` bytes of the body; `rest` is the unread part.
    pub fn seen(&self, bytes: usize, rest: &Incoming) -> Seen {
        let data: Vec<u8> = self.frames.iter().filter_map(Frame::data_ref).flatten().copied().collect();
        let is_whole = (self.ended || rest.is_end_stream()) && data.len() <= bytes;
        Seen { body: data.into_iter().take(bytes).collect(), is_whole }
    }
}
