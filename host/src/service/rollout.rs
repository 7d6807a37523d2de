//! A fleet's way from one policy to the next: what names keys meanwhile, and when nothing of before is
//! under way any more.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;

use super::acquire::Call;
use super::core::Msg;
use super::{AcquireError, Service, swap};
use crate::clock;
use crate::lock::Instant;
use crate::lock::maps::HashMap;
use crate::lock::record::Op;
use crate::lock::table::SubmissionId;
use crate::policy::{Generation, Plan, Prepared};
use crate::store::StoreError;

/// A write that the server had checked in time may land this much after its answer was given up.
const LATE_MS: u32 = 1_000;
/// Until a store that could not be read is tried again.
const LOOK_PAUSE: Duration = Duration::from_millis(100);

impl Service {
    /// Grants from now on, until it is closed. The leases that are in the store already must have been looked
    /// at: see [`Service::look_again`].
    pub fn open(&self) {
        self.shared.gate.open();
    }

    /// Has looked at the leases in the store by the live generation of every policy when it returns, however
    /// often that has to be tried. A generation that goes live meanwhile may have to be looked at again.
    pub async fn look_at_all(&self) {
        let names: Vec<String> = self.shared.policies.names().map(str::to_owned).collect();
        let mut told = false;
        for name in names {
            while let Err(error) = self.look_again(&name).await {
                if !std::mem::replace(&mut told, true) {
                    tracing::warn!("no lock is granted before all leases have been looked at: {error}");
                }
                tokio::time::sleep(LOOK_PAUSE).await;
            }
        }
    }

    /// Grants nothing more until [`Service::open`]. What is under way goes on.
    pub fn close(&self) {
        self.shared.gate.close();
    }

    pub fn is_open(&self) -> bool {
        self.shared.gate.is_open()
    }

    /// From now on the candidate names keys together with the live generation. Requests that the live one
    /// alone planned are under way still when this returns: see [`Service::settled`].
    ///
    /// # Errors
    /// Where more requests arrive than the candidate can be asked about.
    pub async fn name_with(&self, candidate: Prepared) -> Result<(), StoreError> {
        swap::name_with(&self.shared, candidate).await
    }

    /// What keeps proxies from going by the candidate's keys alone, in a sentence: leases for whose end it has to wait. They
    /// are complete once the service has [`settled`](Service::settled).
    ///
    /// # Errors
    /// Where a store cannot be read.
    pub async fn holds_up(&self, candidate: Arc<Generation>) -> Result<Option<String>, StoreError> {
        swap::holds_up(&self.shared, candidate).await
    }

    /// The leases in the store that were granted to guarded requests, by nonce, with their resources: also where
    /// the request is gone, or its proxy. Of the locks that rest on a session, those of this proxy.
    ///
    /// # Errors
    /// Where they cannot all be read.
    pub async fn guarded_leases(&self) -> Result<HashMap<u64, String>, StoreError> {
        swap::guarded_leases(&self.shared).await
    }

    /// Has the stores beside the table give tokens above all that they gave before: keys get other names.
    ///
    /// # Errors
    /// Where one of them cannot.
    pub async fn raise_tokens(&self) -> Result<(), StoreError> {
        self.shared.store.raise_tokens(None).await.map(drop)
    }

    /// From now on the live generation of the policy names keys alone.
    pub fn name_alone(&self, policy: &str) {
        self.shared.policies.name_with(policy, None);
    }

    /// Looks at the leases in the store, as others, or an earlier run, may have granted by other policies: those
    /// that lack the keys of the policy's live generation are waited for, also by waiters that are here already.
    ///
    /// # Errors
    /// Where the store cannot be read.
    pub async fn look_again(&self, policy: &str) -> Result<(), StoreError> {
        match self.shared.policies.get(policy) {
            Some(live) => swap::look(&self.shared, Prepared::Unchanged(live)).await.map(drop),
            None => Ok(()),
        }
    }

    /// Waits until every claim that the store had been sent before is answered, so that nothing that
    /// was planned earlier can be granted later.
    pub async fn settled(&self) {
        let (reply, settled) = oneshot::channel();
        self.shared.tell(Msg::Settle(reply));
        if let Ok(given_up) = settled.await {
            clock::sleep_until(given_up.plus_ms(LATE_MS)).await;
        }
    }
}

/// Adds the keys that the candidate names. A version belongs to one key: between two of them, two could
/// commit what they read as one. And any one of several keys cannot be taken together with others.
pub(super) fn name(plan: &mut Plan, next: &Plan, call: Call) -> Result<(), AcquireError> {
    let same = plan.any == next.any && plan.keys == next.keys;
    let any = plan.any || next.any;
    if same || (!any && next.keys.iter().all(|key| plan.keys.contains(key))) {
        return Ok(());
    }
    if any || call == Call::Version {
        let why = "its policy is being replaced by one that names other keys; try again in a moment";
        return Err(AcquireError::NotYet { why: why.to_owned() });
    }
    plan.keys = swap::union(&plan.keys, next.keys.iter());
    Ok(())
}

/// Claims that the store has been sent and has not answered. Releases are not among them: they grant
/// nothing, and may wait for this proxy to join.
#[derive(Default)]
pub(super) struct UnderWay {
    claims: BTreeSet<SubmissionId>,
    last: SubmissionId,
    /// Up to this one they are waited for.
    boundary: SubmissionId,
    given_up: Instant,
    waiting: Vec<oneshot::Sender<Instant>>,
}

impl UnderWay {
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

    /// Tells when every claim that is under way now has ended, with the moment at which one was last given
    /// up without an answer.
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
    fn who_waits_is_told_when_all_claims_of_before_have_ended() {
        let mut under_way = UnderWay::default();
        let release = Op::Force { key: Key::new("k").expect("it is a key") };
        under_way.began(SubmissionId(1), std::slice::from_ref(&release));
        let (reply, mut first) = oneshot::channel();
        under_way.await_all(reply);
        assert!(first.try_recv().is_ok(), "no claim is under way");

        under_way.began(SubmissionId(2), &[release, claim()]);
        under_way.began(SubmissionId(3), &[claim()]);
        let (reply, mut second) = oneshot::channel();
        under_way.await_all(reply);
        under_way.began(SubmissionId(4), &[claim()]);
        under_way.ended(SubmissionId(1), true);
        under_way.ended(SubmissionId(4), true);
        under_way.ended(SubmissionId(3), true);
        assert!(second.try_recv().is_err(), "the second is under way");
        under_way.ended(SubmissionId(2), false);
        assert!(second.try_recv().is_ok_and(|given_up| given_up > Instant(0)));
    }
}
