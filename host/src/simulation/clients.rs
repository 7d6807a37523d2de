//! The clients of a run: each one asks for a lock, works for a while, and releases the lock, again and again.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::seq::index::sample;
use rand::{Rng, SeedableRng};

mod call;
mod hold;

use super::application::{self, Asked, GUARDED};
use super::check::{Granted, Violation};
use super::faults::{BACKOFF, KEEP_MS, POOL, SEPARATOR};
use super::options::Options;
use super::principals::principals;
use super::world::{Proxy, Shared, TIMEOUT_MS};
use crate::clock;
use crate::guard::LONGEST_PAUSE;
use crate::lock::{Instant, Key, LeaseRef, Mode, Primitive, Space};
use crate::service::{AcquireError, Begun, Lease, LeaseError, Principal, Request};
use crate::store::StoreError;

/// The longest duration of a call beyond its wait and twice the store's time-out. The time-out counts twice because a
/// claim may be queued behind one whose client is gone and to which the store answers late. It counts once more if the
/// policy changes: the claim of the earlier keys may still be in flight.
const SLACK_MS: u32 = 2_000;
const LONG_WORK_MS: u32 = 800;
/// Longer than a membership, than the wait after a fail-over, and than the time for which proxies remember that a
/// clock was set back.
const VERY_LONG_WORK_MS: u32 = 40_000;

/// A request for an exclusive lock.
pub fn request(resource: &str, owner: &str) -> Request {
    Request {
        principal: Principal::ANONYMOUS,
        resource: resource.to_owned(),
        owner: owner.to_owned(),
        mode: Mode::Exclusive,
        ttl_ms: Some(1_000),
        wait_ms: None,
        request_id: None,
        labels: Vec::new(),
    }
}

fn gone<T>() -> Result<T, LeaseError> {
    Err(LeaseError::Store(StoreError::stopped()))
}

/// Whether the lease also ends with a session of its proxy. Then no other proxy can renew or release it.
fn rests_on_session(lease: &LeaseRef) -> bool {
    lease.keys.iter().any(|key| key.space().rests_on_session())
}

/// The resource of the lease: if the request named several keys to choose from, the chosen one.
fn resource_of<'a>(request: &'a Request, lease: &'a Lease) -> &'a str {
    match lease.lease.keys.first() {
        Some(chosen) if request.resource.starts_with(POOL) => chosen.as_str(),
        _ => &request.resource,
    }
}

/// One client.
pub struct Client {
    name: String,
    random: StdRng,
    proxies: usize,
    policies: Vec<&'static str>,
    resources: usize,
    asks_for_several: bool,
    to_the_first_percent: u32,
    work_ms: u32,
    longest_ttl_ms: u32,
    /// The longest lease that the proxies allow.
    limit_ms: u32,
    /// The share of leases, in thousandths, that the client does not release.
    forgets_per_mille: u32,
    shared_percent: u32,
    long_holds_percent: u32,
    /// Whether the client may hold a lock on a session for long without renewing it. This is off if nothing goes
    /// wrong: when the client is no longer certain of the lock, others would still wait for it, and the run checks
    /// that nobody waits in vain.
    stands_still: bool,
    /// How long a guarded request may wait for a change of the routes, in milliseconds.
    waits_for_routes_ms: u32,
    /// Whether leases are so short that the client can wait for their ends.
    renews_late: bool,
    /// The client's own principal, and another one.
    principals: [Principal; 2],
    /// The number of requests so far.
    rounds: u32,
    shared: Arc<Shared>,
}

