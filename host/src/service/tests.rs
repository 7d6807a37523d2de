//! Tests of moments inside the service; everything else is tested on the running proxy.

use std::sync::atomic::Ordering;

use super::acquire::{acquire, enqueue};
use super::planning::{Planned, plan};
use super::*;
use crate::clock;
use crate::config::{EngineLimits, PolicyConfig, PolicySigners, PolicySource, PushGuard, SettingPlaces};
use crate::lock::record::{Claim, Op, Outcome, Tag};
use crate::lock::table::Charge;
use crate::lock::{Call, Instant, LeaseRef, Mode, ServerTime, Space};
use crate::policy::{Compiler, Engine, Prepared, builtin};
use crate::recording::Recorder;
use crate::store::memory::{Memory, MemoryStore};
use crate::store::{Done, Page, Reply, StoreError, Stored};

pub(crate) fn service(memory: &Memory) -> Service {
    Service::start(parts(memory))
}

fn parts(memory: &Memory) -> Parts {
    Parts {
        peers: Arc::new(NoPeers),
        store: Arc::new(memory.store()),
        policies: policies(&Limits::default(), &[]),
        routes: Vec::new(),
        limits: Limits::default(),
        store_timeout_ms: 1_000,
        metrics: Metrics::default(),
        recorder: Recorder::off(),
    }
}

fn policies(limits: &Limits, settings: &[(&str, &str)]) -> Policies {
    let engine = Engine::new(&EngineLimits::default(), Compiler::InProcess).unwrap();
    let source = PolicySource::Builtin("default".into());
    let settings = settings.iter().map(|(name, value)| (name.to_string(), (*value).into())).collect();
    let configs = [PolicyConfig {
        name: "default".into(),
        source,
        settings,
        setting_places: SettingPlaces::default(),
        guard: PushGuard::default(),
        signers: PolicySigners::default(),
    }];
    Policies::load(&engine, &configs, limits, &Metrics::default()).unwrap()
}

pub(crate) fn memory() -> Memory {
    Memory::new(std::time::Duration::from_secs(60))
}

pub(crate) fn request(resource: &str) -> Request {
    Request {
        principal: Principal::ANONYMOUS,
        resource: resource.into(),
        owner: "worker-1".into(),
        mode: Mode::Exclusive,
        ttl_ms: None,
        wait_ms: None,
        request_id: None,
        labels: Vec::new(),
    }
}

#[tokio::test]
async fn a_request_that_was_planned_before_a_swap_is_planned_again() {
    let service = service(&memory());
    service.acquire(request("warm")).await.unwrap();
    let policies = &service.shared.policies;
    let planned = || {
        let generation = policies.get("default").unwrap();
        let plan = plan(&generation, "default", &request("a").for_policy()).unwrap();
        let version = policies.active("default").unwrap().version();
        Planned { live: generation.clone(), place: None, generation, plan, version }
    };
    let before = planned();
    let next = policies.prepare("default", builtin("fair-groups").unwrap(), None).unwrap();
    service.go_live(next).await.unwrap();
    assert!(enqueue(&service.shared, &request("a"), &before, Charge::default(), false).await.is_none());
    enqueue(&service.shared, &request("a"), &planned(), Charge::default(), false).await.unwrap().unwrap();
}

/// The default policy, with these settings.
fn default_with(service: &Service, settings: &[(&str, serde_json::Value)]) -> Prepared {
    let policies = &service.shared.policies;
    let live = policies.get("default").unwrap();
    let settings = settings.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
    policies.prepare("default", &live.component(), Some(settings)).unwrap()
}

/// A policy that denies shared claims and names one key for all resources.
fn once_in_one_stripe(service: &Service) -> Prepared {
    default_with(service, &[("primitive", "once".into()), ("stripes", 1.into())])
}

#[tokio::test]
async fn a_lease_that_the_next_policy_would_refuse_keeps_its_keys_until_it_ends() {
    let service = service(&memory());
    let shared = Request { mode: Mode::Shared, owner: "reader".into(), ..request("a") };
    let lease = service.acquire(shared.clone()).await.unwrap().lease;
    service.go_live(once_in_one_stripe(&service)).await.unwrap();
    let refused = service.acquire(shared).await.unwrap_err();
    assert!(matches!(refused, AcquireError::PolicyFault { .. }), "{refused}");
    let held = service.begin(request("a")).await.unwrap_err();
    assert!(matches!(held, AcquireError::Contended { .. }), "{held}");
    service.release(lease).await.unwrap();
    let begun = service.begin(request("a")).await.unwrap();
    assert!(matches!(begun, Begun::First(_)), "{begun:?}");
}

