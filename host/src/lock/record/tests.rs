//! Tests of single decisions. The simulation in `table::tests` tests their combination.

use std::sync::Arc;

use super::*;
use crate::lock::{Key, LeaseRef, Mode, ServerTime, Token};

mod causes;
mod delegation;
mod order;
mod replays;

const UNNOTICED_MS: u32 = (UNNOTICED_US / 1_000) as u32;
const SECOND: u32 = 1_000;

fn keys(names: &[&str]) -> Arc<[Key]> {
    names.iter().map(|name| Key::new(name).unwrap()).collect()
}

fn claim(names: &[&str], owner: &str, attempt: u64) -> Claim {
    Claim {
        keys: keys(names),
        proxy: "".into(),
        waits: false,
        attempt,
        owner: owner.into(),
        request: None,
        fingerprint: 0,
        mode: Mode::Exclusive,
        ttl_ms: 10 * SECOND,
        at_least_ms: 0,
        delay_ms: 0,
        reentrant: false,
        keep_ms: None,
        global: None,
        any: false,
        delegable: None,
        tag: Tag::default(),
    }
}

/// The records of the keys a to d, and a clock.
struct World {
    records: Records,
    env: Env,
}

impl World {
    fn new() -> World {
        let mut records = Records::default();
        for key in &*keys(&["a", "b", "c", "d"]) {
            records.insert(key.clone(), None);
        }
        let (floor, others, grants_from) = (Token(0), Token(0), ServerTime(0));
        let (now, renamed, takeover) = (ServerTime(1_000_000), Token(0), true);
        let (longest_us, set_back_us, steady) = (u64::MAX, 0, true);
        let env = Env { now, floor, renamed, others, grants_from, takeover, longest_us, set_back_us, steady };
        World { records, env }
    }

    fn apply(&mut self, op: &Op) -> Outcome {
        apply(&mut self.records, op, &self.env)
    }

    fn acquire(&mut self, claim: &Claim) -> Outcome {
        self.apply(&Op::Acquire(claim.clone()))
    }

    fn granted(&mut self, claim: &Claim) -> (LeaseRef, Grant) {
        match self.acquire(claim) {
            Outcome::Granted(grant) => {
                let (keys, token) = (claim.keys.clone(), grant.tokens[0]);
                (LeaseRef { keys, nonce: grant.nonce, token: Some(token), principal: None }, grant)
            }
            other => panic!("{other:?}"),
        }
    }

    fn held(&mut self, claim: &Claim) -> Denial {
        match self.acquire(claim) {
            Outcome::Held(denial) => denial,
            other => panic!("{other:?}"),
        }
    }

    fn release(&mut self, lease: &LeaseRef, attempt: u64) -> Outcome {
        self.apply(&Op::Release(Release { lease: lease.clone(), attempt, outcome: None }))
    }

    fn pass_ms(&mut self, ms: u32) {
        self.env.now = self.env.now.plus_ms(ms);
    }
}

const RELEASED: Outcome = Outcome::Released { levels_left: 0 };

#[test]
fn a_key_has_one_exclusive_holder_and_its_token_rises() {
    let mut world = World::new();
    let (lease, first) = world.granted(&claim(&["a"], "x", 1));
    let denial = world.held(&claim(&["a"], "y", 2));
    assert_eq!(denial.free_in_us, 10_000_000 + UNNOTICED_US);
    assert_eq!(&*denial.holder.unwrap().owner, "x");
    assert_eq!(world.release(&lease, 9), RELEASED);
    let (_, second) = world.granted(&claim(&["a"], "y", 2));
    assert!(second.tokens[0] > first.tokens[0]);
}

#[test]
fn several_keys_are_held_together_or_not_at_all() {
    let mut world = World::new();
    let (lease, _) = world.granted(&claim(&["b"], "x", 1));
    assert_eq!(world.held(&claim(&["a", "b", "c"], "y", 2)).key, lease.keys[0]);
    world.granted(&claim(&["a", "c"], "z", 3));
}

