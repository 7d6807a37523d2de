//! How proxies wake each other's waiters in a run.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::host::Host;
use super::world::lock;
use crate::lock::Key;
use crate::service::{Bell, Service};

/// All proxies that were ever started, by their addresses.
#[derive(Default)]
pub struct Line {
    proxies: Mutex<BTreeMap<String, (Arc<Host>, Service)>>,
    lives: AtomicU64,
}

impl Line {
    pub fn join(&self, address: &str, host: &Arc<Host>, service: &Service) {
        lock(&self.proxies).insert(address.to_owned(), (host.clone(), service.clone()));
    }
}

/// The bell of one proxy.
pub struct Bells {
    /// Weak, because the line owns the service that owns this bell.
    line: Weak<Line>,
    address: String,
    random: Mutex<StdRng>,
    /// Of 1,000 rings, how many are lost.
    lost_per_mille: u32,
}

impl Bells {
    pub fn new(line: &Arc<Line>, proxy: usize, seed: u64) -> Bells {
        let life = line.lives.fetch_add(1, Relaxed);
        let random = Mutex::new(StdRng::seed_from_u64(seed ^ (1_000 + life)));
        // Where many are lost, waiters depend on asking again by themselves.
        let lost_per_mille = if seed.is_multiple_of(4) { 300 } else { 10 };
        let address = format!("proxy-{proxy}-{life}");
        Bells { line: Arc::downgrade(line), address, random, lost_per_mille }
    }

    pub fn address(&self) -> &str {
        &self.address
    }
}

impl Bell for Bells {
    fn name(&self) -> &str {
        &self.address
    }

    fn ring(&self, peer: &str, key: &Key, gone: Box<dyn FnOnce() + Send>) {
        let peer = self.line.upgrade().and_then(|line| lock(&line.proxies).get(peer).cloned());
        let Some((host, service)) = peer else { return gone() };
        let mut random = lock(&self.random);
        let way = Duration::from_micros(random.random_range(100..1_000));
        let is_lost = random.random_ratio(self.lost_per_mille, 1_000);
        let key = key.clone();
        tokio::spawn(async move {
            tokio::time::sleep(way).await;
            if host.is_dead() {
                gone();
            } else if !is_lost {
                service.wake(key);
            }
        });
    }
}
