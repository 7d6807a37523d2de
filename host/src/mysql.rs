//! The store on MySQL and MariaDB.
//!
//! Each key has one row, which holds the key's [`Record`](crate::lock::record::Record). The proxy makes every
//! decision with [`lock::record::apply`](crate::lock::record::apply). It does so either while a transaction
//! holds the rows ([`batch`]), or on remembered rows, which it then writes only if they have not changed
//! ([`optimistic`]).
//!
//! Parts:
//!
//! | module | what it is |
//! | --- | --- |
//! | [`store`], [`context`] | [`MysqlStore`]: the handle, which starts and stops the tasks; what the tasks share |
//! | [`lanes`], [`queue`] | one task a connection: collects a batch, runs it, retries it, answers it |
//! | [`rows`] | rows as both ways below read, decide on and write them |
//! | [`batch`] | one transaction for many groups, in two round trips |
//! | [`optimistic`], [`cache`] | one statement on remembered rows, in one round trip |
//! | [`link`], [`fault`] | a checked connection and its calls; why an exchange failed |
//! | [`spare`] | a connection that is opened on demand and kept for the next call |
//! | [`backoff`] | when to try again |
//! | [`preflight`], [`schema`] | what is checked and created when a connection is opened |
//! | [`failover`] | which of several servers is in use, and what happens before another one is |
//! | [`registry`], [`membership`] | the proxies of a server, their policies, and until when this proxy may write |
//! | [`clock_steps`], [`clock_watch`], [`clock_record`] | whether the server's clock was set: while this process watched, and before |
//! | [`clean`], [`read`] | deletes unused rows; lists rows |
//! | [`health`] | whether the store can be used |
//! | [`codec`], [`sql`] | records as JSON; statements as text |
//! | [`wire`] | carries the statements to a real or a simulated server |
//! | [`session_locks`] | primitives that depend on a session: `advisory`, `row` |
//! | [`managed`] | a private server |
//! | [`conditions`] | when a statement is applied, as tests for real servers and the simulated one |

pub mod conditions;
pub mod managed;

mod backoff;
mod batch;
mod cache;
mod clean;
mod clock_record;
mod clock_steps;
mod clock_watch;
mod codec;
mod context;
mod failover;
mod fault;
mod health;
mod lanes;
mod link;
mod membership;
mod optimistic;
mod preflight;
mod queue;
mod read;
mod registry;
mod rows;
mod schema;
mod session_locks;
mod spare;
mod sql;
mod store;
pub mod wire;

pub use registry::MysqlRegistry;
pub use session_locks::advisory::Advisory;
#[cfg(any(test, feature = "simulation"))]
pub use session_locks::advisory::simulated_name;
pub use session_locks::row::Row;
pub use store::{MysqlStore, OpenError};
