//! What another policy would have done: recorded requests, run again in virtual time.
//!
//! The requests of a [`Recording`](crate::recording::Recording) arrive when they were recorded. A policy plans them in its sandbox, and the
//! lock table of the product decides who gets a key when; a store in memory answers after the time that the recorded store
//! took. Nobody waits in real time, so a million requests take seconds. The same recording and the same policy give the same
//! outcome.
//!
//! | file | content |
//! | --- | --- |
//! | `load` | the requests of a recording, with how long each lease was held |
//! | `plans` | what a policy answers to each request |
//! | `world` | the run: the lock table, the store, the clients |
//! | `draw` | choices that are the same in each run |
//! | `store` | how long the store takes |
//! | `exclusion` | which requests exclude each other under one policy, and no longer do under another |
//! | `diff` | how the plans of two policies differ |
//! | `report` | the two runs side by side |
//! | `page` | the same as an HTML page |

mod diff;
mod draw;
mod exclusion;
mod load;
mod page;
mod plans;
mod report;
mod store;
#[cfg(test)]
mod tests;
mod world;

pub use diff::{PairText, PlanChange, PlanDiff};
pub use exclusion::{Exclusion, Pair, conflict, in_words};
pub use load::{Arrival, Arrivals, Hold, Load};
pub use page::page;
pub use plans::{Planned, Plans};
pub use report::{Failing, Group, Replayed, Report, Side, Waits, jain};
pub use world::{Done, OUTCOMES, Run, run};
