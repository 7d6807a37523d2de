//! Stored values: outcomes of a `once`, and values that are committed with a version.

use std::num::NonZero;

use super::*;
use crate::lock::record::{Commit, StoredValue, Version};

pub async fn all(store: &dyn Store) {
    an_outcome_answers_every_later_claim(store).await;
    a_once_without_an_outcome_is_free_again(store).await;
    an_outcome_is_kept_for_its_time(store).await;
    a_release_with_an_outcome_can_be_repeated(store).await;
    one_of_several_commits_of_a_version_succeeds(store).await;
    a_commit_can_be_repeated(store).await;
    a_holder_blocks_commits(store).await;
}

fn once(key: &str, owner: &str) -> Claim {
    Claim { keep_ms: NonZero::new(60_000), ..claim(&[key], owner) }
}

fn finish(claim: &Claim, grant: &Grant, outcome: &str) -> Op {
    Op::Release(Release { lease: lease(claim, grant), attempt: fresh(), outcome: Some(outcome.into()) })
}

async fn done(store: &dyn Store, claim: &Claim) -> StoredValue {
    match acquire(store, claim).await {
        Outcome::Done(kept) => kept,
        other => panic!("{:?} should be done, and is {other:?}", claim.keys),
    }
}

async fn an_outcome_answers_every_later_claim(store: &dyn Store) {
    let names = Names::new("once");
    let key = names.key("k");
    let first = once(&key, "me");
    let grant = granted(store, &first).await;
    held(store, &once(&key, "you")).await;
    assert_eq!(one(store, finish(&first, &grant, "{\"paid\":true}")).await, RELEASED);
    let kept = done(store, &once(&key, "you")).await;
    assert_eq!((&*kept.value, kept.nonce), ("{\"paid\":true}", grant.nonce));
    assert!(kept.until > kept.since);
    // For other primitives the key is free.
    let plain = granted(store, &claim(&[&key], "you")).await;
    assert!(plain.tokens[0] > grant.tokens[0]);
}

async fn a_once_without_an_outcome_is_free_again(store: &dyn Store) {
    let names = Names::new("once-given-up");
    let key = names.key("k");
    let first = once(&key, "me");
    let grant = granted(store, &first).await;
    release(store, &lease(&first, &grant)).await;
    let second = Claim { ttl_ms: 100, ..once(&key, "you") };
    let late = granted(store, &second).await;
    pass_ms(200 + UNNOTICED_US / 1_000).await;
    let third = once(&key, "they");
    let grant = granted(store, &third).await;
    assert_eq!(one(store, finish(&second, &late, "1")).await, Outcome::Lost);
    assert_eq!(one(store, finish(&third, &grant, "2")).await, RELEASED);
    assert_eq!(&*done(store, &once(&key, "me")).await.value, "2");
}

async fn an_outcome_is_kept_for_its_time(store: &dyn Store) {
    let names = Names::new("once-kept");
    let key = names.key("k");
    let first = Claim { keep_ms: NonZero::new(200), ..once(&key, "me") };
    let grant = granted(store, &first).await;
    one(store, finish(&first, &grant, "1")).await;
    done(store, &first).await;
    pass_ms(300).await;
    granted(store, &once(&key, "you")).await;
}

async fn a_release_with_an_outcome_can_be_repeated(store: &dyn Store) {
    let names = Names::new("once-again");
    let key = names.key("k");
    let first = once(&key, "me");
    let grant = granted(store, &first).await;
    assert_eq!(one(store, finish(&first, &grant, "1")).await, RELEASED);
    assert_eq!(one(store, finish(&first, &grant, "2")).await, RELEASED);
    assert_eq!(&*done(store, &once(&key, "you")).await.value, "1");
    let plain = claim(&[&key], "me");
    let grant = granted(store, &plain).await;
    assert_eq!(one(store, finish(&plain, &grant, "3")).await, Outcome::Lost, "it is no `once`");
}

/// The other store does not know the previous row and, for a moment, does not know that it was deleted.
pub async fn a_new_row_has_a_token_above_that_of_the_deleted_row(store: &dyn Store, other: &dyn Store) {
    let names = Names::new("once-cleaned");
    let key = names.key("k");
    let first = Claim { keep_ms: NonZero::new(10), ..once(&key, "me") };
    let rising = Rising::default();
    for round in 0..4 {
        granted(other, &once(&names.key(&format!("warm-{round}")), "you")).await;
        let grant = granted(store, &Claim { attempt: fresh(), ..first.clone() }).await;
        rising.check(grant.tokens[0]);
        one(store, finish(&first, &grant, "1")).await;
        pass_ms(600).await;
        let second = Claim { attempt: fresh(), ..first.clone() };
        let grant = granted(other, &second).await;
        rising.check(grant.tokens[0]);
        one(other, finish(&second, &grant, "2")).await;
        pass_ms(600).await;
    }
}

async fn read(store: &dyn Store, key: &str) -> Version {
    match one(store, Op::Read { key: Key::new(key).expect("it is a key") }).await {
        Outcome::Version(version) => version,
        other => panic!("a read is answered with {other:?}"),
    }
}

