//! Proxies that want the same key, and proxies that stop.

use super::readers::waiter;
use super::*;
use crate::lock::LeaseRef;
use crate::lock::record::{GlobalQueueChange, Release, TURN_AFTER};
use crate::lock::table::limits::JOIN_MS;

/// Four clients of one proxy hand a key to each other and ask again at once. Returns how often they were
/// granted the key while the other proxy waited.
fn grants_past_another_proxy(seed: u64) -> u64 {
    let mut sim = Sim::new(seed, false);
    sim.has_faults = false;
    let ask = |sim: &mut Sim, proxy: usize| {
        let claim = Claim { ttl_ms: 60_000, ..waiter(0, Mode::Exclusive, 0).claim };
        let asked = sim.waiter(proxy, claim, 10_000);
        sim.enqueue(proxy, Waiter { max_waiters: 100, asks_backoff: false, ..asked });
    };
    let mut before = None;
    ask(&mut sim, 0);
    for steps in 0.. {
        assert!(sim.step(), "seed {seed} has come to an end");
        let waits = |record: &Record| record.wanted.iter().any(|mark| &*mark.proxy == "1");
        let waits = sim.store.get(&key(0)).is_some_and(waits);
        if waits && before.is_none() {
            before = Some(sim.grants[0]);
        }
        if sim.grants[1] > 0 {
            return sim.grants[0] - before.unwrap_or(sim.grants[0]);
        }
        assert!(sim.now.ms_since(Instant(1_000_000)) < 9_000, "seed {seed}: it was never granted");
        // Some clients are gone when their answer arrives.
        if steps >= 40 && !sim.open.keys().any(|(proxy, _)| *proxy == 1) {
            ask(&mut sim, 1);
            before = None;
        }
        for nonce in sim.beliefs.keys().copied().collect::<Vec<_>>() {
            sim.give_back(0, nonce);
        }
        while sim.open.keys().filter(|(proxy, _)| *proxy == 0).count() < 4 {
            ask(&mut sim, 0);
        }
    }
    unreachable!("it has no end")
}

#[test]
fn a_proxy_with_a_queue_gives_another_proxy_its_turn() {
    for seed in 0..300 {
        let grants = grants_past_another_proxy(seed);
        // Grants from before the store knew of the other proxy are reported a moment later.
        assert!(grants <= u64::from(TURN_AFTER) + 2, "seed {seed}: {grants} grants");
    }
}

/// Lets the store answer a batch at once.
fn answer(sim: &mut Sim, table: &mut Table, ticket: SubmissionId, ops: Vec<Op>) {
    let now = ServerTime(sim.now.0 + SERVER_AHEAD_US);
    let result = Ok(Answered { outcomes: sim.on_store(ops), asked_at: sim.now, now });
    table.handle_event(Event::Completed { ticket, result }, sim.now);
}

/// The changes that a proxy sends to the store when it stops while `waiter` is in the global queue.
fn changes_at_shutdown(returns: bool) -> Vec<GlobalQueueChange> {
    let mut sim = Sim::new(1, false);
    let mut table = Table::new();
    let holder = waiter(1, Mode::Exclusive, 0);
    sim.on_store(vec![Op::Acquire(holder.claim)]);
    let mut waits = waiter(2, Mode::Exclusive, 60_000);
    waits.claim.global = Some(GlobalTicket { number: 7, rank: 0, joined: None, returns });
    table.handle_event(Event::Enqueue(Box::new(waits)), sim.now);
    let Some(Action::Submit { ticket, ops }) = table.poll_action() else { panic!("it asks") };
    answer(&mut sim, &mut table, ticket, ops);
    table.handle_event(Event::Shutdown, sim.now);
    table.handle_timeout(sim.now);
    let actions: Vec<Action> = std::iter::from_fn(|| table.poll_action()).collect();
    let told = |action: &Action| matches!(action, Action::Finish { verdict: Verdict::ShuttingDown, .. });
    assert_eq!(actions.iter().filter(|action| told(action)).count(), 1, "the client is told: {actions:?}");
    let ops = actions.into_iter().flat_map(|action| match action {
        Action::Submit { ops, .. } => ops,
        _ => Vec::new(),
    });
    ops.map(|op| if let Op::GlobalQueue { change, .. } = op { change } else { panic!("{op:?}") }).collect()
}

