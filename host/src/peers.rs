//! Notifications between proxies: one TCP connection to each peer that has been notified.
//!
//! A notification says that a key is free and that a waiter of the peer is next. No lock depends on it: the
//! peer then asks the store. So notifications need no authentication, and a false one costs one poll.
//!
//! The called proxy first sends its name, as one line, so that another proxy with the same address is not taken
//! for it. The caller then sends a frame for each notification ([`frame`]). The called proxy sends nothing else.

use std::time::Duration;

mod client;
mod frame;
mod known;
mod server;

pub use client::PeerClient;
pub use server::serve;

/// How long a caller waits for a connection and the name of the called proxy.
const CONNECT_LIMIT: Duration = Duration::from_millis(500);
/// How long a connection stays open without a notification.
const IDLE: Duration = Duration::from_secs(60);
