//! Passes the body of an upstream's answer to the client, and releases the lock at its end.
//!
//! The proxy never holds a lock just to wait for a client. If the client disconnects, or reads nothing for too long,
//! the proxy reads the rest of the answer without the client and stores the outcome of a `once`. The proxy holds the
//! answer to a `once` back until its outcome is stored, up to the size that is stored, so that the head can report
//! whether the outcome was stored.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::{Arc, OnceLock, Weak};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::header::{HeaderMap, HeaderValue};
use tokio::task::AbortHandle;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

use super::headers::{LOCK_STATUS, LOST, UNKEPT};
use super::idle::Idle;
use super::locked::{Locked, lost};
use super::replay::Recording;
use super::upload::{Sending, with_more};
use super::upstream::Connection;
use super::upstream_failed;
use crate::clock;
use crate::fronts::Code;
use crate::http::{BrokenBody, Kind, Problem};
use crate::lock::Instant;
use crate::mutex::Mutex;
use crate::vital;

type Polled = Poll<Option<Result<Frame<Bytes>, BrokenBody>>>;

/// Passes a [`RelayedBody`] on piece by piece.
pub struct Relay {
    shared: Arc<RelayContext>,
    /// Gives up a client that does not read; `None` for an answer that has arrived completely.
    watching: Option<AbortHandle>,
    /// Makes a drain wait for answers in progress.
    _under_way: TaskTrackerToken,
}

struct RelayContext {
    state: Mutex<State>,
    why: OnceLock<String>,
    tasks: TaskTracker,
}

struct State {
    /// `None` once the client was given up.
    answer: Option<Box<RelayedBody>>,
    /// Wakes the client's connection while it waits for the next piece.
    waits: Option<Waker>,
    /// When the client last took a piece.
    taken_at: Instant,
}

/// How the client learns the state of the lock after the head of its answer was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Telling {
    /// The client need not be told.
    Nothing,
    Trailer,
    /// The client accepts no trailers: its answer breaks off.
    BreakOff,
}

/// The body of an answer as it arrives, with the lock that it is under.
pub struct RelayedBody {
    body: Incoming,
    idle: Idle,
    connection: Option<Connection>,
    sending: Arc<Sending>,
    lock: Option<Locked>,
    cut: Option<BoxFuture<'static, Arc<str>>>,
    recording: Option<Recording>,
    telling: Telling,
    /// The store of the outcome that is in progress; resolves to whether the outcome was stored.
    keeping: Option<BoxFuture<'static, bool>>,
    /// Pieces that the client has not taken. The last piece waits until the outcome is stored.
    withheld: VecDeque<Frame<Bytes>>,
    /// The lock status to report to the client, if there is a problem.
    status: Option<HeaderValue>,
    upstream_done: bool,
    done: bool,
}

/// The parts that a [`RelayedBody`] is made of.
pub struct Parts {
    pub body: Incoming,
    pub connection: Connection,
    pub sending: Arc<Sending>,
    pub idle_timeout: Duration,
    pub lock: Option<Locked>,
    pub recording: Option<Recording>,
}

/// Why an answer cannot be completed.
#[derive(Debug, thiserror::Error)]
pub enum Broken {
    #[error("the lease was lost: {0}")]
    Lost(Arc<str>),
    #[error("the upstream broke off: {0}")]
    Upstream(hyper::Error),
    #[error("the upstream sent nothing for {} ms", .0.as_millis())]
    Silent(Duration),
}

impl From<Broken> for Problem {
    fn from(broken: Broken) -> Problem {
        let detail = broken.to_string();
        match broken {
            Broken::Lost(_) => Problem::new(Code::Lost, detail).status(503),
            Broken::Upstream(_) => upstream_failed("the application gave no whole answer").inside(detail),
            Broken::Silent(_) => Problem::new(Kind::UPSTREAM_TIMEOUT, detail),
        }
    }
}

impl Relay {
    /// Starts to pass `answer` on, and to watch its client unless the answer has arrived completely.
    pub fn new(mut answer: RelayedBody, telling: Telling, tasks: TaskTracker) -> Relay {
        answer.telling = telling;
        let watched = (!answer.upstream_done)
            .then(|| (answer.idle.limit(), answer.lock.as_ref().and_then(Locked::cut)));
        let under_way = tasks.token();
        let state = State { answer: Some(Box::new(answer)), waits: None, taken_at: clock::now() };
        let shared = Arc::new(RelayContext { state: Mutex::new(state), why: OnceLock::new(), tasks });
        let watching = watched
            .map(|(limit, cut)| vital::detach(watch(Arc::downgrade(&shared), limit, cut)).abort_handle());
        Relay { shared, watching, _under_way: under_way }
    }
}

