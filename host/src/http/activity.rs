//! What a connection is doing, for its timeouts.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use crate::clock;
use crate::config::HttpLimits;
use crate::lock::Instant;

/// The activity of one connection, shared by its socket, its handlers and its task.
///
/// With HTTP/1, one task uses it; with HTTP/2, each handler runs in its own task.
pub struct Activity {
    phase: AtomicU8,
    /// When the phase began, in microseconds of [`clock::now`].
    since: AtomicU64,
    under_way: AtomicU32,
    /// The number of requests that have begun, and the number of requests after which the next is refused.
    begun: AtomicU32,
    refused_after: AtomicU64,
    /// Whether a request was taken whose answer may not have been sent completely.
    unflushed: AtomicBool,
    /// Whether the end of the connection marks the end of an answer, because the answer has neither a length nor
    /// chunks.
    ended_by_close: AtomicBool,
}

const NEVER: u64 = u64::MAX;

const FRESH: u8 = 0;
const IDLE: u8 = 1;
const HEADERS: u8 = 2;
const BUSY: u8 = 3;

/// What a connection's timer should do.
#[derive(Debug, PartialEq, Eq)]
pub enum Verdict {
    Wait(Duration),
    /// The headers of a request took too long.
    SlowHeaders,
    /// No request arrived for too long.
    Idle,
}

/// A request in progress, from its headers to the end of its answer.
pub struct UnderWay(Arc<Activity>);

impl Activity {
    /// The activity of a new connection.
    pub fn new() -> Arc<Activity> {
        Arc::new(Activity {
            phase: AtomicU8::new(FRESH),
            since: AtomicU64::new(clock::now().0),
            under_way: AtomicU32::new(0),
            begun: AtomicU32::new(0),
            refused_after: AtomicU64::new(NEVER),
            unflushed: AtomicBool::new(false),
            ended_by_close: AtomicBool::new(false),
        })
    }

    /// Records that a request has begun.
    pub fn begin(self: &Arc<Activity>) -> UnderWay {
        self.under_way.fetch_add(1, Relaxed);
        // Only the connection's task calls this.
        self.begun.store(self.begun.load(Relaxed).wrapping_add(1), Relaxed);
        self.phase.store(BUSY, Relaxed);
        self.unflushed.store(true, Relaxed);
        UnderWay(Arc::clone(self))
    }

    /// Records that bytes arrived. They begin a request if none is in progress.
    pub fn received(&self) {
        if self.phase.load(Relaxed) < HEADERS {
            self.enter(HEADERS);
        }
    }

    /// Records that everything that was written has been sent.
    pub fn flushed(&self) {
        if self.phase.load(Relaxed) != BUSY {
            self.unflushed.store(false, Relaxed);
        }
    }

    /// Whether an answer that is written now can only be the HTTP library's own.
    pub fn unasked(&self) -> bool {
        !self.unflushed.load(Relaxed)
    }

    /// Records that the request after the first `requests` will not be read.
    pub fn refuse_after(&self, requests: u32) {
        self.refused_after.store(u64::from(requests), Relaxed);
    }

    /// Whether all that is left is to tell the client that its request is refused.
    pub fn is_refused(&self) -> bool {
        let after = self.refused_after.load(Relaxed);
        after == u64::from(self.begun.load(Relaxed)) && !self.is_busy() && self.unasked()
    }

    /// Whether a request is in progress.
    pub fn is_busy(&self) -> bool {
        self.phase.load(Relaxed) == BUSY
    }

    /// Whether a request has begun to arrive.
    pub fn is_in_headers(&self) -> bool {
        self.phase.load(Relaxed) == HEADERS
    }

    /// Records that the end of the connection marks the end of an answer.
    pub fn set_ended_by_close(&self) {
        self.ended_by_close.store(true, Relaxed);
    }

    /// Whether the end of the connection marks the end of an answer.
    pub fn is_ended_by_close(&self) -> bool {
        self.ended_by_close.load(Relaxed)
    }

    /// Whether closing the connection now would lose nothing.
    pub fn is_quiet(&self) -> bool {
        self.phase.load(Relaxed) < HEADERS && !self.unflushed.load(Relaxed)
    }

    /// What the connection's timer should do at `now`.
    pub fn verdict(&self, now: Instant, limits: &HttpLimits) -> Verdict {
        let phase = self.phase.load(Relaxed);
        let limit = match phase {
            BUSY => return Verdict::Wait(limits.header_timeout.min(limits.idle_timeout)),
            IDLE => limits.idle_timeout,
            _ => limits.header_timeout,
        };
        let spent = Duration::from_micros(now.us_since(Instant(self.since.load(Relaxed))));
        match limit.checked_sub(spent) {
            // The timer's resolution is one millisecond; a shorter wait would spin.
            Some(left) if !left.is_zero() => Verdict::Wait(left.max(Duration::from_millis(1))),
            _ if phase == HEADERS => Verdict::SlowHeaders,
            _ => Verdict::Idle,
        }
    }

    fn enter(&self, phase: u8) {
        self.since.store(clock::now().0, Relaxed);
        self.phase.store(phase, Relaxed);
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        if self.0.under_way.fetch_sub(1, Relaxed) == 1 {
            self.0.enter(IDLE);
        }
    }
}
