//! A connection to a server: opened, checked, used.
//!
//! | module | what it is |
//! | --- | --- |
//! | [`link`] | a connection that was checked and may be used, and its calls |
//! | [`spare`] | a connection that is opened on demand and kept for the next call |
//! | [`preflight`] | the requirements for a server |
//! | [`schema`] | the tables, which are created when a connection is opened |
//! | [`fault`] | why an exchange with the server failed, and therefore what to do next |
//! | [`tls`] | whether and how connections are encrypted |
//! | [`wire`] | carries the statements to a real or a simulated server |

pub mod fault;
pub mod link;
pub mod preflight;
pub mod schema;
pub mod spare;
pub mod tls;
pub mod wire;
