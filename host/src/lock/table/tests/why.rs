//! Why waiters wait, as the table tells it.

use super::readers::waiter;
use super::*;
use crate::lock::record::{Cause, Denial, NextWaiter};

/// A table whose store answers only when a test says so.
struct Scene {
    sim: Sim,
    table: Table,
    submitted: Vec<(SubmissionId, Vec<Op>)>,
}

impl Scene {
    fn new() -> Scene {
        Scene { sim: Sim::new(1, false), table: Table::new(), submitted: Vec::new() }
    }

    fn handle(&mut self, event: Event) {
        self.table.handle_event(event, self.sim.now);
        while let Some(action) = self.table.poll_action() {
            if let Action::Submit { ticket, ops } = action {
                self.submitted.push((ticket, ops));
            }
        }
    }

    fn enqueue(&mut self, waiter: Waiter) {
        self.handle(Event::Enqueue(Box::new(waiter)));
    }

    fn completed(&mut self, ticket: SubmissionId, result: Result<Vec<Outcome>, Unheard>) {
        let now = ServerTime(self.sim.now.0 + SERVER_AHEAD_US);
        let asked_at = self.sim.now;
        let result = result.map(|outcomes| Answered { outcomes, asked_at, now });
        self.handle(Event::Completed { ticket, result });
    }

    /// Lets the store answer all open batches.
    fn answer(&mut self) {
        while !self.submitted.is_empty() {
            let (ticket, ops) = self.submitted.remove(0);
            let outcomes = self.sim.on_store(ops);
            self.completed(ticket, Ok(outcomes));
        }
    }

    /// Answers the oldest batch.
    fn answer_with(&mut self, result: Result<Outcome, Unheard>) {
        let (ticket, _) = self.submitted.remove(0);
        self.completed(ticket, result.map(|outcome| vec![outcome]));
    }

    fn reasons(&self) -> Vec<Reason> {
        self.table.queue(&key(0), self.sim.now).into_iter().map(|queued| queued.why.reason).collect()
    }

    fn reason(&self, of: u64) -> Reason {
        let queue = self.table.queue(&key(0), self.sim.now);
        queue.into_iter().find(|queued| queued.waiter == WaiterId(of)).expect("it waits").why.reason
    }
}

fn exclusive(id: u64) -> Waiter {
    waiter(id, Mode::Exclusive, 60_000)
}

/// A waiter for several keys.
fn of_keys(id: u64, numbers: &[u64]) -> Waiter {
    let mut waiter = exclusive(id);
    waiter.claim.keys = numbers.iter().map(|n| key(*n)).collect();
    waiter
}

fn holder_of(reason: &Reason) -> Option<(Cause, &str)> {
    match reason {
        Reason::Blocked { cause, holder: Some(holder), .. } => Some((*cause, &holder.owner)),
        _ => None,
    }
}

fn behind(reason: &Reason) -> Option<(WaiterId, Mode, Order)> {
    match reason {
        Reason::Behind { ahead, mode, by, .. } => Some((*ahead, *mode, *by)),
        _ => None,
    }
}

#[test]
fn the_first_waits_for_the_holder_and_the_others_for_those_ahead() {
    let mut scene = Scene::new();
    scene.enqueue(exclusive(1));
    assert_eq!(scene.reasons(), [Reason::Asked]);
    scene.answer();
    for id in 2..=4 {
        scene.enqueue(Waiter { rank: if id == 4 { -1 } else { 0 }, ..exclusive(id) });
        scene.answer();
    }
    let queue = scene.table.queue(&key(0), scene.sim.now);
    let order: Vec<_> = queue.iter().map(|queued| (queued.waiter.0, queued.turns_ahead)).collect();
    assert_eq!(order, [(4, 0), (2, 1), (3, 2)]);
    assert_eq!(holder_of(&queue[0].why.reason), Some((Cause::Held, "o1")));
    assert_eq!(behind(&queue[1].why.reason), Some((WaiterId(4), Mode::Exclusive, Order::Rank)));
    assert_eq!(behind(&queue[2].why.reason), Some((WaiterId(2), Mode::Exclusive, Order::Arrival)));
    assert!(queue.iter().all(|queued| queued.rule == Rule::RankThenArrival));
    assert!(queue[0].wait_left_ms > 59_000, "{queue:?}");
}

#[test]
fn a_reader_waits_behind_a_writer_and_readers_together() {
    let mut scene = Scene::new();
    let reader = |id| waiter(id, Mode::Shared, 60_000);
    scene.enqueue(reader(1));
    scene.answer();
    scene.enqueue(exclusive(2));
    scene.answer();
    for id in 3..=4 {
        scene.enqueue(reader(id));
        scene.answer();
    }
    let queue = scene.table.queue(&key(0), scene.sim.now);
    assert_eq!(queue.iter().map(|queued| queued.turns_ahead).collect::<Vec<_>>(), [0, 1, 1]);
    assert_eq!(holder_of(&queue[0].why.reason), Some((Cause::Held, "o1")));
    for reader in &queue[1..] {
        assert_eq!(behind(&reader.why.reason), Some((WaiterId(2), Mode::Exclusive, Order::Arrival)));
    }
}

