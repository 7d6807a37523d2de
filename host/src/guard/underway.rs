//! Tracks the requests that hold a lock or wait for one, so that replacing routes never leads to two holders.
//!
//! A request keeps the name that it got when it arrived. New routes may name the same request differently, and then
//! the lock of a later request would not exclude this one. So before routes are replaced, later requests have to
//! wait. A request that gets its lock during this time, under a name that is about to change, is parked. If the
//! change is given up, the parked request goes to the application by the old routes; if the change is made, it starts
//! over.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use hyper::http::request::Parts;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::clock;
use crate::lock::Instant;
use crate::mutex::Mutex;
use crate::route::Seen;
use crate::service::Request as Wanted;

/// How long a request waits for routes that are being replaced, in total over all changes. One change takes its wait
/// for leases and some calls to the store. With a slow store, a change takes longer than this limit, and another may
/// follow at once.
pub const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// The time that a request has waited so far, under all routes.
#[derive(Default)]
pub struct Waited {
    /// When the request first asked for its lock.
    pub begun: Option<Instant>,
    /// The time that it waited while routes were being replaced.
    for_routes: Duration,
}

/// A wait for routes. Its time is counted on drop, so a cancelled wait counts too.
struct Counting<'a> {
    waited: &'a mut Waited,
    since: Instant,
}

impl Drop for Counting<'_> {
    fn drop(&mut self) {
        self.waited.for_routes += Duration::from_micros(clock::now().us_since(self.since));
    }
}

/// The inputs of a request's name, and the name.
pub struct Named {
    /// The index of the listener.
    pub listener: usize,
    pub parts: Parts,
    /// The part of the body that the policy saw.
    pub seen: Seen,
    /// The lock request, with the name.
    pub wanted: Wanted,
}

/// The requests of all listeners that hold a lock or wait for one.
pub struct UnderWay {
    requests: Mutex<Requests>,
    /// Changes only while `requests` is locked.
    is_paused: AtomicBool,
    /// Notifies all waiting requests, in the order in which they began to wait.
    resumed: Notify,
}

#[derive(Default)]
struct Requests {
    last: u64,
    /// In the order of arrival.
    by_id: BTreeMap<u64, Known>,
    /// Leases that requests got since [`UnderWay::pause`] or held then, and that do not conflict with new names.
    harmless: HashSet<u64>,
}

struct Known {
    named: Named,
    stage: Stage,
    /// Whether the routes that are about to go live name the request differently.
    is_renamed: bool,
    /// Cancelled if the request must start over.
    outdated: CancellationToken,
}

enum Stage {
    Waits,
    /// The request has its lock, but has not been sent to the application.
    Parked,
    /// With the nonce of the lease.
    Holds(u64),
}

/// The entry of a request. Dropping it means that the request is over.
pub struct Entry {
    id: u64,
    all: Arc<UnderWay>,
    outdated: CancellationToken,
}

impl UnderWay {
    /// Creates an empty set.
    pub fn new() -> UnderWay {
        UnderWay { requests: Mutex::default(), is_paused: AtomicBool::new(false), resumed: Notify::new() }
    }

    /// Adds a request that is about to ask for its lock. `None` if routes are being replaced, or if `is_current` says
    /// that they were replaced after the request was named.
    pub fn enter(self: &Arc<UnderWay>, named: Named, is_current: impl FnOnce() -> bool) -> Option<Entry> {
        let mut all = self.requests.lock();
        if self.is_paused.load(Relaxed) || !is_current() {
            return None;
        }
        all.last += 1;
        let id = all.last;
        let outdated = CancellationToken::new();
        let known = Known { named, stage: Stage::Waits, is_renamed: false, outdated: outdated.clone() };
        all.by_id.insert(id, known);
        drop(all);
        Some(Entry { id, all: self.clone(), outdated })
    }

    /// Holds back later requests, and requests that get a lock under a name that is about to change.
    pub fn pause(&self, is_renamed: impl Fn(&Named) -> bool) {
        let Requests { by_id, harmless, .. } = &mut *self.requests.lock();
        for known in by_id.values_mut() {
            known.is_renamed = is_renamed(&known.named);
            if let (Stage::Holds(nonce), false) = (&known.stage, known.is_renamed) {
                harmless.insert(*nonce);
            }
        }
        self.is_paused.store(true, Relaxed);
    }

    /// The leases that do not conflict with new names: those of requests that keep their names, and those under which
    /// nothing has reached the application. Leases that have ended are included, because an answer of the store may
    /// be older.
    pub fn harmless(&self) -> HashSet<u64> {
        self.requests.lock().harmless.clone()
    }

    /// Lets requests continue by the routes from before [`UnderWay::pause`].
    pub fn resume(&self) {
        self.end(|_| {}, || {});
    }

    /// Calls `install`, and lets requests continue. Requests that have a new name and have not reached the
    /// application start over.
    pub fn replace(&self, install: impl FnOnce()) {
        let start_over = |known: &Known| {
            if known.is_renamed && !matches!(known.stage, Stage::Holds(_)) {
                known.outdated.cancel();
            }
        };
        self.end(start_over, install);
    }

    fn end(&self, each: impl Fn(&Known), install: impl FnOnce()) {
        let mut all = self.requests.lock();
        install();
        for known in all.by_id.values_mut() {
            each(known);
            known.is_renamed = false;
        }
        all.harmless.clear();
        self.is_paused.store(false, Relaxed);
        self.resumed.notify_waiters();
    }

