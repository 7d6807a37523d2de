//! Tests of the proxy as users run it: with real processes, servers and WebAssembly modules.
//!
//! Every test runs on MySQL and on MariaDB ([`harness::on_both`]). A test whose server is missing fails; `cargo xtask
//! servers` installs the servers.

#![allow(clippy::unwrap_used)]

#[macro_use]
mod harness;

mod auth;
mod bad_input;
mod command;
mod faults;
mod fleet;
mod guard;
mod policies;
mod promises;
mod systems;
mod tidy;
mod torture;
mod upgrade;
