use std::time::Duration;

use super::super::contract::{claim, fresh};
use super::super::memory::{Memory, MemoryStore};
use super::*;

struct World {
    router: Router,
    table: Memory,
    advisory: MemoryStore,
}

fn world() -> World {
    let memory = || Memory::new(Duration::from_secs(3_600));
    let (table, advisory) = (memory(), memory());
    let others: Vec<(Space, Arc<dyn Store>)> = vec![(Space::Advisory, Arc::new(advisory.store()))];
    World { router: Router::new(Arc::new(table.store()), others), table, advisory: advisory.store() }
}

fn key(name: &str, space: Space) -> Key {
    Key::new(name).expect("it is a key").within(space)
}

/// A claim for the same text in both spaces.
fn both(name: &str) -> Claim {
    let keys = [key(name, Space::Table), key(name, Space::Advisory)];
    Claim { keys: keys.into(), ..claim(&[name], "me") }
}

async fn ask(store: &dyn Store, group: Vec<Op>) -> Result<Reply, StoreError> {
    let (tell, told) = oneshot::channel();
    let deadline = clock::now().plus_ms(10_000);
    store.submit(group, deadline, Box::new(move |result| drop(tell.send(result))));
    told.await.expect("it is answered")
}

async fn one(store: &dyn Store, op: Op) -> Outcome {
    ask(store, vec![op]).await.expect("the stores are there").outcomes.remove(0)
}

#[tokio::test]
async fn a_claim_over_two_spaces_is_granted_and_released_as_a_whole() {
    let world = world();
    let claim = both("k");
    let Outcome::Granted(grant) = one(&world.router, Op::Acquire(claim.clone())).await else {
        panic!("both keys are free")
    };
    assert_eq!(grant.tokens.len(), 2);
    let lease = LeaseRef {
        keys: claim.keys.clone(),
        nonce: grant.nonce,
        token: Some(grant.tokens[0]),
        principal: None,
    };
    for space in [Space::Table, Space::Advisory] {
        let other = Claim { keys: [key("k", space)].into(), attempt: fresh(), ..claim.clone() };
        assert!(matches!(one(&world.router, Op::Acquire(other)).await, Outcome::Held(_)), "{space:?}");
    }
    let renewed = one(&world.router, Op::Renew { lease: lease.clone(), ttl_ms: None }).await;
    assert!(matches!(renewed, Outcome::Renewed { .. }), "{renewed:?}");
    let page = world.router.list(String::new(), None, 1).await.expect("it lists");
    assert_eq!(page.items.len(), 2, "keys of one text are not parted");
    assert_eq!(one(&world.router, release(lease)).await, Outcome::Released { levels_left: 0 });
    assert!(world.router.list(String::new(), None, 9).await.expect("it lists").items.is_empty());
}

#[tokio::test]
async fn a_claim_denied_in_one_space_leaves_nothing_in_the_other() {
    let world = world();
    let taken = Claim { keys: [key("k", Space::Advisory)].into(), ..claim(&["k"], "other") };
    assert!(matches!(one(&world.advisory, Op::Acquire(taken)).await, Outcome::Granted(_)));
    let Outcome::Held(denial) = one(&world.router, Op::Acquire(both("k"))).await else {
        panic!("one of the keys is taken")
    };
    assert_eq!(denial.key, key("k", Space::Advisory));
    let free = claim(&["k"], "third");
    assert!(matches!(one(&world.router, Op::Acquire(free)).await, Outcome::Granted(_)));
}

/// The space with the lower token is raised to the token of the other one.
#[tokio::test]
async fn a_lease_over_two_spaces_has_one_token() {
    let world = world();
    for space in [Space::Table, Space::Advisory] {
        for _ in 0..3 {
            let ahead = Claim { keys: [key("k", space)].into(), ..claim(&["k"], "me") };
            let Outcome::Granted(grant) = one(&world.router, Op::Acquire(ahead.clone())).await else {
                panic!("it is free")
            };
            let lease = LeaseRef {
                keys: ahead.keys,
                nonce: grant.nonce,
                token: Some(grant.tokens[0]),
                principal: None,
            };
            one(&world.router, release(lease)).await;
        }
        let claim = both("k");
        let Outcome::Granted(grant) = one(&world.router, Op::Acquire(claim.clone())).await else {
            panic!("both keys are free")
        };
        assert_eq!(grant.tokens, [grant.tokens[0]; 2]);
        let lease =
            LeaseRef { keys: claim.keys, nonce: grant.nonce, token: Some(grant.tokens[0]), principal: None };
        let renewed = one(&world.router, Op::Renew { lease: lease.clone(), ttl_ms: None }).await;
        assert!(matches!(renewed, Outcome::Renewed { .. }), "{renewed:?}");
        one(&world.router, release(lease)).await;
        for space in [Space::Table, Space::Advisory] {
            let stored = world.router.read(key("k", space)).await.expect("it reads").expect("it is known");
            assert_eq!(stored.record.token, grant.tokens[0], "{space:?}");
        }
    }
}