#[test]
fn all_keys_of_a_lease_have_one_token_above_their_earlier_tokens() {
    let mut world = World::new();
    for attempt in 1..=5 {
        let (lease, _) = world.granted(&claim(&["b"], "x", attempt));
        world.release(&lease, 100 + attempt);
    }
    let highest = world.records.get(&keys(&["b"])[0]).unwrap().token;
    let (lease, grant) = world.granted(&claim(&["a", "b", "c"], "x", 9));
    assert_eq!(grant.tokens, [highest.next(); 3]);
    assert_eq!(
        world.apply(&Op::Renew { lease: lease.clone(), ttl_ms: None }),
        Outcome::Renewed { left_us: 10_000_000 }
    );
    assert_eq!(world.release(&lease, 109), RELEASED);
    for (n, name) in ["a", "b", "c"].into_iter().enumerate() {
        let (_, next) = world.granted(&claim(&[name], "x", 20 + n as u64));
        assert!(next.tokens[0] > grant.tokens[0], "{name} was lifted, too");
    }
    let any = Claim { any: true, ..claim(&["c", "d"], "x", 30) };
    let Outcome::Granted(grant) = world.acquire(&any) else { panic!("d is free") };
    assert_eq!((grant.chosen, grant.tokens), (Some(keys(&["d"])[0].clone()), vec![Token(1)]), "by itself");
}

#[test]
fn a_release_frees_the_remaining_keys_of_a_lease() {
    let mut world = World::new();
    let enter = |attempt| Claim { reentrant: true, ..claim(&["a", "b", "c"], "x", attempt) };
    let (lease, _) = world.granted(&enter(1));
    world.granted(&enter(2));
    world.apply(&Op::Force { key: lease.keys[0].clone() });
    for stranger in [
        LeaseRef { nonce: 7, ..lease.clone() },
        LeaseRef { token: lease.token.map(Token::next), ..lease.clone() },
        LeaseRef { keys: keys(&["b"]), token: lease.token.map(Token::next), ..lease.clone() },
    ] {
        assert_eq!(world.release(&stranger, 8), Outcome::Lost);
    }
    assert_eq!(world.release(&lease, 9), Outcome::Lost);
    world.held(&claim(&["b"], "y", 3));
    assert_eq!(world.release(&lease, 10), Outcome::Lost, "the other one that had entered");
    world.granted(&claim(&["a", "b", "c"], "y", 3));
    assert_eq!(world.release(&lease, 11), Outcome::Lost);
    world.held(&claim(&["b"], "z", 4));
}

/// A release that is repeated because its answer was lost gets the same answer.
#[test]
fn a_repeated_release_of_a_partly_lost_lease_is_answered_as_lost_again() {
    let mut world = World::new();
    let (lease, _) = world.granted(&claim(&["a", "b"], "x", 1));
    world.apply(&Op::Force { key: lease.keys[1].clone() });
    for _ in 0..2 {
        assert_eq!(world.release(&lease, 8), Outcome::Lost);
    }
}

#[test]
fn shared_holders_share_a_key_and_exclude_an_exclusive_holder() {
    let mut world = World::new();
    let shared = |attempt| Claim { mode: Mode::Shared, ..claim(&["a"], "s", attempt) };
    let (one, _) = world.granted(&shared(1));
    let (two, _) = world.granted(&shared(2));
    world.held(&claim(&["a"], "x", 3));
    assert_eq!(world.release(&one, 8), RELEASED);
    world.held(&claim(&["a"], "x", 3));
    assert_eq!(world.release(&two, 9), RELEASED);
    world.granted(&claim(&["a"], "x", 3));
    world.held(&shared(4));
}

#[test]
fn permits_are_counted() {
    let mut world = World::new();
    let some =
        |count, attempt| Claim { mode: Mode::Permits { count, limit: 3 }, ..claim(&["a"], "p", attempt) };
    world.granted(&some(2, 1));
    world.held(&some(2, 2));
    world.granted(&some(1, 3));
    world.held(&some(1, 4));
}

#[test]
fn an_expired_lease_is_lost_and_taken_over() {
    let mut world = World::new();
    let (lease, first) = world.granted(&claim(&["a"], "x", 1));
    world.pass_ms(10 * SECOND);
    // The clock may have been set forward a little, so the holder may still count on its lease.
    assert_eq!(world.held(&claim(&["a"], "y", 2)).free_in_us, UNNOTICED_US);
    world.pass_ms(UNNOTICED_MS);
    assert_eq!(world.apply(&Op::Renew { lease: lease.clone(), ttl_ms: None }), Outcome::Lost);
    assert_eq!(world.release(&lease, 9), Outcome::Lost);
    let (_, second) = world.granted(&claim(&["a"], "y", 2));
    assert!(second.tokens[0] > first.tokens[0]);
    assert_eq!(world.release(&lease, 9), Outcome::Lost);
}

