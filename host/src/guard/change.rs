//! Replacing routes while requests are in progress.
//!
//! If new routes name a request differently, its new lock does not exclude requests that hold the lock under the old
//! name. So such routes go live only when no lease is left under a name that the new routes would not give. These
//! leases belong to requests in progress, to requests that were cut off while their application may still work, and
//! to proxies that have died. The store has all of them; a lock that depends on a session ends with its proxy. A
//! proxy that joins later, or a policy that is replaced later, then has no old names to consider.

use std::sync::Arc;
use std::time::Duration;

use super::routes::Routes;
use super::underway::Named;
use super::{Guard, wanted};
use crate::clock;
use crate::config::{GuardConfig, Limits};
use crate::lock::maps::HashMap;
use crate::route;
use crate::service::Request as Wanted;
use crate::store::StoreError;

/// How long requests are held back while leases under old names end. Most requests finish within this time, and a
/// client hardly notices the delay.
const PATIENCE_MS: u32 = 2_000;
/// The limit of a whole change. The store's leases are read at least once, which takes longer if there are very many.
const LONGEST: Duration = Duration::from_secs(6);
/// The first pause after reading the leases; each pause is twice as long as the one before.
const LOOK: Duration = Duration::from_millis(20);
/// The longest pause between two reads of the leases.
const LONGEST_LOOK: Duration = Duration::from_millis(320);

/// A pending change to routes that may name requests differently. Until it ends, requests that need a lock wait.
///
/// It ends with [`Change::install`] or [`Change::give_up`]. It is dropped without either only when the proxy stops.
/// Requests then keep waiting, because the new names may already be recorded.
#[must_use]
pub struct Change<'a> {
    guard: &'a Guard,
    new: Vec<Arc<Routes>>,
}

impl Guard {
    fn routes_of(&self, configs: &[GuardConfig]) -> Vec<Arc<Routes>> {
        configs.iter().map(|config| Arc::new(Routes::new(config, &self.shared.targets))).collect()
    }

    fn store(&self, new: &[Arc<Routes>]) {
        for (routes, new) in self.routes.iter().zip(new) {
            routes.store(new.clone());
        }
    }

    /// Replaces the routes by routes that name every request as before. The listeners must be the same.
    pub fn replace(&self, configs: &[GuardConfig]) {
        self.store(&self.routes_of(configs));
    }

    /// Starts to replace the routes by routes that may name requests differently. The listeners must be the same.
    pub fn prepare(&self, configs: &[GuardConfig]) -> Change<'_> {
        let new = self.routes_of(configs);
        self.shared.under_way.pause(|named| {
            let (old, new) = (self.routes[named.listener].load(), &new[named.listener]);
            is_renamed(named, &old, new, &self.shared.limits)
        });
        Change { guard: self, new }
    }
}

impl Change<'_> {
    /// Waits until no lease is left under a name that the new routes would not give.
    ///
    /// # Errors
    /// The reason why the new routes cannot go live now. The caller must then give the change up.
    pub async fn unhindered(&self) -> Result<(), String> {
        match tokio::time::timeout(LONGEST, self.wait()).await {
            Ok(Ok(left)) if left.is_empty() => Ok(()),
            Ok(Ok(left)) => Err(said(&left)),
            Ok(Err(error)) => Err(error.to_string()),
            Err(_elapsed) => Err("the leases in the store could not be looked at in time".to_owned()),
        }
    }

    /// Returns the leases that are left after [`PATIENCE_MS`], or earlier if none is left: nonces, with their
    /// resources.
    ///
    /// A request that this proxy grants meanwhile reaches the application only under a name that both the old and the
    /// new routes give. Each read of the leases also finds those of a proxy that has joined and stopped since the
    /// change began.
    async fn wait(&self) -> Result<HashMap<u64, String>, StoreError> {
        let shared = &self.guard.shared;
        let until = clock::now().plus_ms(PATIENCE_MS);
        let mut pause = LOOK;
        loop {
            let mut held = shared.service.guarded_leases().await?;
            // A lease in the store may belong to a request that has not learned of its grant yet.
            tokio::time::sleep(pause).await;
            let harmless = shared.under_way.harmless();
            held.retain(|nonce, _| !harmless.contains(nonce));
            if held.is_empty() || clock::now() >= until {
                return Ok(held);
            }
            pause = (pause * 2).min(LONGEST_LOOK);
        }
    }

    /// Makes the new routes the current ones.
    pub fn install(self) {
        self.guard.shared.under_way.replace(|| self.guard.store(&self.new));
    }

    /// Keeps the old routes, and lets requests continue.
    pub fn give_up(self) {
        self.guard.shared.under_way.resume();
    }
}