/// A `once` has one key, so the next policy refuses a request for two resources.
#[tokio::test]
async fn a_lease_of_two_resources_that_the_next_policy_would_refuse_keeps_both_keys() {
    let service = service(&memory());
    let several = ("separator", "+".into());
    service.go_live(default_with(&service, std::slice::from_ref(&several))).await.unwrap();
    let lease = service.acquire(request("a+b")).await.unwrap().lease;
    let next = [("primitive", "once".into()), ("stripes", 1_000_000.into()), several];
    service.go_live(default_with(&service, &next)).await.unwrap();
    for resource in ["a", "b"] {
        let held = service.begin(request(resource)).await.unwrap_err();
        assert!(matches!(held, AcquireError::Contended { .. }), "{held}");
    }
    service.release(lease).await.unwrap();
    for resource in ["a", "b"] {
        let Begun::First(lease) = service.begin(request(resource)).await.unwrap() else {
            panic!("{resource} was not done before")
        };
        service.release(lease.lease).await.unwrap();
    }
}

/// The next policy reads the name as two resources, one of which has no name.
#[tokio::test]
async fn a_policy_change_waits_for_leases_whose_next_keys_are_unknown() {
    let service = Service::start(Parts { store_timeout_ms: 200, ..parts(&memory()) });
    let lease = service.acquire(request("a+")).await.unwrap().lease;
    let several = default_with(&service, &[("separator", "+".into())]);
    let why = service.holds_up(several.generation().clone()).await.unwrap().expect("it is held up");
    assert!(why.contains("a+"), "{why}");
    service.name_with(several.clone()).await.unwrap();
    let meanwhile = service.acquire(request("b")).await.unwrap();
    service.release(meanwhile.lease).await.unwrap();
    service.go_live(several.clone()).await.unwrap();
    let early = service.acquire(request("c")).await.unwrap_err();
    assert!(matches!(early, AcquireError::NotYet { .. }), "{early}");
    service.release(lease).await.unwrap();
    for _ in 0..200 {
        if service.acquire(request("c")).await.is_ok() {
            assert_eq!(service.holds_up(several.generation().clone()).await.unwrap(), None);
            return;
        }
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    panic!("nothing is granted after the end of the lease");
}

/// Otherwise the waiter would wait for keys that no longer exclude anybody.
#[tokio::test]
async fn a_waiter_that_the_next_policy_refuses_is_refused() {
    refuses_a_waiter(async |service, next| drop(service.go_live(next).await.unwrap())).await;
}

/// A change in a fleet: other proxies may apply the next policy alone before the waiter is granted.
#[tokio::test]
async fn a_waiter_that_the_next_policy_refuses_is_refused_once_both_policies_name_keys() {
    refuses_a_waiter(async |service, next| service.name_with(next).await.unwrap()).await;
}

async fn refuses_a_waiter(change: impl AsyncFnOnce(&Service, Prepared)) {
    let service = service(&memory());
    let lease = service.acquire(request("a")).await.unwrap().lease;
    let shared =
        Request { mode: Mode::Shared, wait_ms: Some(60_000), owner: "reader".into(), ..request("a") };
    let waiter = tokio::spawn({
        let service = service.clone();
        async move { service.acquire(shared).await }
    });
    let waits = async || {
        service.show(&Principal::ANONYMOUS, "a").await.unwrap().is_some_and(|view| view.queue.len() == 1)
    };
    while !waits().await {
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    change(&service, once_in_one_stripe(&service)).await;
    let refused = tokio::time::timeout(std::time::Duration::from_secs(5), waiter).await;
    let refused = refused.expect("it is answered").unwrap().unwrap_err();
    assert!(matches!(refused, AcquireError::PolicyFault { .. }), "{refused}");
    service.release(lease).await.unwrap();
}

/// The lease was taken away before its renewal began.
#[tokio::test]
async fn a_hold_that_begins_after_the_end_of_its_lease_is_reported_lost_at_once() {
    let service = service(&memory());
    let request = Request { ttl_ms: Some(60_000), ..request("a") };
    let (lease, planned) = acquire(&service.shared, &request, Call::Acquire).await.unwrap();
    assert_eq!(service.force_release(lease.lease.keys[0].clone()).await.unwrap(), 1);
    let mut hold = Hold::new(service.clone(), lease, planned.into(), None);
    let told = tokio::time::timeout(std::time::Duration::from_secs(5), hold.next()).await;
    assert!(matches!(told, Ok(HoldEvent::Lost { .. })), "{told:?}");
}

/// Renews each lease but promises no time, like a proxy that is not a member of its fleet.
struct Unsure {
    store: MemoryStore,
    renewals: Arc<AtomicUsize>,
}

impl Store for Unsure {
    fn submit(&self, group: Vec<Op>, deadline: Instant, done: Done) {
        self.store.submit(group, deadline, done);
    }

    fn submit_renewal(&self, _op: Op, _deadline: Instant, done: Done) {
        self.renewals.fetch_add(1, Ordering::Relaxed);
        let outcomes = vec![Outcome::Renewed { left_us: 0 }];
        done(Ok(Reply { outcomes, asked_at: clock::now(), now: ServerTime::default() }));
    }

    fn list(
        &self,
        prefix: String,
        after: Option<Key>,
        limit: usize,
    ) -> crate::store::StoreFuture<Result<Page, StoreError>> {
        self.store.list(prefix, after, limit)
    }

    fn read(&self, key: Key) -> crate::store::StoreFuture<Result<Option<Stored>, StoreError>> {
        self.store.read(key)
    }

    fn health(&self) -> Health {
        self.store.health()
    }

    fn lacks(&self, space: Space) -> Option<String> {
        self.store.lacks(space)
    }
}

/// The lease is not renewed repeatedly.
#[tokio::test]
async fn a_hold_whose_renewals_grant_no_time_is_reported_lost() {
    let (memory, renewals) = (memory(), Arc::new(AtomicUsize::new(0)));
    let store = Arc::new(Unsure { store: memory.store(), renewals: renewals.clone() });
    let service = Service::start(Parts { store, ..parts(&memory) });
    let mut hold = service.hold(Request { ttl_ms: Some(1_500), ..request("a") }).await.unwrap();
    let told = tokio::time::timeout(std::time::Duration::from_secs(10), hold.next()).await;
    assert!(matches!(told, Ok(HoldEvent::Lost { .. })), "{told:?}");
    let renewals = renewals.load(Ordering::Relaxed);
    assert!((1..=10).contains(&renewals), "{renewals} renewals");
}

/// The lease was taken away through another proxy; otherwise watchers of this proxy would wait for its end
/// forever.
#[tokio::test]
async fn a_lease_found_lost_by_its_renewal_is_reported_to_watchers() {
    let memory = memory();
    let (one, other) = (service(&memory), service(&memory));
    let lease = one.acquire(Request { ttl_ms: Some(60_000), ..request("a") }).await.unwrap().lease;
    let mut notices = one.watch().expect("it is the only reader");
    assert_eq!(other.force_release(lease.keys[0].clone()).await.unwrap(), 1);
    assert!(matches!(one.renew(lease, None).await, Err(LeaseError::Lost)));
    let told = tokio::time::timeout(std::time::Duration::from_secs(5), notices.recv()).await;
    let told = told.expect("those who watch are told").unwrap();
    assert_eq!((told.kind, &*told.owner), (NoticeKind::Lost, "worker-1"));
}

/// An earlier run granted the resource under another key.
#[tokio::test]
async fn leases_of_an_earlier_run_are_read_before_the_first_grant() {
    let memory = memory();
    let claim = Claim {
        keys: [Key::new("old/a").unwrap()].into(),
        proxy: "".into(),
        waits: false,
        attempt: 1,
        owner: "worker-0".into(),
        request: None,
        fingerprint: 0,
        mode: Mode::Exclusive,
        ttl_ms: 60_000,
        at_least_ms: 0,
        delay_ms: 0,
        reentrant: false,
        keep_ms: None,
        global: None,
        any: false,
        delegable: None,
        tag: Tag { resource: "a".into(), policy: "default@sha256:0".into(), ..Tag::default() },
    };
    let (done, answer) = oneshot::channel();
    let earlier = memory.store();
    let deadline = clock::now().plus_ms(1_000);
    earlier.submit(vec![Op::Acquire(claim)], deadline, Box::new(|result| drop(done.send(result))));
    let granted = answer.await.unwrap().unwrap().outcomes.remove(0);
    let Outcome::Granted(grant) = granted else { panic!("{granted:?}") };

    let service = service(&memory);
    let held = service.acquire(request("a")).await.unwrap_err();
    assert!(matches!(held, AcquireError::Contended { .. }), "{held}");
    service.acquire(request("b")).await.unwrap();

    // After the end of that lease, its key is not asked for any more.
    let keys: Arc<[Key]> = [Key::new("old/a").unwrap()].into();
    service
        .release(LeaseRef { keys, nonce: grant.nonce, token: Some(grant.tokens[0]), principal: None })
        .await
        .unwrap();
    for _ in 0..200 {
        let lease = service.acquire(request("a")).await.unwrap();
        service.release(lease.lease.clone()).await.unwrap();
        if lease.tokens.len() == 1 {
            return;
        }
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    panic!("the shadow is not lifted");
}

/// A lease that the proxy itself gives up is left to expire, because the worker under it may not know of the
/// loss yet.
#[tokio::test]
async fn a_kept_lease_reported_lost_runs_out_unless_its_work_is_done() {
    for done in [false, true] {
        let limits = Limits { max_hold_ms: 100, ..Limits::default() };
        let service = Service::start(Parts { policies: policies(&limits, &[]), limits, ..parts(&memory()) });
        let hold = service.hold(Request { ttl_ms: Some(1_200), ..request("a") }).await.unwrap();
        let until = hold.lease.valid_until;
        let keeping = hold.keep();
        keeping.watch().wait_for(Option::is_some).await.unwrap();
        if done {
            keeping.release();
        } else {
            drop(keeping);
        }
        service.acquire(Request { wait_ms: Some(5_000), ..request("a") }).await.unwrap();
        assert_eq!(clock::now() < until, done);
    }
}

/// A call that is in flight when the lease ends may have been applied before: its answer says what is stored.
#[tokio::test]
async fn a_stored_outcome_is_confirmed_although_its_answer_arrives_after_the_lease_end() {
    let memory = memory();
    let policies = policies(&Limits::default(), &[("primitive", "once")]);
    let service = Service::start(Parts { policies, store_timeout_ms: 20_000, ..parts(&memory) });
    let guarded = service.guard(&Request { ttl_ms: Some(400), ..request("a") }).await.unwrap();
    let Guarded::Held(hold) = guarded else { panic!("it was not done before") };
    let keeping = hold.keep();
    memory.answer_late(900);
    keeping.finish("1".into()).await.unwrap();
}

/// Even before the loss is reported, a guarded request must not be forwarded.
#[tokio::test]
async fn a_lease_whose_grant_comes_after_its_end_is_not_certain() {
    for (late_ms, is_certain) in [(0, true), (2_000, false)] {
        let memory = memory();
        let service = service(&memory);
        memory.answer_late(late_ms);
        let guarded = service.guard(&Request { ttl_ms: Some(1_000), ..request("a") }).await.unwrap();
        let Guarded::Held(hold) = guarded else { panic!("it was not done before") };
        assert_eq!(hold.keep().is_certain(), is_certain, "{late_ms} ms late");
    }
}

/// The worker under the lease has to stop before its end, even if the store does not answer.
#[tokio::test]
async fn a_kept_lease_is_reported_lost_before_its_end_when_the_store_does_not_answer() {
    let memory = memory();
    let service = service(&memory);
    let hold = service.hold(Request { ttl_ms: Some(3_000), ..request("a") }).await.unwrap();
    let until = hold.lease.valid_until;
    memory.answer_late(10_000);
    let keeping = hold.keep();
    keeping.watch().wait_for(Option::is_some).await.unwrap();
    assert!(clock::now() < until, "it was told after its end");
}