impl RelayContext {
    /// Stops passing the answer to the client, and wakes the client if it waits for a piece.
    fn give_up(&self, state: &mut State, why: String) -> Option<Box<RelayedBody>> {
        tracing::debug!(why, "the answer to a client is cut off");
        let _ = self.why.set(why);
        state.waits.take().into_iter().for_each(Waker::wake);
        state.answer.take()
    }

    /// Reads the rest of an answer without its client: the application does not know that the client is gone, and
    /// works on under its lock. If the lock is lost, reading stops.
    fn finish_alone(&self, mut answer: Box<RelayedBody>) {
        if answer.lock.is_none() && answer.keeping.is_none() {
            return;
        }
        let loss = answer.lock.as_ref().map(Locked::loss);
        self.tasks.spawn(vital::of_this_process(async move {
            let rest = async { while let Some(Ok(_)) = std::future::poll_fn(|cx| answer.poll(cx)).await {} };
            tokio::select! {
                biased;
                () = rest => {}
                _ = lost(loss) => {}
            }
        }));
    }
}

/// Gives up a client that takes nothing for `limit`, and an answer that must be cut off because its lease is lost. A
/// task of its own is needed because nothing polls the body while the client does not read. A client that waits for
/// the next piece does not count as taking nothing.
async fn watch(shared: Weak<RelayContext>, limit: Duration, cut: Option<BoxFuture<'static, Arc<str>>>) {
    let mut cut = std::pin::pin!(lost(cut).fuse());
    loop {
        let until = {
            let Some(shared) = shared.upgrade() else { return };
            let mut state = shared.state.lock();
            if state.answer.as_ref().is_none_or(|answer| answer.done) {
                return;
            }
            let now = clock::now();
            let since = if state.waits.is_some() { now } else { state.taken_at };
            let until = since.plus_us(limit.as_micros() as u64);
            if now >= until {
                let why = format!("the client took nothing for {} ms", limit.as_millis());
                let answer = shared.give_up(&mut state, why);
                drop(state);
                return answer.into_iter().for_each(|answer| shared.finish_alone(answer));
            }
            until
        };
        tokio::select! {
            biased;
            () = clock::sleep_until(until) => {}
            why = &mut cut => {
                let Some(shared) = shared.upgrade() else { return };
                let mut state = shared.state.lock();
                // An answer that has arrived completely is passed on even if its lock is lost.
                if state.answer.as_ref().is_some_and(|answer| !answer.upstream_done) {
                    let answer = shared.give_up(&mut state, Broken::Lost(why).to_string());
                    drop(state);
                    return drop(answer);
                }
            }
        }
    }
}

impl RelayedBody {
    /// Creates the relay of a body that has not ended.
    pub fn new(parts: Parts) -> RelayedBody {
        RelayedBody {
            idle: Idle::new(parts.idle_timeout),
            connection: Some(parts.connection),
            sending: parts.sending,
            cut: parts.lock.as_ref().and_then(Locked::cut),
            lock: parts.lock,
            recording: parts.recording,
            telling: Telling::Nothing,
            keeping: None,
            withheld: VecDeque::new(),
            status: None,
            upstream_done: false,
            done: false,
            body: parts.body,
        }
    }

    /// Reads what has arrived already. For a `once`, reads all that is stored, and waits until it is stored.
    ///
    /// # Errors
    /// The answer broke off; nothing has been sent to the client yet.
    pub async fn begin(&mut self) -> Result<(), Broken> {
        std::future::poll_fn(|cx| self.poll_begin(cx)).await
    }

    fn poll_begin(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Broken>> {
        loop {
            ready!(self.poll_kept(cx));
            let holds_back = self.recording.as_ref().is_some_and(Recording::fits);
            if self.upstream_done || (!holds_back && !self.withheld.is_empty()) {
                return Poll::Ready(Ok(()));
            }
            match self.poll_more(cx) {
                Poll::Ready(more) => more?,
                Poll::Pending if holds_back => return Poll::Pending,
                Poll::Pending => return Poll::Ready(Ok(())),
            }
        }
    }

    /// The lock status to report in the head of the answer, if the head has not been sent.
    pub fn status(&self) -> Option<HeaderValue> {
        let marked = self.lock.as_ref().filter(|lock| lock.marks() && lock.is_lost());
        marked.map(|_| LOST).or_else(|| self.status.clone())
    }

    /// Whether the lock status may still change from what [`RelayedBody::status`] returns now.
    pub fn may_tell(&self) -> bool {
        self.lock.as_ref().is_some_and(|lock| lock.marks() || lock.is_once())
    }

    /// Whether the upstream has nothing more to send.
    pub fn is_whole(&self) -> bool {
        self.upstream_done
    }

    /// Whether the answer must report a lost lease.
    pub fn marks(&self) -> bool {
        self.lock.as_ref().is_some_and(Locked::marks)
    }

    /// Releases the lock before the client has the last piece, so that a client that acts on the complete answer
    /// finds the lock free.
    fn upstream_done(&mut self) {
        self.upstream_done = true;
        self.cut = None;
        // The application has answered, so no more of the request is sent to it: its lock is about to be free.
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
            None => self.status = lock.end(),
        }
    }

