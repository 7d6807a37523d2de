//! What the fronts that applications use have in common: how they tell of errors, modes and times.

mod errors;
pub mod mode;
pub mod time;