/// Whether the new routes would plan this request differently. A request that no longer needs a lock is never
/// excluded by a holder, so it counts as not renamed.
fn is_renamed(named: &Named, old: &Routes, new: &Routes, limits: &Limits) -> bool {
    if (&old.trust_forwarded, &old.keep_headers) != (&new.trust_forwarded, &new.keep_headers) {
        // The request came with headers that were removed before it was named.
        return true;
    }
    let Ok((route, matched)) = new.find(&named.parts) else { return false };
    let Some(lock) = &route.config.lock else { return false };
    // If the new routes need more of the body than was read, the request cannot be named; its new name may be any.
    let Some(seen) = named.seen.limited_to(lock.see_body_bytes) else { return true };
    let asked = route::asked(lock, &named.parts, matched, seen, limits);
    let asked = asked.map(|asked| wanted(&route, lock, asked, named.wanted.owner.clone()));
    asked.map_or(true, |wanted| !is_same(&wanted, &named.wanted))
}

/// Whether every policy plans the two requests alike.
fn is_same(one: &Wanted, other: &Wanted) -> bool {
    let plain = |wanted: &Wanted| {
        let routed = wanted.principal.routed().map(|routed| (routed.policy.clone(), routed.http.clone()));
        (wanted.resource.clone(), wanted.mode, wanted.labels.clone(), routed)
    };
    plain(one) == plain(other)
}

fn said(left: &HashMap<u64, String>) -> String {
    let resource = left.values().min().map_or("", String::as_str);
    match left.len() {
        1 => format!(
            "a request that is under way, or was cut off, holds the lock {resource}, which the new routes would give \
             another name: they go live when it is free"
        ),
        count => format!(
            "{count} requests that are under way, or were cut off, hold locks that the new routes would give other \
             names, one of them {resource}: they go live when those are free"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{HttpLimits, UpstreamLimits};
    use crate::service::tests::{memory, request, service};
    use crate::service::{Guarded, Hold, Principal, RoutedRequest, Service};
    use crate::telemetry::Metrics;

    /// A guarded request that has its lock.
    async fn under_way(service: &Service, resource: &str) -> Hold {
        let routed = RoutedRequest { policy: "default".into(), http: Arc::default() };
        let request =
            Wanted { principal: Principal::Application(routed), ttl_ms: Some(60_000), ..request(resource) };
        let guarded = service.guard(&request).await.expect("it is free");
        let Guarded::Held(hold) = guarded else { panic!("it was not done before") };
        *hold
    }

    /// Such a proxy uses the old names, so it may grant under them, and its requests may still be in progress after
    /// it is gone.
    #[tokio::test]
    async fn a_change_waits_for_leases_of_a_proxy_that_joined_and_left_meanwhile() {
        let memory = memory();
        let (own, other) = (service(&memory), service(&memory));
        let (upstreams, limits) = (UpstreamLimits::default(), Limits::default());
        let guard = Guard::new(&[], &upstreams, own, limits, HttpLimits::default(), Metrics::default());
        let early = under_way(&other, "early").await;
        let change = guard.prepare(&[]);
        let comes_and_goes = async {
            // The leases were read before this, and are read again afterwards.
            tokio::time::sleep(5 * LOOK).await;
            let late = under_way(&other, "late").await;
            drop(early);
            late
        };
        let (unhindered, _late) = tokio::join!(change.unhindered(), comes_and_goes);
        let why = unhindered.expect_err("a lease is left");
        assert!(why.contains("holds the lock late"), "{why}");
        change.give_up();
    }
}