#[test]
fn permits_that_do_not_fit_are_counted() {
    let mut scene = Scene::new();
    let permits = |id, count| waiter(id, Mode::Permits { count, limit: 3 }, 60_000);
    scene.enqueue(permits(1, 2));
    scene.answer();
    scene.enqueue(permits(2, 2));
    scene.answer();
    scene.enqueue(permits(3, 1));
    scene.answer();
    assert_eq!(holder_of(&scene.reason(2)), Some((Cause::Permits { used: 2, limit: 3 }, "o1")));
    let wants = Mode::Permits { count: 2, limit: 3 };
    assert_eq!(behind(&scene.reason(3)), Some((WaiterId(2), wants, Order::Arrival)), "it would fit");
}

#[test]
fn a_policy_that_chooses_is_named() {
    let mut scene = Scene::new();
    scene.enqueue(exclusive(1));
    scene.answer();
    for id in 2..=3 {
        scene.enqueue(Waiter { asks_choice: true, ..exclusive(id) });
        scene.answer();
    }
    assert_eq!(holder_of(&scene.reason(2)), Some((Cause::Held, "o1")));
    assert_eq!(scene.reason(3), Reason::Fairness { waiting: 2 });
    let rules = scene.table.queue(&key(0), scene.sim.now).into_iter().map(|queued| queued.rule);
    assert_eq!(rules.collect::<Vec<_>>(), [Rule::Fairness, Rule::Fairness]);
    scene.handle(Event::Lost { nonce: 1 });
    assert_eq!(scene.reason(2), Reason::Choosing);
    let choice = scene.table.queues[&key(0)].choice.as_ref().expect("the policy is asked").id;
    scene.handle(Event::Chosen { key: key(0), choice, waiter: Some(WaiterId(3)) });
    // The one that the policy chose is asked for.
    assert!(matches!(&scene.submitted[0].1[..], [Op::Acquire(claim)] if &*claim.owner == "o3"));
}

#[test]
fn the_key_of_several_that_is_not_free_is_named() {
    let mut scene = Scene::new();
    scene.enqueue(of_keys(1, &[1]));
    scene.answer();
    scene.enqueue(of_keys(2, &[0, 1]));
    scene.answer();
    scene.enqueue(exclusive(3));
    scene.answer();
    for viewed in [0, 1] {
        let queue = scene.table.queue(&key(viewed), scene.sim.now);
        assert_eq!((&queue[0].why.key, queue[0].waiter), (&key(1), WaiterId(2)), "from key {viewed}");
        assert_eq!(holder_of(&queue[0].why.reason), Some((Cause::Held, "o1")));
    }
    assert_eq!(behind(&scene.reason(3)), Some((WaiterId(2), Mode::Exclusive, Order::Arrival)));
    scene.handle(Event::Wake(key(1)));
    assert_eq!(scene.submitted.len(), 1);
    let asked = scene.table.queue(&key(0), scene.sim.now).remove(0).why;
    assert_eq!(
        (asked.key, holder_of(&asked.reason)),
        (key(1), Some((Cause::Held, "o1"))),
        "it is asked again"
    );
    scene.answer();
    // At the other key, it is not the first.
    scene.enqueue(of_keys(4, &[1, 2]));
    scene.answer();
    let third = scene.table.queue(&key(2), scene.sim.now).remove(0).why;
    assert_eq!(
        (third.key, behind(&third.reason)),
        (key(1), Some((WaiterId(2), Mode::Exclusive, Order::Arrival)))
    );
}

#[test]
fn the_rule_of_the_store_is_passed_on_until_the_key_is_free() {
    for cause in [
        Cause::Delay,
        Cause::ClockInDoubt,
        Cause::FailOver,
        Cause::GlobalQueue,
        Cause::Turn,
        Cause::Delegated,
        Cause::OtherSession,
        Cause::Divided,
    ] {
        let mut scene = Scene::new();
        scene.enqueue(exclusive(1));
        let next_waiter = Some(NextWaiter { proxy: "9".into(), ticket: None });
        let (key, free_in_us, joined) = (key(0), 7_000_000, None);
        let denial =
            Denial { key, cause, holder: None, free_in_us, next_waiter: next_waiter.clone(), joined };
        scene.answer_with(Ok(Outcome::Held(denial)));
        let blocked = Reason::Blocked { cause, holder: None, free_in_ms: 7_000, next_waiter };
        assert_eq!(scene.reasons(), std::slice::from_ref(&blocked));
        scene.handle(Event::Wake(self::key(0)));
        assert!(!scene.submitted.is_empty());
        assert_eq!(
            scene.reasons(),
            [blocked],
            "while the store is asked again, this is the last that is known"
        );
    }
}

#[test]
fn a_store_that_does_not_answer_is_named() {
    let mut scene = Scene::new();
    scene.enqueue(exclusive(1));
    scene.answer_with(Err(Unheard { why: "gone".to_owned(), sent: false }));
    assert_eq!(scene.reasons(), [Reason::Unanswered { why: "gone".to_owned() }]);
}

#[test]
fn waiters_of_the_global_queue_are_ordered_by_it() {
    let mut scene = Scene::new();
    scene.enqueue(exclusive(1));
    scene.answer();
    for id in 2..=3 {
        let mut waits = exclusive(id);
        waits.claim.global = Some(GlobalTicket { number: id, rank: 0, joined: None, returns: false });
        scene.enqueue(waits);
        scene.answer();
    }
    let queue = scene.table.queue(&key(0), scene.sim.now);
    assert!(queue.iter().all(|queued| queued.rule == Rule::GlobalQueue));
    assert_eq!(holder_of(&queue[0].why.reason), Some((Cause::Held, "o1")));
    assert_eq!(behind(&queue[1].why.reason), Some((WaiterId(2), Mode::Exclusive, Order::GlobalQueue)));
}
