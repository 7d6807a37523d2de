//! The body of an upstream's answer on its way to the client, and the end of the lock.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::header::{HeaderMap, HeaderValue};
use tokio_util::task::TaskTracker;

use super::headers::LOCK_STATUS;
use super::idle::Idle;
use super::locked::Locked;
use super::replay::Recording;
use super::upstream::Connection;
use crate::http::BrokenBody;

type Polled = Poll<Option<Result<Frame<Bytes>, BrokenBody>>>;

/// Passes the answer on piece by piece. Where the client goes away, the rest is read all the same:
/// the lock is kept until the upstream is done.
pub struct Relay {
    stream: Option<Box<Stream>>,
    tasks: TaskTracker,
}

struct Stream {
    body: Incoming,
    idle: Idle,
    connection: Option<Connection>,
    lock: Option<Locked>,
    cut: Option<BoxFuture<'static, Arc<str>>>,
    recording: Option<Recording>,
    /// The answer's trailers say whether the lease was lost.
    marks: bool,
    /// The outcome is on its way to the store; tells whether it was kept.
    keeping: Option<BoxFuture<'static, bool>>,
    /// The last piece, which waits for that.
    withheld: Option<Frame<Bytes>>,
    lost: bool,
    upstream_done: bool,
    done: bool,
}

/// What goes with a body.
pub struct Parts {
    pub body: Incoming,
    pub connection: Connection,
    pub idle_timeout: Duration,
    pub lock: Option<Locked>,
    pub recording: Option<Recording>,
    pub tasks: TaskTracker,
}

impl Relay {
    /// For a body that has not ended.
    pub fn new(parts: Parts) -> Relay {
        let marks = parts.lock.as_ref().is_some_and(Locked::marks);
        let stream = Stream {
            idle: Idle::new(parts.idle_timeout),
            connection: Some(parts.connection),
            cut: parts.lock.as_ref().and_then(Locked::cut),
            lock: parts.lock,
            recording: parts.recording,
            marks,
            keeping: None,
            withheld: None,
            lost: false,
            upstream_done: false,
            done: false,
            body: parts.body,
        };
        Relay { stream: Some(Box::new(stream)), tasks: parts.tasks }
    }
}

impl Stream {
    /// The lock is on its way back before the client has the last piece, so that whoever waits for that
    /// finds it free.
    fn upstream_done(&mut self) {
        self.upstream_done = true;
        self.cut = None;
        if let Some(connection) = self.connection.take() {
            connection.keep();
        }
        let Some(lock) = self.lock.take() else { return };
        match self.recording.take() {
            Some(recording) => {
                let outcome = recording.finish();
                self.keeping = Some(Box::pin(async move { lock.finish(outcome).await.is_ok() }));
            }
            None => self.lost = !lock.end(),
        }
    }

    fn broken(&mut self, why: String) -> Polled {
        self.done = true;
        self.connection = None;
        self.lock = None;
        self.cut = None;
        Poll::Ready(Some(Err(BrokenBody::new(why))))
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Polled {
        loop {
            if self.done {
                return Poll::Ready(None);
            }
            if let Some(keeping) = &mut self.keeping {
                self.lost = !ready!(keeping.as_mut().poll(cx));
                self.keeping = None;
            }
            if let Some(frame) = self.withheld.take() {
                return self.pass(frame);
            }
            if self.upstream_done {
                self.done = true;
                return Poll::Ready(self.mark(None).map(Ok));
            }
            if let Some(cut) = &mut self.cut
                && let Poll::Ready(why) = cut.as_mut().poll(cx)
            {
                return self.broken(format!("the lease was lost: {why}"));
            }
            match Pin::new(&mut self.body).poll_frame(cx) {
                Poll::Ready(Some(Ok(frame))) => {
                    self.idle.moved();
                    if let (Some(recording), Some(data)) = (&mut self.recording, frame.data_ref()) {
                        recording.data(data);
                    }
                    if self.body.is_end_stream() || frame.is_trailers() {
                        self.upstream_done();
                    }
                    self.withheld = Some(frame);
                }
                Poll::Ready(Some(Err(error))) => {
                    return self.broken(format!("the upstream broke off: {error}"));
                }
                Poll::Ready(None) => self.upstream_done(),
                Poll::Pending => {
                    let limit = ready!(self.idle.poll(cx));
                    return self.broken(format!("the upstream sent nothing for {} ms", limit.as_millis()));
                }
            }
        }
    }

    fn pass(&mut self, frame: Frame<Bytes>) -> Polled {
        match frame.into_trailers() {
            Ok(trailers) => {
                self.done = true;
                Poll::Ready(self.mark(Some(trailers)).map(Ok))
            }
            Err(frame) => {
                self.done = self.upstream_done && !self.marks;
                Poll::Ready(Some(Ok(frame)))
            }
        }
    }

    fn mark(&self, trailers: Option<HeaderMap>) -> Option<Frame<Bytes>> {
        if !(self.marks && self.lost) {
            return trailers.map(Frame::trailers);
        }
        let mut trailers = trailers.unwrap_or_default();
        trailers.insert(LOCK_STATUS, HeaderValue::from_static("lost"));
        Some(Frame::trailers(trailers))
    }
}

impl Body for Relay {
    type Data = Bytes;
    type Error = BrokenBody;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Polled {
        self.stream.as_mut().map_or(Poll::Ready(None), |stream| stream.poll(cx))
    }

    fn is_end_stream(&self) -> bool {
        self.stream.as_ref().is_none_or(|stream| {
            let nothing_left = stream.withheld.is_none() && stream.keeping.is_none() && !stream.marks;
            stream.done || (stream.upstream_done && nothing_left)
        })
    }

    fn size_hint(&self) -> SizeHint {
        match &self.stream {
            Some(stream) if !stream.marks => stream.body.size_hint(),
            _ => SizeHint::default(),
        }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        let Some(mut stream) = self.stream.take() else { return };
        if stream.lock.is_some() || stream.keeping.is_some() {
            self.tasks.spawn(async move {
                while let Some(Ok(_)) = std::future::poll_fn(|cx| stream.poll(cx)).await {}
            });
        }
    }
}
