//! The body of an upstream's answer on its way to the client, and the end of the lock.

use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::header::{HeaderMap, HeaderValue};
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

use super::headers::LOCK_STATUS;
use super::idle::Idle;
use super::locked::{Locked, lost};
use super::replay::Recording;
use super::upload::Sending;
use super::upstream::Connection;
use crate::clock;
use crate::http::BrokenBody;
use crate::lock::Instant;

type Polled = Poll<Option<Result<Frame<Bytes>, BrokenBody>>>;

/// Passes the answer on piece by piece. Where the client goes away, the rest is read all the same:
/// the lock is kept until the upstream is done. Where the client only stops reading, it is given up after a while.
pub struct Relay {
    shared: Arc<Shared>,
    /// Somebody sees to it that the client reads on.
    is_watched: bool,
    tasks: TaskTracker,
    /// A drain waits for answers that are under way.
    _under_way: TaskTrackerToken,
}

struct Shared {
    /// `None` once it was given up.
    stream: Mutex<Option<Box<Stream>>>,
    why: OnceLock<String>,
    /// When the client last took a piece.
    taken_at: AtomicU64,
}

/// How the client learns that the lease was lost while the answer streamed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Telling {
    /// It need not.
    Nothing,
    Trailer,
    /// It takes no trailers: its answer breaks off.
    BreakOff,
}

struct Stream {
    body: Incoming,
    idle: Idle,
    connection: Option<Connection>,
    sending: Arc<Sending>,
    lock: Option<Locked>,
    cut: Option<BoxFuture<'static, Arc<str>>>,
    recording: Option<Recording>,
    telling: Telling,
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
    pub sending: Arc<Sending>,
    pub idle_timeout: Duration,
    pub lock: Option<Locked>,
    pub recording: Option<Recording>,
    pub telling: Telling,
    pub tasks: TaskTracker,
}

impl Relay {
    /// For a body that has not ended.
    pub fn new(parts: Parts) -> Relay {
        let stream = Stream {
            idle: Idle::new(parts.idle_timeout),
            connection: Some(parts.connection),
            sending: parts.sending,
            cut: parts.lock.as_ref().and_then(Locked::cut),
            lock: parts.lock,
            recording: parts.recording,
            telling: parts.telling,
            keeping: None,
            withheld: None,
            lost: false,
            upstream_done: false,
            done: false,
            body: parts.body,
        };
        let shared = Shared {
            stream: Mutex::new(Some(Box::new(stream))),
            why: OnceLock::new(),
            taken_at: AtomicU64::new(clock::now().0),
        };
        let under_way = parts.tasks.token();
        Relay { shared: Arc::new(shared), is_watched: false, tasks: parts.tasks, _under_way: under_way }
    }
}

impl Shared {
    fn with<R>(&self, look: impl FnOnce(&mut Option<Box<Stream>>) -> R) -> R {
        look(&mut self.stream.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn give_up(&self, why: String) {
        tracing::debug!(why, "an answer is given up");
        let _ = self.why.set(why);
        drop(self.with(Option::take));
    }
}

/// Gives an answer up whose client has taken nothing for `limit`, or whose lease is lost and is to be cut off then:
/// while the client does not read, nothing asks for the body.
async fn watch(shared: Weak<Shared>, limit: Duration, cut: Option<BoxFuture<'static, Arc<str>>>) {
    let mut cut = std::pin::pin!(lost(cut));
    loop {
        let until = {
            let Some(shared) = shared.upgrade() else { return };
            if shared.with(|stream| stream.as_ref().is_none_or(|stream| stream.done)) {
                return;
            }
            let until = Instant(shared.taken_at.load(Relaxed)).plus_us(limit.as_micros() as u64);
            if clock::now() >= until {
                return shared.give_up(format!("nothing moved for {} ms", limit.as_millis()));
            }
            until
        };
        tokio::select! {
            () = clock::sleep_until(until) => {}
            why = &mut cut => {
                if let Some(shared) = shared.upgrade() {
                    shared.give_up(format!("the lease was lost: {why}"));
                }
                return;
            }
        }
    }
}

impl Stream {
    /// The lock is on its way back before the client has the last piece, so that whoever waits for that
    /// finds it free.
    fn upstream_done(&mut self) {
        self.upstream_done = true;
        self.cut = None;
        // An application that has answered gets no more of the request: its lock is about to be free.
        self.sending.stop();
        if let Some(connection) = self.connection.take() {
            connection.keep();
        }
        let Some(lock) = self.lock.take() else { return };
        match self.recording.take() {
            Some(recording) => {
                let outcome = recording.finish();
                self.keeping = Some(Box::pin(lock.finish(outcome)));
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
            if self.upstream_done && self.lost && self.telling == Telling::BreakOff {
                return self.broken("the lease was lost while the upstream worked".to_owned());
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
                self.done = self.upstream_done && self.telling != Telling::Trailer;
                Poll::Ready(Some(Ok(frame)))
            }
        }
    }

    fn mark(&self, trailers: Option<HeaderMap>) -> Option<Frame<Bytes>> {
        if !(self.telling == Telling::Trailer && self.lost) {
            return trailers.map(Frame::trailers);
        }
        let mut trailers = trailers.unwrap_or_default();
        trailers.insert(LOCK_STATUS, HeaderValue::from_static("lost"));
        Some(Frame::trailers(trailers))
    }
}

impl Stream {
    fn is_end(&self) -> bool {
        let nothing_left = self.withheld.is_none() && self.keeping.is_none();
        self.done || (self.upstream_done && nothing_left && self.telling == Telling::Nothing)
    }
}

impl Body for Relay {
    type Data = Bytes;
    type Error = BrokenBody;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Polled {
        let this = &mut *self;
        let shared = &this.shared;
        let polled = shared.with(|stream| stream.as_mut().map(|stream| (stream.poll(cx), stream.done)));
        let Some((polled, done)) = polled else {
            let why = shared.why.get().cloned().unwrap_or_default();
            return Poll::Ready(Some(Err(BrokenBody::new(why))));
        };
        if let Poll::Ready(Some(Ok(_))) = &polled {
            shared.taken_at.store(clock::now().0, Relaxed);
            // Most answers are one piece, for which nobody need watch.
            if !done && !std::mem::replace(&mut this.is_watched, true) {
                let (limit, cut) = shared.with(|stream| {
                    let stream = stream.as_ref();
                    let cut = stream.and_then(|stream| stream.lock.as_ref()).and_then(Locked::cut);
                    (stream.map(|stream| stream.idle.limit()), cut)
                });
                if let Some(limit) = limit {
                    tokio::spawn(watch(Arc::downgrade(shared), limit, cut));
                }
            }
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.shared.with(|stream| stream.as_ref().is_some_and(|stream| stream.is_end()))
    }

    fn size_hint(&self) -> SizeHint {
        self.shared.with(|stream| match stream {
            Some(stream) if stream.telling != Telling::Trailer => stream.body.size_hint(),
            _ => SizeHint::default(),
        })
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        let Some(mut stream) = self.shared.with(Option::take) else { return };
        if stream.lock.is_none() && stream.keeping.is_none() {
            return;
        }
        // The client is gone, and the application is not told: it works on, under its lock. When that is lost
        // nothing is left to wait for.
        let loss = stream.lock.as_ref().map(Locked::loss);
        self.tasks.spawn(async move {
            let rest = async { while let Some(Ok(_)) = std::future::poll_fn(|cx| stream.poll(cx)).await {} };
            tokio::select! {
                () = rest => {}
                _ = lost(loss) => {}
            }
        });
    }
}
