//! The lock core: every decision about who holds what, and who is next.
//!
//! This module is pure. It has no clock, no I/O, no async, no SQL and no dependency but `std`: events
//! and the time go in, decisions come out. It has two halves:
//!
//! - [`record`]: the durable state of one key, as it stands in the store, and what each operation
//!   makes of it. Every store, in MySQL or in memory, runs these same functions on its rows.
//! - [`table`]: the queues of one proxy. It decides when the store is asked for what and by whom.

pub mod maps;
pub mod record;
pub mod table;
mod types;

pub use types::{Instant, Key, LeaseRef, Mode, ServerTime, Space, Token};
