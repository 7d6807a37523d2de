//! What a connection is doing, for its timeouts.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use crate::clock;
use crate::config::HttpLimits;
use crate::lock::Instant;

/// ConnectionContext between the socket, the handlers and the task of one connection.
///
/// HTTP/1 uses it from one task only; HTTP/2 handlers run in tasks of their own.
pub struct Activity {
    phase: AtomicU8,
    /// When the phase began, microseconds of [`clock::now`].
    since: AtomicU64,
    under_way: AtomicU32,
    /// Requests that have begun, and the number of them after which comes one that is refused.
    begun: AtomicU32,
    refused_after: AtomicU64,
    /// A request was taken whose answer may not have left yet.
    unflushed: AtomicBool,
    /// The length of an answer was told neither ahead nor in chunks: the connection's end is its own.
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
    /// Nothing was asked for too long.
    Idle,
}

/// A request that is under way, from its headers to the end of its answer.
pub struct UnderWay(Arc<Activity>);

impl Activity {
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

    pub fn begin(self: &Arc<Activity>) -> UnderWay {
        self.under_way.fetch_add(1, Relaxed);
        // Called from the connection's task alone.
        self.begun.store(self.begun.load(Relaxed).wrapping_add(1), Relaxed);
        self.phase.store(BUSY, Relaxed);
        self.unflushed.store(true, Relaxed);
        UnderWay(Arc::clone(self))
    }

    /// Bytes arrived: where no request is under way they begin one.
    pub fn received(&self) {
        if self.phase.load(Relaxed) < HEADERS {
            self.enter(HEADERS);
        }
    }

    /// Everything that was written has left.
    pub fn flushed(&self) {
        if self.phase.load(Relaxed) != BUSY {
            self.unflushed.store(false, Relaxed);
        }
    }

    /// Whether an answer that is written now can only be the HTTP library's own.
    pub fn unasked(&self) -> bool {
        !self.unflushed.load(Relaxed)
    }

    /// The request that follows the first `requests` will not be read.
    pub fn refuse_after(&self, requests: u32) {
        self.refused_after.store(u64::from(requests), Relaxed);
    }

    /// Whether nothing is left to do but to tell the client that its request is refused.
    pub fn is_refused(&self) -> bool {
        let after = self.refused_after.load(Relaxed);
        after == u64::from(self.begun.load(Relaxed)) && !self.is_busy() && self.unasked()
    }

    /// Whether a request is under way.
    pub fn is_busy(&self) -> bool {
        self.phase.load(Relaxed) == BUSY
    }

    /// Whether a request has begun to arrive.
    pub fn is_in_headers(&self) -> bool {
        self.phase.load(Relaxed) == HEADERS
    }

    pub fn set_ended_by_close(&self) {
        self.ended_by_close.store(true, Relaxed);
    }

    pub fn is_ended_by_close(&self) -> bool {
        self.ended_by_close.load(Relaxed)
    }

    /// Whether nothing at all would be lost if the connection were closed now.
    pub fn is_quiet(&self) -> bool {
        self.phase.load(Relaxed) < HEADERS && !self.unflushed.load(Relaxed)
    }

    pub fn verdict(&self, now: Instant, limits: &HttpLimits) -> Verdict {
        let phase = self.phase.load(Relaxed);
        let limit = match phase {
            BUSY => return Verdict::Wait(limits.header_timeout.min(limits.idle_timeout)),
            IDLE => limits.idle_timeout,
            _ => limits.header_timeout,
        };
        let spent = Duration::from_micros(now.us_since(Instant(self.since.load(Relaxed))));
        match limit.checked_sub(spent) {
            // The timer's own resolution is a millisecond; less would spin.
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
