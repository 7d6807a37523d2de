//! What all tasks of a store share.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};

use tokio_util::sync::CancellationToken;

use super::clock_steps::ClockSteps;
use super::failover::identity::Identity;
use super::failover::servers::Servers;
use super::health::LaneHealth;
use super::membership::Membership;
use super::pipeline::cache::Cache;
use super::session::fault::Fault;
use crate::clock;
use crate::config::StoreConfig;
use crate::lock::Instant;
use crate::mutex::{Mutex, MutexGuard};
use crate::telemetry::Metrics;

/// The state that all tasks of a store share.
pub struct Context {
    pub servers: Arc<Servers>,
    /// `[store]`, which the stores of a quorum share.
    pub config: StoreConfig,
    /// The longest lease that any proxy on this server grants.
    pub max_ttl_ms: u32,
    pub cache: Cache,
    pub health: LaneHealth,
    pub membership: Arc<Membership>,
    pub metrics: Metrics,
    pub stop: CancellationToken,
    /// The server generation in which the account was found to have the privileges that it needs.
    pub probed: AtomicU64,
    /// Whether the server is a Galera node, which has no GET_LOCK.
    pub galera: AtomicBool,
    /// Samples that were taken before this moment on our own clock are out of date.
    pub sampled_after: AtomicU64,
    pub(super) steps: Mutex<ClockSteps>,
    pub(super) identity: Mutex<Option<Identity>>,
}

impl Context {
    /// The steps of the server's clock.
    pub fn clock_steps(&self) -> MutexGuard<'_, ClockSteps> {
        self.steps.lock()
    }

    /// For how many more milliseconds no lease is granted; `None` if leases are granted.
    pub fn wait_ms(&self) -> Option<u32> {
        Some(self.waits_until().ms_since(clock::now())).filter(|wait_ms| *wait_ms > 0)
    }

    /// Until when no lease is granted, on our own clock. Setting the server's clock does not change it.
    pub fn waits_until(&self) -> Instant {
        self.clock_steps().waits_until()
    }

    /// The longest lease, in microseconds.
    pub fn longest_us(&self) -> u64 {
        longest_us(self.max_ttl_ms)
    }

    /// The identity of the server that was connected to last.
    pub fn identity(&self) -> Option<Identity> {
        self.identity.lock().clone()
    }

    /// Notes the identity of the server that a connection has reached.
    pub fn meet(&self, identity: &Identity) {
        let mut known = self.identity.lock();
        if known.as_ref() == Some(identity) {
            return;
        }
        if known.as_ref().is_some_and(|known| known.server != identity.server) {
            self.clock_steps().change_server();
        }
        if known.as_ref().is_none_or(|known| known.floor <= identity.floor) {
            *known = Some(identity.clone());
        }
    }

    /// Fails if the server's clock is not watched. The next connection that is opened begins to watch it.
    pub fn check_watched(&self) -> Result<(), Fault> {
        match self.clock_steps().is_watched() {
            true => Ok(()),
            false => Err(Fault::timeout("the server's clock")),
        }
    }
}

/// The longest lease, in microseconds.
pub fn longest_us(max_ttl_ms: u32) -> u64 {
    u64::from(max_ttl_ms) * 1_000
}
