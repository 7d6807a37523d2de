//! The proxy as its users meet it: real processes, real servers, real modules.
//!
//! Every test runs on MySQL and on MariaDB ([`harness::on_both`]); one that lacks its server fails.
//! `cargo xtask servers` gets them.

#![allow(clippy::unwrap_used)]

#[macro_use]
mod harness;

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
