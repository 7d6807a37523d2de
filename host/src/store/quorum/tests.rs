use super::super::contract::{self, claim, fresh};
use super::super::memory::Memory;
use super::*;
use crate::lock::Mode;
use crate::lock::record::{Claim, Release};

/// Several stores, and any number of proxies that use them.
struct World {
    memories: Vec<Memory>,
}

impl World {
    fn new(members: usize) -> World {
        World { memories: (0..members).map(|_| Memory::new(Duration::from_secs(3_600))).collect() }
    }

    fn proxy(&self) -> Quorum {
        let member =
            |(n, memory): (usize, &Memory)| Member { name: n.to_string(), store: Arc::new(memory.store()) };
        let members = self.memories.iter().enumerate().map(member).collect();
        Quorum::new(members, Duration::from_secs(1), always())
    }

    fn stop(&self, members: std::ops::Range<usize>) {
        self.memories[members].iter().for_each(|memory| memory.set_outage(Some("it is stopped")));
    }

    async fn holders(&self) -> usize {
        let mut holders = 0;
        for memory in &self.memories {
            memory.set_outage(None);
            let page = memory.store().list(String::new(), None, 99).await.expect("it lists");
            holders += page.items.iter().map(|stored| stored.record.holders.len()).sum::<usize>();
        }
        holders
    }
}

fn always() -> Allowed {
    Arc::new(|| Instant(u64::MAX))
}

async fn submit(store: &Quorum, op: Op) -> Result<Outcome, StoreError> {
    let (tell, told) = tokio::sync::oneshot::channel();
    let deadline = clock::now().plus_ms(10_000);
    store.submit(vec![op], deadline, Box::new(move |result| drop(tell.send(result))));
    told.await.expect("it is answered").map(|mut reply: Reply| reply.outcomes.remove(0))
}

fn quorum_claim(name: &str, owner: &str) -> Claim {
    let claim = claim(&[name], owner);
    Claim { keys: claim.keys.iter().map(|key| key.clone().within(Space::Quorum)).collect(), ..claim }
}

async fn token(store: &Quorum, claim: &Claim) -> (Token, LeaseRef) {
    match submit(store, Op::Acquire(claim.clone())).await {
        Ok(Outcome::Granted(grant)) => {
            let lease = LeaseRef {
                keys: claim.keys.clone(),
                nonce: grant.nonce,
                token: Some(grant.tokens[0]),
                principal: None,
            };
            (grant.tokens[0], lease)
        }
        other => panic!("it should be granted, and is {other:?}"),
    }
}

