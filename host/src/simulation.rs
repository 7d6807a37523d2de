//! Proxies, servers and clients in one thread and in virtual time, with every choice made from one seed.
//!
//! The proxies are those of the product, down to the text of their statements. What is simulated is what they run on:
//! the servers ([`server`]), the way there ([`network`]), and time.

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
pub mod search;
pub mod server;
pub mod world;

#[cfg(test)]
mod tests;

/// Does the work in virtual time, with random numbers from the seed.
///
/// # Panics
/// Where another simulation runs on this thread.
pub fn simulate<T>(seed: u64, work: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    let runtime = runtime.unwrap_or_else(|error| panic!("no runtime can be made: {error}"));
    let done = runtime.block_on(async {
        crate::clock::simulated::begin();
        crate::random::seeded::begin(seed);
        work.await
    });
    // Tasks that are left end here, by the clock of the simulation.
    drop(runtime);
    application::end();
    crate::random::seeded::end();
    crate::clock::simulated::end();
    done
}
