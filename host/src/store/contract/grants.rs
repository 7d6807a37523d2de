//! Grants: modes, several keys, request ids, tokens.

use super::*;

pub async fn all(store: &dyn Store) {
    of_one_exclusive_key(store).await;
    shared_holders_exclude_exclusive_ones(store).await;
    permits_are_counted(store).await;
    several_keys_are_granted_together_or_not_at_all(store).await;
}

pub async fn of_one_exclusive_key(store: &dyn Store) {
    exclusive_keys_have_one_holder(store).await;
    a_reentrant_lease_is_released_as_often_as_it_was_acquired(store).await;
    a_repeated_request_id_gets_the_same_lease(store).await;
    a_request_id_serves_one_body_and_one_lease(store).await;
    tokens_rise_with_every_grant_and_force(store).await;
    lock_at_least_keeps_the_key_after_a_release(store).await;
    lock_delay_keeps_the_key_after_an_expiry(store).await;
}

pub async fn exclusive_keys_have_one_holder(store: &dyn Store) {
    let names = Names::new("exclusive");
    let (mine, yours) = (claim(&[&names.key("k")], "me"), claim(&[&names.key("k")], "you"));
    let grant = granted(store, &mine).await;
    assert!(!grant.repeated && grant.levels == 1 && grant.left_us <= 10_000_000);
    let denial = held(store, &yours).await;
    let holder = denial.holder.expect("somebody holds it");
    assert_eq!((&*holder.owner, holder.token), ("me", grant.tokens[0]));
    assert!(denial.free_in_us > 5_000_000 && denial.free_in_us <= 10_000_000 + UNNOTICED_US);
    held(store, &claim(&[&names.key("k")], "me")).await;
    granted(store, &claim(&[&names.key("K")], "you")).await;
    assert_eq!(release(store, &lease(&mine, &grant)).await, RELEASED);
    granted(store, &yours).await;
}

/// The next token comes from another store, also for a key whose text differs from that of the table's key.
pub async fn tokens_rise_after_a_lease_of_two_spaces(one: &dyn Store, other: &dyn Store, space: Space) {
    let names = Names::new("two-spaces");
    let within = |name: &str| Key::new(&names.key(name)).expect("it is a key").within(space);
    let alone = |name: &str| Claim { keys: [within(name)].into(), ..claim(&[&names.key("k")], "me") };
    let rising = Rising::default();
    // The space has given tokens: the table's tokens are above all that the space may give before its next
    // count begins.
    let first = granted(other, &alone("first")).await;
    rising.check(first.tokens[0]);
    for (table, beside) in [("same", "same"), ("one", "another")] {
        let keys = [within(table).within(Space::Table), within(beside)];
        for _ in 0..2 {
            let both = Claim { keys: keys.clone().into(), ..claim(&[&names.key("k")], "me") };
            let grant = granted(one, &both).await;
            rising.check(grant.tokens[0]);
            assert_eq!(release(one, &lease(&both, &grant)).await, RELEASED);
            let alone = alone(beside);
            let grant = granted(other, &alone).await;
            rising.check(grant.tokens[0]);
            assert_eq!(release(other, &lease(&alone, &grant)).await, RELEASED);
        }
    }
}

/// Tokens begin near the current time. A server that replaces another one relies on the time alone if it lacks
/// the last writes.
pub async fn tokens_stay_close_to_the_clock(
    one: &dyn Store,
    other: &dyn Store,
    space: Space,
    table: &dyn Store,
) {
    let names = Names::new("close");
    let beside = Key::new(&names.key("k")).expect("it is a key").within(space);
    let both = [beside.clone().within(Space::Table), beside.clone()];
    for _ in 0..3 {
        let raised = table.raise_tokens(None).await;
        assert!(raised.is_ok(), "{raised:?}");
        for (store, keys) in [(one, &both[..]), (other, &both[1..]), (one, &both[..])] {
            let asked = Claim { keys: keys.into(), ..claim(&[&names.key("k")], "me") };
            let grant = granted(store, &asked).await;
            let stored = table.read(both[0].clone()).await.expect("it reads").expect("it is there");
            let ahead_us = grant.tokens[0].0.saturating_sub(stored.now.0);
            assert!(ahead_us < 2_000_000, "{} is ahead of the clock by {ahead_us} us", grant.tokens[0].0);
            assert_eq!(release(store, &lease(&asked, &grant)).await, RELEASED);
        }
    }
}

