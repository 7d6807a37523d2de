//! The contract of every store, as tests that can be run on any store.
//!
//! Each property is one function; [`run_all`] runs all of them. Keys are unique, so that the properties can be
//! run repeatedly and concurrently on one server.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::oneshot;

use super::space_adapter::SpaceAdapter;
use super::{Reply, Store, StoreError};
use crate::clock;
use crate::lock::record::{Claim, Denial, Grant, Op, Outcome, Release, Tag, UNNOTICED_US};
use crate::lock::{Key, LeaseRef, Mode, Space, Token};
use crate::random;

mod changed;
mod grants;
mod leases;
mod listing;
mod once;
mod races;
mod values;

pub use changed::Changed;

/// The kind of store that a property needs. All stores of one kind share their rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Remembers idle keys for an hour.
    Lasting,
    /// Deletes the rows of keys that were idle for [`FORGETS_AFTER`]; these rows are separate from those of
    /// other kinds.
    Forgetful,
}

/// How long a key must be idle for a [`Kind::Forgetful`] store to delete its row.
pub const FORGETS_AFTER: Duration = Duration::from_millis(200);

/// Runs every property on the stores that `make` opens.
///
/// # Panics
/// If a property does not hold.
pub async fn run_all<F, A>(make: F)
where
    F: Fn(Kind) -> A,
    A: Future<Output = Arc<dyn Store>>,
{
    let one = make(Kind::Lasting).await;
    let other = make(Kind::Lasting).await;
    let forgetful = make(Kind::Forgetful).await;
    grants::all(&*one).await;
    grants::a_claim_for_any_of_several_keys_gets_a_free_key(&*one).await;
    leases::all(&*one).await;
    listing::all(&*one).await;
    values::all(&*one).await;
    grants::tokens_survive_clean_up(&*forgetful).await;
    values::a_new_row_has_a_token_above_that_of_the_deleted_row(&*forgetful, &*make(Kind::Forgetful).await)
        .await;
    values::a_commit_of_a_version_that_another_store_replaced_conflicts(&*one, &*other).await;
    values::commits_of_two_stores_are_serialised(&one, &other).await;
    once::all(one.clone(), other.clone()).await;
    races::all(one, other).await;
}

/// Runs the properties of a space whose leases are held by a session: leases, grants, and mutual exclusion
/// between stores. Only the store that granted a lease knows it, and no values are stored.
///
/// # Panics
/// If a property does not hold.
pub async fn run_session_locks(one: Arc<dyn Store>, other: Arc<dyn Store>, space: Space) {
    let moved =
        |store| -> Arc<dyn Store> { Arc::new(SpaceAdapter { store, inside: space, outside: Space::Table }) };
    let (one, other) = (moved(one), moved(other));
    grants::all(&*one).await;
    leases::all(&*one).await;
    listing::all(&*one).await;
    races::exclusion(&one, &other).await;
}

/// Runs the properties of leases with keys of the table and of another space: `one` has both, `other` only that
/// space, and `table` only the table.
///
/// # Panics
/// If a property does not hold.
pub async fn run_both(one: Arc<dyn Store>, other: Arc<dyn Store>, space: Space, table: Arc<dyn Store>) {
    grants::tokens_rise_after_a_lease_of_two_spaces(&*one, &*other, space).await;
    grants::tokens_stay_close_to_the_clock(&*one, &*other, space, &*table).await;
    if space == Space::Row {
        grants::tokens_rise_for_a_reader_that_joins_a_lease_of_two_spaces(&*one, &*other, space).await;
    }
}

/// Runs the properties of a space in which any one of several keys can be claimed.
///
/// # Panics
/// If a property does not hold.
pub async fn run_any(store: Arc<dyn Store>, space: Space) {
    let moved = SpaceAdapter { store, inside: space, outside: Space::Table };
    grants::a_claim_for_any_of_several_keys_gets_a_free_key(&moved).await;
}

/// Runs the properties of a space in which readers of two stores hold a key together.
///
/// # Panics
/// If a property does not hold.
pub async fn run_shared(one: Arc<dyn Store>, other: Arc<dyn Store>, space: Space) {
    let moved = |store| SpaceAdapter { store, inside: space, outside: Space::Table };
    let (one, other) = (moved(one), moved(other));
    races::readers_of_two_stores_keep_writers_out(&one, &other).await;
    grants::a_release_in_a_group_does_not_turn_a_shared_key_exclusive(&one, &other).await;
}

