//! One request to an upstream, and its answer.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::future::BoxFuture;
use hyper::body::{Body as _, Incoming};
use hyper::header::{self, HeaderValue};
use hyper::http::response;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

use super::locked::{Locked, lost};
use super::relay::{self, Relay, RelayedBody, Telling};
use super::routes::Route;
use super::upload::{Sending, Upload};
use super::upstream::{self, Connection, SendError};
use super::{empty, headers, tunnel, upstream_failed};
use crate::clock;
use crate::fronts::Code;
use crate::http::{Body, Kind, Peer, Problem, Response};
use crate::vital;

type Request = hyper::Request<Upload>;

/// The context of an exchange, apart from the request itself.
pub struct Exchange {
    pub route: Arc<Route>,
    /// How much of the request has been sent.
    pub sending: Arc<Sending>,
    pub lock: Option<Box<Locked>>,
    /// The protocol that the client wants to switch to.
    pub upgrade: Option<HeaderValue>,
    /// Whether the client accepts trailers.
    pub takes_trailers: bool,
    pub peer: Arc<Peer>,
    /// Runs the exchange if it continues without its client.
    pub tasks: TaskTracker,
}

impl Exchange {
    /// Returns the upstream's answer. The lock is released when the answer ends or when the exchange fails.
    ///
    /// If the exchange holds a lock and the caller drops this future, the exchange continues in its own task, because
    /// the application continues too.
    pub async fn answer(self, request: Request) -> Result<Response, Problem> {
        let Some(lock) = &self.lock else { return self.run(request).await };
        let (tasks, loss) = (self.tasks.clone(), lock.loss());
        let under_way = tasks.token();
        Surviving {
            future: Some(Box::pin(self.run(request))),
            loss: Some(loss),
            tasks,
            _under_way: under_way,
        }
        .await
    }

    async fn run(mut self, request: Request) -> Result<Response, Problem> {
        let (answer, mut connection) = self.send(request).await?;
        if answer.status() == hyper::StatusCode::SWITCHING_PROTOCOLS {
            return self.switch(answer, connection);
        }
        let (mut head, body) = answer.into_parts();
        check(&head, &connection)?;
        headers::strip_hop_by_hop(&mut head.headers);
        headers::strip_own(&mut head.headers);
        if head.version == hyper::Version::HTTP_10 {
            // Otherwise, the HTTP library would use HTTP/1.0, without chunks, for later requests on this connection.
            connection.is_last();
        }
        head.version = hyper::Version::HTTP_11;
        let lock = self.lock.take();
        if body.is_end_stream() {
            self.sending.stop();
            connection.keep();
            return Ok(end(head, lock).await);
        }
        let recording = lock.as_ref().and_then(|lock| lock.recording(&head));
        let mut answer = RelayedBody::new(relay::Parts {
            body,
            connection,
            sending: self.sending.clone(),
            idle_timeout: self.route.config.idle_timeout,
            lock: lock.map(|lock| *lock),
            recording,
        });
        answer.begin().await?;
        let telling = self.telling(&mut head, &answer);
        if !answer.is_whole() {
            self.peer.set_patience(self.route.config.idle_timeout);
        }
        Ok(Response::from_parts(head, Body::proxied(Relay::new(answer, telling, self.tasks))))
    }

    /// Chooses how to report the state of the lock to the client. A state that is already known goes into the head.
    fn telling(&self, head: &mut response::Parts, answer: &RelayedBody) -> Telling {
        if let Some(status) = answer.status() {
            head.headers.insert(headers::LOCK_STATUS, status);
            return Telling::Nothing;
        }
        if answer.may_tell() && self.takes_trailers {
            // Only a chunked answer can have trailers.
            head.headers.remove(header::CONTENT_LENGTH);
            head.headers.append(header::TRAILER, HeaderValue::from(headers::LOCK_STATUS));
            return Telling::Trailer;
        }
        // A client whose answer breaks off repeats its request, which is exactly what `once` must prevent. So for a
        // `once`, the policy decides.
        if answer.marks() { Telling::BreakOff } else { Telling::Nothing }
    }

    async fn send(&self, request: Request) -> Result<(hyper::Response<Incoming>, Connection), Problem> {
        let cut = self.lock.as_ref().and_then(|lock| lock.cut());
        let may_leave = || self.lock.as_ref().is_none_or(|lock| lock.is_certain());
        tokio::select! {
            biased;
            sent = upstream::send(&self.route.targets, request, self.route.config.idle_timeout, may_leave) => {
                sent.map_err(|error| self.failed(&error))
            }
            limit = silence(&self.sending, self.route.config.response_timeout) => {
                let detail = format!("the upstream did not answer within {} ms", limit.as_millis());
                Err(Problem::new(Kind::UPSTREAM_TIMEOUT, detail))
            }
            why = lost(cut) => {
                let detail = format!("the lease was lost while the upstream worked: {why}");
                Err(Problem::new(Code::Lost, detail).status(503))
            }
        }
    }