/// The session that gives the next token already has the key, and another store has given a higher token since
/// then.
pub async fn tokens_rise_for_a_reader_that_joins_a_lease_of_two_spaces(
    one: &dyn Store,
    other: &dyn Store,
    space: Space,
) {
    let names = Names::new("joins");
    let key = Key::new(&names.key("k")).expect("it is a key").within(space);
    let reader = |keys: &[Key], owner| Claim {
        keys: keys.into(),
        mode: Mode::Shared,
        ..claim(&[&names.key("k")], owner)
    };
    let rising = Rising::default();
    let alone = [key.clone()];
    rising.check(granted(other, &reader(&alone, "first")).await.tokens[0]);
    let both = [key.clone().within(Space::Table), key];
    rising.check(granted(one, &reader(&both, "both")).await.tokens[0]);
    rising.check(granted(other, &reader(&alone, "joins")).await.tokens[0]);
}

pub async fn shared_holders_exclude_exclusive_ones(store: &dyn Store) {
    let names = Names::new("shared");
    let key = names.key("k");
    let reader = |owner| Claim { mode: Mode::Shared, ..claim(&[&key], owner) };
    let (first, second) = (reader("a"), reader("b"));
    let first_grant = granted(store, &first).await;
    let second_grant = granted(store, &second).await;
    assert!(second_grant.tokens[0] > first_grant.tokens[0]);
    held(store, &claim(&[&key], "writer")).await;
    release(store, &lease(&first, &first_grant)).await;
    held(store, &claim(&[&key], "writer")).await;
    release(store, &lease(&second, &second_grant)).await;
    granted(store, &claim(&[&key], "writer")).await;
    held(store, &reader("a")).await;
}

/// One group releases a shared lease and claims its key exclusively, after a claim for another key. A reader of
/// another store also holds the key.
pub async fn a_release_in_a_group_does_not_turn_a_shared_key_exclusive(one: &dyn Store, other: &dyn Store) {
    let names = Names::new("stronger");
    let (shared, free) = (names.key("shared"), names.key("free"));
    let reader = |owner| Claim { mode: Mode::Shared, ..claim(&[&shared], owner) };
    let own = reader("a");
    let grant = granted(one, &own).await;
    granted(other, &reader("b")).await;
    let writer = |key: &str| Op::Acquire(claim(&[key], "writer"));
    let group = vec![release_op(&lease(&own, &grant)), writer(&free), writer(&shared)];
    let outcomes = run(one, group).await;
    assert!(matches!(outcomes[..], [RELEASED, Outcome::Granted(_), Outcome::Held(_)]), "{outcomes:?}");
}

pub async fn permits_are_counted(store: &dyn Store) {
    let names = Names::new("permits");
    let key = names.key("k");
    let taking = |count| Claim { mode: Mode::Permits { count, limit: 5 }, ..claim(&[&key], "me") };
    let two = taking(2);
    let grant = granted(store, &two).await;
    granted(store, &taking(2)).await;
    held(store, &taking(2)).await;
    granted(store, &taking(1)).await;
    held(store, &taking(1)).await;
    release(store, &lease(&two, &grant)).await;
    granted(store, &taking(2)).await;
}

