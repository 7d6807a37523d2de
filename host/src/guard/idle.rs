//! A time-out between two pieces of a body, whose timer costs nothing while pieces are there.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::Sleep;

pub struct Idle {
    limit: Duration,
    timer: Option<Pin<Box<Sleep>>>,
    /// Something moved since the timer was set.
    moved: bool,
}

impl Idle {
    pub fn new(limit: Duration) -> Idle {
        Idle { limit, timer: None, moved: false }
    }

    pub fn limit(&self) -> Duration {
        self.limit
    }

    /// Holds from the next piece on.
    pub fn set_limit(&mut self, limit: Duration) {
        self.limit = limit;
    }

    pub fn moved(&mut self) {
        self.moved = true;
    }

    /// Ready with the limit when nothing has moved for as long. To be called whenever nothing is there.
    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Duration> {
        let timer = self.timer.get_or_insert_with(|| Box::pin(tokio::time::sleep(self.limit)));
        if std::mem::take(&mut self.moved) {
            timer.as_mut().reset(tokio::time::Instant::now() + self.limit);
        }
        timer.as_mut().poll(cx).map(|()| self.limit)
    }
}
