//! The lock core: it decides who holds each key and which waiter is next.
//!
//! This module is pure: no clock, no I/O, no async, no SQL, and no dependency except `std`. Events and the time
//! go in; decisions come out. It has two halves:
//!
//! - [`record`]: the durable state of one key, as stored, and how each operation changes it. Every store, in
//!   MySQL or in memory, runs these functions on its rows.
//! - [`table`]: the queues of one proxy. The table decides when to send which operation to the store, and for
//!   which waiter.

pub mod maps;
mod primitive;
pub mod record;
mod space;
pub mod table;
mod types;

pub use primitive::{Call, Modes, Primitive, Properties};
pub use space::Space;
pub use types::{Instant, Key, LeaseRef, Mode, ServerTime, Token};