    fn failed(&self, error: &SendError) -> Problem {
        let mut detail = error.to_string();
        let mut source = std::error::Error::source(error);
        while let Some(cause) = source {
            let cause_text = cause.to_string();
            if !detail.ends_with(&cause_text) {
                detail = format!("{detail}: {cause_text}");
            }
            source = cause.source();
        }
        let said = match error {
            _ if self.sending.failed() => Problem::new(Kind::TIMEOUT, "the request did not arrive in whole"),
            SendError::Busy { limit, .. } => {
                let busy = "the application has as many requests under way as it may have";
                Problem::new(Kind::OVERLOADED, busy).with("bound", *limit).retry_after_ms(1_000)
            }
            SendError::Late => {
                Problem::new(Code::Lost, "the lease ended before the request could be sent").status(503)
            }
            SendError::Connect { .. } if error.is_timeout() => {
                Problem::new(Kind::UPSTREAM_TIMEOUT, "the application could not be connected to in time")
            }
            SendError::Connect { .. } => upstream_failed("the application cannot be reached"),
            SendError::Broken { .. } if error.is_timeout() => {
                Problem::new(Kind::UPSTREAM_TIMEOUT, "the application did not take the request in time")
            }
            SendError::Broken { .. } => upstream_failed("the application gave no whole answer"),
        };
        // Clients must not learn the details of the upstream.
        said.inside(detail)
    }

    fn switch(
        mut self,
        mut answer: hyper::Response<Incoming>,
        connection: Connection,
    ) -> Result<Response, Problem> {
        if self.upgrade.is_none() {
            let detail = "the application changed the protocol, which nobody had asked for";
            return Err(upstream_failed(detail));
        }
        let upstream = hyper::upgrade::on(&mut answer);
        let lock = self.lock.take();
        let idle = self.route.config.idle_timeout;
        self.peer.upgrade(move |client, early| {
            let tunnel = tunnel::run(client, early, upstream, lock, idle);
            Box::pin(async move {
                tunnel.await;
                // The upgraded connection counts toward the upstream's request limit until it ends.
                drop(connection);
            })
        });
        let (mut head, _) = answer.into_parts();
        head.version = hyper::Version::HTTP_11;
        Ok(empty(head))
    }
}

/// Completes an answer without a body.
async fn end(mut head: response::Parts, lock: Option<Box<Locked>>) -> Response {
    let status = match lock {
        None => None,
        Some(lock) => match lock.recording(&head) {
            Some(recording) => (!lock.finish(recording.finish()).await).then_some(headers::UNKEPT),
            None => lock.end(),
        },
    };
    if let Some(status) = status {
        head.headers.insert(headers::LOCK_STATUS, status);
    }
    empty(head)
}

/// Rejects answers whose length is ambiguous.
fn check(head: &response::Parts, connection: &Connection) -> Result<(), Problem> {
    let mut codings = head.headers.get_all(header::TRANSFER_ENCODING).iter();
    let mut lengths = head.headers.get_all(header::CONTENT_LENGTH).iter();
    let is_number = |length: &HeaderValue| length.as_bytes().iter().all(u8::is_ascii_digit);
    let what = match (codings.next(), codings.next(), lengths.next(), lengths.next()) {
        (Some(_), _, Some(_), _) => "both a content-length and a transfer-encoding",
        (None, _, _, Some(_)) => "more than one content-length",
        (None, _, Some(length), None) if !is_number(length) => "a content-length that is no number",
        (Some(coding), None, None, _) if coding.as_bytes().eq_ignore_ascii_case(b"chunked") => return Ok(()),
        (Some(_), ..) => "a transfer-encoding other than chunked",
        (None, ..) => return Ok(()),
    };
    Err(upstream_failed(format!("the application sent {what}"))
        .inside(format!("{} sent {what}", connection.target())))
}

/// How often [`silence`] checks whether the request has been sent completely, in milliseconds.
const LOOK: u32 = 500;

/// Returns when the upstream has received the whole request and has sent nothing for `limit`.
async fn silence(sending: &Sending, limit: Duration) -> Duration {
    loop {
        let until = match sending.ended_at() {
            Some(ended) => ended.plus_us(limit.as_micros() as u64),
            None => clock::now().plus_ms(LOOK),
        };
        clock::sleep_until(until).await;
        if sending.ended_at().is_some_and(|ended| clock::now() >= ended.plus_us(limit.as_micros() as u64)) {
            return limit;
        }
    }
}

/// A future that continues in its own task if its caller drops it. It ends early if the lease that it runs under is
/// lost.
struct Surviving<F: Future + Send + 'static> {
    future: Option<Pin<Box<F>>>,
    loss: Option<BoxFuture<'static, Arc<str>>>,
    tasks: TaskTracker,
    /// Makes a drain wait for exchanges in progress.
    _under_way: TaskTrackerToken,
}

impl<F: Future + Send + 'static> Future for Surviving<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let Some(future) = &mut self.future else { return Poll::Pending };
        let output = std::task::ready!(future.as_mut().poll(cx));
        self.future = None;
        Poll::Ready(output)
    }
}

impl<F: Future + Send + 'static> Drop for Surviving<F> {
    fn drop(&mut self) {
        let Some(future) = self.future.take() else { return };
        let loss = self.loss.take();
        self.tasks.spawn(vital::of_this_process(async move {
            tokio::select! {
                biased;
                answer = future => drop(answer),
                _ = lost(loss) => {}
            }
        }));
    }
}