#[test]
fn a_stopping_proxy_keeps_the_places_of_requests_that_can_be_repeated() {
    assert_eq!(changes_at_shutdown(true), []);
    assert_eq!(changes_at_shutdown(false), [GlobalQueueChange::Leave { proxy: "0".into(), ticket: Some(7) }]);
}

/// The batches are answered in order: the first finds the key held by another proxy.
#[test]
fn a_queue_goes_on_behind_a_waiter_whose_client_has_gone() {
    let mut sim = Sim::new(1, false);
    sim.on_store(vec![Op::Acquire(waiter(1, Mode::Exclusive, 0).claim)]);
    let mut table = Table::new();
    for (id, wait_ms) in [(2, 0), (3, 60_000), (4, 60_000)] {
        let mut waits = Waiter { asks_backoff: true, ..waiter(id, Mode::Exclusive, wait_ms) };
        waits.claim.request = (id == 3).then(|| "r".into());
        table.handle_event(Event::Enqueue(Box::new(waits)), sim.now);
    }
    table.handle_event(Event::Cancel(WaiterId(3)), sim.now);
    let mut asked = Vec::new();
    while let Some(action) = table.poll_action() {
        match action {
            Action::Submit { ticket, ops } => answer(&mut sim, &mut table, ticket, ops),
            Action::Backoff { waiter, .. } => asked.push(waiter),
            _ => {}
        }
    }
    assert_eq!(asked, [WaiterId(4)]);
}

/// The policy is replaced by one with a global queue: earlier waiters take the first places.
#[test]
fn waiters_that_move_to_the_global_queue_keep_their_order() {
    let mut sim = Sim::new(1, false);
    sim.on_store(vec![Op::Acquire(waiter(1, Mode::Exclusive, 0).claim)]);
    let (mut table, now) = (Table::new(), sim.now);
    let in_global_queue = |id: u64| {
        let global = Some(GlobalTicket { number: 100 - id, rank: 0, joined: None, returns: false });
        Claim { global, attempt: 10 + id, ..waiter(id, Mode::Exclusive, 60_000).claim }
    };
    let mut submits = |table: &mut Table| {
        while let Some(action) = table.poll_action() {
            let Action::Submit { ticket, ops } = action else { continue };
            answer(&mut sim, table, ticket, ops);
        }
    };
    for id in [2, 3] {
        let early = waiter(id, Mode::Exclusive, 60_000);
        table.handle_event(Event::Enqueue(Box::new(early)), now);
        submits(&mut table);
    }
    for id in [2, 3] {
        let event = Event::Replan { waiter: WaiterId(id), claim: Box::new(in_global_queue(id)) };
        table.handle_event(event, now);
    }
    let late = Waiter { claim: in_global_queue(4), ..waiter(4, Mode::Exclusive, 60_000) };
    table.handle_event(Event::Enqueue(Box::new(late)), now);
    submits(&mut table);
    table.handle_timeout(now.plus_ms(JOIN_MS));
    submits(&mut table);
    let places: Vec<u64> = sim.store[&key(0)].global_queue.iter().map(|place| place.ticket).collect();
    assert_eq!(places, [98, 97, 96]);
}

/// Carries out what the table asks for. Returns the leases that it granted, and the proxies that it notified.
fn settle(sim: &mut Sim, table: &mut Table) -> (Vec<(WaiterId, LeaseRef)>, Vec<Arc<str>>) {
    let (mut granted, mut notified) = (Vec::new(), Vec::new());
    while let Some(action) = table.poll_action() {
        match action {
            Action::Submit { ticket, ops } => answer(sim, table, ticket, ops),
            Action::Finish { waiter, verdict: Verdict::Granted { grant, keys, .. } } => {
                let lease = LeaseRef { keys, nonce: grant.nonce, token: None, principal: None };
                granted.push((waiter, lease));
            }
            Action::NotifyPeer { next_waiter, .. } => notified.push(next_waiter.proxy),
            _ => {}
        }
    }
    (granted, notified)
}

