//! What clients do: each asks for a lock, works for a while, and lets go, again and again.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use rand::Rng;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;

use super::check::{Granted, Violation};
use super::world::{LONGEST_TTL_MS, POLICIES, Proxy, Shared, TIMEOUT_MS, lock};
use crate::clock;
use crate::lock::{LeaseRef, Mode};
use crate::service::{AcquireError, Lease, LeaseError, Request};
use crate::store::StoreError;

/// What a call may take beyond its wait and the store's time-out, which counts twice: a claim may stand behind another one,
/// whose client has gone and which the store takes its time to answer.
const SLACK_MS: u32 = 2_000;

pub fn request(resource: &str, owner: &str) -> Request {
    Request {
        resource: resource.to_owned(),
        owner: owner.to_owned(),
        mode: Mode::Exclusive,
        ttl_ms: Some(1_000),
        wait_ms: None,
        request_id: None,
        labels: Vec::new(),
        via: None,
    }
}

fn gone<T>() -> Result<T, LeaseError> {
    Err(LeaseError::Store(StoreError::stopped()))
}

/// One client.
pub struct Client {
    pub name: String,
    pub random: StdRng,
    pub proxies: usize,
    pub shared: Arc<Shared>,
    pub resources: usize,
}

impl Client {
    pub async fn run(mut self) {
        while !self.shared.over.load(Relaxed) {
            self.round().await;
            let pause = self.random.random_range(0..20);
            tokio::time::sleep(Duration::from_millis(pause)).await;
        }
    }

    /// Any proxy.
    fn proxy(&mut self) -> Proxy {
        self.shared.proxy(self.random.random_range(0..self.proxies))
    }

    async fn round(&mut self) {
        let policy = POLICIES[self.random.random_range(0..POLICIES.len())];
        let resource = format!("{policy}/{}", self.random.random_range(0..self.resources));
        let wait_ms = *[0, 20, 500, 3_000].choose(&mut self.random).unwrap_or(&0);
        let mode = match self.random.random_range(0..10_u32) {
            0 | 1 => Mode::Shared,
            _ => Mode::Exclusive,
        };
        let request_id =
            self.random.random_bool(0.3).then(|| format!("{}-{}", self.name, self.random.random::<u64>()));
        let request = Request {
            mode,
            ttl_ms: Some(self.random.random_range(200..LONGEST_TTL_MS)),
            wait_ms: (wait_ms > 0).then_some(wait_ms),
            request_id,
            ..request(&resource, &self.name)
        };
        let mut asked = self.ask(&request).await;
        if request.request_id.is_some() && matches!(asked, Some(Err(AcquireError::Store(_)))) {
            asked = self.ask(&request).await;
        }
        match asked {
            Some(Ok((proxy, lease))) => self.work(&proxy, &request, &lease).await,
            Some(Err(_)) => tokio::time::sleep(Duration::from_millis(20)).await,
            None => {}
        }
    }

    /// `None` where the client did not wait for the answer.
    async fn ask(&mut self, request: &Request) -> Option<Result<(Proxy, Lease), AcquireError>> {
        let proxy = self.proxy();
        let asked_at = clock::now();
        let longest = request.wait_ms.unwrap_or(0) + 2 * TIMEOUT_MS + SLACK_MS;
        let (name, resource, wait_ms) = (&self.name, &request.resource, request.wait_ms.unwrap_or(0));
        self.shared.note(format!("{name} asks proxy {} for {resource}, and waits {wait_ms} ms", proxy.index));
        let leaves = self.random.random_bool(0.1);
        let patience = if leaves { self.random.random_range(1..1_000) } else { longest };
        let limit = Duration::from_millis(patience.into());
        let (service, wanted) = (proxy.service.clone(), request.clone());
        let call = proxy.host.run(async move { service.acquire(wanted).await });
        let Ok(asked) = tokio::time::timeout(limit, call).await else {
            if !leaves && !self.shared.was_paused() {
                let why =
                    format!("{} was not answered within {longest} ms on {}", self.name, request.resource);
                self.shared.broken(Violation(why));
            }
            self.shared.note(format!("{} leaves while it waits for {}", self.name, request.resource));
            return None;
        };
        // Its proxy is gone.
        let asked = asked?;
        let now = clock::now();
        if let Ok(lease) = &asked {
            let granted = Granted {
                resource: &request.resource,
                owner: &self.name,
                lease: &lease.lease,
                mode: lease.mode,
                token: lease.tokens[0],
                asked_at,
                now,
                valid_until: lease.valid_until,
                session_of: (lease.primitive != "lease").then_some(proxy.index),
            };
            self.shared.check(|checks| checks.granted(&granted));
        } else if let Err(error) = &asked {
            self.shared.note(format!("{} is refused {}: {error}", self.name, request.resource));
        }
        Some(asked.map(|lease| (proxy, lease)))
    }

    async fn work(&mut self, granted_by: &Proxy, request: &Request, lease: &Lease) {
        let resource = &request.resource;
        let can_move = lease.primitive == "lease";
        let renewals = if self.random.random_bool(0.2) { self.random.random_range(1..4_u32) } else { 0 };
        for _ in 0..renewals {
            tokio::time::sleep(Duration::from_millis(self.random.random_range(0..800))).await;
            let other =
                if can_move && self.random.random_bool(0.3) { self.proxy() } else { granted_by.clone() };
            let now = clock::now();
            if now >= self.certain_until(resource, &lease.lease) {
                break;
            }
            let (service, wanted) = (other.service.clone(), lease.lease.clone());
            match other.host.run(async move { service.renew(wanted, None).await }).await.unwrap_or_else(gone)
            {
                Ok(renewed) => {
                    let now = clock::now();
                    self.shared.note(format!(
                        "{} renews {resource}, for {} ms",
                        self.name,
                        renewed.valid_until.ms_since(now)
                    ));
                    self.shared
                        .check(|checks| checks.renewed(resource, &lease.lease, (now, renewed.valid_until)));
                }
                Err(LeaseError::Lost) => return self.lost(resource, lease),
                Err(_) => {}
            }
        }
        tokio::time::sleep(Duration::from_millis(self.random.random_range(0..30))).await;
        // One that forgets to let go.
        if self.random.random_bool(0.05) {
            return;
        }
        let other = if can_move && self.random.random_bool(0.3) { self.proxy() } else { granted_by.clone() };
        self.shared.note(format!("{} lets go of {resource}", self.name));
        lock(&self.shared.checks).let_go(resource, &lease.lease);
        lock(&self.shared.checks).releases += 1;
        let (service, wanted) = (other.service.clone(), lease.lease.clone());
        let _ = other.host.run(async move { service.release(wanted).await }).await;
    }

    fn certain_until(&self, resource: &str, lease: &LeaseRef) -> crate::lock::Instant {
        lock(&self.shared.checks).certain_until(resource, lease).unwrap_or_default()
    }

    /// A lease that only time ends is not lost before its time.
    fn lost(&self, resource: &str, lease: &Lease) {
        let left_ms = self.certain_until(resource, &lease.lease).ms_since(clock::now());
        self.shared.note(format!("{} has lost {resource}", self.name));
        lock(&self.shared.checks).let_go(resource, &lease.lease);
        if left_ms > 0 && lease.primitive == "lease" {
            let why = format!(
                "{} has lost {resource}, of which it was certain for another {left_ms} ms",
                self.name
            );
            self.shared.broken(Violation(why));
        }
    }
}
