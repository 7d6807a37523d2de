//! The lock core: it decides who holds each key and which waiter is next.
//!
//! This module is pure: no clock, no I/O, no async, no SQL, and no dependency except `std`. Events and the time
//! go in; decisions come out. It has two halves:
//!
//! - [`record`]: the durable state of one key, as stored, and how each operation changes it. Every store, in
//!   MySQL or in memory, runs these functions on its rows.
//! - [`table`]: the queues of one proxy. The table decides when to send which operation to the store, and for
//!   which waiter.
//!
//! # Driving a table
//!
//! The caller owns one [`Table`](table::Table) and does three things, for as long as the proxy runs:
//!
//! 1. It reports what has happened with [`Table::handle_event`](table::Table::handle_event).
//! 2. It calls [`Table::poll_action`](table::Table::poll_action) until there is no action left, and carries out
//!    each [`Action`](table::Action) in that order. The documentation of an action names the event that answers it.
//! 3. It calls [`Table::handle_timeout`](table::Table::handle_timeout) at the time that
//!    [`Table::poll_timeout`](table::Table::poll_timeout) names, and then polls the actions again.
//!
//! # An acquire, from its arrival to its end
//!
//! 1. **It arrives.** The caller turns the request into a [`Claim`](record::Claim) and reports
//!    [`Event::Enqueue`](table::Event::Enqueue). The waiter enters the queue of each of its keys.
//! 2. **It asks.** Once the waiter is at the head of its queues and its keys may be free, an
//!    [`Action::Submit`](table::Action::Submit) carries its [`Op::Acquire`](record::Op::Acquire). If its policy has
//!    a `fairness` hook, an [`Action::Choose`](table::Action::Choose) comes before.
//! 3. **The store decides.** A store reads the records of the keys under its locks, calls [`record::run`], writes
//!    the changed records back, and commits. The caller reports the [`Outcome`](record::Outcome)s with
//!    [`Event::Completed`](table::Event::Completed).
//! 4. **It is granted**, and [`Action::Finish`](table::Action::Finish) has the verdict for the client; **or it is
//!    denied**, and stays at the head. It asks again after a pause ([`Action::Backoff`](table::Action::Backoff)
//!    asks the policy for it), when the holder's lease ends, or as soon as [`Event::Wake`](table::Event::Wake)
//!    says that another proxy has freed the key. At its deadline, it is finished with a verdict that names the
//!    holder.
//! 5. **It ends.** [`Event::Release`](table::Event::Release) sends the release and the next waiter's acquire in one
//!    batch. A lease that nobody releases ends by the clock: the table asks the store, because another proxy may
//!    have renewed the lease, and then the next waiter asks.
//!
//! Renewals go to the store without a queue; [`Event::Renewed`](table::Event::Renewed) reports them. If the client
//! leaves early ([`Event::Cancel`](table::Event::Cancel), [`Event::Undelivered`](table::Event::Undelivered)), the
//! table undoes its grant with an [`Op::Abandon`](record::Op::Abandon).

mod key;
mod lease_ref;
pub mod maps;
mod mode;
mod primitive;
pub mod record;
mod space;
pub mod table;
mod time;
mod token;

pub use key::Key;
pub use lease_ref::LeaseRef;
pub use mode::Mode;
pub use primitive::{Call, Modes, Primitive, Properties};
pub use space::Space;
pub use time::{Instant, ServerTime};
pub use token::Token;
