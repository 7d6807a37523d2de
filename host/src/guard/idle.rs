//! A time-out between two pieces of a body. The timer is set only when the next piece has not arrived yet.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::Sleep;

/// A time-out that restarts whenever something moves.
pub struct Idle {
    limit: Duration,
    timer: Option<Pin<Box<Sleep>>>,
    /// Whether something has moved since the timer was set.
    moved: bool,
}

impl Idle {
    /// Creates a time-out of `limit`.
    pub fn new(limit: Duration) -> Idle {
        Idle { limit, timer: None, moved: false }
    }

    /// The current limit.
    pub fn limit(&self) -> Duration {
        self.limit
    }

    /// Sets the limit; it takes effect after the next piece.
    pub fn set_limit(&mut self, limit: Duration) {
        self.limit = limit;
    }

    /// Records that something has moved.
    pub fn moved(&mut self) {
        self.moved = true;
    }

    /// Ready with the limit when nothing has moved for that long. Must be called whenever no piece is available.
    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Duration> {
        let timer = self.timer.get_or_insert_with(|| Box::pin(tokio::time::sleep(self.limit)));
        if std::mem::take(&mut self.moved) {
            timer.as_mut().reset(tokio::time::Instant::now() + self.limit);
        }
        timer.as_mut().poll(cx).map(|()| self.limit)
    }
}