impl Client {
    /// The client number `n`.
    pub fn new(n: usize, options: &Options, shared: Arc<Shared>) -> Client {
        Client {
            name: format!("client-{n}"),
            random: StdRng::seed_from_u64(options.seed.wrapping_mul(1_000).wrapping_add(n as u64)),
            proxies: options.proxies,
            policies: options.policies.clone(),
            resources: options.resources,
            asks_for_several: options.asks_for_several,
            to_the_first_percent: options.to_the_first_percent,
            work_ms: options.work_ms,
            longest_ttl_ms: options.longest_ttl_ms,
            limit_ms: options.limit_ms(),
            forgets_per_mille: options.forgets_per_mille,
            shared_percent: options.shared_percent,
            long_holds_percent: options.long_holds_percent,
            stands_still: !options.is_calm(),
            waits_for_routes_ms: if options.renames_routes() { LONGEST_PAUSE.as_millis() as u32 } else { 0 },
            renews_late: !options.has_long_leases(),
            principals: principals(n, options),
            rounds: 0,
            shared,
        }
    }

    /// Makes requests until the run is over.
    pub async fn run(mut self) {
        while !self.shared.over.load(Relaxed) {
            self.round().await;
            self.pause(20).await;
        }
    }

    /// A random proxy.
    fn proxy(&mut self) -> Proxy {
        let percent = self.to_the_first_percent;
        let is_first = percent > 0 && self.random.random_ratio(percent, 100);
        self.shared.proxy(if is_first { 0 } else { self.random.random_range(0..self.proxies) })
    }

    /// The proxy that granted the lease, or sometimes another one if any proxy can renew and release the lease.
    fn proxy_for(&mut self, granted_by: &Proxy, lease: &LeaseRef) -> Proxy {
        match !rests_on_session(lease) && self.random.random_bool(0.3) {
            true => self.proxy(),
            false => granted_by.clone(),
        }
    }

    async fn pause(&mut self, at_most_ms: u64) {
        let ms = self.random.random_range(0..at_most_ms);
        tokio::time::sleep(Duration::from_millis(ms)).await;
    }

    fn note(&self, what: &str) {
        self.shared.note(format!("{} {what}", self.name));
    }

    async fn round(&mut self) {
        let policy = self.policies[self.random.random_range(0..self.policies.len())];
        let resource = self.resource(policy);
        let wait_ms = *[0, 20, 500, 3_000].choose(&mut self.random).unwrap_or(&0);
        // Sometimes ask for a mode that the primitive lacks, because policies are replaced.
        let takes_shared = matches!(policy, "lease" | "quorum" | "row" | POOL | BACKOFF);
        let mode = match (policy, self.random.random_range(0..40_u32)) {
            ("once", _) => Mode::Exclusive,
            // Mostly permits, so that several clients hold this resource at the same time.
            ("quorum", 9..36) if resource.ends_with("/1") => Mode::Permits { count: 1, limit: 0 },
            ("lease" | "quorum" | POOL | BACKOFF, 0..8) | (_, 0) => {
                Mode::Permits { count: self.random.random_range(1..=2), limit: 0 }
            }
            (_, 8) => Mode::Shared,
            _ if takes_shared && self.random.random_ratio(self.shared_percent, 100) => Mode::Shared,
            _ => Mode::Exclusive,
        };
        self.rounds += 1;
        let id = self.random.random::<u64>();
        let request_id = self.random.random_bool(0.3).then(|| format!("{}-{id}", self.name));
        let request = Request {
            mode,
            ttl_ms: Some(self.random.random_range(200..self.longest_ttl_ms)),
            wait_ms: (wait_ms > 0).then_some(wait_ms),
            request_id,
            principal: self.principals[0].clone(),
            // Each request has its own owner, so a lease that an earlier request left behind has another owner.
            ..request(&resource, &format!("{}.{}", self.name, self.rounds))
        };
        match policy {
            GUARDED => self.send(&request).await,
            "once" => self.do_once(&request).await,
            "version" => self.make_version(request).await,
            _ if self.random.random_bool(0.15) => self.hold(&request).await,
            _ => self.lock(&request).await,
        }
    }

    /// The longest work between two renewals. Leases of a policy's first resource outlast many faults, and many
    /// clients wait for them.
    fn work_ms(&self, request: &Request) -> u32 {
        if request.resource.ends_with("/0") { LONG_WORK_MS.max(self.work_ms) } else { self.work_ms }
    }

