//! One request to an upstream, and its answer.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::body::{Body as _, Incoming};
use hyper::header::{self, HeaderValue};
use hyper::http::response;
use tokio_util::task::TaskTracker;

use super::locked::Locked;
use super::relay::{self, Relay};
use super::routes::Route;
use super::upload::{Sending, Upload};
use super::upstream::{self, Connection, SendError};
use super::{empty, headers, tunnel, upstream_failed};
use crate::clock;
use crate::http::{Body, Kind, Peer, Problem, Response};

type Request = hyper::Request<Upload>;

/// What an exchange needs beside its request.
pub struct Exchange {
    pub route: Arc<Route>,
    pub sending: Arc<Sending>,
    pub lock: Option<Box<Locked>>,
    /// The protocol that the client wants to change to.
    pub upgrade: Option<HeaderValue>,
    pub peer: Arc<Peer>,
    pub tasks: TaskTracker,
}

impl Exchange {
    /// As [`Exchange::run`]; goes on in a task of its own where the caller goes away, for the upstream does, too.
    pub fn outlive(self, request: Request) -> impl Future<Output = Result<Response, Problem>> {
        let tasks = self.tasks.clone();
        Surviving { future: Some(Box::pin(self.run(request))), tasks }
    }

    /// Answers with what the upstream answers. Its end lets go of the lock, and so does any failure.
    pub async fn run(mut self, request: Request) -> Result<Response, Problem> {
        let (answer, connection) = self.send(request).await?;
        if answer.status() == hyper::StatusCode::SWITCHING_PROTOCOLS {
            return self.switch(answer);
        }
        let (mut head, body) = answer.into_parts();
        check(&head, &connection)?;
        headers::strip_hop_by_hop(&mut head.headers);
        // An HTTP/1.0 upstream does not make its client one.
        head.version = hyper::Version::HTTP_11;
        let lock = self.lock.take();
        if lock.as_ref().is_some_and(|lock| lock.is_lost() && lock.marks()) {
            head.headers.insert(headers::LOCK_STATUS, HeaderValue::from_static("lost"));
        }
        if body.is_end_stream() {
            connection.keep();
            return Ok(end(head, lock).await);
        }
        if lock.as_ref().is_some_and(|lock| lock.marks()) {
            // Only an answer in chunks has trailers.
            head.headers.remove(header::CONTENT_LENGTH);
            head.headers.append(header::TRAILER, HeaderValue::from(headers::LOCK_STATUS));
        }
        let recording = lock.as_ref().and_then(|lock| lock.recording(&head));
        let relay = Relay::new(relay::Parts {
            body,
            connection,
            idle_timeout: self.route.config.idle_timeout,
            lock: lock.map(|lock| *lock),
            recording,
            tasks: self.tasks,
        });
        Ok(Response::from_parts(head, Body::proxied(relay)))
    }

    async fn send(&self, request: Request) -> Result<(hyper::Response<Incoming>, Connection), Problem> {
        let cut = self.lock.as_ref().and_then(|lock| lock.cut());
        let cut = async {
            match cut {
                Some(cut) => cut.await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            sent = upstream::send(&self.route.targets, request) => sent.map_err(|error| self.failed(&error)),
            limit = silence(&self.sending, self.route.config.response_timeout) => {
                let detail = format!("the upstream did not answer within {} ms", limit.as_millis());
                Err(Problem::new(Kind::UpstreamTimeout, detail))
            }
            why = cut => {
                let detail = format!("the lease was lost while the upstream worked: {why}");
                Err(Problem::new(Kind::Lost, detail).status(503))
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
        match error {
            _ if self.sending.failed() => Problem::new(Kind::Timeout, detail),
            SendError::Busy { limit, .. } => {
                Problem::new(Kind::Overloaded, detail).with("bound", *limit).retry_after_ms(1_000)
            }
            SendError::Connect { .. } | SendError::Broken { .. } => {
                tracing::debug!(detail, "an upstream failed");
                upstream_failed(detail)
            }
        }
    }

    fn switch(mut self, mut answer: hyper::Response<Incoming>) -> Result<Response, Problem> {
        if self.upgrade.is_none() {
            let detail = "the upstream changed the protocol, which nobody had asked for".to_owned();
            return Err(upstream_failed(detail));
        }
        let upstream = hyper::upgrade::on(&mut answer);
        let lock = self.lock.take();
        self.peer.upgrade(move |client, early| Box::pin(tunnel::run(client, early, upstream, lock)));
        let (mut head, _) = answer.into_parts();
        head.version = hyper::Version::HTTP_11;
        Ok(empty(head))
    }
}

/// The end of an answer without a body.
async fn end(mut head: response::Parts, lock: Option<Box<Locked>>) -> Response {
    if let Some(lock) = lock {
        let marks = lock.marks();
        let kept = match lock.recording(&head) {
            Some(recording) => lock.finish(recording.finish()).await.is_ok(),
            None => lock.end(),
        };
        if marks && !kept {
            head.headers.insert(headers::LOCK_STATUS, HeaderValue::from_static("lost"));
        }
    }
    empty(head)
}

/// Refuses answers whose length can be read in two ways.
fn check(head: &response::Parts, connection: &Connection) -> Result<(), Problem> {
    let headers = &head.headers;
    let lengths = headers.get_all(header::CONTENT_LENGTH).iter().count();
    let what = match headers.contains_key(header::TRANSFER_ENCODING) {
        true if lengths > 0 => "both a content-length and a transfer-encoding",
        _ if lengths > 1 => "more than one content-length",
        _ => return Ok(()),
    };
    Err(upstream_failed(format!("{} sent {what}", connection.target())))
}

/// When the upstream has been sent all that there is, and has said nothing for `limit`.
async fn silence(sending: &Sending, limit: Duration) -> Duration {
    let limit_us = limit.as_micros() as u64;
    loop {
        let until = sending.last().plus_us(limit_us);
        if clock::now() >= until {
            return limit;
        }
        clock::sleep_until(until).await;
    }
}

/// A future that is finished in a task of its own where nobody waits for it any more.
struct Surviving<F: Future + Send + 'static> {
    future: Option<Pin<Box<F>>>,
    tasks: TaskTracker,
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
        if let Some(future) = self.future.take() {
            self.tasks.spawn(async move { drop(future.await) });
        }
    }
}
