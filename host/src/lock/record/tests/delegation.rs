//! Keys that a proxy decides about in its memory.

use super::*;

const EXTRA_MS: u32 = 2 * SECOND;
const NONCE: u64 = 77;

fn asked(claim: Claim) -> Delegate {
    Delegate { claim, nonce: NONCE, rules: "p@1".into(), extra_ms: EXTRA_MS, tokens: 100 }
}

fn of(proxy: &str, claim: Claim) -> Claim {
    Claim { proxy: proxy.into(), ..claim }
}

fn delegated(world: &mut World, claim: &Claim) -> Delegated {
    match world.apply(&Op::Delegate(Box::new(asked(claim.clone())))) {
        Outcome::Delegated(delegated) => *delegated,
        other => panic!("{other:?}"),
    }
}

fn restore(record: Record, at: ServerTime) -> Op {
    let key = keys(&["a"])[0].clone();
    Op::Restore(Box::new(Restore { key, nonce: NONCE, record, at, passed: 0 }))
}

fn extend(ttl_ms: u32, last_token: u64) -> Op {
    Op::Extend(Extend { key: keys(&["a"])[0].clone(), nonce: NONCE, ttl_ms, last_token: Token(last_token) })
}

fn is_elsewhere(outcome: &Outcome) -> bool {
    matches!(outcome, Outcome::Elsewhere { proxy, .. } if **proxy == *"p")
}

#[test]
fn a_delegated_key_is_taken_for_others_until_the_delegation_ends() {
    let mut world = World::new();
    let delegated = delegated(&mut world, &of("p", claim(&["a"], "x", 1)));
    assert_eq!(delegated.left_us, u64::from(10 * SECOND + EXTRA_MS + UNNOTICED_MS) * 1_000);
    assert_eq!((delegated.record.holders.len(), delegated.record.holders[0].nonce), (1, 1));
    let other = of("q", claim(&["a"], "y", 2));
    assert!(is_elsewhere(&world.acquire(&other)));
    world.pass_ms(10 * SECOND + EXTRA_MS);
    assert!(is_elsewhere(&world.acquire(&other)));
    world.pass_ms(2 * UNNOTICED_MS);
    let (_, grant) = world.granted(&other);
    assert!(grant.tokens[0] > delegated.last_token, "{grant:?}");
}

#[test]
fn the_record_does_not_answer_for_leases_beneath_a_delegation() {
    let mut world = World::new();
    let mine = of("p", claim(&["a"], "x", 1));
    let Delegated { grant, .. } = delegated(&mut world, &mine);
    let lease = LeaseRef { keys: mine.keys.clone(), nonce: 1, token: Some(grant.tokens[0]), principal: None };
    let key = mine.keys[0].clone();
    let again = Claim { request: Some("r".into()), ..of("q", claim(&["a"], "y", 3)) };
    for op in [
        Op::Renew { lease: lease.clone(), ttl_ms: None },
        Op::Raise { lease: lease.clone(), tokens: None },
        Op::Release(Release { lease, attempt: 9, outcome: None }),
        Op::Abandon { keys: mine.keys.clone(), attempt: 1 },
        Op::Acquire(again.clone()),
        Op::Rejoin(again),
        Op::Force { key: key.clone() },
        Op::Read { key },
    ] {
        let before = world.records.clone();
        let outcome = world.apply(&op);
        assert!(is_elsewhere(&outcome), "{op:?}: {outcome:?}");
        assert_eq!(format!("{before:?}"), format!("{:?}", world.records), "nothing has changed");
    }
    assert_eq!(world.apply(&Op::Abandon { keys: mine.keys, attempt: NONCE }), Outcome::Abandoned);
    world.held(&of("q", claim(&["a"], "y", 4)));
}

#[test]
fn a_delegation_is_undone_and_leaves_the_grant_that_was_made_with_it() {
    let mut world = World::new();
    let mine = of("p", claim(&["a"], "x", 1));
    delegated(&mut world, &mine);
    world.apply(&Op::Abandon { keys: mine.keys.clone(), attempt: NONCE });
    assert_eq!(world.apply(&Op::Abandon { keys: mine.keys, attempt: 1 }), Outcome::Abandoned);
    world.granted(&of("q", claim(&["a"], "y", 2)));
}

