//! Leases: renewing, releasing, handing over, and repeating these operations.

use super::*;
use crate::lock::ServerTime;
use crate::lock::record::Record;

pub async fn all(store: &dyn Store) {
    a_renewal_extends_a_lease_and_never_shortens_it(store).await;
    a_wrong_lease_reference_is_answered_as_lost_and_changes_nothing(store).await;
    an_expired_lease_is_lost(store).await;
    a_release_can_be_repeated(store).await;
    abandoning_undoes_only_the_grant_of_the_same_attempt(store).await;
    a_handoff_releases_and_grants_in_one_group(store).await;
    a_handoff_can_be_repeated(store).await;
    groups_of_one_key_keep_their_order(store).await;
    the_time_left_is_a_lower_bound(store).await;
}

pub async fn a_renewal_extends_a_lease_and_never_shortens_it(store: &dyn Store) {
    let names = Names::new("renew");
    let claim = Claim { ttl_ms: 400, ..claim(&[&names.key("k")], "me") };
    let grant = granted(store, &claim).await;
    let lease = lease(&claim, &grant);
    for _ in 0..4 {
        pass_ms(200).await;
        let Outcome::Renewed { left_us } = renew(store, &lease, 400).await else {
            panic!("a running lease is renewed")
        };
        assert!(left_us <= 400_000 && left_us > 300_000);
    }
    renew(store, &lease, 10_000).await;
    let Outcome::Renewed { left_us } = renew(store, &lease, 100).await else {
        panic!("a running lease is renewed")
    };
    assert!(left_us > 8_000_000);
}

pub async fn a_wrong_lease_reference_is_answered_as_lost_and_changes_nothing(store: &dyn Store) {
    let names = Names::new("foreign");
    let claim = claim(&[&names.key("k")], "me");
    let grant = granted(store, &claim).await;
    let mine = lease(&claim, &grant);
    let before = store.read(claim.keys[0].clone()).await.expect("it reads").expect("it is there").record;
    let strangers = [
        LeaseRef { nonce: mine.nonce ^ 1, ..mine.clone() },
        LeaseRef { token: mine.token.map(Token::next), ..mine.clone() },
        LeaseRef { keys: [Key::new(&names.key("other")).expect("it is a key")].into(), ..mine.clone() },
    ];
    for stranger in strangers {
        assert_eq!(renew(store, &stranger, 60_000).await, Outcome::Lost);
        assert_eq!(release(store, &stranger).await, Outcome::Lost);
    }
    let after = store.read(claim.keys[0].clone()).await.expect("it reads").expect("it is there").record;
    // With several servers, different ones may determine the end.
    let (ends, ended) = (before.holders[0].until, after.holders[0].until);
    assert!(ended.us_since(ends) < 1_000_000 && ends.us_since(ended) < 1_000_000, "{ends:?}, then {ended:?}");
    assert_eq!(without_times(before), without_times(after));
    assert_eq!(release(store, &mine).await, RELEASED);
    assert_eq!(release(store, &mine).await, Outcome::Lost);
}

fn without_times(mut record: Record) -> Record {
    for holder in &mut record.holders {
        (holder.since, holder.until) = (ServerTime::default(), ServerTime::default());
    }
    // Each server has batch ids of its own.
    record.batch_ids.clear();
    record
}

pub async fn an_expired_lease_is_lost(store: &dyn Store) {
    let names = Names::new("expired");
    let mine = Claim { ttl_ms: 150, ..claim(&[&names.key("k")], "me") };
    let grant = granted(store, &mine).await;
    pass_ms(200 + UNNOTICED_US / 1_000).await;
    assert_eq!(renew(store, &lease(&mine, &grant), 10_000).await, Outcome::Lost);
    assert_eq!(release(store, &lease(&mine, &grant)).await, Outcome::Lost);
    let yours = claim(&[&names.key("k")], "you");
    let next = granted(store, &yours).await;
    assert!(next.tokens[0] > grant.tokens[0]);
    assert_eq!(release(store, &lease(&mine, &grant)).await, Outcome::Lost);
    assert!(matches!(renew(store, &lease(&yours, &next), 10_000).await, Outcome::Renewed { .. }));
}

pub async fn a_release_can_be_repeated(store: &dyn Store) {
    let names = Names::new("release");
    let mine = claim(&[&names.key("k")], "me");
    let grant = granted(store, &mine).await;
    let op = release_op(&lease(&mine, &grant));
    assert_eq!(one(store, op.clone()).await, RELEASED);
    let yours = claim(&[&names.key("k")], "you");
    granted(store, &yours).await;
    assert_eq!(one(store, op).await, RELEASED);
    held(store, &claim(&[&names.key("k")], "me")).await;
}

