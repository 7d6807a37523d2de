//! The durable state of a key, and the effect of each operation on it.
//!
//! A store reads the records of an operation's keys under its own locks, calls [`run`] or [`apply()`], and writes
//! back the changed records, all in one transaction. So the decisions made here hold on every server and in every
//! proxy, and can be tested without either.

mod admission;
mod apply;
mod decide;
mod delegation;
mod doubt;
mod env;
mod global_queue;
mod op;
mod outcome;
mod records;
mod refusal;
mod replay;
mod state;
mod tag;

pub use apply::apply;
pub use delegation::on_another_clock;
pub use doubt::Doubt;
pub use env::Env;
pub use global_queue::{PLACE_MS, TURN_AFTER, WANTED_MS};
pub use op::{
    Claim, Commit, Delegable, Delegate, Extend, GlobalQueueChange, GlobalTicket, Left, Op, Release, Restore,
    When,
};
pub use outcome::{Cause, Delegated, Denial, Grant, HeldBy, NextWaiter, Outcome, UNKNOWN, Version};
pub use records::Records;
pub use refusal::{others_wait, place_in_global_queue, refusal};
pub use replay::{BATCH_ID_KEPT_US, Tried, run};
pub use state::{
    BatchId, COMMITS_KEPT, Committed, ENDED_KEPT, Ended, GlobalPlace, Holder, Level, MAX_BATCH_IDS,
    MAX_GLOBAL_QUEUE, MAX_HOLDERS, MAX_LEVELS, MAX_REPEATS, MAX_WANTED, NAMELESS_KEPT, Origin, Record,
    StoredValue, UNNOTICED_US, Wanted,
};
pub use tag::{HttpView, RESERVED, Tag};

#[cfg(test)]
mod tests;