fn commit(key: &str, version: Token, value: Option<&str>) -> Commit {
    Commit {
        key: Key::new(key).expect("it is a key"),
        version,
        value: value.map(Into::into),
        attempt: fresh(),
        request: None,
        fingerprint: 1,
    }
}

async fn one_of_several_commits_of_a_version_succeeds(store: &dyn Store) {
    let names = Names::new("version");
    let key = names.key("k");
    let start = read(store, &key).await;
    assert_eq!(start.kept, None);
    let group = (0..8).map(|n| Op::Commit(commit(&key, start.version, Some(&n.to_string())))).collect();
    let outcomes = run(store, group).await;
    let made = outcomes.iter().filter(|outcome| matches!(outcome, Outcome::Committed { .. })).count();
    let lost = outcomes.iter().filter(|outcome| matches!(outcome, Outcome::Conflict(_))).count();
    assert_eq!((made, lost), (1, 7), "{outcomes:?}");
    let now = read(store, &key).await;
    assert!(now.version > start.version);
    assert_eq!(now.kept.expect("a value was committed").until, crate::lock::ServerTime(u64::MAX));
    one(store, Op::Commit(commit(&key, now.version, None))).await;
    assert_eq!(read(store, &key).await.kept, None);
    let next = granted(store, &claim(&[&key], "me")).await;
    assert!(next.tokens[0] > now.version, "versions and fencing tokens are one row of numbers");
}

/// A store may have cached the row as it last wrote it.
pub async fn a_commit_of_a_version_that_another_store_replaced_conflicts(one: &dyn Store, other: &dyn Store) {
    let key = Names::new("version-stale").key("k");
    let mut seen = read(one, &key).await.version;
    for n in 0..8 {
        let (first, late) = if n % 2 == 0 { (one, other) } else { (other, one) };
        let made = super::one(first, Op::Commit(commit(&key, seen, Some("1")))).await;
        let Outcome::Committed { version } = made else { panic!("a commit is answered with {made:?}") };
        let late = super::one(late, Op::Commit(commit(&key, seen, Some("2")))).await;
        assert!(matches!(&late, Outcome::Conflict(now) if now.version == version), "it is {late:?}");
        seen = version;
    }
}

/// Each client adds one to the value that it has read.
pub async fn commits_of_two_stores_are_serialised(one: &Arc<dyn Store>, other: &Arc<dyn Store>) {
    const COUNTERS: usize = 4;
    const COMMITS: usize = 25;
    let key = Names::new("version-race").key("k");
    let counters = (0..COUNTERS).map(|n| {
        let store = if n % 2 == 0 { one.clone() } else { other.clone() };
        let key = key.clone();
        tokio::spawn(async move {
            let mut made = Vec::new();
            while made.len() < COMMITS {
                let seen = read(&*store, &key).await;
                let count: usize = seen.kept.map_or(0, |kept| kept.value.parse().expect("a number"));
                let next = commit(&key, seen.version, Some(&(count + 1).to_string()));
                match super::one(&*store, Op::Commit(next)).await {
                    Outcome::Committed { version } => made.push((count + 1, version)),
                    Outcome::Conflict(now) => assert!(now.version > seen.version),
                    other => panic!("a commit is answered with {other:?}"),
                }
            }
            made
        })
    });
    let mut made = Vec::new();
    for counter in counters.collect::<Vec<_>>() {
        made.extend(counter.await.expect("a counter found nothing wrong"));
    }
    made.sort_unstable();
    let counts: Vec<usize> = made.iter().map(|(count, _)| *count).collect();
    assert_eq!(counts, (1..=COUNTERS * COMMITS).collect::<Vec<_>>(), "each count once");
    assert!(made.is_sorted_by(|a, b| a.1 < b.1), "versions rise with the counts: {made:?}");
}

async fn a_commit_can_be_repeated(store: &dyn Store) {
    let names = Names::new("version-again");
    let key = names.key("k");
    let start = read(store, &key).await;
    let asked = Commit { request: Some("r".into()), ..commit(&key, start.version, Some("1")) };
    let made = one(store, Op::Commit(asked.clone())).await;
    assert!(matches!(made, Outcome::Committed { .. }));
    assert_eq!(one(store, Op::Commit(asked.clone())).await, made, "its answer was lost");
    let again = Commit { attempt: fresh(), ..asked.clone() };
    assert_eq!(one(store, Op::Commit(again)).await, made, "its client asks again");
    let other = Commit { attempt: fresh(), fingerprint: 2, ..asked };
    assert_eq!(one(store, Op::Commit(other)).await, Outcome::RequestReused { ended: false });
}

async fn a_holder_blocks_commits(store: &dyn Store) {
    let names = Names::new("version-held");
    let key = names.key("k");
    let mine = claim(&[&key], "me");
    let grant = granted(store, &mine).await;
    let version = read(store, &key).await.version;
    let denied = one(store, Op::Commit(commit(&key, version, None))).await;
    assert!(matches!(denied, Outcome::Held(denial) if denial.holder.is_some()));
    release(store, &lease(&mine, &grant)).await;
    let made = one(store, Op::Commit(commit(&key, version, None))).await;
    assert!(matches!(made, Outcome::Committed { .. }));
}
