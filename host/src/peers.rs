//! Notifications between proxies: one TCP connection to each peer that has been notified.
//!
//! A notification says that a key is free and that a waiter of the peer is next. No lock depends on it: the
//! peer then asks the store. So notifications need no authentication, and a false one costs one poll.
//!
//! [`wire`] has the protocol, [`server`] serves it over `net`, and [`known`] says which peers have ended.

mod client;
mod known;
mod server;
mod wire;

pub use client::PeerClient;
pub use server::serve;
