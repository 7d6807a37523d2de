//! The interface of a store, and its implementations except those in SQL.
//!
//! A [`Store`] has one [`Record`] for each key and runs [`lock::record::apply`](crate::lock::record::apply) on
//! the records in transactions. [`contract`] is the set of tests that every implementation passes, in memory,
//! on MySQL and on MariaDB.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use crate::lock::record::{Doubt, Holder, Op, Outcome, Record, UNKNOWN};
use crate::lock::{Instant, Key, ServerTime, Space, Token};

pub mod contract;
mod delegation;
pub mod local_records;
pub mod memory;
mod quorum;
pub mod registry;
mod router;
mod space_adapter;

pub use delegation::{Bounds, Delegations, Life, Lives};
pub use quorum::{Allowed, Member, Quorum};
pub use router::Router;

/// A boxed future, so that the trait can be used behind `dyn`.
pub type StoreFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// Called once with the answer to a group, by the store's own task. It must not block.
pub type Done = Box<dyn FnOnce(Result<Reply, StoreError>) + Send>;

/// Called with the nonces of leases that ended early because the session that held them is gone. It must not
/// block.
pub type Loss = Arc<dyn Fn(Vec<u64>) + Send + Sync>;

/// Notifies the proxy of this name that the calling one waits for a key. It must not block.
pub type Notify = Box<dyn Fn(&str, &Key) + Send + Sync>;

/// A store of locks.
pub trait Store: Send + Sync + 'static {
    /// Runs the operations in order in one transaction: all of them, or none.
    ///
    /// Groups with the same first key run in the order of submission. If the answer to a group is lost, the
    /// store retries the group until `deadline`. After that it answers [`StoreError::Unavailable`] and does not
    /// apply the group later. If a claim was applied but its answer was lost, the caller has to abandon it.
    fn submit(&self, group: Vec<Op>, deadline: Instant, done: Done);

    /// As [`Store::submit`], for renewals. A store with connections has separate ones for them, so that a flood of
    /// acquires cannot delay them.
    fn submit_renewal(&self, op: Op, deadline: Instant, done: Done) {
        self.submit(vec![op], deadline, done);
    }

    /// At most `limit` held keys with this prefix, in byte order, that come after `after`.
    ///
    /// # Errors
    /// If the store cannot be read.
    fn list(&self, prefix: String, after: Option<Key>, limit: usize)
    -> StoreFuture<Result<Page, StoreError>>;

    /// The record of one key; `None` if the store has never had it or has forgotten it.
    ///
    /// # Errors
    /// If the store cannot be read.
    fn read(&self, key: Key) -> StoreFuture<Result<Option<Stored>, StoreError>>;

    /// Whether the store can grant locks.
    fn health(&self) -> Health;

    /// Whether no proxy can be granted keys of this space at the moment, as far as is known here: their servers
    /// cannot be reached.
    fn is_gone(&self, _space: Space) -> bool {
        matches!(self.health(), Health::Unavailable { .. })
    }

    /// Why this store does not have keys of this space; `None` if it has them.
    fn lacks(&self, space: Space) -> Option<String>;

    /// Registers the callback for leases that are lost early. It is not called for leases that expire.
    fn on_loss(&self, _tell: Loss) {}

    /// Waits until no holder counts on a lease that would end with this proxy, provided that none is granted or
    /// renewed from now on.
    fn rested(&self) -> StoreFuture<()> {
        Box::pin(std::future::ready(()))
    }

    /// Raises the token floor: every token that is given from now on is above all tokens that were given
    /// before, whatever their keys were called, and above `least`, which bounds the tokens given elsewhere.
    /// Returns the new floor. If several spaces share one floor, the table's floor serves for all of them and
    /// is raised by the [`Registry`](registry::Registry).
    ///
    /// # Errors
    /// If the floor could not be raised.
    fn raise_tokens(&self, _least: Option<Token>) -> StoreFuture<Result<Token, StoreError>> {
        Box::pin(std::future::ready(Ok(Token::default())))
    }

    /// Tells the store the name of this proxy, and how it notifies others.
    fn connect(&self, _proxy: Arc<str>, _notify: Notify) {}

    /// Waits until the store itself knows all leases of this proxy, and decides about all keys, until
    /// [`Store::resume_delegations`].
    fn suspend_delegations(&self) -> StoreFuture<()> {
        Box::pin(std::future::ready(()))
    }

    /// From now on the store itself decides about all keys. The leases of this proxy's memory are on their way to it.
    fn end_delegations(&self) {}

    /// Lets this proxy decide about keys in its memory again, unless it is stopping.
    fn resume_delegations(&self) {}

    /// Another proxy waits for this key, or has changed its record. The store forgets what it remembers of the record, and
    /// gives the key back if it is delegated to this proxy. A hint: no decision depends on it.
    fn outdated(&self, _key: &Key) {}

    /// Drops cached records, so that later decisions are based on later answers of the server: other spaces
    /// have given tokens for the same keys.
    fn forget(&self) {}
}

