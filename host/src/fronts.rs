//! Shared parts of the fronts that applications use: how errors, modes and times are presented.

mod errors;
pub mod mode;
pub mod time;
