//! Proxies, servers and clients in one thread and in virtual time, with every choice made from one seed.
//!
//! The proxies are those of the product, down to the text of their statements. What is simulated is what they run on:
//! the servers ([`server`]), the way there ([`network`]), and time.

pub mod check;
pub mod clients;
pub mod host;
pub mod network;
pub mod server;
pub mod world;

#[cfg(test)]
mod tests;
