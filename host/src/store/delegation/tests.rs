use std::collections::HashMap as Map;
use std::sync::Mutex as StdMutex;

use super::*;
use crate::clock;
use crate::lock::record::{Claim, Delegable, Grant, Outcome, Release, When};
use crate::lock::{LeaseRef, Mode};
use crate::store::contract;
use crate::store::memory::Memory;
use crate::telemetry::Metrics;

const BOUNDS: Bounds = Bounds {
    longest_ms: 3_600_000,
    drift_per_mille: 1,
    timeout: Duration::from_secs(5),
    tokens: Bounds::TOKENS,
};

/// The proxies of one store, which notify each other.
#[derive(Clone, Default)]
struct Proxies(Arc<StdMutex<Map<String, Weak<Delegations>>>>);

impl Proxies {
    fn start(&self, name: &str, memory: &Memory) -> Arc<Delegations> {
        self.member(name, memory, Box::new(|| Life { number: 0, may_grant: true }))
    }

    fn member(&self, name: &str, memory: &Memory, lives: Lives) -> Arc<Delegations> {
        let store = Arc::new(Delegations::new(Arc::new(memory.store()), BOUNDS, lives, Metrics::default()));
        let proxies = self.clone();
        let notify = move |proxy: &str, key: &Key| {
            let peer = proxies.0.lock().unwrap().get(proxy).and_then(Weak::upgrade);
            if let Some(peer) = peer {
                peer.outdated(key);
            }
        };
        store.connect(name.into(), Box::new(notify));
        self.0.lock().unwrap().insert(name.to_owned(), Arc::downgrade(&store));
        store
    }

    /// A proxy whose claims may all be delegated.
    fn eager(&self, name: &str, memory: &Memory) -> Arc<dyn Store> {
        let (store, name) = (self.start(name, memory), name.into());
        Arc::new(contract::Changed { store, change: move |claim| eager(claim, &name) })
    }
}

fn eager(claim: Claim, name: &Arc<str>) -> Claim {
    let delegable = Some(Delegable { rules: "p@1".into(), when: When::Always });
    Claim { proxy: name.clone(), delegable, ..claim }
}

fn memory() -> Memory {
    Memory::new(Duration::from_secs(3_600))
}

fn claim(key: &str, owner: &str, name: &str) -> Claim {
    eager(contract::claim(&[key], owner), &name.into())
}

async fn run(store: &dyn Store, op: Op) -> Result<Outcome, StoreError> {
    let (tell, told) = tokio::sync::oneshot::channel();
    let deadline = clock::now().plus_ms(5_000);
    store.submit(vec![op], deadline, Box::new(move |result| drop(tell.send(result))));
    told.await.expect("it is answered").map(|mut reply| reply.outcomes.pop().expect("an outcome"))
}

async fn acquire(store: &dyn Store, claim: &Claim) -> Outcome {
    run(store, Op::Acquire(claim.clone())).await.expect("the store answers")
}

async fn granted(store: &dyn Store, claim: &Claim) -> Grant {
    match acquire(store, claim).await {
        Outcome::Granted(grant) => grant,
        other => panic!("{other:?}"),
    }
}

fn lease(claim: &Claim, grant: &Grant) -> LeaseRef {
    LeaseRef { keys: claim.keys.clone(), nonce: grant.nonce, token: Some(grant.tokens[0]), principal: None }
}

async fn release(store: &dyn Store, lease: LeaseRef) -> Outcome {
    let attempt = contract::fresh();
    run(store, Op::Release(Release { lease, attempt, outcome: None })).await.expect("the store answers")
}

fn is_delegated(store: &Delegations, key: &Key) -> bool {
    store.shared.state.lock().held(key).is_some()
}

const RELEASED: Outcome = Outcome::Released { levels_left: 0 };

#[tokio::test]
async fn delegations_keep_the_contract() {
    let (lasting, forgetful) = (memory(), Memory::new(contract::FORGETS_AFTER));
    let proxies = Proxies::default();
    let count = StdMutex::new(0);
    contract::run_all(|kind| {
        let number = {
            let mut count = count.lock().unwrap();
            *count += 1;
            *count
        };
        let memory = if kind == contract::Kind::Lasting { &lasting } else { &forgetful };
        std::future::ready(proxies.eager(&format!("proxy-{number}"), memory))
    })
    .await;
}

