//! The bindings of the worlds in `wit/policy.wit`, one module a hook.
//!
//! They are generated: `tests/bindings.rs` compares them with the WIT, and writes them anew. A macro that generates them
//! while a policy is compiled would bring sixty crates into each build of a policy.
//!
//! The export macro of a world carries the section that describes the world. So a component exports only the hooks whose
//! macro its crate invokes. All modules share the types of `naming`.

#![allow(
    clippy::all,
    clippy::pedantic,
    clippy::restriction,
    missing_docs,
    unused_qualifications,
    rustdoc::all
)]

pub mod backoff;
pub mod fairness;
pub mod naming;
pub mod renewal;
pub mod response;
pub mod settings;