    /// A random resource of the policy, or a name of several resources.
    fn resource(&mut self, policy: &str) -> String {
        let takes_several = !["once", "version", POOL, BACKOFF, GUARDED].contains(&policy);
        let wanted = match self.asks_for_several && takes_several && self.random.random_bool(0.3) {
            true => self.random.random_range(2..=3),
            false => 1,
        };
        let chosen = sample(&mut self.random, self.resources, wanted.min(self.resources));
        let names: Vec<String> = chosen.iter().map(|n| format!("{policy}/{n}")).collect();
        names.join(SEPARATOR)
    }

    /// Sends a guarded request to the application, through a proxy that locks its resource.
    async fn send(&mut self, request: &Request) {
        let proxy = self.proxy();
        let (resource, process) = (request.resource.clone(), &proxy.process);
        let asked = Asked {
            resource: resource.clone(),
            owner: request.owner.clone(),
            proxy: (proxy.index, proxy.life),
        };
        let (near, far) = application::connection();
        let pauses = (!process.is_paused()).then(|| process.pauses());
        let served = tokio::spawn({
            let (process, front) = (process.clone(), proxy.front.clone());
            async move { process.run(application::serve(front, far)).await }
        });
        self.note(&format!("sends a request for {resource} through proxy {}", proxy.index));
        let leaves = self.random.random_bool(0.1);
        let waits_ms = application::WAIT_MS + self.waits_for_routes_ms;
        let longest = waits_ms
            + 2 * TIMEOUT_MS
            + SLACK_MS
            + application::LONG_WORK_MS
            + 2 * application::SLOW_CONNECTION_MS;
        let patience = if leaves { self.random.random_range(1..1_000) } else { longest };
        let limit = Duration::from_millis(patience.into());
        let answered = tokio::time::timeout(limit, application::send(&asked, near)).await;
        drop(served);
        let (kind, what) = match answered {
            Ok(Some(status)) if status.is_success() => ("a guarded request is answered", status.to_string()),
            Ok(Some(status)) => ("a guarded request is refused", status.to_string()),
            Ok(None) => ("a guarded request breaks off", "no whole answer".to_owned()),
            Err(_elapsed) => {
                if !leaves && pauses == Some(proxy.process.pauses()) {
                    let why = format!("{} was not answered within {longest} ms on {resource}", self.name);
                    self.shared.broken(Violation(why));
                }
                ("a client leaves a guarded request", "it waits no longer".to_owned())
            }
        };
        self.shared.tally.count(kind);
        self.note(&format!("{kind}, for {resource}: {what}"));
    }

    async fn lock(&mut self, request: &Request) {
        let asked_at = clock::now();
        let proxy = self.proxy();
        let mut asked = self.acquire(proxy, request, asked_at).await;
        let may_repeat = request.request_id.is_some();
        let is_unknown = match &asked {
            None => self.random.random_bool(0.5),
            Some((_, told)) => matches!(told, Err(AcquireError::Store(_))),
        };
        if may_repeat && is_unknown {
            let other = self.proxy();
            asked = self.acquire(other, request, asked_at).await;
        }
        let (proxy, lease) = match asked {
            Some((proxy, Ok(lease))) => (proxy, lease),
            Some(_) => return self.pause(40).await,
            None => return,
        };
        if may_repeat && self.random.random_bool(0.2) {
            let other = self.proxy_for(&proxy, &lease.lease);
            self.acquire(other, request, asked_at).await;
            // The second answer may have a higher token; the token of the first answer also belongs to the lease.
            self.renew(&proxy, request, &lease).await;
        }
        self.work(&proxy, request, &lease).await;
        self.release(&proxy, request, &lease).await;
    }