pub async fn abandoning_undoes_only_the_grant_of_the_same_attempt(store: &dyn Store) {
    let names = Names::new("abandon");
    let first = Claim { request: Some("r".into()), ..claim(&[&names.key("k")], "me") };
    let abandon = Op::Abandon { keys: first.keys.clone(), attempt: first.attempt };
    assert_eq!(one(store, abandon.clone()).await, Outcome::Abandoned);
    granted(store, &first).await;
    let retry = Claim { attempt: fresh(), ..first.clone() };
    let grant = granted(store, &retry).await;
    assert_eq!(one(store, abandon).await, Outcome::Abandoned);
    held(store, &claim(&[&names.key("k")], "you")).await;
    let abandon = Op::Abandon { keys: retry.keys.clone(), attempt: retry.attempt };
    assert_eq!(one(store, abandon).await, Outcome::Abandoned);
    let again = granted(store, &Claim { attempt: fresh(), ..first }).await;
    assert!(!again.repeated && again.tokens[0] > grant.tokens[0]);
}

pub async fn a_handoff_releases_and_grants_in_one_group(store: &dyn Store) {
    let names = Names::new("handoff");
    let rising = Rising::default();
    let mut last = claim(&[&names.key("k")], "0");
    let mut grant = granted(store, &last).await;
    for n in 1..20 {
        rising.check(grant.tokens[0]);
        let next = claim(&[&names.key("k")], &n.to_string());
        let release = release_op(&lease(&last, &grant));
        let outcomes = run(store, vec![release, Op::Acquire(next.clone())]).await;
        let [RELEASED, Outcome::Granted(given)] = &outcomes[..] else { panic!("it is {outcomes:?}") };
        grant = given.clone();
        last = next;
    }
}

pub async fn a_handoff_can_be_repeated(store: &dyn Store) {
    let names = Names::new("handoff-again");
    let first = claim(&[&names.key("k")], "me");
    let grant = granted(store, &first).await;
    let release = release_op(&lease(&first, &grant));
    let group = vec![release, Op::Acquire(claim(&[&names.key("k")], "you"))];
    let once = run(store, group.clone()).await;
    let twice = run(store, group).await;
    let (Outcome::Granted(once), Outcome::Granted(again)) = (&once[1], &twice[1]) else {
        panic!("both are granted")
    };
    assert_eq!((once.nonce, &once.tokens), (again.nonce, &again.tokens));
    assert_eq!(twice[0], RELEASED);
}

/// The groups are answered in the order of submission, without waiting between submissions.
pub async fn groups_of_one_key_keep_their_order(store: &dyn Store) {
    let names = Names::new("order");
    let key = names.key("k");
    let mut answers = Vec::new();
    for n in 0..200 {
        let (tell, told) = oneshot::channel();
        let claim = Claim { mode: Mode::Permits { count: 1, limit: 1000 }, ..claim(&[&key], &n.to_string()) };
        let done = Box::new(move |result| drop(tell.send(result)));
        store.submit(vec![Op::Acquire(claim)], clock::now().plus_ms(10_000), done);
        answers.push(told);
    }
    let rising = Rising::default();
    for told in answers {
        let reply: Result<Reply, StoreError> = told.await.expect("every group is answered");
        let reply = reply.expect("the store is available");
        let [Outcome::Granted(grant)] = &reply.outcomes[..] else { panic!("it is {:?}", reply.outcomes) };
        rising.check(grant.tokens[0]);
    }
}

/// Nobody else is granted the key until `asked_at + left_us` on the proxy's own clock.
pub async fn the_time_left_is_a_lower_bound(store: &dyn Store) {
    let names = Names::new("bound");
    for _ in 0..3 {
        let mine = Claim { ttl_ms: 150, ..claim(&[&names.key("k")], "me") };
        let reply = submit(store, vec![Op::Acquire(mine)]).await.expect("the store is available");
        let [Outcome::Granted(grant)] = &reply.outcomes[..] else { panic!("it is {:?}", reply.outcomes) };
        let certain_until = reply.asked_at.plus_us(grant.left_us);
        let yours = claim(&[&names.key("k")], "you");
        let grant = loop {
            match acquire(store, &yours).await {
                Outcome::Granted(grant) => break grant,
                Outcome::Held(_) => pass_ms(1).await,
                other => panic!("it is {other:?}"),
            }
        };
        assert!(clock::now() >= certain_until, "it was granted while its holder was certain of it");
        release(store, &lease(&yours, &grant)).await;
    }
}
