//! Deterministic simulation: proxies, servers and clients run in one thread and in virtual time, and every choice
//! follows from one seed.
//!
//! The proxies run the code of the product, including the text of their statements. Only their environment is
//! simulated: the servers ([`server`]), the network ([`network`]), and time.

pub mod application;
pub mod check;
pub mod clients;
pub mod conditions;
pub mod end;
pub mod faults;
pub mod network;
pub mod options;
pub mod pair;
pub mod peers;
mod principals;
pub mod search;
pub mod server;
pub mod world;

#[cfg(test)]
mod tests;

/// Runs `work` in virtual time, with random numbers from the seed.
///
/// # Panics
/// If another simulation runs on this thread.
pub fn simulate<T>(seed: u64, work: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    let runtime = runtime.unwrap_or_else(|error| panic!("no runtime can be made: {error}"));
    let done = runtime.block_on(async {
        crate::clock::simulated::begin();
        crate::random::seeded::begin(seed);
        work.await
    });
    // Dropping the runtime ends the remaining tasks, while the simulated clock still runs.
    drop(runtime);
    application::end();
    crate::random::seeded::end();
    crate::clock::simulated::end();
    done
}