    /// Asks a proxy for a lock; `asked_at` is when the request was first sent. `None` if there was no answer, because
    /// the client or the proxy is gone.
    async fn acquire(
        &mut self,
        proxy: Proxy,
        request: &Request,
        asked_at: Instant,
    ) -> Option<(Proxy, Result<Lease, AcquireError>)> {
        let (service, wanted) = (proxy.service.clone(), request.clone());
        let asked = self.call(&proxy, request, async move { service.acquire(wanted).await }).await?;
        if let Ok(lease) = &asked {
            self.granted(&proxy, request, lease, asked_at);
        }
        Some((proxy, asked))
    }

    fn granted(&self, proxy: &Proxy, request: &Request, lease: &Lease, asked_at: Instant) {
        if request.resource.contains(SEPARATOR) {
            self.shared.tally.count("a grant of several resources");
        }
        if request.resource.starts_with(POOL) {
            self.shared.tally.count("a grant of any one of several keys");
        }
        self.shared.tally.count(match lease.primitive {
            Primitive::Lease => "a grant of a lease",
            Primitive::Advisory => "a grant of an advisory lock",
            Primitive::Row => "a grant of a row lock",
            Primitive::Once => "a grant of a once",
            Primitive::Quorum => "a grant of a quorum",
            _ => "another grant",
        });
        let granted = Granted {
            resource: resource_of(request, lease),
            owner: &request.owner,
            lease: &lease.lease,
            mode: lease.mode,
            token: lease.tokens[0],
            request_id: request.request_id.as_deref(),
            asked_at,
            now: clock::now(),
            valid_until: lease.valid_until,
            proxy: proxy.index,
            life: proxy.life,
        };
        self.check_length(request, lease.valid_until);
        // The run looks at the record from time to time, and a proxy that has just started may have changed it since.
        let recorded = self.shared.servers[0].recorded_rules();
        self.shared.check(|checks| {
            checks.rules_are(recorded, clock::now());
            checks.rules_allow(proxy.auth.version().0, asked_at)
        });
        self.shared.check(|checks| checks.granted(&granted));
    }

    /// Works for a while under the lease.
    async fn work(&mut self, granted_by: &Proxy, request: &Request, lease: &Lease) {
        if request.principal.identity().is_some() && self.random.random_bool(0.1) {
            self.try_with_another_principal(granted_by, lease).await;
        }
        let renewals = if self.random.random_bool(0.2) { self.random.random_range(1..4_u32) } else { 0 };
        for _ in 0..renewals {
            self.pause(self.work_ms(request).into()).await;
            if clock::now() >= self.certain_until(request, lease)
                || !self.renew(granted_by, request, lease).await
            {
                return;
            }
        }
        // The client does not renew for a long time. Meanwhile the proxy may count as gone, and other proxies may
        // change the policy.
        let stands_still = self.random.random_ratio(self.long_holds_percent, 100) && self.stands_still;
        if rests_on_session(&lease.lease) && stands_still {
            self.pause(VERY_LONG_WORK_MS.into()).await;
            self.shared.tally.count("a lease on a session is renewed after a long time");
            if !self.renew(granted_by, request, lease).await {
                return;
            }
        }
        // A renewal that comes too late: others may have had the lock since.
        if self.random.random_bool(0.02) && self.renews_late {
            clock::sleep_until(self.certain_until(request, lease)).await;
            self.pause(1_500).await;
            self.shared.tally.count("a lease is renewed after its end");
            if !self.renew(granted_by, request, lease).await {
                return;
            }
        }
        self.pause(30).await;
    }