    /// Waits until no routes are being replaced. Returns false if this request has waited for routes for
    /// [`LONGEST_PAUSE`] in total; `waited` contains its earlier waits.
    pub async fn resumed(&self, waited: &mut Waited) -> bool {
        let limit = LONGEST_PAUSE.saturating_sub(waited.for_routes);
        let _counting = Counting { waited, since: clock::now() };
        let wait = async {
            loop {
                let resumed = self.resumed.notified();
                tokio::pin!(resumed);
                resumed.as_mut().enable();
                if !self.is_paused.load(Relaxed) {
                    return;
                }
                resumed.await;
            }
        };
        tokio::time::timeout(limit, wait).await.is_ok()
    }
}

impl Entry {
    /// Records that the request has its lock, and returns when it may go to the application. False if it must start
    /// over instead.
    pub async fn holds(&self, nonce: u64, waited: &mut Waited) -> bool {
        while !self.proceeds(nonce) {
            if self.outdated.is_cancelled() || !self.all.resumed(waited).await {
                return false;
            }
        }
        true
    }

    fn proceeds(&self, nonce: u64) -> bool {
        let Requests { by_id, harmless, .. } = &mut *self.all.requests.lock();
        let Some(known) = by_id.get_mut(&self.id) else { return false };
        let waits = known.is_renamed || known.outdated.is_cancelled();
        known.stage = if waits { Stage::Parked } else { Stage::Holds(nonce) };
        if self.all.is_paused.load(Relaxed) {
            harmless.insert(nonce);
        }
        !waits
    }

    /// A token that is cancelled when the request must start over.
    pub fn watch(&self) -> CancellationToken {
        self.outdated.clone()
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.all.requests.lock().by_id.remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::super::locked::Locked;
    use super::*;
    use crate::service::Guarded;
    use crate::service::tests::{memory, request, service};
    use crate::simulation::simulate;
    use crate::telemetry::Metrics;

    fn named() -> Named {
        let (parts, ()) = hyper::Request::new(()).into_parts();
        let seen = Seen { body: Vec::new(), is_whole: true };
        Named { listener: 0, parts, seen, wanted: request("old") }
    }

    /// Whether a request that gets its lock while routes are replaced goes to the application.
    async fn goes_on(end: impl FnOnce(&UnderWay)) -> bool {
        let all = Arc::new(UnderWay::new());
        let [held, granted] = [(); 2].map(|()| all.enter(named(), || true).expect("nothing is replaced"));
        assert!(held.holds(1, &mut Waited::default()).await);
        all.pause(|_| true);
        assert!(all.enter(named(), || true).is_none());
        let mut waited = Waited::default();
        let mut granting = Box::pin(granted.holds(2, &mut waited));
        assert!(futures_util::poll!(&mut granting).is_pending());
        assert_eq!(all.harmless(), HashSet::from([2]), "nothing has reached the application under it");
        end(&all);
        assert!(!held.watch().is_cancelled());
        granting.await
    }

    #[tokio::test]
    async fn a_request_granted_during_a_change_of_routes_waits_for_the_result_of_the_change() {
        assert!(goes_on(UnderWay::resume).await);
        assert!(!goes_on(|all| all.replace(|| {})).await);
    }

    /// Another client may have the lock by then.
    #[tokio::test]
    async fn a_request_that_loses_its_lock_while_it_is_paused_starts_over() {
        for is_lost in [false, true] {
            let (all, service) = (Arc::new(UnderWay::new()), service(&memory()));
            let entry = all.enter(named(), || true).expect("nothing is replaced");
            let guarded = service.guard(&request("old")).await.expect("it is free");
            let Guarded::Held(hold) = guarded else { panic!("it was not done before") };
            let key = hold.lease.lease.keys[0].clone();
            let locked = Locked::new(*hold, || unreachable!("it is no once"), Metrics::default(), entry);
            all.pause(|_| true);
            let mut waited = Waited::default();
            let mut proceeding = Box::pin(locked.proceeds(&mut waited));
            assert!(futures_util::poll!(&mut proceeding).is_pending());
            if is_lost {
                assert_eq!(service.force_release(key).await.expect("the store is there"), 1);
                locked.loss().await;
            }
            all.resume();
            assert_eq!(proceeding.await, !is_lost);
        }
    }

    #[test]
    fn the_wait_of_a_request_for_new_routes_is_bounded_over_several_changes() {
        simulate(1, async {
            let (all, mut waited) = (UnderWay::new(), Waited::default());
            let change = LONGEST_PAUSE * 2 / 5;
            for is_in_time in [true, true, false] {
                all.pause(|_| true);
                let ended = tokio::time::timeout(change, all.resumed(&mut waited)).await;
                // A cancelled wait counts too.
                assert_eq!(ended.ok(), if is_in_time { None } else { Some(false) });
                all.resume();
            }
        });
    }

    #[tokio::test]
    async fn a_request_that_keeps_its_name_continues_during_a_change_of_routes() {
        let all = Arc::new(UnderWay::new());
        let entry = all.enter(named(), || true).expect("nothing is replaced");
        all.pause(|_| false);
        assert!(entry.holds(1, &mut Waited::default()).await);
        assert_eq!(all.harmless(), HashSet::from([1]));
        assert!(all.enter(named(), || false).is_none());
        drop(entry);
        assert_eq!(all.harmless(), HashSet::from([1]), "the store may still name it");
        all.resume();
        assert!(all.harmless().is_empty());
    }
}
