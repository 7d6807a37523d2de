//! A connection that is opened on demand and kept for the next call.
//!
//! It is taken out while it is used. So a call that fails or is dropped half-way leaves no connection behind, and
//! the server rolls back its transaction.

use std::time::Duration;

use mysql_async::Row;
use tokio::sync::{Mutex, MutexGuard};

use super::fault::Fault;
use super::link::Link;
use crate::clock;
use crate::lock::Instant;
use crate::mysql::context::Context;
use crate::mysql::sql::SESSION_TIMEOUT_S;

/// A connection that was idle for longer may have been closed by the server, in microseconds.
const FRESH_US: u64 = (SESSION_TIMEOUT_S as u64 - 1) * 1_000_000;

/// A connection that is kept between calls.
#[derive(Default)]
pub struct SpareLink {
    kept: Mutex<Option<Kept>>,
    /// How long the server keeps the session while it is idle, in seconds, if not as usual.
    session_s: Option<u32>,
}

struct Kept {
    link: Link,
    used: Instant,
}

/// The answer to [`SpareLink::ask`]. Other calls wait until it is dropped.
pub struct Answer<'a> {
    pub link: Link,
    pub sets: Vec<Vec<Row>>,
    /// When the statements were sent.
    pub asked_at: Instant,
    kept: MutexGuard<'a, Option<Kept>>,
}

impl SpareLink {
    /// The server keeps the session for this long while it is idle.
    pub fn lasting(session_s: u32) -> SpareLink {
        SpareLink { kept: Mutex::default(), session_s: Some(session_s) }
    }

    /// Takes the kept connection, unless the server may have closed it. For transactions, which cannot be sent
    /// twice.
    pub async fn take(&self) -> Option<Link> {
        let kept = self.kept.lock().await.take()?;
        (clock::now().us_since(kept.used) < FRESH_US).then_some(kept.link)
    }

    /// Keeps the connection for the next call.
    pub async fn put(&self, link: Link) {
        *self.kept.lock().await = Some(Kept { link, used: clock::now() });
    }

    /// Sends statements that may be sent twice. If the kept connection has been closed, they are sent again on a
    /// new one. The server has `limit` to answer. Calls run one after the other.
    pub async fn ask(&self, context: &Context, sql: String, limit: Duration) -> Result<Answer<'_>, Fault> {
        let mut kept = self.kept.lock().await;
        let mut link = match kept.take() {
            Some(kept) => kept.link,
            None => self.open(context, limit).await?,
        };
        let mut asked_at = clock::now();
        let sets = match within(limit, link.exchange(sql.clone())).await {
            Ok(sets) => sets,
            Err(_) => {
                link = self.open(context, limit).await?;
                asked_at = clock::now();
                within(limit, link.exchange(sql)).await?
            }
        };
        Ok(Answer { link, sets, asked_at, kept })
    }

    /// Closes the kept connection.
    pub async fn close(&self) {
        if let Some(kept) = self.kept.lock().await.take() {
            kept.link.close().await;
        }
    }

    async fn open(&self, context: &Context, limit: Duration) -> Result<Link, Fault> {
        let mut link = Link::open(context).await?;
        if let Some(session_s) = self.session_s {
            within(limit, link.keep_idle(session_s)).await?;
        }
        Ok(link)
    }
}

impl Answer<'_> {
    /// Keeps the connection for the next call.
    pub fn keep(mut self) {
        *self.kept = Some(Kept { link: self.link, used: clock::now() });
    }
}

async fn within<T>(limit: Duration, work: impl Future<Output = Result<T, Fault>>) -> Result<T, Fault> {
    tokio::time::timeout(limit, work).await.unwrap_or_else(|_| Err(Fault::timeout("a spare connection")))
}