    /// Another principal, which knows the lease id, tries to renew or release the lease.
    async fn try_with_another_principal(&mut self, granted_by: &Proxy, lease: &Lease) {
        let proxy = self.proxy_for(granted_by, &lease.lease);
        let principal = self.principals[1].name();
        let mut stolen = LeaseRef { principal, ..lease.lease.clone() };
        if self.random.random_bool(0.3) {
            // A key of another space, so that the lease is in two stores and its token belongs to the invented key.
            let invented = Key::new("!").map(|key| key.within(Space::Advisory));
            stolen.keys = invented.into_iter().chain(stolen.keys.iter().cloned()).collect();
        }
        let service = proxy.service.clone();
        let releases = self.random.random_bool(0.5);
        let tried = proxy.process.run(async move {
            if releases { service.release(stolen).await } else { service.renew(stolen, None).await.map(drop) }
        });
        match tried.await {
            Some(Ok(())) => {
                let what = if releases { "released" } else { "renewed" };
                let why = format!(
                    "a lease of {} on {} was {what} by another principal",
                    lease.owner, lease.resource
                );
                self.shared.broken(Violation(why));
            }
            Some(Err(LeaseError::Forbidden)) => {
                self.shared.tally.count("a lease is refused to another principal");
            }
            _ => {}
        }
    }

    /// Renews the lease. Returns whether it may still be valid.
    async fn renew(&mut self, granted_by: &Proxy, request: &Request, lease: &Lease) -> bool {
        let other = self.proxy_for(granted_by, &lease.lease);
        let (service, wanted) = (other.service.clone(), lease.lease.clone());
        let renewed = other.process.run(async move { service.renew(wanted, None).await }).await;
        match renewed.unwrap_or_else(gone) {
            Ok(renewed) => {
                self.renewed(request, lease, renewed.valid_until);
                true
            }
            Err(LeaseError::Lost) => {
                self.lost(request, lease, clock::now());
                false
            }
            Err(_) => true,
        }
    }

    fn renewed(&self, request: &Request, lease: &Lease, valid_until: Instant) {
        let (now, resource) = (clock::now(), resource_of(request, lease));
        self.shared.tally.count("a renewal");
        self.note(&format!("has renewed {resource}, for {} ms", valid_until.ms_since(now)));
        self.check_length(request, valid_until);
        self.shared.check(|checks| checks.renewed(resource, &lease.lease, (now, valid_until)));
    }

    /// Checks that no client is told to hold for longer than the proxies allow, whatever the server's clock does.
    fn check_length(&self, request: &Request, valid_until: Instant) {
        let (left_ms, longest_ms) = (valid_until.ms_since(clock::now()), self.limit_ms);
        if left_ms > longest_ms {
            let (owner, resource) = (&request.owner, &request.resource);
            let why = format!(
                "too long: {owner} has {resource} for another {left_ms} ms, and no lease is longer than {longest_ms} ms"
            );
            self.shared.broken(Violation(why));
        }
    }

    async fn release(&mut self, granted_by: &Proxy, request: &Request, lease: &Lease) {
        // The client forgets to release the lock.
        if self.random.random_ratio(self.forgets_per_mille, 1_000) {
            return;
        }
        let other = self.proxy_for(granted_by, &lease.lease);
        self.let_go(request, lease);
        let (service, wanted) = (other.service.clone(), lease.lease.clone());
        let released = other.process.run(async move { service.release(wanted).await }).await;
        if let Some(Ok(())) = released {
            self.shared.checks.lock().released(&request.owner);
        }
    }

    fn let_go(&self, request: &Request, lease: &Lease) {
        self.shared.tally.count("a release");
        let resource = resource_of(request, lease);
        self.note(&format!("lets go of {resource}"));
        self.shared.checks.lock().let_go(resource, &lease.lease);
    }

    fn certain_until(&self, request: &Request, lease: &Lease) -> Instant {
        self.shared.checks.lock().certain_until(resource_of(request, lease), &lease.lease).unwrap_or_default()
    }

    /// The client is told that the lease ends at `end`. A lease that only time ends must not be lost early.
    fn lost(&self, request: &Request, lease: &Lease, end: Instant) {
        let resource = resource_of(request, lease);
        let left_ms = self.certain_until(request, lease).ms_since(end.max(clock::now()));
        self.shared.tally.count("a lease that its client is told is lost");
        self.note(&format!("has lost {resource}"));
        if end <= clock::now() {
            self.shared.checks.lock().let_go(resource, &lease.lease);
        }
        let may_be_gone = rests_on_session(&lease.lease) || self.shared.checks.lock().has_lost_writes;
        if left_ms > 0 && !may_be_gone {
            let why = format!(
                "{} has lost {resource}, of which it was certain for another {left_ms} ms",
                self.name
            );
            self.shared.broken(Violation(why));
        }
    }

