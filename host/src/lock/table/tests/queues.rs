//! When a key has a queue.

use super::readers::waiter;
use super::*;
use crate::lock::LeaseRef;
use crate::lock::record::{GlobalQueueChange, Release};
use crate::lock::table::limits::KEEP_PLACES_MS;

/// Carries out what the table asks for. Returns the operations, and the nonces of the grants.
fn act(sim: &mut Sim, table: &mut Table) -> (Vec<Op>, Vec<u64>) {
    let (mut all, mut granted) = (Vec::new(), Vec::new());
    while let Some(action) = table.poll_action() {
        match action {
            Action::Submit { ticket, ops } => {
                all.extend(ops.iter().cloned());
                let now = ServerTime(sim.now.0 + SERVER_AHEAD_US);
                let result = Ok(Answered { outcomes: sim.on_store(ops), asked_at: sim.now, now });
                table.handle_event(Event::Completed { ticket, result }, sim.now);
            }
            Action::Finish { verdict: Verdict::Granted { grant, .. }, .. } => granted.push(grant.nonce),
            _ => {}
        }
    }
    (all, granted)
}

fn ask(sim: &mut Sim, table: &mut Table, waiter: Waiter) -> (Vec<Op>, Vec<u64>) {
    table.handle_event(Event::Enqueue(Box::new(waiter)), sim.now);
    act(sim, table)
}

#[test]
fn a_held_key_has_a_queue_only_while_a_client_waits() {
    let (mut sim, mut table) = (Sim::new(1, false), Table::new());
    assert_eq!(ask(&mut sim, &mut table, waiter(1, Mode::Exclusive, 0)).1.len(), 1);
    assert!(table.queues.is_empty());
    let (asked, granted) = ask(&mut sim, &mut table, waiter(2, Mode::Exclusive, 60_000));
    assert!(granted.is_empty());
    // No other proxy is met behind a lease of this one.
    assert!(matches!(&asked[..], [Op::Acquire(claim)] if !claim.waits), "{asked:?}");
    assert_eq!(table.queues.len(), 1);
    table.handle_event(Event::Cancel(WaiterId(2)), sim.now);
    assert!(table.queues.is_empty());
}

/// The lease was released through another proxy, which then granted the key.
#[test]
fn a_waiter_behind_another_proxy_leaves_a_note_even_if_this_one_knows_an_earlier_lease() {
    let (mut sim, mut table) = (Sim::new(1, false), Table::new());
    let (_, granted) = ask(&mut sim, &mut table, waiter(1, Mode::Exclusive, 0));
    let lease = LeaseRef { keys: [key(0)].into(), nonce: granted[0], token: None, principal: None };
    sim.on_store(vec![Op::Release(Release { lease, attempt: 9, outcome: None })]);
    let elsewhere = Claim { proxy: "1".into(), ..waiter(3, Mode::Exclusive, 0).claim };
    sim.on_store(vec![Op::Acquire(elsewhere)]);
    let notes = [4, 5].map(|id| {
        let (asked, _) = ask(&mut sim, &mut table, waiter(id, Mode::Exclusive, 60_000));
        table.handle_event(Event::Cancel(WaiterId(id)), sim.now);
        matches!(&asked[0], Op::Acquire(claim) if claim.waits)
    });
    assert_eq!(notes, [false, true], "the first answer tells that the earlier lease is over");
}

#[test]
fn places_in_a_global_queue_are_extended_once_however_often_the_queue_was_made_again() {
    let (mut sim, mut table) = (Sim::new(1, false), Table::new());
    let long = Waiter {
        claim: Claim { ttl_ms: 60_000, ..waiter(1, Mode::Exclusive, 0).claim },
        ..waiter(1, Mode::Exclusive, 0)
    };
    ask(&mut sim, &mut table, long);
    for id in 2..10 {
        let mut waits = waiter(id, Mode::Exclusive, 60_000);
        waits.claim.global = Some(GlobalTicket { number: id, rank: 0, joined: None, returns: false });
        ask(&mut sim, &mut table, waits);
        sim.now = sim.now.plus_ms(10);
        if id < 9 {
            table.handle_event(Event::Cancel(WaiterId(id)), sim.now);
            assert!(table.queues.is_empty());
        }
    }
    sim.now = sim.now.plus_ms(KEEP_PLACES_MS);
    table.handle_timeout(sim.now);
    let (asked, _) = act(&mut sim, &mut table);
    let keeps = |op: &&Op| matches!(op, Op::GlobalQueue { change: GlobalQueueChange::Keep { .. }, .. });
    assert_eq!(asked.iter().filter(keeps).count(), 1, "{asked:?}");
}

#[test]
fn a_key_that_several_leases_share_keeps_the_groups_of_their_grants() {
    let (mut sim, mut table) = (Sim::new(1, false), Table::new());
    let reader = |id, group: &str| Waiter { group: group.into(), ..waiter(id, Mode::Shared, 0) };
    ask(&mut sim, &mut table, reader(1, "a"));
    let (_, second) = ask(&mut sim, &mut table, reader(2, "b"));
    table.handle_event(Event::Lost { nonce: second[0] }, sim.now);
    act(&mut sim, &mut table);
    ask(&mut sim, &mut table, Waiter { group: "b".into(), ..waiter(3, Mode::Exclusive, 60_000) });
    let shares = table.queues[&key(0)].shares();
    assert_eq!(shares.iter().map(|share| share.recent_grants).collect::<Vec<_>>(), [1]);
}
