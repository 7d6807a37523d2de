//! Waiters with a wait of 0, beside others of the same mode.

use super::*;

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

/// Enqueues all waiters while the batch of the first one is in flight. Returns the waiters that are granted.
fn granted(waiters: Vec<Waiter>) -> Vec<u64> {
    let (mut sim, mut table) = (Sim::new(1, false), Table::new());
    for waiter in waiters {
        table.handle_event(Event::Enqueue(Box::new(waiter)), sim.now);
    }
    let mut granted = Vec::new();
    while let Some(action) = table.poll_action() {
        match action {
            Action::Submit { ticket, ops } => {
                let server = ServerTime(sim.now.0 + SERVER_AHEAD_US);
                let answer = Answered { outcomes: sim.on_store(ops), asked_at: sim.now, now: server };
                sim.now = sim.now.plus_ms(1);
                table.handle_event(Event::Completed { ticket, result: Ok(answer) }, sim.now);
            }
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