    /// Does work once, unless it was already done.
    async fn do_once(&mut self, request: &Request) {
        let proxy = self.proxy();
        let (service, wanted, asked_at) = (proxy.service.clone(), request.clone(), clock::now());
        let asked = self.call(&proxy, request, async move { service.begin(wanted).await }).await;
        let lease = match asked {
            Some(Ok(Begun::First(lease))) => lease,
            Some(Ok(Begun::Done(kept))) => {
                self.shared.tally.count("a once that was done");
                self.note(&format!("is told that {} was done: {}", request.resource, kept.value));
                self.shared.check(|checks| checks.done(&request.resource, &kept.value));
                // Leave the proxies to the others for a while.
                return self.pause(400).await;
            }
            _ => return self.pause(40).await,
        };
        self.granted(&proxy, request, &lease, asked_at);
        self.shared.check(|checks| checks.begun(&request.resource, asked_at, clock::now()));
        self.work(&proxy, request, &lease).await;
        if self.random.random_bool(0.1) {
            return self.release(&proxy, request, &lease).await;
        }
        let outcome = format!("\"{}-{}\"", self.name, self.random.random::<u32>());
        self.let_go(request, &lease);
        self.note(&format!("has done {}: {outcome}", request.resource));
        self.shared.checks.lock().finishes(&request.resource, &outcome);
        let other = self.proxy_for(&proxy, &lease.lease);
        let (service, wanted, left) = (other.service.clone(), lease.lease.clone(), outcome.clone());
        let kept_until = clock::now().plus_ms(KEEP_MS);
        let finished = other.process.run(async move { service.finish(wanted, left.into()).await }).await;
        if let Some(Ok(())) = finished {
            self.shared.tally.count("an outcome is kept");
            self.note(&format!("is told that {outcome} is kept"));
            let mut checks = self.shared.checks.lock();
            checks.finished(&request.resource, clock::now(), kept_until);
            checks.released(&request.owner);
        }
    }

    /// Reads a version and commits the next one.
    async fn make_version(&mut self, request: Request) {
        let request = Request { mode: Mode::Exclusive, wait_ms: None, ..request };
        let resource = request.resource.clone();
        let proxy = self.proxy();
        let (service, wanted, asked_at) = (proxy.service.clone(), request.clone(), clock::now());
        let read = self.call(&proxy, &request, async move { service.read_version(&wanted).await }).await;
        let Some(Ok(read)) = read else { return self.pause(40).await };
        let version = read.version.version;
        let content = read.version.kept.map(|kept| kept.value.to_string());
        self.note(&format!("reads version {} of {resource}: {content:?}", version.0));
        self.shared.check(|checks| checks.read(&resource, (version, content), (asked_at, clock::now())));
        self.pause(10).await;
        let content = format!("\"{}-{}\"", self.name, self.random.random::<u32>());
        for _ in 0..2 {
            let proxy = self.proxy();
            let (service, wanted, value) = (proxy.service.clone(), request.clone(), content.clone());
            let commit = async move { service.commit(&wanted, version, Some(value.into())).await };
            match self.call(&proxy, &request, commit).await {
                Some(Ok(made)) => {
                    self.shared.tally.count("a version is made");
                    self.note(&format!("makes version {} of {} of {resource}", made.version.0, version.0));
                    let both = (version, made.version);
                    return self
                        .shared
                        .check(|checks| checks.committed(&resource, both, &content, clock::now()));
                }
                Some(Err(AcquireError::Conflict(_))) => {
                    return self.shared.tally.count("a version was made meanwhile");
                }
                // The same commit may be repeated.
                Some(Err(AcquireError::Store(_))) if request.request_id.is_some() => {}
                _ => return,
            }
        }
    }
}
