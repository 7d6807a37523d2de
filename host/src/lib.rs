//! Lockkeeper: a lock proxy. MySQL's locking primitives, governed by WebAssembly policies.
//!
//! # Layout
//!
//! | module | what it is |
//! | --- | --- |
//! | [`lock`] | every decision about locks; pure, `std` only |
//! | [`store`] | what a primitive must do; a store in memory; the contract tests |
//! | [`mysql`] | the store on MySQL and MariaDB; the private server |
//! | [`policy`] | loads, checks, runs and swaps WebAssembly policies |
//! | [`service`] | the one loop between them |
//! | [`fleet`] | the proxies of one store, and the policies that they all go by |
//! | [`api`], [`guard`], [`admin`], [`cli`] | translators: HTTP, an HTTP proxy, and the command line |
//! | `route` | what a guarded route makes of a request |
//! | [`http`] | the HTTP server that the fronts share, and its limits |
//! | [`bell`] | proxies that wake each other's waiters |
//! | [`config`], [`clock`], [`telemetry`], [`watch`], [`app`] | settings, time, metrics and logs, files that change, wiring |
//! | [`random`] | the only source of random numbers |
//! | `vital` | tasks without which the process ends |
//! | [`coverage`] | branches that the search has to take |
//! | `simulation` | proxies, servers and clients in one thread and in virtual time; not part of the program |

pub mod admin;
pub mod api;
pub mod app;
pub mod cli;
pub mod clock;
pub mod config;
pub mod coverage;
pub mod fleet;
mod fronts;
pub mod guard;
pub mod http;
pub mod latest;
pub mod lock;
pub mod mysql;
pub mod peers;
pub mod policy;
pub mod random;
mod route;
pub mod service;
#[cfg(any(test, feature = "simulation"))]
pub mod simulation;
pub mod store;
pub mod telemetry;
mod vital;
pub mod watch;
