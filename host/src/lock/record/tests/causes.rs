//! The rule that a denial names, and the same answer for display.

use super::*;

const PERMITS: fn(u32) -> Mode = |count| Mode::Permits { count, limit: 3 };

fn cause(world: &mut World, mode: Mode) -> Cause {
    world.held(&Claim { mode, ..claim(&["a"], "asks", 99) }).cause
}

#[test]
fn a_denial_names_the_lease_or_the_permits_that_deny() {
    for (held, asked) in
        [(Mode::Exclusive, Mode::Exclusive), (Mode::Exclusive, Mode::Shared), (Mode::Shared, Mode::Exclusive)]
    {
        let mut world = World::new();
        world.granted(&Claim { mode: held, ..claim(&["a"], "x", 1) });
        assert_eq!(cause(&mut world, asked), Cause::Held, "{held:?} {asked:?}");
    }
    let mut world = World::new();
    world.granted(&Claim { mode: PERMITS(2), ..claim(&["a"], "x", 1) });
    assert_eq!(cause(&mut world, PERMITS(2)), Cause::Permits { used: 2, limit: 3 });
    assert_eq!(cause(&mut world, Mode::Exclusive), Cause::Held);
}

#[test]
fn a_denial_names_a_delay_once_the_lease_has_ended() {
    let mut world = World::new();
    world.granted(&Claim { delay_ms: 5 * SECOND, ..claim(&["a"], "x", 1) });
    assert_eq!(cause(&mut world, Mode::Exclusive), Cause::Held);
    world.pass_ms(10 * SECOND + UNNOTICED_MS);
    assert_eq!(cause(&mut world, Mode::Exclusive), Cause::Delay);
    world.pass_ms(5 * SECOND);
    world.granted(&claim(&["a"], "y", 2));

    let mut world = World::new();
    let (lease, _) = world.granted(&Claim { at_least_ms: 5 * SECOND, ..claim(&["a"], "x", 1) });
    assert_eq!(world.release(&lease, 1), RELEASED);
    let denial = world.held(&claim(&["a"], "y", 2));
    assert_eq!((denial.cause, denial.holder), (Cause::Delay, None));
}

#[test]
fn a_denial_names_a_clock_in_doubt_and_a_fail_over() {
    let mut world = World::new();
    world.granted(&claim(&["a"], "x", 1));
    world.pass_ms(20 * SECOND);
    world.env.takeover = false;
    assert_eq!(cause(&mut world, Mode::Exclusive), Cause::ClockInDoubt);
    world.env.takeover = true;
    world.env.grants_from = world.env.now.plus_ms(SECOND);
    assert_eq!(cause(&mut world, Mode::Exclusive), Cause::FailOver);
    world.pass_ms(SECOND);
    world.granted(&claim(&["a"], "y", 2));
}

#[test]
fn a_denial_names_the_global_queue_and_the_turn_of_another_proxy() {
    let ticket = |number| Some(GlobalTicket { number, rank: 0, joined: None, returns: false });
    let waits =
        |owner: &str, number| Claim { waits: true, global: ticket(number), ..claim(&["a"], owner, number) };
    let mut world = World::new();
    let (lease, _) = world.granted(&claim(&["a"], "x", 1));
    assert_eq!(world.held(&waits("y", 2)).cause, Cause::Held);
    assert_eq!(world.held(&waits("z", 3)).cause, Cause::Held);
    assert_eq!(world.release(&lease, 1), RELEASED);
    assert_eq!(world.held(&waits("z", 3)).cause, Cause::GlobalQueue);
    let record = world.records.get(&keys(&["a"])[0]).unwrap();
    let places = [2, 3, 4].map(|number| place_in_global_queue(record, number, &world.env));
    assert_eq!(places, [Some(0), Some(1), None]);

    let mut world = World::new();
    let of =
        |proxy: &str, attempt| Claim { proxy: proxy.into(), waits: true, ..claim(&["a"], proxy, attempt) };
    let (mut lease, _) = world.granted(&of("p", 1));
    assert_eq!(world.held(&of("q", 2)).cause, Cause::Held);
    for n in 0..u64::from(TURN_AFTER) {
        assert_eq!(world.release(&lease, n + 1), RELEASED);
        lease = world.granted(&of("p", n + 3)).0;
    }
    assert_eq!(world.release(&lease, 99), RELEASED);
    let record = world.records.get(&keys(&["a"])[0]).unwrap();
    assert_eq!(["p", "q"].map(|own| others_wait(record, own, &world.env)), [true, false]);
    assert_eq!(world.held(&of("p", 100)).cause, Cause::Turn);
}

/// What is shown is what the store would answer, and showing it changes nothing.
#[test]
fn a_shown_refusal_is_the_answer_of_the_store() {
    let mut world = World::new();
    let key = keys(&["a"])[0].clone();
    let asks = claim(&["a", "b"], "y", 2);
    let shown =
        |world: &World, claim: &Claim| refusal(world.records.get(&key).unwrap(), &key, claim, &world.env);
    assert_eq!(shown(&world, &asks), None);
    let (lease, _) = world.granted(&claim(&["a"], "x", 1));
    let before = world.records.clone();
    let waits = Claim { waits: true, ..asks.clone() };
    assert_eq!(shown(&world, &waits), Some(world.held(&asks)));
    assert_eq!(world.records.get(&key), before.get(&key));
    assert_eq!(world.release(&lease, 1), RELEASED);
    assert_eq!(shown(&world, &asks), None);
    assert!(world.records.get(&key).unwrap().holders.is_empty());

    let mine = Claim { proxy: "p".into(), ..claim(&["a"], "x", 5) };
    let (rules, extra_ms, tokens) = ("p@1".into(), 2 * SECOND, 100);
    world.apply(&Op::Delegate(Box::new(Delegate { claim: mine, nonce: 77, rules, extra_ms, tokens })));
    let denial = shown(&world, &asks).expect("another proxy decides");
    assert_eq!(
        (denial.cause, denial.next_waiter.map(|next| next.proxy)),
        (Cause::Delegated, Some("p".into()))
    );
}
