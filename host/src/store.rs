//! What a primitive must do, and an honest store in memory.
//!
//! A [`Store`] holds one [`Record`] a key and runs
//! [`lock::record::apply`](crate::lock::record::apply) on them in transactions. The contract that
//! every implementation passes, in memory, on MySQL and on MariaDB, is in [`contract`].

use std::future::Future;
use std::pin::Pin;

use crate::lock::record::{Doubt, Holder, Op, Outcome, Record, UNKNOWN};
use crate::lock::{Instant, Key, ServerTime, Space, Token};

pub mod contract;
pub mod memory;
mod quorum;
pub mod registry;
mod router;
mod space_adapter;

pub use quorum::{Allowed, Member, Quorum};
pub use router::Router;

/// A boxed future: the trait stays usable behind `dyn`.
pub type StoreFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// Called once with what became of a group, from the store's own task: it must not block.
pub type Done = Box<dyn FnOnce(Result<Reply, StoreError>) + Send>;

/// Called with the nonces of leases that ended before their time: the session that they rested on is gone.
/// It must not block.
pub type Loss = std::sync::Arc<dyn Fn(Vec<u64>) + Send + Sync>;

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
    fn list(&self, prefix: String, after: Option<Key>, limit: usize)
    -> StoreFuture<Result<Page, StoreError>>;

    /// One key's record; `None` where the store has never seen it or has forgotten it.
    fn read(&self, key: Key) -> StoreFuture<Result<Option<Stored>, StoreError>>;

    fn health(&self) -> Health;

    /// Whether nobody can be granted keys of this space for now, as far as is known here: their servers are out of
    /// reach.
    fn is_gone(&self, _space: Space) -> bool {
        matches!(self.health(), Health::Unavailable { .. })
    }

    /// Why keys of this space cannot be had here; `None` where they can.
    fn lacks(&self, space: Space) -> Option<String>;

    /// Who is told of leases that are lost at once. A lease that only its time ends is not told of.
    fn on_loss(&self, _tell: Loss) {}

    /// Waits until nobody is certain of a lease that would end with this proxy, if none is granted or renewed from
    /// now on.
    fn rested(&self) -> StoreFuture<()> {
        Box::pin(std::future::ready(()))
    }

    /// Has every token that is given from now on be above all that were given before, whatever their keys were
    /// called, and above `least`: a bound of those that were given. Where tokens of several spaces go by one
    /// floor, that of the table serves for all, and is raised by the [`Registry`](registry::Registry).
    fn raise_tokens(&self, _least: Option<Token>) -> StoreFuture<Result<Token, StoreError>> {
        Box::pin(std::future::ready(Ok(Token::default())))
    }

    /// Whatever is decided from now on is decided on what the store says from now on: other spaces have
    /// given out tokens of the same keys.
    fn forget(&self) {}
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
    /// Whether that clock can be believed.
    pub doubt: Doubt,
}

impl Stored {
    /// Whether the holder of the record is out of the way.
    pub fn has_ended(&self, holder: &Holder) -> bool {
        self.doubt.has_ended(holder, self.now)
    }
}

#[derive(Clone, Debug, Default)]
pub struct Page {
    pub items: Vec<Stored>,
    /// Whether more follow after the last item.
    pub more: bool,
    /// Of several stores, those whose keys may be lacking here, and why.
    pub unheard: Vec<String>,
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
    /// The group was not sent within its deadline, and is not applied.
    #[error("the store is unavailable: {why}")]
    Unsent { why: String },
    /// More groups are waiting than the store's bound allows; this one was not sent.
    #[error("the store has {queued} operations waiting, which is its limit (store.max_queued)")]
    Overloaded { queued: usize },
}

impl StoreError {
    /// Whether the group may have been applied.
    pub fn was_sent(&self) -> bool {
        matches!(self, StoreError::Unavailable { .. })
    }

    /// Without saying again that it is the store.
    pub fn why(self) -> String {
        match self {
            StoreError::Unavailable { why } | StoreError::Unsent { why } => why,
            other => other.to_string(),
        }
    }

    /// What [`Outcome::Unknown`] stands for.
    pub fn unknown() -> StoreError {
        StoreError::Unavailable { why: UNKNOWN.to_owned() }
    }

    /// The store's task is gone: the proxy is going down.
    pub fn stopped() -> StoreError {
        StoreError::Unavailable { why: "the proxy is shutting down".into() }
    }
}
