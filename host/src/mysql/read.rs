//! Reads rows for people: one key, or a page of keys. Uses a connection of its own, opened on demand, so that
//! readers cannot delay locks.

use std::future::Future;
use std::sync::Arc;

use super::context::Context;
use super::pipeline::rows::read_row;
use super::session::fault::Fault;
use super::session::spare::SpareLink;
use super::sql::{self, LEASES, NOW_US, ROW};
use crate::clock;
use crate::lock::Key;
use crate::store::{Page, StoreError, Stored};

/// The number of rows that one statement reads.
const CHUNK: usize = 256;

/// Reads rows on a connection of its own.
pub struct Reader {
    context: Arc<Context>,
    link: SpareLink,
}

impl Reader {
    /// Opens no connection yet.
    pub fn new(context: Arc<Context>) -> Reader {
        Reader { context, link: SpareLink::default() }
    }

    /// The row of `key`, if there is one.
    pub async fn read(&self, key: Key) -> Result<Option<Stored>, StoreError> {
        let condition = format!("k={}", sql::hexed(key.as_str().as_bytes()));
        let rows = self.within(self.rows(&condition, 1)).await?;
        Ok(rows.into_iter().next())
    }

    /// Held keys that start with `prefix`, from after `after`, at most `limit` of them.
    pub async fn list(&self, prefix: &str, after: Option<Key>, limit: usize) -> Result<Page, StoreError> {
        self.within(self.page(prefix, after, limit)).await
    }

    /// Closes the connection.
    pub async fn close(&self) {
        self.link.close().await;
    }

    async fn page(&self, prefix: &str, mut after: Option<Key>, limit: usize) -> Result<Page, Fault> {
        let (mut page, start) = (Page::default(), after.clone());
        loop {
            let in_doubt_us = self.context.clock_steps().doubt(clock::now()).by_us;
            let rows = self.rows(&range(prefix, after.as_ref(), in_doubt_us), CHUNK).await?;
            if self.context.clock_steps().doubt(clock::now()).by_us > in_doubt_us {
                // The clock was set forward: running leases may be missing.
                (page, after) = (Page::default(), start.clone());
                continue;
            }
            let last = rows.len() < CHUNK;
            after = rows.last().map(|row| row.key.clone());
            for row in rows {
                if !is_held(&row) {
                    continue;
                }
                if page.items.len() == limit {
                    page.more = true;
                    return Ok(page);
                }
                page.items.push(row);
            }
            if last {
                return Ok(page);
            }
        }
    }

    async fn rows(&self, condition: &str, limit: usize) -> Result<Vec<Stored>, Fault> {
        let sql = format!(
            "{};SELECT {ROW} FROM {LEASES} WHERE {condition} ORDER BY k LIMIT {limit}",
            sql::sample()
        );
        let context = &self.context;
        let mut answer = self.link.ask(context, sql, context.config.timeout).await?;
        let rows = answer.sets.pop().unwrap_or_default();
        let sample = answer.sets.pop();
        answer.link.learn(context, sample, answer.asked_at)?;
        context.check_watched()?;
        let now = answer.link.sample.now;
        let doubt = context.clock_steps().doubt(clock::now());
        answer.keep();
        let stored = |(key, (record, _))| Stored { key, record, now, doubt };
        rows.into_iter().map(|row| read_row(row).map(stored)).collect()
    }

    async fn within<T>(&self, work: impl Future<Output = Result<T, Fault>>) -> Result<T, StoreError> {
        let result = tokio::time::timeout(self.context.config.timeout, work).await;
        let result = result.unwrap_or_else(|_| Err(Fault::timeout("reading")));
        result.map_err(|fault| StoreError::Unavailable { why: fault.to_string() })
    }
}

/// The condition for keys after `after` that start with `prefix`, in byte order, and that may be held. Rows
/// that ended in the last `in_doubt_us` microseconds are included.
fn range(prefix: &str, after: Option<&Key>, in_doubt_us: u64) -> String {
    let mut condition = match after {
        Some(after) if after.as_str() >= prefix => format!("k>{}", sql::hexed(after.as_str().as_bytes())),
        _ => format!("k>={}", sql::hexed(prefix.as_bytes())),
    };
    if let Some(end) = end_of(prefix) {
        condition.push_str(&format!(" AND k<{}", sql::hexed(&end)));
    }
    // A value that is kept for ever ends at the column's largest number, so nothing may be added to it.
    condition.push_str(&format!(" AND until_us>GREATEST({NOW_US}-{in_doubt_us},0)"));
    condition
}

/// The first bytes after everything that starts with `prefix`; `None` if nothing comes after.
fn end_of(prefix: &str) -> Option<Vec<u8>> {
    let mut end = prefix.as_bytes().to_vec();
    while let Some(last) = end.pop() {
        if last < u8::MAX {
            end.push(last + 1);
            return Some(end);
        }
    }
    None
}

fn is_held(row: &Stored) -> bool {
    row.record.until() > row.now || row.record.holders.iter().any(|holder| !row.has_ended(holder))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_range_of_a_prefix_ends_before_its_successor() {
        assert_eq!(end_of("ab"), Some(b"ac".to_vec()));
        assert_eq!(end_of("a%"), Some(b"a&".to_vec()));
        assert_eq!(end_of(""), None);
    }
}
