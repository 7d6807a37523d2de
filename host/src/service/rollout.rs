//! How a fleet changes a policy: which generations name keys during the change, and when all earlier claims are
//! settled.

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

/// How much later than the moment at which its answer was given up a write may take effect, if the server
/// checked its deadline in time.
const LATE_MS: u32 = 1_000;
/// How long to wait before a store that could not be read is tried again.
const LOOK_PAUSE: Duration = Duration::from_millis(100);

impl Service {
    /// Begins to grant locks, until [`Service::close`]. The leases that are already in the store must have been
    /// examined: see [`Service::look_again`].
    pub fn open(&self) {
        self.shared.gate.open();
    }

    /// Examines the leases in the store by the live generation of every policy, and retries until that has
    /// worked. If another generation goes live meanwhile, the leases may have to be examined again.
    pub async fn look_at_all(&self) {
        let names: Vec<String> = self.shared.policies.names().map(str::to_owned).collect();
        let mut told = false;
        for name in names {
            while let Err(error) = self.look_again(&name).await {
                if !std::mem::replace(&mut told, true) {
                    tracing::warn!("no lock is granted until all earlier leases have been examined: {error}");
                }
                tokio::time::sleep(LOOK_PAUSE).await;
            }
        }
    }

    /// Stops granting locks until [`Service::open`]. Claims that are in flight are not affected.
    pub fn close(&self) {
        self.shared.gate.close();
    }

    /// Whether locks are granted.
    pub fn is_open(&self) -> bool {
        self.shared.gate.is_open()
    }

    /// From now on the candidate names keys together with the live generation. Requests that were planned by
    /// the live generation alone may still be in flight when this returns: see [`Service::settled`].
    ///
    /// # Errors
    /// If requests arrive faster than the candidate can be asked about them.
    pub async fn name_with(&self, candidate: Prepared) -> Result<(), StoreError> {
        swap::name_with(&self.shared, candidate).await
    }

    /// Why proxies cannot apply the candidate's keys alone yet, in a sentence: it names leases that have to end
    /// first. The list of leases is complete only after [`Service::settled`].
    ///
    /// # Errors
    /// If a store cannot be read.
    pub async fn holds_up(&self, candidate: Arc<Generation>) -> Result<Option<String>, StoreError> {
        swap::holds_up(&self.shared, candidate).await
    }

    /// The leases in the store that were granted to guarded requests, with their resources, by nonce. They
    /// include leases of requests and proxies that have ended. Of the locks that a session holds, only those of
    /// this proxy are included.
    ///
    /// # Errors
    /// If not all of them can be read.
    pub async fn guarded_leases(&self) -> Result<HashMap<u64, String>, StoreError> {
        swap::guarded_leases(&self.shared).await
    }

    /// Raises the token floors of the stores other than the table above all tokens that they have given,
    /// because keys get other names.
    ///
    /// # Errors
    /// If one of the stores cannot raise its floor.
    pub async fn raise_tokens(&self) -> Result<(), StoreError> {
        self.shared.store.raise_tokens(None).await.map(drop)
    }

    /// From now on the live generation of the policy names keys alone.
    pub fn name_alone(&self, policy: &str) {
        self.shared.policies.name_with(policy, None);
    }

    /// Examines the leases in the store, because other proxies or an earlier run may have granted them by other
    /// policies. New claims and present waiters wait for leases that lack the keys of the policy's live
    /// generation.
    ///
    /// # Errors
    /// If the store cannot be read.
    pub async fn look_again(&self, policy: &str) -> Result<(), StoreError> {
        match self.shared.policies.get(policy) {
            Some(live) => swap::look(&self.shared, Prepared::Unchanged(live)).await.map(drop),
            None => Ok(()),
        }
    }

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

/// Adds the keys that the candidate names to the plan. This is not possible for a version, which belongs to one
/// key: with two keys, two clients could commit what they read as one. Nor is it possible for a claim for any
/// one of several keys.
pub(super) fn name(plan: &mut Plan, next: &Plan, call: Call) -> Result<(), AcquireError> {
    let same = plan.any == next.any && plan.keys == next.keys;
    let any = plan.any || next.any;
    if same || (!any && next.keys.iter().all(|key| plan.keys.contains(key))) {
        return Ok(());
    }
    if any || call == Call::Version {
        let why = "its policy is being replaced by a policy that names other keys; try again in a moment";
        return Err(AcquireError::NotYet { why: why.to_owned() });
    }
    plan.keys = swap::union(&plan.keys, next.keys.iter());
    Ok(())
}

/// Claims that were sent to the store and are not answered yet. Releases are not included: they grant nothing,
/// and may wait until this proxy has joined its fleet.
#[derive(Default)]
pub(super) struct UnderWay {
    claims: BTreeSet<SubmissionId>,
    last: SubmissionId,
    /// Claims up to this one are awaited.
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