#[tokio::test]
async fn a_delegated_key_is_granted_without_the_store() {
    let memory = memory();
    let store = Proxies::default().start("one", &memory);
    let first = claim("k", "a", "one");
    let mut last = granted(&*store, &first).await;
    assert!(is_delegated(&store, &first.keys[0]));
    memory.set_outage(Some("down"));
    for n in 0..5 {
        assert!(matches!(acquire(&*store, &claim("k", "b", "one")).await, Outcome::Held(_)));
        assert_eq!(release(&*store, lease(&first, &last)).await, RELEASED);
        let next = granted(&*store, &claim("k", &format!("owner {n}"), "one")).await;
        assert!(next.tokens[0] > last.tokens[0]);
        last = next;
    }
}

#[tokio::test]
async fn another_proxy_gets_a_delegated_key_and_its_leases() {
    let (memory, proxies) = (memory(), Proxies::default());
    let (one, two) = (proxies.start("one", &memory), proxies.start("two", &memory));
    let mine = claim("k", "a", "one");
    let first = granted(&*one, &mine).await;
    release(&*one, lease(&mine, &first)).await;
    let mine = claim("k", "a", "one");
    let held = granted(&*one, &mine).await;
    // A renewal and a release at the other proxy.
    let renew = Op::Renew { lease: lease(&mine, &held), ttl_ms: None };
    assert!(matches!(run(&*two, renew).await, Ok(Outcome::Renewed { .. })));
    assert!(!is_delegated(&one, &mine.keys[0]));
    assert_eq!(release(&*two, lease(&mine, &held)).await, RELEASED);
    let yours = claim("k", "b", "two");
    let grant = granted(&*two, &yours).await;
    assert!(grant.tokens[0] > held.tokens[0]);
    assert!(is_delegated(&two, &yours.keys[0]));
}

#[tokio::test]
async fn a_repeated_request_gets_its_lease_from_another_proxy() {
    let (memory, proxies) = (memory(), Proxies::default());
    let (one, two) = (proxies.start("one", &memory), proxies.start("two", &memory));
    let first = claim("k", "a", "one");
    release(&*one, lease(&first, &granted(&*one, &first).await)).await;
    let mine = Claim { request: Some("r".into()), ..claim("k", "a", "one") };
    let held = granted(&*one, &mine).await;
    let again =
        granted(&*two, &Claim { attempt: contract::fresh(), proxy: "two".into(), ..mine.clone() }).await;
    assert_eq!((again.nonce, &again.tokens), (held.nonce, &held.tokens));
    assert!(again.repeated);
}

#[tokio::test]
async fn a_lease_ends_before_its_delegation_does() {
    let memory = memory();
    let store = Proxies::default().start("one", &memory);
    let short = Claim { ttl_ms: 1_000, ..claim("k", "a", "one") };
    release(&*store, lease(&short, &granted(&*store, &short).await)).await;
    let long = Claim { ttl_ms: 60_000, ..claim("k", "b", "one") };
    memory.set_outage(Some("down"));
    let refused = run(&*store, Op::Acquire(long.clone())).await;
    assert!(refused.is_err(), "the delegation cannot be extended: {refused:?}");
    memory.set_outage(None);
    granted(&*store, &Claim { attempt: contract::fresh(), ..long }).await;
    let short = Claim { ttl_ms: 1_000, ..claim("l", "a", "one") };
    release(&*store, lease(&short, &granted(&*store, &short).await)).await;
    let long = Claim { ttl_ms: 60_000, ..claim("l", "b", "one") };
    assert!(granted(&*store, &long).await.left_us <= 60_000_000);
    assert!(is_delegated(&store, &long.keys[0]));
    let stored = memory.store().read(long.keys[0].clone()).await.expect("it reads").expect("it is there");
    let latest = stored.record.holders.iter().map(|holder| holder.until).max().expect("it is held");
    assert!(latest.us_since(stored.now) > 60_000_000, "{latest:?}");
}