    fn broken(&mut self, why: String) -> Polled {
        self.done = true;
        self.connection = None;
        self.lock = None;
        self.cut = None;
        Poll::Ready(Some(Err(BrokenBody::new(why))))
    }

    /// Waits while the outcome is being stored.
    fn poll_kept(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if let Some(keeping) = &mut self.keeping {
            self.status = (!ready!(keeping.as_mut().poll(cx))).then_some(UNKEPT);
            self.keeping = None;
        }
        Poll::Ready(())
    }

    /// Reads a piece, or the end, from the upstream.
    fn poll_more(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Broken>> {
        if let Some(cut) = &mut self.cut
            && let Poll::Ready(why) = cut.as_mut().poll(cx)
        {
            return Poll::Ready(Err(Broken::Lost(why)));
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
                self.withheld.push_back(frame);
                Poll::Ready(Ok(()))
            }
            Poll::Ready(Some(Err(error))) => Poll::Ready(Err(Broken::Upstream(error))),
            Poll::Ready(None) => {
                self.upstream_done();
                Poll::Ready(Ok(()))
            }
            Poll::Pending => self.idle.poll(cx).map(|limit| Err(Broken::Silent(limit))),
        }
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Polled {
        loop {
            if self.done {
                return Poll::Ready(None);
            }
            ready!(self.poll_kept(cx));
            if self.upstream_done && self.status.is_some() && self.telling == Telling::BreakOff {
                return self.broken("the lease was lost while the upstream worked".to_owned());
            }
            if let Some(frame) = self.withheld.pop_front() {
                return self.pass(frame);
            }
            if self.upstream_done {
                self.done = true;
                return Poll::Ready(self.mark(None).map(Ok));
            }
            if let Err(broken) = ready!(self.poll_more(cx)) {
                return self.broken(broken.to_string());
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
                self.done =
                    self.upstream_done && self.withheld.is_empty() && self.telling != Telling::Trailer;
                Poll::Ready(Some(Ok(frame)))
            }
        }
    }

    fn mark(&self, trailers: Option<HeaderMap>) -> Option<Frame<Bytes>> {
        let Some(status) = self.status.as_ref().filter(|_| self.telling == Telling::Trailer) else {
            return trailers.map(Frame::trailers);
        };
        let mut trailers = trailers.unwrap_or_default();
        trailers.insert(LOCK_STATUS, status.clone());
        Some(Frame::trailers(trailers))
    }

    fn is_end(&self) -> bool {
        let nothing_left = self.withheld.is_empty() && self.keeping.is_none();
        self.done || (self.upstream_done && nothing_left && self.telling == Telling::Nothing)
    }

    fn size_hint(&self) -> SizeHint {
        if self.telling == Telling::Trailer {
            return SizeHint::default();
        }
        let withheld = self.withheld.iter().filter_map(Frame::data_ref).map(|data| data.len() as u64);
        with_more(self.body.size_hint(), withheld.sum())
    }
}

impl Body for Relay {
    type Data = Bytes;
    type Error = BrokenBody;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Polled {
        let shared = &self.shared;
        let mut state = shared.state.lock();
        let Some(answer) = &mut state.answer else {
            let why = shared.why.get().cloned().unwrap_or_default();
            return Poll::Ready(Some(Err(BrokenBody::new(why))));
        };
        let polled = answer.poll(cx);
        state.waits = polled.is_pending().then(|| cx.waker().clone());
        if let Poll::Ready(Some(Ok(_))) = &polled {
            state.taken_at = clock::now();
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.shared.state.lock().answer.as_ref().is_some_and(|answer| answer.is_end())
    }

    fn size_hint(&self) -> SizeHint {
        self.shared.state.lock().answer.as_ref().map_or_else(SizeHint::default, |answer| answer.size_hint())
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        if let Some(watching) = &self.watching {
            watching.abort();
        }
        let answer = self.shared.state.lock().answer.take();
        if let Some(answer) = answer {
            self.shared.finish_alone(answer);
        }
    }
}
