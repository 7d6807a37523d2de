//! Readers and permits that are granted together.

use super::*;
use crate::lock::LeaseRef;
use crate::lock::record::Release;

pub(super) fn waiter(id: u64, mode: Mode, wait_ms: u32) -> Waiter {
    let claim = Claim {
        keys: [key(0)].into(),
        proxy: "0".into(),
        waits: wait_ms > 0,
        attempt: id,
        owner: format!("o{id}").into(),
        request: None,
        fingerprint: 1,
        mode,
        ttl_ms: 5_000,
        at_least_ms: 0,
        delay_ms: 0,
        reentrant: false,
        keep_ms: None,
        any: false,
        delegable: None,
        global: None,
        tag: Tag::default(),
    };
    let (asks_choice, asks_backoff) = (false, false);
    let group = "".into();
    Waiter {
        id: WaiterId(id),
        claim,
        rank: 0,
        group,
        wait_ms,
        max_waiters: 100,
        asks_choice,
        asks_backoff,
        seed: 1,
        charge: Charge::default(),
    }
}

/// Lets the store answer a batch, a millisecond later.
fn answer(sim: &mut Sim, table: &mut Table, ticket: SubmissionId, ops: Vec<Op>) {
    let server = ServerTime(sim.now.0 + SERVER_AHEAD_US);
    let answer = Answered { outcomes: sim.on_store(ops), asked_at: sim.now, now: server };
    sim.now = sim.now.plus_ms(1);
    table.handle_event(Event::Completed { ticket, result: Ok(answer) }, sim.now);
}

/// Enqueues all waiters while the batch of the first one is in flight. Returns the waiters that are granted.
fn granted(waiters: Vec<Waiter>) -> Vec<u64> {
    let (mut sim, mut table) = (Sim::new(1, false), Table::new());
    for waiter in waiters {
        table.handle_event(Event::Enqueue(Box::new(waiter)), sim.now);
    }
    let mut granted = Vec::new();
    while let Some(action) = table.poll_action() {
        match action {
            Action::Submit { ticket, ops } => answer(&mut sim, &mut table, ticket, ops),
            Action::Finish { waiter, verdict: Verdict::Granted { .. } } => granted.push(waiter.0),
            _ => {}
        }
    }
    granted.sort_unstable();
    granted
}

#[test]
fn readers_that_do_not_wait_are_granted_together() {
    let reader = |id| waiter(id, Mode::Shared, 0);
    assert_eq!(granted((1..=8).map(reader).collect()), [1, 2, 3, 4, 5, 6, 7, 8]);
    let patient = waiter(2, Mode::Shared, 5_000);
    assert_eq!(granted(vec![reader(1), patient, reader(3), reader(4)]), [1, 2, 3, 4]);
    let permit = |id| waiter(id, Mode::Permits { count: 1, limit: 3 }, 0);
    assert_eq!(granted((1..=5).map(permit).collect()), [1, 2, 3], "as many as there are");
}

#[test]
fn a_waiting_writer_holds_back_the_readers_behind_it() {
    let reader = |id| waiter(id, Mode::Shared, 0);
    let writer = |wait_ms| waiter(2, Mode::Exclusive, wait_ms);
    assert_eq!(granted(vec![reader(1), writer(0), reader(3)]), [1, 3], "it did not wait");
    assert_eq!(granted(vec![reader(1), writer(5_000), reader(3)]), [1], "it waits, and goes first");
    assert_eq!(granted(vec![writer(0), reader(1), reader(3)]), [2]);
}

/// A writer holds the key, these waiters wait for their turn by a policy's choice, and the writer releases. The policy chooses
/// `choice`, and then the first of its candidates. Returns how often it was asked before the first of them released, and the
/// waiters that were granted until then.
fn granted_by_choice(waiters: Vec<Waiter>, choice: u64) -> (usize, Vec<u64>) {
    let (mut sim, mut table) = (Sim::new(1, false), Table::new());
    table.handle_event(Event::Enqueue(Box::new(waiter(100, Mode::Exclusive, 5_000))), sim.now);
    let (mut asked, mut granted, mut queued) = (0, Vec::new(), Some(waiters));
    while let Some(action) = table.poll_action() {
        match action {
            Action::Submit { ticket, ops } => answer(&mut sim, &mut table, ticket, ops),
            Action::Choose { key, choice: number, candidates, .. } => {
                asked += 1;
                let chosen = candidates.iter().map(|candidate| candidate.waiter).find(|id| id.0 == choice);
                let waiter = chosen.or(candidates.first().map(|candidate| candidate.waiter));
                table.handle_event(Event::Chosen { key, choice: number, waiter }, sim.now);
            }
            Action::Finish { waiter: WaiterId(100), verdict: Verdict::Granted { grant, keys, .. } } => {
                for waiter in queued.take().into_iter().flatten() {
                    let waiter = Waiter { asks_choice: true, ..waiter };
                    table.handle_event(Event::Enqueue(Box::new(waiter)), sim.now);
                }
                let lease = LeaseRef { keys, nonce: grant.nonce, token: None, principal: None };
                let release = Release { lease, attempt: 7, outcome: None };
                table.handle_event(Event::Release { id: ReleaseId(1), release }, sim.now);
            }
            Action::Finish { waiter, verdict: Verdict::Granted { .. } } => granted.push(waiter.0),
            _ => {}
        }
    }
    granted.sort_unstable();
    (asked, granted)
}

#[test]
fn readers_are_granted_together_with_the_reader_that_a_policy_chooses() {
    let reader = |id| waiter(id, Mode::Shared, 5_000);
    let writer = waiter(3, Mode::Exclusive, 5_000);
    assert_eq!(granted_by_choice((1..=50).map(reader).collect(), 20), (1, (1..=50).collect()));
    let (_, granted) = granted_by_choice(vec![reader(1), reader(2), writer.clone(), reader(4)], 1);
    assert_eq!(granted, [1, 2], "reader 4 does not pass the writer");
    let (_, granted) = granted_by_choice(vec![reader(1), reader(2), writer.clone(), reader(4)], 4);
    assert_eq!(granted, [1, 2, 4], "unless the policy says so");
    let (_, granted) = granted_by_choice(vec![reader(1), reader(2), writer], 3);
    assert_eq!(granted, [3], "a writer comes alone");
}
