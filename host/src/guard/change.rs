//! Routes that take the place of others while requests are under way.
//!
//! The lock of a request that new routes name differently does not keep out the requests that have its new name. So
//! such routes go live only when no lease is left that was granted under a name that they would not give: leases of
//! requests under way, of requests that were cut off and whose application may be at work, and of proxies that have
//! died. They are in the store; those that rest on a session end with their proxy. A proxy that joins later, or a policy
//! that is replaced, has no other names to know of then.

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

/// How long requests are kept waiting for the end of leases under old names. Most requests are over by then, and a
/// client hardly notices the delay.
const PATIENCE_MS: u32 = 2_000;
/// All leases in the store are looked at once at least, which takes longer where there are very many.
const LONGEST: Duration = Duration::from_secs(6);
/// After a look at the leases, at first; each pause is twice as long as the one before.
const LOOK: Duration = Duration::from_millis(20);
const LONGEST_LOOK: Duration = Duration::from_millis(320);

/// Routes that name requests differently, and are about to go live: requests that need a lock wait.
///
/// It ends with [`Change::install`] or [`Change::give_up`]. Where it is dropped, which happens only when the proxy
/// stops, requests go on waiting: it may be that the new names are recorded already.
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

    /// Replaces the routes by others that name each request as before. The listeners must be the same.
    pub fn replace(&self, configs: &[GuardConfig]) {
        self.store(&self.routes_of(configs));
    }

    /// Begins to replace the routes by others that may name requests differently. The listeners must be the same.
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
    /// Waits until no lease is left that was granted under a name that the new routes would not give.
    ///
    /// # Errors
    /// Why they cannot go live now; the change has to be given up.
    pub async fn unhindered(&self) -> Result<(), String> {
        match tokio::time::timeout(LONGEST, self.wait()).await {
            Ok(Ok(left)) if left.is_empty() => Ok(()),
            Ok(Ok(left)) => Err(said(&left)),
            Ok(Err(error)) => Err(error.to_string()),
            Err(_elapsed) => Err("the leases in the store could not be looked at in time".to_owned()),
        }
    }

    /// The leases that are left when the patience is over, or when none is: nonces, with their resources.
    ///
    /// Whatever this proxy grants meanwhile reaches the application under a name that both give, or not at all. What a
    /// proxy has granted that has joined and gone meanwhile is looked at like the leases of before.
    async fn wait(&self) -> Result<HashMap<u64, String>, StoreError> {
        let shared = &self.guard.shared;
        let until = clock::now().plus_ms(PATIENCE_MS);
        let mut pause = LOOK;
        loop {
            let mut held = shared.service.guarded_leases().await?;
            // A grant that is in the store may be on its way to its request.
            tokio::time::sleep(pause).await;
            let harmless = shared.under_way.harmless();
            held.retain(|nonce, _| !harmless.contains(nonce));
            if held.is_empty() || clock::now() >= until {
                return Ok(held);
            }
            pause = (pause * 2).min(LONGEST_LOOK);
        }
    }

    /// The new routes are the current ones when this returns.
    pub fn install(self) {
        self.guard.shared.under_way.replace(|| self.guard.store(&self.new));
    }

    /// Requests go on by the old routes.
    pub fn give_up(self) {
        self.guard.shared.under_way.resume();
    }
}

/// Whether a request like this one would be planned differently from now on. One that needs no lock any more is not
/// kept out by one that has it.
fn is_renamed(named: &Named, old: &Routes, new: &Routes, limits: &Limits) -> bool {
    if (old.trust_forwarded, &old.keep_headers) != (new.trust_forwarded, &new.keep_headers) {
        // It came with headers that have been taken out of it.
        return true;
    }
    let Ok((route, matched)) = new.find(&named.parts) else { return false };
    let Some(lock) = &route.config.lock else { return false };
    // What cannot be named, as more of its body is needed, may be the same as a request that can.
    let Some(seen) = named.seen.limited_to(lock.see_body_bytes) else { return true };
    let asked = route::asked(lock, &named.parts, matched, seen, limits);
    let asked = asked.map(|asked| wanted(&route, lock, asked, named.wanted.owner.clone()));
    asked.map_or(true, |wanted| !is_same(&wanted, &named.wanted))
}

/// Whether two requests are planned alike by every policy.
fn is_same(one: &Wanted, other: &Wanted) -> bool {
    let plain = |wanted: &Wanted| {
        let routed = wanted.routed.as_ref().map(|routed| (routed.policy.clone(), routed.http.clone()));
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
    use crate::service::{Guarded, Hold, RoutedRequest, Service};
    use crate::telemetry::Metrics;

    /// A guarded request that has its lock.
    async fn under_way(service: &Service, resource: &str) -> Hold {
        let routed = RoutedRequest { policy: "default".into(), http: Arc::default() };
        let request = Wanted { ttl_ms: Some(60_000), routed: Some(routed), ..request(resource) };
        let guarded = service.guard(&request).await.expect("it is free");
        let Guarded::Held(hold) = guarded else { panic!("it was not done before") };
        *hold
    }

    /// It has the old names, so it may grant; and what it has passed on may be under way when it is gone.
    #[tokio::test]
    async fn the_leases_of_a_proxy_that_comes_and_goes_meanwhile_are_waited_for() {
        let memory = memory();
        let (own, other) = (service(&memory), service(&memory));
        let (upstreams, limits) = (UpstreamLimits::default(), Limits::default());
        let guard = Guard::new(&[], &upstreams, own, limits, HttpLimits::default(), Metrics::default());
        let early = under_way(&other, "early").await;
        let change = guard.prepare(&[]);
        let comes_and_goes = async {
            // The leases have been looked at before, and are looked at again after.
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