pub async fn several_keys_are_granted_together_or_not_at_all(store: &dyn Store) {
    let names = Names::new("several");
    let (a, b, c) = (names.key("a"), names.key("b"), names.key("c"));
    let middle = claim(&[&b], "you");
    let in_the_way = granted(store, &middle).await;
    let all = claim(&[&c, &a, &b], "me");
    let denial = held(store, &all).await;
    assert_eq!(denial.key.as_str(), b);
    let free = claim(&[&a], "you");
    let grant = granted(store, &free).await;
    release(store, &lease(&free, &grant)).await;
    release(store, &lease(&middle, &in_the_way)).await;
    let grant = granted(store, &all).await;
    assert_eq!(grant.tokens, [grant.tokens[0]; 3], "a lease has one token");
    assert!(grant.tokens[0] > in_the_way.tokens[0]);
    for key in [&a, &b, &c] {
        held(store, &claim(&[key], "you")).await;
    }
    assert!(matches!(renew(store, &lease(&all, &grant), 20_000).await, Outcome::Renewed { .. }));
    assert_eq!(release(store, &lease(&all, &grant)).await, RELEASED);
    for key in [&a, &b, &c] {
        granted(store, &claim(&[key], "you")).await;
    }
}

pub async fn a_claim_for_any_of_several_keys_gets_a_free_key(store: &dyn Store) {
    let names = Names::new("any");
    let keys: Vec<String> = (0..5).map(|n| names.key(&n.to_string())).collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    let any = |owner: &str| Claim { any: true, ..claim(&keys, owner) };
    granted(store, &claim(&[keys[3]], "you")).await;
    let mut given = Vec::new();
    let mut leases = Vec::new();
    for n in 0..4 {
        let asked = any(&n.to_string());
        let grant = granted(store, &asked).await;
        let again = granted(store, &asked).await;
        assert_eq!((again.nonce, &again.chosen), (grant.nonce, &grant.chosen), "the same claim again");
        assert_eq!(grant.tokens.len(), 1);
        let key = grant.chosen.expect("one of them");
        leases.push(LeaseRef {
            keys: [key.clone()].into(),
            nonce: grant.nonce,
            token: Some(grant.tokens[0]),
            principal: None,
        });
        given.push(key.as_str().to_owned());
    }
    held(store, &any("late")).await;
    given.sort();
    assert_eq!(given, [keys[0], keys[1], keys[2], keys[4]]);
    let free = leases.pop().expect("one of four");
    assert_eq!(release(store, &free).await, RELEASED);
    let grant = granted(store, &any("late")).await;
    assert_eq!(grant.chosen.as_ref(), Some(&free.keys[0]));
}

pub async fn a_reentrant_lease_is_released_as_often_as_it_was_acquired(store: &dyn Store) {
    let names = Names::new("reentrant");
    let enter = || Claim { reentrant: true, ..claim(&[&names.key("k")], "me") };
    let first = enter();
    let grant = granted(store, &first).await;
    let again = granted(store, &enter()).await;
    assert!(again.repeated && again.levels == 2 && again.tokens == grant.tokens);
    let lease = lease(&first, &grant);
    assert_eq!(release(store, &lease).await, Outcome::Released { levels_left: 1 });
    held(store, &claim(&[&names.key("k")], "you")).await;
    assert_eq!(release(store, &lease).await, RELEASED);
    granted(store, &claim(&[&names.key("k")], "you")).await;
}

pub async fn a_repeated_request_id_gets_the_same_lease(store: &dyn Store) {
    let names = Names::new("request");
    let asked = || Claim { request: Some("r1".into()), ..claim(&[&names.key("k")], "me") };
    let first = granted(store, &asked()).await;
    let again = granted(store, &asked()).await;
    assert!(again.repeated);
    assert_eq!((again.nonce, &again.tokens), (first.nonce, &first.tokens));
    let claim = claim(&[&names.key("lost")], "me");
    let first = granted(store, &claim).await;
    let again = granted(store, &claim).await;
    assert_eq!((again.nonce, &again.tokens), (first.nonce, &first.tokens));
}