/// The answer to a group.
#[derive(Clone, Debug)]
pub struct Reply {
    /// One outcome for each operation, in order.
    pub outcomes: Vec<Outcome>,
    /// The proxy's clock before the store was asked. Times "left" in the outcomes count from this moment, so
    /// they are lower bounds.
    pub asked_at: Instant,
    /// The store's clock at the decision.
    pub now: ServerTime,
}

/// A record that was read from the store.
#[derive(Clone, Debug)]
pub struct Stored {
    /// The key of the record.
    pub key: Key,
    /// The durable state of the key.
    pub record: Record,
    /// The store's clock when the record was read.
    pub now: ServerTime,
    /// How far that clock can be trusted.
    pub doubt: Doubt,
}

impl Stored {
    /// The delegation of the key to a proxy, if it lasts. In what [`Store::read`] and [`Store::list`] return, that is another
    /// proxy, which has not given the key back in time.
    pub fn delegation(&self) -> Option<&Holder> {
        let mut holders = self.record.holders.iter();
        holders.find(|holder| holder.tag.delegated_to.is_some() && !self.has_ended(holder))
    }

    /// Whether the holder no longer blocks the key.
    pub fn has_ended(&self, holder: &Holder) -> bool {
        self.doubt.has_ended(holder, self.now)
    }
}

/// One page of a listing.
#[derive(Clone, Debug, Default)]
pub struct Page {
    /// The records in byte order of their keys.
    pub items: Vec<Stored>,
    /// Whether more follow after the last item.
    pub more: bool,
    /// The stores whose keys may be missing here, and why.
    pub unheard: Vec<String>,
}

/// Whether the store can grant locks, and if not, why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Health {
    /// The store can grant locks.
    Ready {
        /// The server's name and version, e.g. `MySQL 9.7.4`.
        server: String,
        /// Settings that weaken the guarantees of a lock, one sentence each.
        warnings: Vec<String>,
    },
    /// The store cannot grant locks.
    Unavailable {
        /// The cause.
        why: String,
    },
}

/// Why the store did not answer a group or a read.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The group was not answered by its deadline; it may have been applied.
    #[error("the store is unavailable: {why}")]
    Unavailable {
        /// The cause.
        why: String,
    },
    /// The group was not sent by its deadline, and is not applied.
    #[error("the store is unavailable: {why}")]
    Unsent {
        /// The cause.
        why: String,
    },
    /// More groups wait than the store's limit allows. This group was not sent.
    #[error("the store has {queued} operations waiting, which is its limit (store.max_queued)")]
    Overloaded {
        /// How many operations were waiting.
        queued: usize,
    },
}

impl StoreError {
    /// Whether the group may have been applied.
    pub fn was_sent(&self) -> bool {
        matches!(self, StoreError::Unavailable { .. })
    }

    /// The cause, without the words "the store is unavailable".
    pub fn why(self) -> String {
        match self {
            StoreError::Unavailable { why } | StoreError::Unsent { why } => why,
            other => other.to_string(),
        }
    }

    /// The error for [`Outcome::Unknown`].
    pub fn unknown() -> StoreError {
        StoreError::Unavailable { why: UNKNOWN.to_owned() }
    }

    /// The error when the store's task has ended because the proxy is shutting down.
    pub fn stopped() -> StoreError {
        StoreError::Unavailable { why: "the proxy is shutting down".into() }
    }
}