fn release(lease: LeaseRef) -> Op {
    Op::Release(Release { lease, attempt: fresh(), outcome: None })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_quorum_keeps_the_applicable_part_of_the_contract() {
    let world = World::new(3);
    contract::run_session_locks(Arc::new(world.proxy()), Arc::new(world.proxy()), Space::Quorum).await;
    contract::run_fleet(Arc::new(world.proxy()), Arc::new(world.proxy()), Space::Quorum).await;
}

/// A member that grants late gives a higher token and answers when the client repeats its request.
#[tokio::test]
async fn a_lease_is_valid_under_each_token_that_was_reported_for_it() {
    let world = World::new(3);
    let proxy = world.proxy();
    claimed_at(&world, 2).await;
    let free = Op::Force { key: claim(&["k"], "you").keys[0].clone() };
    assert_eq!(at_member(&world, 2, free).await, Outcome::Forced { holders: 1 });
    let stop = |n: usize, why| world.memories[n].set_outage(why);
    let claim = Claim { request: Some("r".into()), ..quorum_claim("k", "me") };
    stop(2, Some("it is stopped"));
    let (first, lease) = token(&proxy, &claim).await;
    stop(2, None);
    let late = Claim { keys: contract::claim(&["k"], "me").keys, ..claim.clone() };
    assert!(matches!(at_member(&world, 2, Op::Acquire(late)).await, Outcome::Granted(_)));
    stop(0, Some("it is stopped"));
    let (raised, again) = token(&proxy, &Claim { attempt: fresh(), ..claim }).await;
    assert!(raised > first, "the third member gave a higher token: {raised:?} after {first:?}");
    assert_eq!(again.nonce, lease.nonce, "it is the same lease");
    stop(0, None);
    for lease in [&lease, &again] {
        let renewed = submit(&proxy, Op::Renew { lease: lease.clone(), ttl_ms: None }).await;
        assert!(matches!(renewed, Ok(Outcome::Renewed { .. })), "{renewed:?}");
    }
    let released = submit(&proxy, release(lease)).await;
    assert!(matches!(released, Ok(Outcome::Released { .. })), "{released:?}");
    assert_eq!(world.holders().await, 0);
}

#[tokio::test]
async fn a_quorum_grants_without_a_minority_and_not_without_a_majority() {
    let world = World::new(5);
    let proxy = world.proxy();
    world.stop(0..2);
    let (_, lease) = token(&proxy, &quorum_claim("k", "me")).await;
    assert!(matches!(submit(&proxy, Op::Acquire(quorum_claim("k", "you"))).await, Ok(Outcome::Held(_))));
    assert_eq!(
        submit(&proxy, release(lease)).await.expect("it answers"),
        Outcome::Released { levels_left: 0 }
    );
    world.stop(0..3);
    let claim = quorum_claim("k", "me");
    let error = submit(&proxy, Op::Acquire(claim.clone())).await.expect_err("there is no majority");
    assert!(error.to_string().contains("stores.0"), "{error}");
    assert_eq!(world.holders().await, 2);
    let abandon = Op::Abandon { keys: claim.keys.clone(), attempt: claim.attempt };
    assert!(matches!(submit(&proxy, abandon).await, Ok(Outcome::Abandoned)));
    assert_eq!(world.holders().await, 0, "nothing is left behind");
}

/// With a limit of two, three leases of one permit each could each have a majority, although no member would
/// have granted more than two permits.
#[tokio::test]
async fn majorities_do_not_grant_more_permits_than_there_are() {
    let world = World::new(3);
    let proxy = world.proxy();
    let permit = |owner| Claim { mode: Mode::Permits { count: 1, limit: 2 }, ..quorum_claim("k", owner) };
    let stop = |n: usize, why| world.memories[n].set_outage(why);
    for (away, owner) in [(2, "a"), (0, "b")] {
        stop(away, Some("it is stopped"));
        token(&proxy, &permit(owner)).await;
        stop(away, None);
    }
    for away in [None, Some(1)] {
        if let Some(away) = away {
            stop(away, Some("it is stopped"));
        }
        let refused = submit(&proxy, Op::Acquire(permit("c"))).await;
        assert!(matches!(refused, Ok(Outcome::Held(_))), "{away:?}: {refused:?}");
    }
    stop(1, None);
    let holders = world.holders().await;
    assert_eq!(holders, 4, "what the third was granted is taken back");
}

/// Every majority has a higher token than all earlier ones, although each member counts separately.
#[tokio::test]
async fn tokens_rise_over_changing_majorities() {
    let world = World::new(5);
    let proxy = world.proxy();
    let mut last = Token::default();
    for round in 0..30 {
        let away = [0..2, 1..3, 2..4, 3..5][round % 4].clone();
        world.stop(away);
        let (token, lease) = token(&proxy, &quorum_claim("k", "me")).await;
        assert!(token > last, "{token} comes after {last} in round {round}");
        last = token;
        submit(&proxy, release(lease)).await.expect("it is released");
        world.memories.iter().for_each(|memory| memory.set_outage(None));
        // The leases that an absent member still holds expire.
        world.memories.iter().for_each(|memory| memory.advance_ms(11_000));
    }
}

#[tokio::test]
async fn a_quorum_does_not_wait_for_a_slow_member() {
    let world = World::new(5);
    let proxy = world.proxy();
    // This member never answers.
    let members: Vec<Member> = world
        .memories
        .iter()
        .enumerate()
        .map(|(n, memory)| {
            let store: Arc<dyn Store> = if n == 0 { Arc::new(Silent) } else { Arc::new(memory.store()) };
            Member { name: n.to_string(), store }
        })
        .collect();
    let slow = Quorum::new(members, Duration::from_secs(60), always());
    let begun = clock::now();
    token(&slow, &quorum_claim("k", "me")).await;
    assert!(matches!(submit(&slow, Op::Acquire(quorum_claim("k", "you"))).await, Ok(Outcome::Held(_))));
    assert!(clock::now().ms_since(begun) < 5_000, "the majority was there at once");
    let impatient =
        Quorum { members: slow.members.clone(), allowed: always(), patience: Duration::from_millis(50) };
    assert_eq!(listed(&impatient).await.len(), 1);
    assert!(clock::now().ms_since(begun) < 5_000, "a page is not waited for");
    assert!(matches!(submit(&proxy, Op::Acquire(quorum_claim("k", "you"))).await, Ok(Outcome::Held(_))));
}

/// Otherwise each claim would repeatedly get some of the members and none the majority.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_of_several_simultaneous_claims_is_granted() {
    let world = World::new(5);
    let proxies: Vec<Arc<Quorum>> = (0..5).map(|_| Arc::new(world.proxy())).collect();
    for round in 0..40 {
        let claim = |n: usize| quorum_claim(&format!("k{round}"), &n.to_string());
        let asked = proxies.iter().cloned().enumerate().map(|(n, proxy)| {
            let claim = claim(n);
            tokio::spawn(async move { submit(&proxy, Op::Acquire(claim)).await })
        });
        let mut granted = 0;
        for asked in asked.collect::<Vec<_>>() {
            match asked.await.expect("it does not panic") {
                Ok(Outcome::Granted(_)) => granted += 1,
                Ok(Outcome::Held(_)) => {}
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(granted, 1, "in round {round}");
    }
}

/// Each claim reaches another member first and would get it, if it asked all members at the same time.
#[tokio::test]
async fn one_of_several_claims_that_reach_different_members_first_is_granted() {
    let world = World::new(3);
    let proxy = |nearest: usize| {
        let member = |(n, memory): (usize, &Memory)| {
            let store: Arc<dyn Store> = Arc::new(memory.store());
            let store = if n == nearest { store } else { Arc::new(Late(store)) };
            Member { name: n.to_string(), store }
        };
        let members = world.memories.iter().enumerate().map(member).collect();
        Quorum::new(members, Duration::from_secs(5), always())
    };
    let proxies = [proxy(0), proxy(1), proxy(2)];
    for round in 0..3 {
        let ask = async |n: usize| {
            submit(&proxies[n], Op::Acquire(quorum_claim(&format!("k{round}"), &n.to_string()))).await
        };
        let (one, two, three) = tokio::join!(ask(0), ask(1), ask(2));
        let answers = [one, two, three];
        let granted = answers.iter().filter(|answer| matches!(answer, Ok(Outcome::Granted(_))));
        assert_eq!(granted.count(), 1, "in round {round}: {answers:?}");
    }
}

/// The pauses that the claims of several proxies are told when they are refused one after another.
async fn pauses(proxy: &Quorum) -> Vec<u64> {
    let mut pauses = Vec::new();
    for _ in 0..20 {
        match submit(proxy, Op::Acquire(quorum_claim("k", "me"))).await {
            Ok(Outcome::Held(denial)) => pauses.push(denial.free_in_us),
            other => panic!("it should be held, and is {other:?}"),
        }
    }
    pauses
}

/// The answer of a single member.
async fn at_member(world: &World, member: usize, op: Op) -> Outcome {
    let (tell, told) = tokio::sync::oneshot::channel();
    let done: Done = Box::new(|result| drop(tell.send(result)));
    world.memories[member].store().submit(vec![op], clock::now().plus_ms(10_000), done);
    let reply: Result<Reply, StoreError> = told.await.expect("it is answered");
    reply.expect("it is there").outcomes.remove(0)
}

/// Makes a claim that only one member knows.
async fn claimed_at(world: &World, member: usize) {
    let outcome = at_member(world, member, Op::Acquire(claim(&["k"], "you"))).await;
    assert!(matches!(outcome, Outcome::Granted(_)));
}

/// Whether all pauses are equal, so that the claims would collide again.
fn is_in_step(pauses: &[u64]) -> bool {
    pauses.iter().all(|pause| *pause == pauses[0])
}

/// The first member has granted another claim, which is asking the other members or has given up.
#[tokio::test]
async fn a_claim_refused_by_the_first_member_pauses_longer_for_an_older_holder() {
    let world = World::new(3);
    let proxy = world.proxy();
    claimed_at(&world, proxy.first(&quorum_claim("k", "me").keys[0])).await;
    let early = pauses(&proxy).await;
    assert!(!is_in_step(&early), "{early:?}");
    world.memories.iter().for_each(|memory| memory.advance_ms(1_500));
    let late = pauses(&proxy).await;
    assert!(late.iter().any(|pause| *pause > 200_000), "{early:?}, and later {late:?}");
}

/// One member has granted this claim, another member a different claim, and the third is absent.
#[tokio::test]
async fn claims_that_split_the_members_do_not_retry_in_step() {
    let world = World::new(3);
    let proxy = world.proxy();
    let first = proxy.first(&quorum_claim("k", "me").keys[0]);
    let (second, third) = ((first + 1) % 3, (first + 2) % 3);
    claimed_at(&world, second).await;
    world.stop(third..third + 1);
    let pauses = pauses(&proxy).await;
    assert!(!is_in_step(&pauses), "{pauses:?}");
}

/// The first member has a holder that the other members no longer have.
#[tokio::test]
async fn a_holder_left_on_a_single_member_blocks_no_claim() {
    let world = World::new(3);
    let proxy = world.proxy();
    let claim = Claim { ttl_ms: 3_600_000, ..quorum_claim("k", "me") };
    let first = proxy.first(&claim.keys[0]);
    let (_, lease) = token(&proxy, &claim).await;
    world.stop(first..first + 1);
    submit(&proxy, release(lease)).await.expect("it is released");
    world.memories[first].set_outage(None);
    world.memories.iter().for_each(|memory| memory.advance_ms(10_000));
    token(&proxy, &quorum_claim("k", "you")).await;
}

/// Members of which the last one fails without saying whether it applied an operation.
fn with_a_failing_member(world: &World) -> (Quorum, Arc<Failing>) {
    let failing = Arc::new(Failing::default());
    let member = |(n, memory): (usize, &Memory)| {
        let store: Arc<dyn Store> = if n < 2 { Arc::new(memory.store()) } else { failing.clone() };
        Member { name: n.to_string(), store }
    };
    let members = world.memories.iter().enumerate().map(member).collect();
    (Quorum::new(members, Duration::from_millis(200), always()), failing)
}

#[tokio::test]
async fn a_refused_claim_is_undone_for_as_long_as_its_lease_may_last() {
    let world = World::new(3);
    token(&world.proxy(), &quorum_claim("k", "you")).await;
    world.memories.iter().for_each(|memory| memory.advance_ms(5_000));
    let (proxy, failing) = with_a_failing_member(&world);
    let claim = Claim { ttl_ms: 600_000, ..quorum_claim("k", "me") };
    let held = submit(&proxy, Op::Acquire(claim)).await.expect("it is refused");
    assert!(matches!(held, Outcome::Held(_)), "{held:?}");
    let asked = failing.0.lock();
    let [(Op::Acquire(_), deadline), (Op::Abandon { .. }, until)] = &asked[..] else { panic!("{asked:?}") };
    assert!(until.ms_since(*deadline) >= 600_000, "it is undone as soon as the member is back");
}

/// The claim is sent again with the same attempt; undoing it could arrive after the grant.
#[tokio::test]
async fn a_claim_without_a_majority_is_not_undone_by_the_quorum() {
    let world = World::new(3);
    let (proxy, failing) = with_a_failing_member(&world);
    world.stop(0..2);
    submit(&proxy, Op::Acquire(quorum_claim("k", "me"))).await.expect_err("there is no majority");
    let asked = failing.0.lock();
    assert!(matches!(asked[..], [(Op::Acquire(_), _)]), "{asked:?}");
}

/// Records its operations, and fails.
#[derive(Default)]
struct Failing(Mutex<Vec<(Op, Instant)>>);

impl Store for Failing {
    fn submit(&self, group: Vec<Op>, deadline: Instant, done: Done) {
        self.0.lock().extend(group.into_iter().map(|op| (op, deadline)));
        done(Err(StoreError::Unavailable { why: "it fails".to_owned() }));
    }

    fn list(
        &self,
        _prefix: String,
        _after: Option<Key>,
        _limit: usize,
    ) -> StoreFuture<Result<Page, StoreError>> {
        Box::pin(std::future::pending())
    }

    fn read(&self, _key: Key) -> StoreFuture<Result<Option<Stored>, StoreError>> {
        Box::pin(std::future::pending())
    }

    fn health(&self) -> Health {
        Health::Ready { server: "failing".into(), warnings: Vec::new() }
    }

    fn lacks(&self, _space: Space) -> Option<String> {
        None
    }
}

async fn listed(proxy: &Quorum) -> Vec<Stored> {
    proxy.list(String::new(), None, 9).await.expect("it lists").items
}

/// A majority granted the lease, but only one of the members that now answer did.
#[tokio::test]
async fn a_lease_is_visible_to_every_majority() {
    let world = World::new(3);
    let proxy = world.proxy();
    world.stop(2..3);
    let claim = quorum_claim("k", "me");
    let (_, lease) = token(&proxy, &claim).await;
    world.memories[2].set_outage(None);
    world.stop(0..1);
    let seen = listed(&proxy).await;
    assert_eq!(seen[0].record.holders[0].nonce, lease.nonce);
    let read = proxy.read(claim.keys[0].clone()).await.expect("it reads").expect("it is known");
    assert_eq!(read.record.holders.len(), 1);
    world.memories[0].set_outage(None);
    submit(&proxy, release(lease)).await.expect("it is released");
    assert!(listed(&proxy).await.is_empty());
}

/// Each member has its own clock, and the clocks differ.
#[tokio::test]
async fn a_lease_is_visible_whatever_the_clocks_of_the_members_say() {
    let world = World::new(3);
    world.memories[0].advance_ms(3_600_000);
    let proxy = world.proxy();
    let (_, lease) = token(&proxy, &quorum_claim("k", "me")).await;
    let seen = listed(&proxy).await;
    let holder = &seen[0].record.holders[0];
    assert_eq!((holder.nonce, seen[0].record.holders.len()), (lease.nonce, 1));
    let left_ms = holder.until.ms_since(seen[0].now);
    assert!((1..=10_000).contains(&left_ms), "{left_ms} ms");
    assert!(holder.since <= seen[0].now);
}

/// A proxy that was paused and continues after the end of its membership writes nothing.
#[tokio::test]
async fn nothing_is_written_after_the_end_of_a_membership() {
    let world = World::new(3);
    let until = Arc::new(Mutex::new(Instant(u64::MAX)));
    let allowed: Allowed = {
        let until = until.clone();
        Arc::new(move || *until.lock())
    };
    let member =
        |memory: &Memory| Member { name: "late".to_owned(), store: Arc::new(Late(Arc::new(memory.store()))) };
    let members = world.memories.iter().map(member).collect();
    let proxy = Quorum::new(members, Duration::from_secs(5), allowed);
    let (_, lease) = token(&proxy, &quorum_claim("held", "me")).await;
    let renew = Op::Renew { lease: lease.clone(), ttl_ms: Some(20_000) };

    let allow = |ms: u32| *until.lock() = clock::now().plus_ms(ms);
    allow(LATE_MS / 2);
    let error = submit(&proxy, Op::Acquire(quorum_claim("k", "me"))).await.expect_err("it is too late");
    assert!(error.to_string().contains("the deadline has passed"), "{error}");
    for op in [Op::Acquire(quorum_claim("k", "me")), renew.clone()] {
        let error = submit(&proxy, op).await.expect_err("it is no member");
        assert!(error.to_string().contains(NO_MEMBER), "{error}");
    }
    tokio::time::sleep(Duration::from_millis(3 * u64::from(LATE_MS))).await;
    assert_eq!(world.holders().await, 3, "the first lease alone, on each store");
    allow(60_000);
    assert!(matches!(submit(&proxy, renew).await, Ok(Outcome::Renewed { .. })));
    submit(&proxy, release(lease)).await.expect("it is released");
}

const LATE_MS: u32 = 100;

/// Delays every call a little.
struct Late(Arc<dyn Store>);

impl Store for Late {
    fn submit(&self, group: Vec<Op>, deadline: Instant, done: Done) {
        let store = self.0.clone();
        tokio::spawn(async move {
            tokio::time::sleep(Duration::from_millis(u64::from(LATE_MS))).await;
            store.submit(group, deadline, done);
        });
    }

    fn list(
        &self,
        prefix: String,
        after: Option<Key>,
        limit: usize,
    ) -> StoreFuture<Result<Page, StoreError>> {
        self.0.list(prefix, after, limit)
    }

    fn read(&self, key: Key) -> StoreFuture<Result<Option<Stored>, StoreError>> {
        self.0.read(key)
    }

    fn health(&self) -> Health {
        self.0.health()
    }

    fn lacks(&self, space: Space) -> Option<String> {
        self.0.lacks(space)
    }
}

struct Silent;

impl Store for Silent {
    fn submit(&self, _group: Vec<Op>, _deadline: Instant, done: Done) {
        std::mem::forget(done);
    }

    fn submit_renewal(&self, _op: Op, _deadline: Instant, done: Done) {
        std::mem::forget(done);
    }

    fn list(
        &self,
        _prefix: String,
        _after: Option<Key>,
        _limit: usize,
    ) -> StoreFuture<Result<Page, StoreError>> {
        Box::pin(std::future::pending())
    }

    fn read(&self, _key: Key) -> StoreFuture<Result<Option<Stored>, StoreError>> {
        Box::pin(std::future::pending())
    }

    fn health(&self) -> Health {
        Health::Ready { server: "silent".into(), warnings: Vec::new() }
    }

    fn lacks(&self, _space: Space) -> Option<String> {
        None
    }
}
