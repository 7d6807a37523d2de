//! What a primitive must do, and an honest store in memory.
//!
//! A [`Store`] holds one [`Record`] a key and runs
//! [`lock::record::apply`](crate::lock::record::apply) on them in transactions. The contract that
//! every implementation passes, in memory, on MySQL and on MariaDB, is in [`contract`].

use std::future::Future;
use std::pin::Pin;

use crate::lock::record::{Op, Outcome, Record};
use crate::lock::{Instant, Key, ServerTime};

pub mod contract;
pub mod memory;
pub mod registry;

/// A boxed future: the trait stays usable behind `dyn`.
pub type Answer<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// Called once with what became of a group, from the store's own task: it must not block.
pub type Done = Box<dyn FnOnce(Result<Reply, StoreError>) + Send>;

/// A place where leases live.
pub trait Store: Send + Sync + 'static {
    /// Runs the operations in order, as one: all of them in one transaction, or none.
    ///
    /// Groups that share their first key are run in the order in which they were submitted. The
    /// store repeats a group whose answer was lost until `deadline`; after that it answers
    /// [`StoreError::Unavailable`], and what the group asked for is not applied later (a claim that
    /// was applied without an answer being had is the caller's to abandon).
    fn submit(&self, group: Vec<Op>, deadline: Instant, done: Done);

    /// As [`Store::submit`], on connections of its own, so that a flood of acquires cannot starve
    /// it. For renewals.
    fn submit_renewal(&self, op: Op, deadline: Instant, done: Done);

    /// Held keys with this prefix, in byte order, from after `after`, at most `limit`.
    fn list(&self, prefix: String, after: Option<Key>, limit: usize) -> Answer<Result<Page, StoreError>>;

    /// One key's record; `None` where the store has never seen it or has forgotten it.
    fn read(&self, key: Key) -> Answer<Result<Option<Stored>, StoreError>>;

    fn health(&self) -> Health;
}

/// What became of a group.
#[derive(Clone, Debug)]
pub struct Reply {
    /// One for each operation, in order.
    pub outcomes: Vec<Outcome>,
    /// The proxy's clock before the store was asked: times that the outcomes give as "left" count
    /// from here, so that they are lower bounds.
    pub asked_at: Instant,
    /// The store's clock when it decided.
    pub now: ServerTime,
}

/// A record with the store's clock at the time of reading.
#[derive(Clone, Debug)]
pub struct Stored {
    pub key: Key,
    pub record: Record,
    pub now: ServerTime,
}

#[derive(Clone, Debug, Default)]
pub struct Page {
    pub items: Vec<Stored>,
    /// Whether more follow after the last item.
    pub more: bool,
}

/// Whether the store can grant locks, and if not, why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Health {
    Ready {
        /// The server's name and version, e.g. `MySQL 9.7.4`.
        server: String,
        /// Settings that weaken what a lock promises, one sentence each.
        warnings: Vec<String>,
    },
    Unavailable {
        why: String,
    },
}

#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// Nothing was heard of the group within its deadline; whether it was applied before is unknown.
    #[error("the store is unavailable: {why}")]
    Unavailable { why: String },
    /// More groups are waiting than the store's bound allows; this one was not sent.
    #[error("the store has {queued} operations waiting, which is its limit (store.max_queued)")]
    Overloaded { queued: usize },
}

impl StoreError {
    /// The store's task is gone: the proxy is going down.
    pub fn stopped() -> StoreError {
        StoreError::Unavailable { why: "the proxy is shutting down".into() }
    }
}