pub async fn a_request_id_serves_one_body_and_one_lease(store: &dyn Store) {
    let names = Names::new("reused");
    let asked = Claim { request: Some("r1".into()), ..claim(&[&names.key("k")], "me") };
    let grant = granted(store, &asked).await;
    let other = Claim { attempt: fresh(), fingerprint: 2, ..asked.clone() };
    assert_eq!(acquire(store, &other).await, Outcome::RequestReused { ended: false });
    release(store, &lease(&asked, &grant)).await;
    let late = Claim { attempt: fresh(), ..asked };
    assert_eq!(acquire(store, &late).await, Outcome::RequestReused { ended: true });
}

pub async fn tokens_rise_with_every_grant_and_force(store: &dyn Store) {
    let names = Names::new("tokens");
    let key = names.key("k");
    let rising = Rising::default();
    for _ in 0..20 {
        let claim = claim(&[&key], "me");
        let grant = granted(store, &claim).await;
        rising.check(grant.tokens[0]);
        release(store, &lease(&claim, &grant)).await;
    }
    let short = Claim { ttl_ms: 100, ..claim(&[&key], "me") };
    rising.check(granted(store, &short).await.tokens[0]);
    pass_ms(150 + UNNOTICED_US / 1_000).await;
    rising.check(granted(store, &claim(&[&key], "me")).await.tokens[0]);
    let force = Op::Force { key: Key::new(&key).expect("it is a key") };
    assert_eq!(one(store, force).await, Outcome::Forced { holders: 1 });
    let last = granted(store, &claim(&[&key], "me")).await.tokens[0];
    assert!(last.0 > rising.0.load(Ordering::SeqCst) + 1, "the token moves on with force, too");
}

/// On a store of [`Kind::Forgetful`].
pub async fn tokens_survive_clean_up(store: &dyn Store) {
    let names = Names::new("clean");
    let key = names.key("k");
    let rising = Rising::default();
    for _ in 0..3 {
        for _ in 0..5 {
            let claim = claim(&[&key], "me");
            let grant = granted(store, &claim).await;
            rising.check(grant.tokens[0]);
            release(store, &lease(&claim, &grant)).await;
        }
        let deadline = clock::now().plus_ms(20_000);
        loop {
            pass_ms(FORGETS_AFTER.as_millis() as u64 + 50).await;
            // Other calls continue meanwhile, because some stores clean up when they are used.
            granted(store, &claim(&[&names.key(&fresh().to_string())], "you")).await;
            let key = Key::new(&key).expect("it is a key");
            if store.read(key).await.expect("the store is available").is_none() {
                break;
            }
            assert!(clock::now() < deadline, "an idle row is deleted");
        }
    }
}

pub async fn lock_at_least_keeps_the_key_after_a_release(store: &dyn Store) {
    let names = Names::new("at-least");
    let mine = Claim { at_least_ms: 400, ..claim(&[&names.key("k")], "me") };
    let grant = granted(store, &mine).await;
    assert_eq!(release(store, &lease(&mine, &grant)).await, RELEASED);
    let yours = claim(&[&names.key("k")], "you");
    let denial = held(store, &yours).await;
    assert!(denial.holder.is_none() && denial.free_in_us <= 400_000);
    pass_ms(420).await;
    granted(store, &yours).await;
}

pub async fn lock_delay_keeps_the_key_after_an_expiry(store: &dyn Store) {
    let names = Names::new("delay");
    let mine = Claim { ttl_ms: 200, delay_ms: 500, ..claim(&[&names.key("k")], "me") };
    let grant = granted(store, &mine).await;
    pass_ms(250 + UNNOTICED_US / 1_000).await;
    assert_eq!(renew(store, &lease(&mine, &grant), 10_000).await, Outcome::Lost);
    let yours = claim(&[&names.key("k")], "you");
    held(store, &yours).await;
    pass_ms(480).await;
    granted(store, &yours).await;
}