/// The store's clock was set forward by less than can be noticed, and the holder counts on its lease for that
/// much longer.
#[test]
fn a_lease_can_be_renewed_until_its_keys_can_be_granted_to_others() {
    let mut world = World::new();
    let (lease, _) = world.granted(&claim(&["a"], "x", 1));
    for _ in 0..2 {
        world.pass_ms(10 * SECOND + UNNOTICED_MS - 1);
        let renewed = world.apply(&Op::Renew { lease: lease.clone(), ttl_ms: None });
        assert_eq!(renewed, Outcome::Renewed { left_us: 10_000_000 });
    }
    world.pass_ms(10 * SECOND + UNNOTICED_MS - 1);
    assert_eq!(world.release(&lease, 9), Outcome::Released { levels_left: 0 });
}

#[test]
fn an_expired_lease_is_not_taken_over_while_the_clock_is_in_doubt() {
    let mut world = World::new();
    world.granted(&claim(&["a"], "x", 1));
    world.pass_ms(20 * SECOND);
    world.env.takeover = false;
    assert!(world.held(&claim(&["a"], "y", 2)).free_in_us > 0);
    world.env.takeover = true;
    world.granted(&claim(&["a"], "y", 2));
}

/// The store's clock was set forward beyond the end of a running lease.
#[test]
fn a_lease_whose_end_is_in_doubt_can_be_renewed_and_released() {
    let mut world = World::new();
    let (lease, _) = world.granted(&claim(&["a"], "x", 1));
    world.pass_ms(20 * SECOND);
    world.env.takeover = false;
    let renewed = world.apply(&Op::Renew { lease: lease.clone(), ttl_ms: None });
    assert_eq!(renewed, Outcome::Renewed { left_us: 10_000_000 });
    world.pass_ms(20 * SECOND);
    assert_eq!(world.release(&lease, 9), Outcome::Released { levels_left: 0 });
    world.granted(&claim(&["a"], "y", 2));
}

/// The previous server may have granted the keys to others after the end of the lease.
#[test]
fn the_state_of_a_lease_whose_end_is_in_doubt_is_unknown_before_grants_begin() {
    let mut world = World::new();
    let (lease, _) = world.granted(&claim(&["a"], "x", 1));
    let (running, _) = world.granted(&Claim { ttl_ms: 30 * SECOND, ..claim(&["b"], "x", 2) });
    world.pass_ms(20 * SECOND);
    world.env.takeover = false;
    world.env.grants_from = world.env.now.plus_ms(SECOND);
    let renew = |lease: &LeaseRef| Op::Renew { lease: lease.clone(), ttl_ms: None };
    assert_eq!(world.apply(&renew(&lease)), Outcome::Unknown);
    assert_eq!(world.release(&lease, 9), Outcome::Unknown);
    assert_eq!(world.apply(&renew(&running)), Outcome::Renewed { left_us: 30_000_000 });
    world.env.takeover = true;
    assert_eq!(world.apply(&renew(&lease)), Outcome::Lost);
}

/// On the previous server the lease keeps its end, and proxies that still use that server grant its keys
/// afterwards.
#[test]
fn a_lease_is_not_extended_while_another_server_may_be_in_use() {
    let mut world = World::new();
    world.env.longest_us = 10_000_000;
    let reentrant = Claim { reentrant: true, ..claim(&["a"], "x", 1) };
    let (lease, _) = world.granted(&reentrant);
    world.pass_ms(4 * SECOND);
    world.env.grants_from = world.env.now.plus_ms(12 * SECOND);
    let renew = Op::Renew { lease, ttl_ms: None };
    assert_eq!(world.apply(&renew), Outcome::Renewed { left_us: 6_000_000 });
    let (_, again) = world.granted(&Claim { attempt: 2, ..reentrant });
    assert_eq!(again.left_us, 6_000_000);
    world.pass_ms(2 * SECOND);
    assert_eq!(world.apply(&renew), Outcome::Renewed { left_us: 10_000_000 });
}