fn release(lease: LeaseRef) -> Op {
    Op::Release(Release { lease, attempt: fresh(), outcome: None })
}

/// The owner's lease of one space is not a lease of both spaces.
#[tokio::test]
async fn a_lease_of_one_space_cannot_be_reentered_for_two_spaces() {
    let world = world();
    let old = Claim { reentrant: true, ..claim(&["k"], "me") };
    assert!(matches!(one(&world.router, Op::Acquire(old)).await, Outcome::Granted(_)));
    let wider = Claim { reentrant: true, ..both("k") };
    assert!(matches!(one(&world.router, Op::Acquire(wider)).await, Outcome::Held(_)));
    let stored = world.router.read(key("k", Space::Table)).await.expect("it reads").expect("it is held");
    assert_eq!(stored.record.holders[0].levels.len(), 1, "nothing is left of the attempt");
    let stored = world.router.read(key("k", Space::Advisory)).await.expect("it reads");
    assert!(stored.is_none_or(|stored| stored.record.holders.is_empty()));
}

/// Otherwise half of the claim would be held for its full time although its caller was told that it has
/// nothing.
#[tokio::test]
async fn a_claim_that_cannot_be_undone_is_not_reported_as_held() {
    let world = world();
    let taken = Claim { keys: [key("k", Space::Advisory)].into(), ..claim(&["k"], "other") };
    assert!(matches!(one(&world.advisory, Op::Acquire(taken)).await, Outcome::Granted(_)));
    let claim = both("k");
    // The table grants its part; after that it cannot be reached.
    world.table.run_before_outage(1);
    let result = ask(&world.router, vec![Op::Acquire(claim.clone())]).await;
    assert!(result.is_err(), "half of it is still there: {result:?}");
    world.table.set_outage(None);
    let abandon = Op::Abandon { keys: claim.keys, attempt: claim.attempt };
    assert_eq!(one(&world.router, abandon).await, Outcome::Abandoned);
    let stored = world.router.read(key("k", Space::Table)).await.expect("it reads");
    assert!(stored.is_none_or(|stored| stored.record.holders.is_empty()));
}

/// A store that accepts no operation that undoes a claim.
struct Crowded(MemoryStore);

impl Store for Crowded {
    fn submit(&self, group: Vec<Op>, deadline: Instant, done: Done) {
        match group[..] {
            [Op::Abandon { .. }] => done(Err(StoreError::Overloaded { queued: 1 })),
            _ => self.0.submit(group, deadline, done),
        }
    }

    fn submit_renewal(&self, op: Op, deadline: Instant, done: Done) {
        self.0.submit_renewal(op, deadline, done);
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

/// The stores of the table and of the named locks, and a router that cannot undo anything in the table.
fn crowded() -> (Memory, Memory, Router) {
    let memory = || Memory::new(Duration::from_secs(3_600));
    let (table, advisory) = (memory(), memory());
    let others: Vec<(Space, Arc<dyn Store>)> = vec![(Space::Advisory, Arc::new(advisory.store()))];
    let router = Router::new(Arc::new(Crowded(table.store())), others);
    (table, advisory, router)
}

/// The claim was granted, and otherwise nobody would undo it later.
#[tokio::test]
async fn a_group_that_fails_after_its_first_operation_counts_as_sent() {
    let (table, _, router) = crowded();
    let other = Op::Abandon { keys: [key("other", Space::Table)].into(), attempt: fresh() };
    let result = ask(&router, vec![Op::Acquire(both("k")), other]).await;
    let stored = table.store().read(key("k", Space::Table)).await.expect("it reads").expect("it is held");
    assert_eq!(stored.record.holders.len(), 1);
    let error = result.expect_err("the second operation has no place");
    assert!(error.was_sent(), "{error}");
}

/// The claim was sent although its undoing was not; otherwise nobody would undo it later.
#[tokio::test]
async fn a_claim_that_cannot_be_undone_counts_as_sent() {
    let (table, advisory, router) = crowded();
    let taken = Claim { keys: [key("k", Space::Advisory)].into(), ..claim(&["k"], "other") };
    assert!(matches!(one(&advisory.store(), Op::Acquire(taken)).await, Outcome::Granted(_)));
    let result = ask(&router, vec![Op::Acquire(both("k"))]).await;
    let stored = table.store().read(key("k", Space::Table)).await.expect("it reads").expect("it is held");
    assert_eq!(stored.record.holders.len(), 1, "half of it is still there");
    let error = result.expect_err("half of it is still there");
    assert!(error.was_sent(), "{error}");
}

#[tokio::test]
async fn a_space_without_a_store_is_refused_with_a_reason() {
    let world = world();
    assert!(world.router.lacks(Space::Quorum).expect("there is none").contains("[stores."));
    assert_eq!(world.router.lacks(Space::Advisory), None);
}
