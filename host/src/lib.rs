//! Lockkeeper: a lock proxy. MySQL's locking primitives, governed by WebAssembly policies.
//!
//! # Layout
//!
//! | module | what it is |
//! | --- | --- |
//! | [`lock`] | every decision about locks; pure, `std` only |
//! | [`store`] | the interface of a store; a store in memory; contract tests for all stores |
//! | [`mysql`] | the store on MySQL and MariaDB; the private server |
//! | [`policy`] | loads, checks, runs and replaces WebAssembly policies |
//! | [`service`] | the event loop that connects the locks, the policies and the store |
//! | [`fleet`] | the proxies that share one store, and the policies that all of them apply |
//! | [`api`], [`guard`], [`admin`], [`cli`] | front ends: HTTP API, HTTP proxy, admin address, command line |
//! | `route` | how a guarded route turns a request into a lock request |
//! | [`audit`] | the log of refusals and of operators' actions |
//! | [`auth`] | who sends a request, and what that client may do |
//! | [`net`] | the connections of any wire protocol: listening, limits, TLS, drain |
//! | [`pem`] | certificates and keys in files |
//! | [`http`] | the HTTP server that the fronts share, and its limits |
//! | [`peers`] | proxies that notify each other's waiters |
//! | [`config`], [`clock`], [`telemetry`], [`watch`], [`app`] | settings, time, metrics and logs, file watching, wiring |
//! | [`latest`] | a value that changes, for readers that need only its latest state |
//! | [`mutex`] | a mutex whose value stays in use after a panic |
//! | [`random`] | the only source of random numbers |
//! | [`recording`], [`replay`] | what clients asked for, and other policies tried on it |
//! | `vital` | tasks whose failure ends the process |
//! | [`coverage`] | branches that the simulation's search has to reach |
//! | `fuzz` | properties that hold for any input; not part of the program |
//! | `simulation` | proxies, servers and clients in one thread and in virtual time; not part of the program |

#![warn(missing_docs)]

pub mod admin;
pub mod api;
pub mod app;
pub mod audit;
pub mod auth;
pub mod cli;
pub mod clock;
pub mod config;
pub mod coverage;
pub mod fleet;
pub mod fronts;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzz;
pub mod guard;
pub mod http;
pub mod latest;
pub mod lock;
pub mod mutex;
pub mod mysql;
pub mod net;
pub mod peers;
pub mod pem;
pub mod policy;
pub mod random;
pub mod recording;
pub mod replay;
mod route;
pub mod service;
pub mod shadow;
#[cfg(any(test, feature = "simulation"))]
#[allow(missing_docs)]
pub mod simulation;
pub mod store;
pub mod telemetry;
mod vital;
pub mod watch;
