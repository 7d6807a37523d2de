//! The global queue, and turns of proxies without one.

use super::*;

fn global_ticket(ticket: u64) -> Option<GlobalTicket> {
    Some(GlobalTicket { number: ticket, rank: 0, joined: None, returns: false })
}

fn waiting(ticket: u64, proxy: &str) -> Claim {
    waiting_for(&["a"], ticket, proxy)
}

fn waiting_for(names: &[&str], ticket: u64, proxy: &str) -> Claim {
    Claim { global: global_ticket(ticket), proxy: proxy.into(), waits: true, ..claim(names, proxy, ticket) }
}

fn change_global_queue(world: &mut World, change: GlobalQueueChange) -> Option<NextWaiter> {
    match world.apply(&Op::GlobalQueue { key: keys(&["a"])[0].clone(), change }) {
        Outcome::GlobalQueue { next_waiter } => next_waiter,
        other => panic!("{other:?}"),
    }
}

fn turn_of(outcome: Outcome) -> Option<u64> {
    match outcome {
        Outcome::Held(denial) => denial.next_waiter.and_then(|next_waiter| next_waiter.ticket),
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_first_waiter_of_the_global_queue_is_next_whichever_waiter_asks() {
    let mut world = World::new();
    let (held, _) = world.granted(&waiting(1, "p"));
    for ticket in 2..=4 {
        assert_eq!(turn_of(world.acquire(&waiting(ticket, "p"))), None, "it is held: nobody's turn");
    }
    world.release(&held, 9);
    assert_eq!(
        change_global_queue(&mut world, GlobalQueueChange::Look).and_then(|next_waiter| next_waiter.ticket),
        Some(2)
    );
    assert_eq!(turn_of(world.acquire(&waiting(4, "p"))), Some(2));
    let late = Claim { waits: false, ..waiting(5, "q") };
    assert_eq!(turn_of(world.acquire(&late)), Some(2), "nobody goes past the line");
    let (second, _) = world.granted(&waiting(2, "p"));
    world.release(&second, 10);
    assert_eq!(turn_of(world.acquire(&late)), Some(3), "who does not wait has taken no place");
    change_global_queue(&mut world, GlobalQueueChange::Leave { proxy: "p".into(), ticket: Some(3) });
    world.granted(&waiting(4, "p"));
}

#[test]
fn rank_goes_before_arrival_in_the_global_queue() {
    let mut world = World::new();
    let (held, _) = world.granted(&waiting(1, "p"));
    world.acquire(&waiting(2, "p"));
    let urgent =
        Claim { global: Some(GlobalTicket { rank: -1, ..global_ticket(3).unwrap() }), ..waiting(3, "q") };
    world.acquire(&urgent);
    world.release(&held, 9);
    assert_eq!(turn_of(world.acquire(&waiting(2, "p"))), Some(3));
    world.granted(&urgent);
}

#[test]
fn a_place_ends_unless_it_is_kept_and_evicted_proxies_are_passed_over() {
    let mut world = World::new();
    let (held, _) = world.granted(&waiting(1, "p"));
    for (ticket, proxy) in [(2, "gone"), (3, "q"), (4, "p")] {
        world.acquire(&waiting(ticket, proxy));
    }
    world.release(&held, 9);
    let evict = GlobalQueueChange::Evict { proxy: "gone".into() };
    assert_eq!(change_global_queue(&mut world, evict).and_then(|next_waiter| next_waiter.ticket), Some(3));
    world.env.now = world.env.now.plus_ms(PLACE_MS - 1);
    change_global_queue(&mut world, GlobalQueueChange::Keep { tickets: vec![4] });
    world.env.now = world.env.now.plus_ms(2);
    assert_eq!(
        change_global_queue(&mut world, GlobalQueueChange::Look).and_then(|next_waiter| next_waiter.ticket),
        Some(4),
        "nobody kept the third"
    );
    world.granted(&waiting(4, "p"));
}

#[test]
fn the_global_queue_is_bounded() {
    let mut world = World::new();
    world.granted(&waiting(1, "p"));
    for ticket in 0..MAX_GLOBAL_QUEUE as u64 {
        assert!(matches!(world.acquire(&waiting(10 + ticket, "p")), Outcome::Held(_)));
    }
    assert_eq!(world.acquire(&waiting(9_999, "p")), Outcome::Crowded);
    assert!(matches!(world.acquire(&waiting(10, "p")), Outcome::Held(_)), "who is in it stays");
}

/// Two waiters for the same keys have the same order in both queues, however they got their places.
#[test]
fn waiters_have_the_same_order_in_the_global_queues_of_all_their_keys() {
    let mut world = World::new();
    let (a, _) = world.granted(&claim(&["a"], "x", 1));
    let (b, _) = world.granted(&claim(&["b"], "x", 2));
    let (one, other) = (waiting_for(&["a"], 3, "p"), waiting_for(&["b"], 4, "q"));
    world.held(&one);
    world.pass_ms(1);
    world.held(&other);
    // A policy swap adds the second key, and the later waiter reaches the store first.
    let (one, other) = (waiting_for(&["a", "b"], 3, "p"), waiting_for(&["a", "b"], 4, "q"));
    for claim in [&other, &one] {
        world.pass_ms(1);
        world.held(claim);
    }
    for lease in [&a, &b] {
        assert_eq!(world.release(lease, 9), RELEASED);
    }
    assert_eq!(turn_of(world.acquire(&other)), Some(3), "it came later");
    world.granted(&one);
}

#[test]
fn a_place_lost_in_one_global_queue_is_taken_again_at_its_old_position() {
    let mut world = World::new();
    let (held, _) = world.granted(&claim(&["a", "b"], "x", 1));
    let (first, second) = (waiting_for(&["a", "b"], 2, "p"), waiting_for(&["a", "b"], 3, "q"));
    let joined = world.held(&first).joined;
    world.held(&second);
    change_global_queue(&mut world, GlobalQueueChange::Evict { proxy: "p".into() });
    assert_eq!(world.held(&first).joined, joined, "its other place tells");
    change_global_queue(&mut world, GlobalQueueChange::Evict { proxy: "p".into() });
    world.apply(&Op::GlobalQueue {
        key: keys(&["b"])[0].clone(),
        change: GlobalQueueChange::Evict { proxy: "p".into() },
    });
    let told = Claim { global: Some(GlobalTicket { joined, ..first.global.clone().unwrap() }), ..first };
    assert_eq!(world.held(&told).joined, joined, "its proxy was told");
    world.release(&held, 9);
    assert_eq!(turn_of(world.acquire(&second)), Some(2));
    world.granted(&told);
}

/// A place that an earlier version of the program wrote has no time.
#[test]
fn places_written_by_an_earlier_version_go_first() {
    let mut world = World::new();
    world.granted(&waiting(1, "p"));
    for ticket in [3, 2] {
        world.held(&waiting(ticket, "old"));
    }
    let mut record = world.records.get(&keys(&["a"])[0]).unwrap().clone();
    record.global_queue.iter_mut().for_each(|place| place.joined = None);
    record.holders.clear();
    world.records.insert(keys(&["a"])[0].clone(), Some(record));
    for ticket in [2, 4] {
        assert_eq!(turn_of(world.acquire(&waiting(ticket, "p"))), Some(3));
    }
}

#[test]
fn a_repeated_request_on_another_proxy_takes_over_its_place() {
    let mut world = World::new();
    let asked = |ticket, proxy: &str| Claim {
        global: Some(GlobalTicket { returns: true, ..global_ticket(ticket).unwrap() }),
        ..waiting(ticket, proxy)
    };
    let (held, _) = world.granted(&waiting(1, "p"));
    world.held(&asked(2, "gone"));
    world.held(&waiting(3, "q"));
    world.release(&held, 9);
    let evict = GlobalQueueChange::Evict { proxy: "gone".into() };
    assert_eq!(change_global_queue(&mut world, evict), None, "the place stays, and its proxy cannot be rung");
    assert_eq!(turn_of(world.acquire(&waiting(3, "q"))), Some(2));
    let (lease, _) = world.granted(&asked(2, "p"));
    world.held(&asked(4, "q"));
    world.held(&asked(4, "p"));
    change_global_queue(&mut world, GlobalQueueChange::Leave { proxy: "q".into(), ticket: Some(4) });
    change_global_queue(&mut world, GlobalQueueChange::Leave { proxy: "q".into(), ticket: Some(3) });
    world.release(&lease, 10);
    assert_eq!(
        change_global_queue(&mut world, GlobalQueueChange::Look).and_then(|next_waiter| next_waiter.ticket),
        Some(4),
        "it has moved on"
    );
}

#[test]
fn a_place_whose_request_is_not_repeated_expires() {
    let mut world = World::new();
    let (held, _) = world.granted(&waiting(1, "p"));
    let returns = Some(GlobalTicket { returns: true, ..global_ticket(2).unwrap() });
    world.held(&Claim { global: returns, ..waiting(2, "gone") });
    world.held(&waiting(3, "q"));
    world.release(&held, 9);
    let denial = world.held(&waiting(3, "q"));
    assert_eq!(denial.free_in_us, u64::from(PLACE_MS) * 1_000);
    world.pass_ms(PLACE_MS);
    world.granted(&waiting(3, "q"));
}

fn asks(proxy: &str, names: &[&str], attempt: u64) -> Claim {
    Claim { proxy: proxy.into(), waits: true, ..claim(names, proxy, attempt) }
}

/// Grants the keys to a proxy repeatedly. Returns how often, before it is another proxy's turn.
fn grants_in_a_row(world: &mut World, proxy: &str, names: &[&str]) -> u32 {
    for n in 0..100 {
        let claim = asks(proxy, names, 1_000 + u64::from(n));
        let outcome = world.acquire(&claim);
        let Outcome::Granted(grant) = outcome else { return n };
        let lease =
            LeaseRef { keys: claim.keys, nonce: grant.nonce, token: Some(grant.tokens[0]), principal: None };
        assert_eq!(world.release(&lease, 2_000 + u64::from(n)), RELEASED);
    }
    panic!("{proxy} has the key for itself");
}

#[test]
fn a_waiting_proxy_is_passed_over_a_bounded_number_of_times() {
    let mut world = World::new();
    let (held, _) = world.granted(&asks("p", &["a"], 1));
    for proxy in ["q", "r"] {
        assert_eq!(world.held(&asks(proxy, &["a"], 2)).next_waiter, None, "it is held");
    }
    world.release(&held, 9);
    assert_eq!(grants_in_a_row(&mut world, "p", &["a"]), TURN_AFTER);
    let denial = world.held(&asks("p", &["a"], 3));
    assert_eq!(denial.next_waiter, Some(NextWaiter { proxy: "q".into(), ticket: None }));
    assert_eq!(denial.free_in_us, u64::from(PLACE_MS) * 1_000);
    let (lease, _) = world.granted(&asks("q", &["a"], 4));
    world.release(&lease, 10);
    assert_eq!(grants_in_a_row(&mut world, "q", &["a"]), 0, "it is the third one's turn");
    let (lease, _) = world.granted(&asks("r", &["a"], 5));
    world.release(&lease, 11);
    // The first proxy was noted as waiting when it was denied, and was passed over twice since then.
    assert_eq!(grants_in_a_row(&mut world, "q", &["a"]), TURN_AFTER - 2);
}

#[test]
fn the_turn_of_a_proxy_that_is_gone_expires() {
    let mut world = World::new();
    let (held, _) = world.granted(&asks("p", &["a"], 1));
    world.held(&asks("gone", &["a"], 2));
    world.release(&held, 9);
    grants_in_a_row(&mut world, "p", &["a"]);
    let once = Claim { waits: false, ..asks("p", &["a"], 3) };
    world.held(&once);
    world.pass_ms(PLACE_MS);
    world.granted(&once);
    let record = world.records.get(&keys(&["a"])[0]).unwrap();
    assert!(record.wanted.is_empty(), "nobody waits: {:?}", record.wanted);
}

#[test]
fn a_proxy_that_stops_waiting_withdraws_its_mark() {
    let mut world = World::new();
    let (held, _) = world.granted(&asks("p", &["a"], 1));
    world.held(&asks("q", &["a"], 2));
    assert_eq!(change_global_queue(&mut world, GlobalQueueChange::Look), None, "it is held");
    world.release(&held, 9);
    let next = change_global_queue(&mut world, GlobalQueueChange::Look);
    assert_eq!(next, Some(NextWaiter { proxy: "q".into(), ticket: None }));
    assert_eq!(
        change_global_queue(&mut world, GlobalQueueChange::Leave { proxy: "q".into(), ticket: None }),
        None
    );
}

/// Each of two proxies has its turn on one of the keys that both want.
#[test]
fn turns_on_several_keys_do_not_wait_for_each_other() {
    let mut world = World::new();
    let (a, _) = world.granted(&asks("p", &["a"], 1));
    let (b, _) = world.granted(&asks("p", &["b"], 2));
    world.held(&asks("q", &["a"], 3));
    world.pass_ms(1);
    world.held(&asks("r", &["b"], 4));
    world.release(&a, 8);
    world.release(&b, 9);
    grants_in_a_row(&mut world, "p", &["a"]);
    grants_in_a_row(&mut world, "p", &["b"]);
    world.held(&asks("r", &["a", "b"], 5));
    world.granted(&asks("q", &["a", "b"], 6));
}

/// A proxy that has its turn but also waits for another key does not keep the free key reserved.
#[test]
fn a_turn_that_cannot_be_taken_ends() {
    let mut world = World::new();
    let (held, _) = world.granted(&asks("p", &["a"], 1));
    world.granted(&Claim { ttl_ms: 600_000, ..asks("p", &["b"], 2) });
    world.held(&asks("q", &["a", "b"], 3));
    world.release(&held, 9);
    assert_eq!(grants_in_a_row(&mut world, "p", &["a"]), TURN_AFTER);
    for _ in 0..4 {
        world.pass_ms(PLACE_MS / 4);
        world.held(&asks("q", &["a", "b"], 3));
    }
    world.granted(&asks("p", &["a"], 4));
}

#[test]
fn a_claim_for_any_of_several_keys_avoids_a_key_reserved_for_another_proxy() {
    let mut world = World::new();
    let (held, _) = world.granted(&asks("p", &["a"], 1));
    world.held(&asks("q", &["a"], 2));
    world.release(&held, 9);
    grants_in_a_row(&mut world, "p", &["a"]);
    for attempt in [4, 5] {
        let any = Claim { any: true, ..asks("p", &["a", "b"], attempt) };
        match world.acquire(&any) {
            Outcome::Granted(grant) => assert_eq!(grant.chosen, Some(keys(&["b"])[0].clone())),
            Outcome::Held(denial) => assert_eq!((attempt, denial.key), (5, keys(&["a"])[0].clone())),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn marks_of_waiting_proxies_are_bounded() {
    let mut world = World::new();
    world.granted(&asks("p", &["a"], 1));
    for n in 0..2 * MAX_WANTED as u64 {
        world.held(&asks(&format!("q{n}"), &["a"], 2 + n));
    }
    assert_eq!(world.records.get(&keys(&["a"])[0]).unwrap().wanted.len(), MAX_WANTED);
}
