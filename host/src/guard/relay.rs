//! The body of an upstream's answer on its way to the client, and the end of the lock.
//!
//! A client is never waited for with a lock: where it goes away, or takes nothing for too long, the rest of the answer is
//! read without it, and the outcome of a `once` is kept. The answer to a `once` is held back until then, up to what is
//! kept of it, so that its head can say what became of the outcome.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
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
use crate::http::{BrokenBody, Kind, Problem};
use crate::lock::Instant;
use crate::vital;

type Polled = Poll<Option<Result<Frame<Bytes>, BrokenBody>>>;

/// Passes an [`RelayedBody`] on piece by piece.
pub struct Relay {
    shared: Arc<RelayContext>,
    /// Gives the client up where it does not read on; `None` for an answer that has arrived in whole.
    watching: Option<AbortHandle>,
    /// A drain waits for answers that are under way.
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
    /// The client's connection, while it waits for the next piece.
    waits: Option<Waker>,
    /// When the client last took a piece.
    taken_at: Instant,
}

/// How the client learns what became of the lock while its answer streamed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Telling {
    /// It need not.
    Nothing,
    Trailer,
    /// It takes no trailers: its answer breaks off.
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
    /// The outcome is on its way to the store; tells whether it was kept.
    keeping: Option<BoxFuture<'static, bool>>,
    /// Pieces that the client has not taken. The last piece waits until the outcome is kept.
    withheld: VecDeque<Frame<Bytes>>,
    /// What the client is told of the lock, where it is not as it should be.
    status: Option<HeaderValue>,
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
            Broken::Lost(_) => Problem::new(Kind::Lost, detail).status(503),
            Broken::Upstream(_) => upstream_failed("the application gave no whole answer").inside(detail),
            Broken::Silent(_) => Problem::new(Kind::UpstreamTimeout, detail),
        }
    }
}

impl Relay {
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
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The client gets no more of the answer, and is told so if it waits for a piece.
    fn give_up(&self, state: &mut State, why: String) -> Option<Box<RelayedBody>> {
        tracing::debug!(why, "a client gets no more of its answer");
        let _ = self.why.set(why);
        state.waits.take().into_iter().for_each(Waker::wake);
        state.answer.take()
    }

    /// Reads the rest of an answer without its client: the application is not told, and works on under its lock. When
    /// that is lost nothing is left to wait for.
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

/// Gives a client up that has taken nothing for `limit`, and an answer whose lease is lost and is to be cut off then:
/// while the client does not read, nothing asks for the body. A client that waits for the next piece is not the one that
/// takes nothing.
async fn watch(shared: Weak<RelayContext>, limit: Duration, cut: Option<BoxFuture<'static, Arc<str>>>) {
    let mut cut = std::pin::pin!(lost(cut).fuse());
    loop {
        let until = {
            let Some(shared) = shared.upgrade() else { return };
            let mut state = shared.state();
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
                let mut state = shared.state();
                // An answer that has arrived in whole is passed on, whatever becomes of its lock.
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
    /// For a body that has not ended.
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

    /// Takes in what is there already. Of a `once`, all that is kept, and waits until it is.
    ///
    /// # Errors
    /// Where the answer broke off; the client has not been told anything yet.
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

    /// What is to be said of the lock in the head of the answer, where that has not left.
    pub fn status(&self) -> Option<HeaderValue> {
        let marked = self.lock.as_ref().filter(|lock| lock.marks() && lock.is_lost());
        marked.map(|_| LOST).or_else(|| self.status.clone())
    }

    /// Whether the client may have to be told more of the lock than [`RelayedBody::status`] says now.
    pub fn may_tell(&self) -> bool {
        self.lock.as_ref().is_some_and(|lock| lock.marks() || lock.is_once())
    }

    /// Whether the upstream has nothing more to send.
    pub fn is_whole(&self) -> bool {
        self.upstream_done
    }

    pub fn marks(&self) -> bool {
        self.lock.as_ref().is_some_and(Locked::marks)
    }

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

    /// Waits for the outcome, where one is on its way to the store.
    fn poll_kept(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if let Some(keeping) = &mut self.keeping {
            self.status = (!ready!(keeping.as_mut().poll(cx))).then_some(UNKEPT);
            self.keeping = None;
        }
        Poll::Ready(())
    }

    /// Takes in a piece, or the end, from the upstream.
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
        let mut state = shared.state();
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
        self.shared.state().answer.as_ref().is_some_and(|answer| answer.is_end())
    }

    fn size_hint(&self) -> SizeHint {
        self.shared.state().answer.as_ref().map_or_else(SizeHint::default, |answer| answer.size_hint())
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        if let Some(watching) = &self.watching {
            watching.abort();
        }
        let answer = self.shared.state().answer.take();
        if let Some(answer) = answer {
            self.shared.finish_alone(answer);
        }
    }
}
