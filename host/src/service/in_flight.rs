//! The claims in flight to the store, and waiting until all of them are settled.

use std::collections::BTreeSet;

use tokio::sync::oneshot;

use super::context::Service;
use super::message::Msg;
use crate::clock;
use crate::lock::Instant;
use crate::lock::record::Op;
use crate::lock::table::SubmissionId;

/// How much later than the moment at which its answer was given up a write may take effect, if the server
/// checked its deadline in time.
const LATE_MS: u32 = 1_000;

impl Service {
    /// Waits until every claim that was sent to the store before is answered, so that nothing that was planned
    /// earlier can be granted later.
    pub async fn settled(&self) {
        let (reply, settled) = oneshot::channel();
        self.shared.tell(Msg::Settle(reply));
        if let Ok(given_up) = settled.await {
            clock::sleep_until(given_up.plus_ms(LATE_MS)).await;
        }
    }
}

/// Claims that were sent to the store and are not answered yet. Releases are not included: they grant nothing,
/// and may wait until this proxy has joined its fleet.
#[derive(Default)]
pub(super) struct ClaimsInFlight {
    claims: BTreeSet<SubmissionId>,
    last: SubmissionId,
    /// Claims up to this one are awaited.
    boundary: SubmissionId,
    given_up: Instant,
    waiting: Vec<oneshot::Sender<Instant>>,
}

impl ClaimsInFlight {
    pub fn began(&mut self, ticket: SubmissionId, ops: &[Op]) {
        if ops.iter().any(|op| matches!(op, Op::Acquire(_))) {
            self.last = self.last.max(ticket);
            self.claims.insert(ticket);
        }
    }

    pub fn ended(&mut self, ticket: SubmissionId, answered: bool) {
        if self.claims.remove(&ticket) {
            if !answered {
                self.given_up = clock::now();
            }
            self.tell();
        }
    }

    /// Replies when every claim that is in flight now has ended, with the moment at which a claim was last
    /// given up without an answer.
    pub fn await_all(&mut self, reply: oneshot::Sender<Instant>) {
        self.boundary = self.last;
        self.waiting.push(reply);
        self.tell();
    }

    fn tell(&mut self) {
        if self.claims.first().is_none_or(|first| *first > self.boundary) {
            for reply in self.waiting.drain(..) {
                let _ = reply.send(self.given_up);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lock::Key;
    use crate::store::contract;

    fn claim() -> Op {
        Op::Acquire(contract::claim(&["k"], "o"))
    }

    #[test]
    fn a_waiter_is_notified_when_all_earlier_claims_have_ended() {
        let mut in_flight = ClaimsInFlight::default();
        let release = Op::Force { key: Key::new("k").expect("it is a key") };
        in_flight.began(SubmissionId(1), std::slice::from_ref(&release));
        let (reply, mut first) = oneshot::channel();
        in_flight.await_all(reply);
        assert!(first.try_recv().is_ok(), "no claim is under way");

        in_flight.began(SubmissionId(2), &[release, claim()]);
        in_flight.began(SubmissionId(3), &[claim()]);
        let (reply, mut second) = oneshot::channel();
        in_flight.await_all(reply);
        in_flight.began(SubmissionId(4), &[claim()]);
        in_flight.ended(SubmissionId(1), true);
        in_flight.ended(SubmissionId(4), true);
        in_flight.ended(SubmissionId(3), true);
        assert!(second.try_recv().is_err(), "the second is under way");
        in_flight.ended(SubmissionId(2), false);
        assert!(second.try_recv().is_ok_and(|given_up| given_up > Instant(0)));
    }
}
