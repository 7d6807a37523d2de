//! The body of a request on its way to the upstream.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::{Body, Frame, Incoming, SizeHint};

use super::idle::Idle;
use crate::clock;
use crate::http::{BodyError, BrokenBody};
use crate::lock::Instant;

/// What was read of it before, and the rest as it arrives. A client that sends nothing for too long breaks it.
pub struct Upload {
    first: VecDeque<Frame<Bytes>>,
    rest: Incoming,
    idle: Idle,
    sending: Arc<Sending>,
}

/// How far the upstream has been sent its request.
pub struct Sending {
    last: AtomicU64,
    failed: AtomicBool,
}

impl Sending {
    fn moved(&self) {
        self.last.store(clock::now().0, Relaxed);
    }

    /// When a piece of the body was last passed on; at first, when it began.
    pub fn last(&self) -> Instant {
        Instant(self.last.load(Relaxed))
    }

    /// Whether the client did not send its request to the end.
    pub fn failed(&self) -> bool {
        self.failed.load(Relaxed)
    }
}

impl Upload {
    pub fn new(prefix: Prefix, rest: Incoming, idle: Duration) -> (Upload, Arc<Sending>) {
        let sending =
            Arc::new(Sending { last: AtomicU64::new(clock::now().0), failed: AtomicBool::new(false) });
        (Upload { first: prefix.frames, rest, idle: Idle::new(idle), sending: sending.clone() }, sending)
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
        if let Some(frame) = this.first.pop_front() {
            return Poll::Ready(Some(Ok(frame)));
        }
        match Pin::new(&mut this.rest).poll_frame(cx) {
            Poll::Ready(Some(Ok(frame))) => {
                this.idle.moved();
                this.sending.moved();
                Poll::Ready(Some(Ok(frame)))
            }
            Poll::Ready(Some(Err(error))) => this.broken(format!("the request broke off: {error}")),
            Poll::Ready(None) => Poll::Ready(None),
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
        let first: u64 =
            self.first.iter().filter_map(|frame| frame.data_ref().map(|data| data.len() as u64)).sum();
        let rest = self.rest.size_hint();
        let mut hint = SizeHint::new();
        hint.set_lower(first + rest.lower());
        if let Some(upper) = rest.upper() {
            hint.set_upper(first + upper);
        }
        hint
    }
}

/// The beginning of a body, read before the rest is passed on.
#[derive(Default)]
pub struct Prefix {
    frames: VecDeque<Frame<Bytes>>,
}

impl Prefix {
    /// Reads until there are `bytes`, or all.
    ///
    /// # Errors
    /// Where that does not happen within `timeout`, or the client goes away.
    pub async fn read(body: &mut Incoming, bytes: usize, timeout: Duration) -> Result<Prefix, BodyError> {
        let mut prefix = Prefix::default();
        if bytes == 0 || body.is_end_stream() {
            return Ok(prefix);
        }
        let read = async {
            let mut len = 0;
            while len < bytes {
                let Some(frame) = body.frame().await else { break };
                let frame = frame.map_err(BodyError::Broken)?;
                len += frame.data_ref().map_or(0, Bytes::len);
                prefix.frames.push_back(frame);
            }
            Ok(())
        };
        match tokio::time::timeout(timeout, read).await {
            Ok(read) => read.map(|()| prefix),
            Err(_elapsed) => Err(BodyError::Slow { limit: timeout }),
        }
    }

    /// At most `bytes` of it.
    pub fn bytes(&self, bytes: usize) -> Vec<u8> {
        let data = self.frames.iter().filter_map(Frame::data_ref).flatten();
        data.take(bytes).copied().collect()
    }
}
