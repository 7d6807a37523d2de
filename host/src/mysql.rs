//! The store on MySQL and MariaDB.
//!
//! Each key has one row, which holds the key's [`Record`](crate::lock::record::Record). The proxy makes every
//! decision with [`lock::record::apply`](crate::lock::record::apply).
//!
//! Parts:
//!
//! | module | what it is |
//! | --- | --- |
//! | [`store`], [`context`] | [`MysqlStore`]: the handle, which starts and stops the tasks; what the tasks share |
//! | [`pipeline`] | operations on leases: queued, batched, decided, written, answered |
//! | [`session_locks`] | primitives that depend on a session: `advisory`, `row` |
//! | [`session`] | a connection: opened, checked, used |
//! | [`failover`] | which of several servers is in use, and what happens before another server is used |
//! | [`registry`], [`membership`] | the proxies of a server, their policies, and until when this proxy may write |
//! | [`clock_steps`], [`clock_watch`], [`clock_record`] | whether the server's clock was set: while this process watched, and before |
//! | [`clean`], [`read`] | deletes unused rows; lists rows |
//! | [`health`] | whether the store can be used |
//! | [`codec`], [`sql`] | records as JSON; statements as text |
//! | [`managed`] | a private server |
//! | [`conditions`] | when a statement is applied, as tests for real servers and the simulated one |

pub mod conditions;
pub mod managed;

mod clean;
mod clock_record;
mod clock_steps;
mod clock_watch;
pub(crate) mod codec;
mod context;
mod failover;
mod health;
mod membership;
mod pipeline;
mod read;
mod registry;
mod session;
mod session_locks;
pub(crate) mod sql;
mod store;

pub use registry::MysqlRegistry;
pub use session::tls::ClientTls;
pub use session::wire;
pub use session_locks::advisory::Advisory;
#[cfg(any(test, feature = "simulation"))]
pub use session_locks::advisory::simulated_name;
pub use session_locks::row::Row;
pub use store::{MysqlStore, OpenError};
