//! The time-outs of a connection, and the stop of the proxy.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::time::{Sleep, sleep};
use tokio_util::sync::CancellationToken;

use super::activity::{Activity, Verdict};
use crate::clock;
use crate::config::HttpLimits;

/// Why a connection should end.
pub enum Alarm {
    /// The proxy is shutting down. Raised once.
    Stop,
    /// The connection is idle.
    Close,
    /// The headers of a request took too long.
    SlowHeaders,
}

/// Raises an alarm when a connection should end. Its single timer is reset only when it fires and when incomplete
/// headers arrive, so an ordinary request costs no timer operation.
pub struct Watchdog<'a, S> {
    limits: &'a HttpLimits,
    activity: &'a Activity,
    timer: Pin<Box<Sleep>>,
    /// Whether the timer is set for the end of the headers.
    headers_timed: bool,
    stop: Option<Pin<Box<S>>>,
}

impl<'a> Watchdog<'a, ()> {
    /// The watchdog of a new connection.
    pub fn new(
        limits: &'a HttpLimits,
        activity: &'a Activity,
        stop: &'a CancellationToken,
    ) -> Watchdog<'a, impl Future<Output = ()> + 'a> {
        Watchdog {
            limits,
            activity,
            timer: Box::pin(sleep(limits.header_timeout)),
            headers_timed: false,
            stop: Some(Box::pin(stop.cancelled())),
        }
    }
}

impl<S: Future<Output = ()>> Future for Watchdog<'_, S> {
    type Output = Alarm;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Alarm> {
        let this = &mut *self;
        if let Some(stop) = &mut this.stop
            && stop.as_mut().poll(cx).is_ready()
        {
            this.stop = None;
            return Poll::Ready(if this.activity.is_quiet() { Alarm::Close } else { Alarm::Stop });
        }
        let in_headers = this.activity.is_in_headers();
        if in_headers && !this.headers_timed {
            this.timer.as_mut().reset(tokio::time::Instant::now());
        }
        this.headers_timed = in_headers;
        while this.timer.as_mut().poll(cx).is_ready() {
            let wait = match this.activity.verdict(clock::now(), this.limits) {
                Verdict::Wait(left) => left,
                Verdict::SlowHeaders => return Poll::Ready(Alarm::SlowHeaders),
                Verdict::Idle => {
                    this.timer.as_mut().reset(tokio::time::Instant::now() + this.limits.header_timeout);
                    return Poll::Ready(Alarm::Close);
                }
            };
            this.timer.as_mut().reset(tokio::time::Instant::now() + wait);
        }
        Poll::Pending
    }
}