/// Runs the properties of stores of which each knows the leases of all.
///
/// # Panics
/// If a property does not hold.
pub async fn run_fleet(one: Arc<dyn Store>, other: Arc<dyn Store>, space: Space) {
    let moved = |store| SpaceAdapter { store, inside: space, outside: Space::Table };
    races::each_store_knows_the_leases_of_the_other_store(&moved(one), &moved(other)).await;
}

/// A unique claim for 10 seconds.
pub fn claim(keys: &[&str], owner: &str) -> Claim {
    let mut keys: Vec<Key> = keys.iter().map(|key| Key::new(key).expect("it is a key")).collect();
    keys.sort();
    Claim {
        keys: keys.into(),
        proxy: "".into(),
        waits: false,
        attempt: fresh(),
        owner: owner.into(),
        request: None,
        fingerprint: 1,
        mode: Mode::Exclusive,
        ttl_ms: 10_000,
        at_least_ms: 0,
        delay_ms: 0,
        reentrant: false,
        keep_ms: None,
        global: None,
        any: false,
        delegable: None,
        tag: Tag { resource: "a resource".into(), policy: "default@sha256:00".into(), ..Tag::default() },
    }
}

/// A random number, which no other call has returned, in this or another process.
pub fn fresh() -> u64 {
    random::number()
}

/// The keys of one property.
struct Names(String);

impl Names {
    fn new(property: &str) -> Names {
        Names(format!("{property}-{:016x}", fresh()))
    }

    fn key(&self, name: &str) -> String {
        format!("{}/{name}", self.0)
    }
}

async fn submit(store: &dyn Store, group: Vec<Op>) -> Result<Reply, StoreError> {
    let (tell, told) = oneshot::channel();
    let done = Box::new(move |result| drop(tell.send(result)));
    store.submit(group, clock::now().plus_ms(10_000), done);
    told.await.expect("every group is answered")
}

async fn run(store: &dyn Store, group: Vec<Op>) -> Vec<Outcome> {
    submit(store, group).await.expect("the store is available").outcomes
}

async fn one(store: &dyn Store, op: Op) -> Outcome {
    run(store, vec![op]).await.pop().expect("each operation has an outcome")
}

async fn acquire(store: &dyn Store, claim: &Claim) -> Outcome {
    one(store, Op::Acquire(claim.clone())).await
}

async fn granted(store: &dyn Store, claim: &Claim) -> Grant {
    match acquire(store, claim).await {
        Outcome::Granted(grant) => grant,
        other => panic!("{:?} should be granted, and is {other:?}", claim.keys),
    }
}

async fn held(store: &dyn Store, claim: &Claim) -> Denial {
    match acquire(store, claim).await {
        Outcome::Held(denial) => denial,
        other => panic!("{:?} should be held, and is {other:?}", claim.keys),
    }
}

async fn renew(store: &dyn Store, lease: &LeaseRef, ttl_ms: u32) -> Outcome {
    let (tell, told) = oneshot::channel();
    let done = Box::new(move |result| drop(tell.send(result)));
    let op = Op::Renew { lease: lease.clone(), ttl_ms: Some(ttl_ms) };
    store.submit_renewal(op, clock::now().plus_ms(10_000), done);
    let reply: Result<Reply, StoreError> = told.await.expect("every renewal is answered");
    reply.expect("the store is available").outcomes.pop().expect("it has an outcome")
}

async fn release(store: &dyn Store, lease: &LeaseRef) -> Outcome {
    one(store, release_op(lease)).await
}

fn release_op(lease: &LeaseRef) -> Op {
    Op::Release(Release { lease: lease.clone(), attempt: fresh(), outcome: None })
}

const RELEASED: Outcome = Outcome::Released { levels_left: 0 };

fn lease(claim: &Claim, grant: &Grant) -> LeaseRef {
    LeaseRef { keys: claim.keys.clone(), nonce: grant.nonce, token: Some(grant.tokens[0]), principal: None }
}

async fn pass_ms(ms: u64) {
    tokio::time::sleep(Duration::from_millis(ms)).await;
}

/// Checks that numbers are above all earlier ones.
#[derive(Default)]
struct Rising(AtomicU64);

impl Rising {
    fn check(&self, token: Token) {
        let last = self.0.fetch_max(token.0, Ordering::SeqCst);
        assert!(token.0 > last, "token {token} comes after {last}");
    }
}