/// The reported time must be over when a clock that was set back is set forward again and the lease is not in
/// doubt any more.
#[test]
fn the_reported_time_left_of_a_lease_never_exceeds_its_ttl() {
    let mut world = World::new();
    let reentrant = Claim { reentrant: true, ..claim(&["a"], "x", 1) };
    world.pass_ms(500 * SECOND);
    let (lease, _) = world.granted(&reentrant);
    world.pass_ms(SECOND);
    world.env.now = ServerTime(world.env.now.0 - 400_000_000);
    let renewed = world.apply(&Op::Renew { lease: lease.clone(), ttl_ms: None });
    assert_eq!(renewed, Outcome::Renewed { left_us: 10_000_000 });
    let raised = world.apply(&Op::Raise { lease: lease.clone(), tokens: Some(vec![Token(99)]) });
    assert_eq!(raised, Outcome::Renewed { left_us: 10_000_000 });
    for attempt in [1, 2] {
        let (_, again) = world.granted(&Claim { attempt, ..reentrant.clone() });
        assert_eq!(again.left_us, 10_000_000, "attempt {attempt}");
    }
    world.env.longest_us = 7_000_000;
    let renewed = world.apply(&Op::Renew { lease, ttl_ms: None });
    assert_eq!(renewed, Outcome::Renewed { left_us: 7_000_000 });
}

/// Another proxy reads the clock before it is set back, and after it is set forward again.
#[test]
fn a_lease_granted_while_the_clock_was_set_back_lasts_when_the_clock_is_set_forward_again() {
    let mut world = World::new();
    let (earlier, _) = world.granted(&Claim { reentrant: true, ..claim(&["a"], "x", 1) });
    world.pass_ms(SECOND);
    let forward_us = world.env.now.0;
    world.env.now = ServerTime(forward_us - 1_500_000);
    world.env.set_back_us = 1_500_000;
    let (_, again) = world.granted(&Claim { reentrant: true, ..claim(&["a"], "x", 1) });
    assert_eq!(again.left_us, 9_000_000, "a repeat");
    let (later, grant) = world.granted(&claim(&["b"], "x", 2));
    assert_eq!(grant.left_us, 10_000_000);
    let renewed = world.apply(&Op::Renew { lease: earlier, ttl_ms: None });
    assert_eq!(renewed, Outcome::Renewed { left_us: 10_000_000 });
    world.env.set_back_us = 0;
    world.env.now = ServerTime(forward_us + 9_999_000);
    world.held(&claim(&["a"], "y", 3));
    world.held(&claim(&["b"], "y", 4));
    assert_eq!(world.release(&later, 9), Outcome::Released { levels_left: 0 });
}

#[test]
fn a_lease_whose_end_is_in_doubt_can_be_forced_free() {
    let mut world = World::new();
    let (lease, _) = world.granted(&claim(&["a"], "x", 1));
    world.pass_ms(20 * SECOND);
    world.env.takeover = false;
    assert_eq!(world.apply(&Op::Force { key: lease.keys[0].clone() }), Outcome::Forced { holders: 1 });
    world.granted(&claim(&["a"], "y", 2));
}

#[test]
fn nothing_is_granted_before_the_quarantine_ends() {
    let mut world = World::new();
    world.env.grants_from = world.env.now.plus_ms(SECOND);
    assert_eq!(world.held(&claim(&["a"], "x", 1)).free_in_us, 1_000_000);
    world.pass_ms(SECOND);
    world.granted(&claim(&["a"], "x", 1));
}

#[test]
fn a_renewal_extends_a_lease_and_never_shortens_it() {
    let mut world = World::new();
    let (lease, _) = world.granted(&claim(&["a"], "x", 1));
    world.pass_ms(4 * SECOND);
    let renew = |world: &mut World, ttl_ms| world.apply(&Op::Renew { lease: lease.clone(), ttl_ms });
    assert_eq!(renew(&mut world, Some(SECOND)), Outcome::Renewed { left_us: 6_000_000 });
    assert_eq!(renew(&mut world, None), Outcome::Renewed { left_us: 10_000_000 });
}

#[test]
fn a_repeated_request_finds_its_lease_or_is_refused_as_reused() {
    let mut world = World::new();
    let asked = |attempt, fingerprint| Claim {
        request: Some("r".into()),
        fingerprint,
        ..claim(&["a"], "x", attempt)
    };
    let (lease, first) = world.granted(&asked(1, 7));
    let (_, again) = world.granted(&asked(2, 7));
    assert!(again.repeated);
    assert_eq!((again.nonce, &again.tokens), (first.nonce, &first.tokens));
    assert_eq!(world.acquire(&asked(3, 8)), Outcome::RequestReused { ended: false });
    let more = Claim { keys: claim(&["a", "b"], "x", 0).keys, ..asked(5, 7) };
    assert_eq!(world.acquire(&more), Outcome::RequestReused { ended: false }, "its keys have changed");
    assert_eq!(world.release(&lease, 9), RELEASED);
    assert_eq!(world.acquire(&asked(4, 7)), Outcome::RequestReused { ended: true });
}