/// Lets a claim of another proxy be denied, so that the record says that this proxy waits.
fn waits_elsewhere(sim: &mut Sim, proxy: &str, mode: Mode) {
    let claim = Claim { proxy: proxy.into(), attempt: 99, ..waiter(99, mode, 60_000).claim };
    let outcomes = sim.on_store(vec![Op::Acquire(claim)]);
    assert!(matches!(outcomes[..], [Outcome::Held(_)]), "{outcomes:?}");
}

#[test]
fn a_proxy_that_waits_is_notified_however_the_key_becomes_free() {
    let release = |lease: &LeaseRef| Event::Release {
        id: ReleaseId(1),
        release: Release { lease: lease.clone(), attempt: 5, outcome: None },
    };
    let undelivered = |lease: &LeaseRef| Event::Undelivered {
        nonce: lease.nonce,
        keys: lease.keys.clone(),
        attempt: lease.nonce,
        ttl_ms: 5_000,
    };
    let frees: [&dyn Fn(&LeaseRef) -> Event; 3] = [&release, &undelivered, &|_| Event::Taken(key(0))];
    for (n, frees) in frees.iter().enumerate() {
        let mut sim = Sim::new(1, false);
        let mut table = Table::new();
        let holder = waiter(1, Mode::Exclusive, 0);
        table.handle_event(Event::Enqueue(Box::new(holder)), sim.now);
        let (granted, notified) = settle(&mut sim, &mut table);
        let [(_, lease)] = &granted[..] else { panic!("{granted:?}") };
        assert!(notified.is_empty(), "nobody waits");
        waits_elsewhere(&mut sim, "1", Mode::Exclusive);
        if n == 2 {
            sim.on_store(vec![Op::Force { key: key(0) }]);
        }
        table.handle_event(frees(lease), sim.now);
        table.handle_timeout(sim.now);
        assert_eq!(settle(&mut sim, &mut table).1, ["1".into()], "{n}");
    }
}

#[test]
fn a_proxy_whose_own_waiter_takes_the_key_notifies_no_other() {
    let mut sim = Sim::new(1, false);
    let mut table = Table::new();
    for id in [1, 2] {
        let asks = waiter(id, Mode::Exclusive, 60_000);
        table.handle_event(Event::Enqueue(Box::new(asks)), sim.now);
    }
    let (granted, _) = settle(&mut sim, &mut table);
    let [(WaiterId(1), lease)] = &granted[..] else { panic!("{granted:?}") };
    waits_elsewhere(&mut sim, "1", Mode::Exclusive);
    let release = Release { lease: lease.clone(), attempt: 5, outcome: None };
    table.handle_event(Event::Release { id: ReleaseId(1), release }, sim.now);
    let (granted, notified) = settle(&mut sim, &mut table);
    assert!(matches!(granted[..], [(WaiterId(2), _)]), "{granted:?}");
    assert!(notified.is_empty(), "{notified:?}");
}

#[test]
fn a_proxy_that_waits_for_a_permit_is_notified_when_one_of_several_is_free() {
    let mut sim = Sim::new(1, false);
    let mut table = Table::new();
    let permit = Mode::Permits { count: 1, limit: 2 };
    for id in [1, 2] {
        table.handle_event(Event::Enqueue(Box::new(waiter(id, permit, 0))), sim.now);
    }
    let (granted, _) = settle(&mut sim, &mut table);
    assert_eq!(granted.len(), 2);
    waits_elsewhere(&mut sim, "1", permit);
    let release = Release { lease: granted[0].1.clone(), attempt: 5, outcome: None };
    table.handle_event(Event::Release { id: ReleaseId(1), release }, sim.now);
    assert_eq!(settle(&mut sim, &mut table).1, ["1".into()]);
}
