//! How long an acquire occupies the limits of its client.

use super::readers::waiter;
use super::*;
use crate::lock::ServerTime;

/// A table with one waiter, and what the waiter is charged for.
struct Charged {
    table: Table,
    sim: Sim,
    request: Arc<()>,
    lease: Arc<()>,
    /// The batches that the store has not answered.
    sent: Vec<(SubmissionId, Vec<Op>)>,
    verdict: Option<Verdict>,
}

impl Charged {
    fn new() -> Charged {
        let (mut table, sim) = (Table::new(), Sim::new(1, false));
        let (request, lease) = (Arc::new(()), Arc::new(()));
        let charge = Charge { request: Some(request.clone()), lease: Some(lease.clone()) };
        let waiter = Waiter { charge, ..waiter(1, Mode::Exclusive, 0) };
        table.handle_event(Event::Enqueue(Box::new(waiter)), sim.now);
        let mut charged = Charged { table, sim, request, lease, sent: Vec::new(), verdict: None };
        charged.act();
        charged
    }

    fn tell(&mut self, event: Event) {
        self.table.handle_event(event, self.sim.now);
        self.act();
    }

    fn act(&mut self) {
        self.table.handle_timeout(self.sim.now);
        while let Some(action) = self.table.poll_action() {
            match action {
                Action::Submit { ticket, ops } => self.sent.push((ticket, ops)),
                Action::Finish { verdict, .. } => self.verdict = Some(verdict),
                _ => {}
            }
        }
    }

    /// The store answers the oldest batch, or does not.
    fn store_answers(&mut self, does: bool) {
        let (ticket, ops) = self.sent.remove(0);
        let now = ServerTime(self.sim.now.0 + SERVER_AHEAD_US);
        let result = match does {
            true => Ok(Answered { outcomes: self.sim.on_store(ops), asked_at: self.sim.now, now }),
            false => Err(Unheard { why: "down".into(), sent: true }),
        };
        self.tell(Event::Completed { ticket, result });
    }

    /// Whether the request counts, and whether the lease does.
    fn counts(&self) -> (bool, bool) {
        (Arc::strong_count(&self.request) > 1, Arc::strong_count(&self.lease) > 1)
    }
}

#[test]
fn a_request_counts_until_its_grant_and_a_lease_until_its_end() {
    let mut charged = Charged::new();
    assert_eq!(charged.counts(), (true, true));
    charged.store_answers(true);
    let Some(Verdict::Granted { grant, .. }) = charged.verdict.take() else { panic!("it is free") };
    assert_eq!(charged.counts(), (false, true));
    charged.tell(Event::Lost { nonce: grant.nonce });
    assert_eq!(charged.counts(), (false, false));
}

#[test]
fn a_client_that_leaves_is_charged_until_its_claim_is_undone() {
    let mut charged = Charged::new();
    charged.tell(Event::Cancel(WaiterId(1)));
    assert_eq!(charged.counts(), (true, true), "the store may grant it");
    charged.store_answers(true);
    assert_eq!(charged.counts(), (true, true), "the grant must be undone");
    charged.store_answers(true);
    assert_eq!(charged.counts(), (false, false));
}

#[test]
fn a_client_without_an_answer_is_charged_until_its_claim_is_undone() {
    let mut charged = Charged::new();
    charged.store_answers(false);
    assert!(matches!(charged.verdict, Some(Verdict::Unavailable { .. })));
    assert_eq!(charged.counts(), (true, true), "it may have been granted");
    charged.store_answers(false);
    assert_eq!(charged.counts(), (true, true), "it is undone later");
    charged.sim.now = charged.sim.now.plus_ms(4_000);
    charged.act();
    charged.store_answers(true);
    assert_eq!(charged.counts(), (false, false));
}

#[test]
fn a_grant_that_was_not_delivered_counts_until_it_is_undone() {
    let mut charged = Charged::new();
    charged.store_answers(true);
    let Some(Verdict::Granted { grant, keys, attempt, .. }) = charged.verdict.take() else { panic!() };
    charged.tell(Event::Undelivered { nonce: grant.nonce, keys, attempt, ttl_ms: 5_000 });
    assert_eq!(charged.counts(), (false, true));
    charged.store_answers(true);
    assert_eq!(charged.counts(), (false, false));
}