#[test]
fn a_rejoin_finds_an_existing_lease_and_grants_no_new_one() {
    let mut world = World::new();
    assert_eq!(world.apply(&Op::Rejoin(claim(&["a"], "x", 1))), Outcome::Absent);
    world.granted(&claim(&["a"], "x", 1));
    assert!(matches!(world.apply(&Op::Rejoin(claim(&["a"], "x", 1))), Outcome::Granted(_)));
}

#[test]
fn a_reentrant_lease_counts_the_entries_of_its_owner() {
    let mut world = World::new();
    let again = |attempt| Claim { reentrant: true, ..claim(&["a", "b"], "x", attempt) };
    let (lease, first) = world.granted(&again(1));
    let (_, second) = world.granted(&again(2));
    assert_eq!((second.levels, second.nonce, &second.tokens), (2, first.nonce, &first.tokens));
    // A level cannot be added to some of the keys only: the lease holds all of them.
    world.held(&Claim { reentrant: true, ..claim(&["a"], "x", 3) });
    assert_eq!(world.release(&lease, 8), Outcome::Released { levels_left: 1 });
    assert_eq!(world.release(&lease, 8), Outcome::Released { levels_left: 1 }, "the same release again");
    world.held(&claim(&["b"], "y", 4));
    assert_eq!(world.release(&lease, 9), RELEASED);
    world.granted(&claim(&["b"], "y", 4));
}

#[test]
fn a_repeated_release_is_answered_as_released() {
    let mut world = World::new();
    let (lease, _) = world.granted(&claim(&["a"], "x", 1));
    assert_eq!(world.release(&lease, 9), RELEASED);
    assert_eq!(world.release(&lease, 9), RELEASED);
    assert_eq!(world.release(&lease, 10), Outcome::Lost);
}

#[test]
fn a_lease_reference_with_a_wrong_nonce_or_token_changes_nothing() {
    let mut world = World::new();
    let (lease, _) = world.granted(&claim(&["a"], "x", 1));
    let before = world.records.clone();
    for foreign in
        [LeaseRef { nonce: 2, ..lease.clone() }, LeaseRef { token: Some(Token(9)), ..lease.clone() }]
    {
        assert_eq!(world.release(&foreign, 9), Outcome::Lost);
        assert_eq!(world.apply(&Op::Renew { lease: foreign, ttl_ms: None }), Outcome::Lost);
    }
    assert_eq!(world.records.get(&lease.keys[0]), before.get(&lease.keys[0]));
}

#[test]
fn an_abandoned_claim_is_undone_unless_a_repeat_of_its_request_has_the_lease() {
    let mut world = World::new();
    let asked = |attempt| Claim { request: Some("r".into()), ..claim(&["a"], "x", attempt) };
    world.granted(&asked(1));
    world.granted(&asked(2));
    let abandon = |world: &mut World, attempt| world.apply(&Op::Abandon { keys: keys(&["a"]), attempt });
    abandon(&mut world, 1);
    world.held(&claim(&["a"], "y", 3));
    abandon(&mut world, 2);
    world.granted(&claim(&["a"], "y", 3));
}

#[test]
fn lock_at_least_and_lock_delay_keep_the_key() {
    let mut world = World::new();
    let (lease, _) = world.granted(&Claim { at_least_ms: SECOND, ..claim(&["a"], "x", 1) });
    assert_eq!(world.release(&lease, 9), RELEASED);
    assert_eq!(world.held(&claim(&["a"], "y", 2)).free_in_us, 1_000_000);
    world.pass_ms(SECOND);
    world.granted(&Claim { delay_ms: SECOND, ..claim(&["a"], "y", 2) });
    world.pass_ms(10 * SECOND + UNNOTICED_MS);
    assert_eq!(world.held(&claim(&["a"], "z", 3)).free_in_us, 1_000_000);
    world.pass_ms(SECOND);
    world.granted(&claim(&["a"], "z", 3));
    world.granted(&Claim { ttl_ms: SECOND, at_least_ms: 3 * SECOND, ..claim(&["b"], "x", 4) });
    world.pass_ms(SECOND);
    assert_eq!(world.held(&claim(&["b"], "y", 5)).free_in_us, 2_000_000);
}