#[test]
fn a_restored_record_has_the_leases_of_the_memory_for_as_long_as_they_have_left() {
    let mut world = World::new();
    let mine = of("p", claim(&["a"], "x", 1));
    let mut memory = World::new();
    let first = delegated(&mut world, &mine);
    // The memory has a clock of its own, an hour behind.
    let at = |ms: u32| ServerTime(1_000_000).plus_ms(ms);
    let hour_us = 3_600_000_000;
    memory.env.now = ServerTime(world.env.now.0 + hour_us);
    let (now, own) = (world.env.now, memory.env.now);
    memory.records.insert(mine.keys[0].clone(), Some(on_another_clock(&first.record, now, own, own)));
    let lease = LeaseRef { keys: mine.keys.clone(), nonce: 1, token: None, principal: None };
    assert_eq!(memory.release(&lease, 5), RELEASED);
    let (lease, grant) = memory.granted(&Claim { at_least_ms: 500, ..claim(&["a"], "y", 2) });
    assert!(grant.tokens[0] > first.grant.tokens[0] && grant.tokens[0] <= first.last_token);
    memory.pass_ms(4 * SECOND);
    world.pass_ms(9 * SECOND);
    let record = memory.records.get(&mine.keys[0]).unwrap().clone();
    let outcome = world.apply(&restore(record, memory.env.now));
    assert_eq!(outcome, Outcome::Restored { next_waiter: None });
    let stored = world.records.get(&mine.keys[0]).unwrap();
    assert_eq!(stored.holders.len(), 1);
    assert_eq!(stored.holders[0].until, at(9 * SECOND + 6 * SECOND), "6 s are left");
    assert_eq!(stored.holders[0].since, at(5 * SECOND));
    assert_eq!(world.release(&lease, 6), RELEASED);
    let (_, next) = world.granted(&of("q", claim(&["a"], "z", 3)));
    assert!(next.tokens[0] > grant.tokens[0]);
}

#[test]
fn a_delegation_that_has_ended_is_neither_extended_nor_restored() {
    let mut world = World::new();
    let first = delegated(&mut world, &of("p", claim(&["a"], "x", 1)));
    assert_eq!(
        world.apply(&extend(30 * SECOND, 500)),
        Outcome::Extended { left_us: 30_000_000, is_wanted: false }
    );
    assert!(is_elsewhere(&world.acquire(&Claim { waits: true, ..of("q", claim(&["a"], "w", 12)) })));
    assert!(matches!(world.apply(&extend(30 * SECOND, 500)), Outcome::Extended { is_wanted: true, .. }));
    world.pass_ms(29 * SECOND);
    assert!(is_elsewhere(&world.acquire(&of("q", claim(&["a"], "y", 2)))));
    world.pass_ms(SECOND + 2 * UNNOTICED_MS);
    let (_, grant) = world.granted(&of("q", claim(&["a"], "y", 3)));
    assert!(grant.tokens[0] > Token(500), "{grant:?}");
    assert_eq!(world.apply(&extend(30 * SECOND, 900)), Outcome::Lost);
    assert_eq!(world.apply(&restore(first.record, ServerTime(0))), Outcome::Lost);
}

#[test]
fn a_repeated_operation_gets_the_same_delegation() {
    let mut world = World::new();
    let mine = of("p", claim(&["a"], "x", 1));
    let first = delegated(&mut world, &mine);
    world.pass_ms(SECOND);
    let again = delegated(&mut world, &mine);
    assert_eq!(
        (again.last_token, &again.record, &again.grant.tokens),
        (first.last_token, &first.record, &first.grant.tokens)
    );
    assert_eq!(again.left_us, first.left_us - 1_000_000);
}

#[test]
fn a_key_with_other_holders_or_waiters_is_granted_without_a_delegation() {
    let mut world = World::new();
    let reader = |owner, attempt| Claim { mode: Mode::Shared, ..of("p", claim(&["a"], owner, attempt)) };
    world.granted(&reader("x", 1));
    let outcome = world.apply(&Op::Delegate(Box::new(asked(reader("y", 2)))));
    assert!(matches!(outcome, Outcome::Granted(_)), "{outcome:?}");
    world.env.longest_us = 11_000_000;
    let outcome = world.apply(&Op::Delegate(Box::new(asked(of("p", claim(&["b"], "x", 3))))));
    assert!(matches!(outcome, Outcome::Granted(_)), "it would outlast the longest lease: {outcome:?}");
}
