//! The path of operations on leases to the server and back.
//!
//! The proxy decides on the rows of a batch with [`record::apply`](crate::lock::record::apply). It does so either
//! while a transaction holds the rows ([`batch`]), or on remembered rows, which are then written only if they have
//! not changed ([`optimistic`]).
//!
//! | module | what it is |
//! | --- | --- |
//! | [`queue`] | the jobs that wait for a lane, the batches that are made of them, and their answers |
//! | [`lanes`] | one task for each connection: collects a batch, runs it, retries it, answers it |
//! | [`batch`] | one transaction for many groups, in two round trips |
//! | [`optimistic`], [`cache`] | one statement on remembered rows, in one round trip |
//! | [`rows`] | what both ways have in common: reading a row, the inputs for decisions, the next row |
//! | [`backoff`] | when to try again |

pub mod backoff;
pub mod batch;
pub mod cache;
pub mod lanes;
pub mod optimistic;
pub mod queue;
pub mod rows;
