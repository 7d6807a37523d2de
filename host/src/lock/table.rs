//! The queues of one proxy: when the proxy asks the store, and for which waiter.
//!
//! [`Table`] is a state machine. [`Table::handle_event`] takes an [`Event`] and the time. [`Table::handle_timeout`]
//! does the work that is due at a given time, and [`Table::poll_timeout`] says when that is. After each call,
//! [`Table::poll_action`] hands out the [`Action`]s that follow. The table never reads the clock and never waits.
//!
//! Each key has one queue, ordered by rank and then by arrival, and at most one *in-flight batch*: a group of
//! operations that was sent to the store and is not yet answered. Only the head of a queue asks the store, so a
//! held key costs one poll, however many waiters there are. A release and the next waiter's acquire go to the
//! store in one batch: the handoff is one step in the store.

mod actions;
mod answers;
mod background;
mod charge;
mod chores;
mod entry;
mod events;
mod global_queue;
mod in_flight;
mod lease_changes;
mod leases;
mod limits;
mod machine;
mod queue;
mod submit;
mod timer;
mod turns;
mod views;
mod waiters;
mod why;

pub use actions::{Action, Candidate, Contention, GroupShare, Note, Verdict};
pub use charge::Charge;
pub use events::{Answered, Event, Next, ReleaseId, SubmissionId, Unheard, Waiter, WaiterId};
pub use leases::HeldLease;
pub use limits::{ABANDON_MS, VIEW_WAITERS};
pub use machine::Table;
pub use turns::built_in_backoff;
pub use views::{Order, Queued, Reason, Rule, Why};

#[cfg(any(test, feature = "simulation"))]
pub mod simulation;
#[cfg(test)]
mod tests;
