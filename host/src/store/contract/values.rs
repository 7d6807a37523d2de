//! What is kept with a key: outcomes of a `once`, and values that are committed with a version.

use super::*;
use crate::lock::record::{Commit, Kept, Version};

pub async fn all(store: &dyn Store) {
    an_outcome_answers_everybody_after_it(store).await;
    a_once_without_an_outcome_is_free_again(store).await;
    an_outcome_is_kept_for_its_time(store).await;
    finishing_can_be_repeated(store).await;
    one_commit_of_a_version_is_made(store).await;
    a_commit_can_be_repeated(store).await;
    a_holder_keeps_commits_out(store).await;
}

fn once(key: &str, owner: &str) -> Claim {
    Claim { keep_ms: 60_000, ..claim(&[key], owner) }
}

fn finish(claim: &Claim, grant: &Grant, outcome: &str) -> Op {
    Op::Release(Release { lease: lease(claim, grant), attempt: fresh(), outcome: Some(outcome.into()) })
}

async fn done(store: &dyn Store, claim: &Claim) -> Kept {
    match acquire(store, claim).await {
        Outcome::Done(kept) => kept,
        other => panic!("{:?} should be done, and is {other:?}", claim.keys),
    }
}

async fn an_outcome_answers_everybody_after_it(store: &dyn Store) {
    let names = Names::new("once");
    let key = names.key("k");
    let first = once(&key, "me");
    let grant = granted(store, &first).await;
    held(store, &once(&key, "you")).await;
    assert_eq!(one(store, finish(&first, &grant, "{\"paid\":true}")).await, RELEASED);
    let kept = done(store, &once(&key, "you")).await;
    assert_eq!((&*kept.value, kept.nonce), ("{\"paid\":true}", grant.nonce));
    assert!(kept.until > kept.since);
    // To the other primitives the key is free.
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
    let first = Claim { keep_ms: 200, ..once(&key, "me") };
    let grant = granted(store, &first).await;
    one(store, finish(&first, &grant, "1")).await;
    done(store, &first).await;
    pass_ms(300).await;
    granted(store, &once(&key, "you")).await;
}

async fn finishing_can_be_repeated(store: &dyn Store) {
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

/// The other store knows neither the row that was, nor, for a moment, that it is gone.
pub async fn a_new_row_is_above_what_was_cleaned_up(store: &dyn Store, other: &dyn Store) {
    let names = Names::new("once-cleaned");
    let key = names.key("k");
    let first = Claim { keep_ms: 10, ..once(&key, "me") };
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

async fn one_commit_of_a_version_is_made(store: &dyn Store) {
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

async fn a_holder_keeps_commits_out(store: &dyn Store) {
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
