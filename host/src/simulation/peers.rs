//! Notifications between the proxies of a run.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Weak};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::lock::Key;
use crate::mutex::Mutex;
use crate::service::{Peers, Service};
use crate::vital::process::Process;

/// All proxies that were ever started, by address.
#[derive(Default)]
pub struct PeerNetwork {
    proxies: Mutex<BTreeMap<String, (Arc<Process>, Service)>>,
    lives: AtomicU64,
}

impl PeerNetwork {
    /// Adds a proxy.
    pub fn join(&self, address: &str, process: &Arc<Process>, service: &Service) {
        self.proxies.lock().insert(address.to_owned(), (process.clone(), service.clone()));
    }
}

/// Sends the notifications of one proxy.
pub struct PeerClient {
    /// Weak, because the network owns the service, and the service owns this client.
    network: Weak<PeerNetwork>,
    address: String,
    random: Mutex<StdRng>,
    /// The share of notifications, in thousandths, that are lost.
    lost_per_mille: u32,
}

impl PeerClient {
    /// The client of a proxy that starts.
    pub fn new(network: &Arc<PeerNetwork>, proxy: usize, seed: u64) -> PeerClient {
        let life = network.lives.fetch_add(1, Relaxed);
        let random = Mutex::new(StdRng::seed_from_u64(seed ^ (1_000 + life)));
        // If many notifications are lost, waiters depend on their own polling.
        let lost_per_mille = if seed.is_multiple_of(4) { 300 } else { 10 };
        let address = format!("proxy-{proxy}-{life}");
        PeerClient { network: Arc::downgrade(network), address, random, lost_per_mille }
    }

    /// The address of this proxy.
    pub fn address(&self) -> &str {
        &self.address
    }
}

impl Peers for PeerClient {
    fn name(&self) -> &str {
        &self.address
    }

    fn notify(&self, peer: &str, key: &Key, gone: Box<dyn FnOnce() + Send>) {
        let peer = self.network.upgrade().and_then(|network| network.proxies.lock().get(peer).cloned());
        let Some((process, service)) = peer else { return gone() };
        let mut random = self.random.lock();
        let way = Duration::from_micros(random.random_range(100..1_000));
        let is_lost = random.random_ratio(self.lost_per_mille, 1_000);
        let key = key.clone();
        tokio::spawn(async move {
            tokio::time::sleep(way).await;
            if process.is_dead() {
                gone();
            } else if !is_lost {
                service.wake(key);
            }
        });
    }
}
