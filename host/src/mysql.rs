//! The store on MySQL and MariaDB.
//!
//! One row a key holds the key's [`Record`](crate::lock::record::Record). Every decision is made by
//! [`lock::record::apply`](crate::lock::record::apply) in the proxy, while a transaction holds the
//! rows ([`batch`]), or is made on a remembered row and written only if the row is still the same
//! ([`fast`]). Parts:
//!
//! | module | what it is |
//! | --- | --- |
//! | [`store`] | [`MysqlStore`]: the handle, and how its tasks are started and stopped |
//! | [`lanes`] | a task a connection: collects a batch, runs it, repeats it, answers it |
//! | [`batch`] | one transaction for many groups, two round trips |
//! | [`fast`], [`cache`] | one statement for one key, on a remembered row |
//! | [`link`] | a connection that was checked and may be used; errors; one exchange with the server |
//! | [`preflight`], [`schema`] | what is checked, created and recorded when a connection is opened |
//! | [`servers`], [`prober`] | which of several servers is used, and what is seen of the others |
//! | [`registry`], [`membership`] | the proxies of one server, their policies, and until when this one may write |
//! | [`steps`], [`watch`] | whether the server's clock has been set: since this process looked, and before |
//! | [`clean`], [`read`] | rows that nobody uses are deleted; rows are listed |
//! | [`codec`], [`sql`] | records as JSON; statements as text |
//! | [`wire`] | what carries the statements: a connection to a real server, or to a simulated one |
//! | [`pinned`] | the primitives that rest on a session: `advisory`, `row` |
//! | [`managed`] | a private server |
//! | [`conditions`] | what is applied when, as tests for real servers and the simulated one |

pub mod conditions;
pub mod managed;

mod batch;
mod cache;
mod clean;
mod clock_steps;
mod clock_watch;
mod codec;
mod health;
mod lanes;
mod link;
mod membership;
mod optimistic;
mod pinned;
mod preflight;
mod prober;
mod queue;
mod read;
mod registry;
mod schema;
mod servers;
mod sql;
mod store;
pub mod wire;

pub use pinned::advisory::Advisory;
#[cfg(any(test, feature = "simulation"))]
pub use pinned::advisory::simulated_name;
pub use pinned::row::Row;
pub use registry::MysqlRegistry;
pub use store::{MysqlStore, OpenError};