#[tokio::test]
async fn a_membership_that_has_ended_takes_the_delegated_keys_with_it() {
    let (memory, proxies) = (memory(), Proxies::default());
    let life = Arc::new(std::sync::atomic::AtomicU64::new(1));
    let seen = life.clone();
    let member = move || Life { number: seen.load(std::sync::atomic::Ordering::SeqCst), may_grant: true };
    let store = proxies.member("one", &memory, Box::new(member));
    let lost = Arc::new(StdMutex::new(Vec::new()));
    let told = lost.clone();
    store.on_loss(Arc::new(move |nonces| told.lock().unwrap().extend(nonces)));
    let mine = claim("k", "a", "one");
    let grant = granted(&*store, &mine).await;
    life.store(2, std::sync::atomic::Ordering::SeqCst);
    let renewed = run(&*store, Op::Renew { lease: lease(&mine, &grant), ttl_ms: None }).await;
    assert_eq!(renewed.ok(), Some(Outcome::Lost));
    assert_eq!(*lost.lock().unwrap(), [grant.nonce]);
    assert!(
        matches!(acquire(&*store, &claim("k", "b", "one")).await, Outcome::Held(_)),
        "it is taken until it ends"
    );
}

#[tokio::test]
async fn a_proxy_that_may_not_grant_decides_about_no_key() {
    let (memory, proxies) = (memory(), Proxies::default());
    let may_grant = Arc::new(std::sync::atomic::AtomicBool::new(true));
    let seen = may_grant.clone();
    let member = move || Life { number: 1, may_grant: seen.load(std::sync::atomic::Ordering::SeqCst) };
    let store = proxies.member("one", &memory, Box::new(member));
    let mine = claim("k", "a", "one");
    release(&*store, lease(&mine, &granted(&*store, &mine).await)).await;
    assert!(is_delegated(&store, &mine.keys[0]));
    may_grant.store(false, std::sync::atomic::Ordering::SeqCst);
    granted(&*store, &claim("k", "b", "one")).await;
    assert!(!is_delegated(&store, &mine.keys[0]));
}

#[tokio::test]
async fn a_suspended_proxy_has_put_all_leases_into_the_store() {
    let memory = memory();
    let store = Proxies::default().start("one", &memory);
    let claims: Vec<Claim> = (0..20).map(|n| claim(&format!("k{n}"), "a", "one")).collect();
    let mut held = Vec::new();
    for claim in &claims {
        let first = granted(&*store, claim).await;
        release(&*store, lease(claim, &first)).await;
        let claim = Claim { attempt: contract::fresh(), mode: Mode::Shared, ..claim.clone() };
        held.push((claim.clone(), granted(&*store, &claim).await));
    }
    store.suspend_delegations().await;
    let plain = memory.store();
    for (claim, grant) in &held {
        let stored = plain.read(claim.keys[0].clone()).await.expect("it reads").expect("it is there");
        let nonces: Vec<u64> = stored.record.holders.iter().map(|holder| holder.nonce).collect();
        assert_eq!(nonces, [grant.nonce]);
        assert_eq!(release(&plain, lease(claim, grant)).await, RELEASED);
    }
    granted(&*store, &claim("k0", "b", "one")).await;
    assert!(!is_delegated(&store, &claims[0].keys[0]));
    store.resume_delegations();
    granted(&*store, &claim("k1", "b", "one")).await;
    assert!(is_delegated(&store, &claims[1].keys[0]));
}

#[tokio::test]
async fn a_lost_answer_leaves_no_delegation_behind() {
    let memory = memory();
    let store = Proxies::default().start("one", &memory);
    let mine = claim("k", "a", "one");
    memory.lose(1);
    assert!(run(&*store, Op::Acquire(mine.clone())).await.is_err());
    let abandon = Op::Abandon { keys: mine.keys.clone(), attempt: mine.attempt };
    assert_eq!(run(&*store, abandon).await.ok(), Some(Outcome::Abandoned));
    granted(&*store, &claim("k", "b", "one")).await;
}