#[test]
fn a_forced_release_raises_the_token() {
    let mut world = World::new();
    let (lease, first) = world.granted(&claim(&["a"], "x", 1));
    let force = Op::Force { key: lease.keys[0].clone() };
    assert_eq!(world.apply(&force), Outcome::Forced { holders: 1 });
    assert_eq!(world.apply(&force), Outcome::Forced { holders: 0 });
    assert_eq!(world.release(&lease, 9), Outcome::Lost);
    let (_, next) = world.granted(&claim(&["a"], "y", 2));
    assert!(next.tokens[0] > first.tokens[0].next());
}

#[test]
fn tokens_start_above_the_floor() {
    let mut world = World::new();
    world.env.floor = Token::floor_of_epoch(3);
    let (_, grant) = world.granted(&claim(&["a"], "x", 1));
    assert_eq!(grant.tokens[0], Token::floor_of_epoch(3).next());
}

#[test]
fn holders_and_levels_are_bounded() {
    let mut world = World::new();
    let shared = |attempt| Claim { mode: Mode::Shared, ..claim(&["a"], "s", attempt) };
    for attempt in 1..=MAX_HOLDERS as u64 {
        world.granted(&shared(attempt));
    }
    assert_eq!(world.acquire(&shared(0)), Outcome::Full);
    let again = |attempt| Claim { reentrant: true, ..claim(&["b"], "x", attempt) };
    for attempt in 1..=MAX_LEVELS as u64 {
        world.granted(&again(attempt));
    }
    assert_eq!(world.acquire(&again(0)), Outcome::Full);
}

#[test]
fn until_covers_every_holder_delay_and_value() {
    let mut world = World::new();
    world.granted(&Claim { ttl_ms: 3_000, delay_ms: 2_000, ..claim(&["a"], "x", 1) });
    let record = |world: &World| world.records.get(&keys(&["a"])[0]).unwrap().clone();
    assert_eq!(record(&world).until(), world.env.now.plus_ms(5_000).plus_us(UNNOTICED_US));
    let mut idle = Record { not_before: ServerTime(11), ..Record::default() };
    assert_eq!(idle.until(), ServerTime(11));
    let (since, until) = (ServerTime(1), ServerTime(12));
    idle.kept = Some(StoredValue { value: "1".into(), since, until, nonce: 1, origin: Origin::Api });
    assert_eq!(idle.until(), ServerTime(12));
}

fn commit(version: u64, attempt: u64) -> Op {
    let (key, version) = (keys(&["a"])[0].clone(), Token(version));
    Op::Commit(Commit { key, version, value: None, attempt, request: None, fingerprint: 0 })
}

#[test]
fn the_version_of_a_key_without_a_row_lasts_while_other_keys_are_cleaned_up() {
    let mut world = World::new();
    let key = keys(&["a"])[0].clone();
    world.env.floor = Token(40);
    let read = world.apply(&Op::Read { key: key.clone() });
    assert_eq!(read, Outcome::Version(Version { version: Token(40), kept: None }));
    world.env.floor = Token(43);
    assert_eq!(world.apply(&commit(40, 1)), Outcome::Committed { version: Token(44) });
    // The key's own row is cleaned up: the token floor is above its last token.
    world.records.insert(key, None);
    world.env.floor = Token(45);
    for read in [40, 44] {
        let refused = world.apply(&commit(read, read));
        assert!(matches!(refused, Outcome::Conflict(Version { version: Token(45), .. })), "{refused:?}");
    }
    world.env.floor = Token(46);
    assert_eq!(
        world.apply(&commit(45, 2)),
        Outcome::Committed { version: Token(47) },
        "as the conflict said"
    );
}

#[test]
fn a_key_that_was_cleaned_up_has_the_version_of_the_floor() {
    let mut world = World::new();
    world.env.floor = Token(40);
    assert!(matches!(world.apply(&commit(39, 1)), Outcome::Conflict(Version { version: Token(40), .. })));
    assert_eq!(world.apply(&commit(40, 2)), Outcome::Committed { version: Token(41) });
    // The floor rises when other keys are cleaned up, which does not change this key.
    world.env.floor = Token(90);
    assert_eq!(world.apply(&commit(41, 3)), Outcome::Committed { version: Token(91) });
    // Other keys have had the commits of this name, so an earlier version does not belong to the present
    // content.
    (world.env.floor, world.env.renamed) = (Token(95), Token(95));
    assert!(matches!(world.apply(&commit(91, 4)), Outcome::Conflict(Version { version: Token(95), .. })));
    assert_eq!(world.apply(&commit(95, 5)), Outcome::Committed { version: Token(96) });
    assert!(matches!(world.apply(&commit(95, 6)), Outcome::Conflict(Version { version: Token(96), .. })));
}
