//! Notifications between proxies: one TCP connection to each peer that has been notified.
//!
//! A notification says that a key is free and that a waiter of the peer is next. No lock depends on it: the
//! peer then asks the store, and waiters also poll. But each notification costs the peer that question, so a peer
//! wakes nobody for a caller that does not prove that it is a proxy of the same store: every frame is signed with a
//! secret that is in the store.
//!
//! [`wire`] has the protocol, [`server`] serves it over `net`, [`places`] bounds its connections, and [`known`] says
//! which peers have ended.

mod client;
mod known;
mod places;
mod server;
pub(crate) mod wire;

pub use client::PeerClient;
pub use server::serve;
