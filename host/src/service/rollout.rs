//! Replaces a policy while locks are held.
//!
//! If the new generation names keys differently, a holder of the old key and a holder of the new key must never
//! exist together. So before a generation goes live where locks are granted, it is asked again about every held lease,
//! here and in the store, and about every waiter:
//!
//! - A lease that lacks its new keys becomes a [`Shadow`]: until it ends, claims for one of its new keys also
//!   take its old keys.
//! - If the new generation refuses the request of a lease, for example for a mode that its primitive lacks, the
//!   new keys are those of the same request in exclusive mode. If the generation refuses that request, too, the
//!   keys are not known: a change waits for the end of the lease ([`Service::holds_up`]), and a proxy that starts
//!   grants nothing by the policy before that.
//! - A waiter waits for the old and the new keys, and keeps its position. If the new generation wants a global
//!   queue, the waiter joins it. A waiter that the new generation refuses is refused.
//!
//! The event loop applies the result in one step: see [`super::swap`]. Requests that were planned by the old
//! generation are planned again.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;

use super::context::{Service, ServiceContext};
use super::found::{Lacking, Survey};
use super::message::{Msg, Swap, SwapStep};
use super::shadow::Shadow;
use super::survey::{plans_for, survey};
use crate::coverage::{Branch, reached};
use crate::lock::Space;
use crate::lock::maps::HashMap;
use crate::lock::record::Holder;
use crate::policy::{Generation, Prepared};
use crate::store::StoreError;
use crate::vital;

/// How many rounds a swap makes: in each round, claims that have arrived since the last planning are planned.
/// Then the swap fails.
const ROUNDS: usize = 64;
/// How long to wait before a store that could not be read is tried again.
const LOOK_PAUSE: Duration = Duration::from_millis(100);

impl Service {
    /// Makes a checked policy generation live. Holders and waiters of the previous generation keep their locks,
    /// even if the new one names keys differently.
    ///
    /// A closed service makes it live at once: it grants nothing, and has to examine the leases before it is
    /// opened.
    ///
    /// # Errors
    /// If the store cannot be read, or requests arrive faster than the new policy can be asked about them.
    pub async fn go_live(&self, prepared: Prepared) -> Result<Arc<Generation>, StoreError> {
        match self.is_open() {
            true => look(&self.shared, prepared).await,
            false => swap(&self.shared, prepared, None, false).await,
        }
    }

    /// Examines the leases in the store, because other proxies or an earlier run may have granted them by other
    /// policies. New claims and present waiters wait for leases that lack the keys of the policy's live
    /// generation.
    ///
    /// # Errors
    /// If the store cannot be read.
    pub async fn look_again(&self, policy: &str) -> Result<(), StoreError> {
        match self.shared.policies.get(policy) {
            Some(live) => look(&self.shared, Prepared::Unchanged(live)).await.map(drop),
            None => Ok(()),
        }
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

    /// Whether every lease in the store has the keys that the live generations of this proxy's policies name for it.
    /// The leases that this proxy cannot see, because a session of another proxy holds them, do not count.
    pub fn has_named_all(&self) -> bool {
        self.shared.named.lock().has_all(self.shared.policies.numbers())
    }

    /// Takes over from another proxy that [`Service::has_named_all`] holds for the live generations.
    pub fn take_as_named(&self) {
        self.shared.named.lock().take_over(self.shared.policies.numbers());
    }

    /// Which kinds of keys the stores have, as text: the keys of a plan depend on it. `None` if a quorum of servers has
    /// keys: what the main store knows of policies may be older than the leases of these servers.
    pub fn spaces(&self) -> Option<String> {
        let store = &self.shared.store;
        let has = |space: &Space| store.lacks(*space).is_none();
        let all = Space::ALL.iter().filter(|space| has(space));
        all.map(|space| (!space.has_own_servers()).then(|| format!("{space:?} "))).collect()
    }

    /// From now on the candidate names keys together with the live generation. Leases that lack the candidate's
    /// keys do no harm yet: each new grant takes the keys of the live generation as well. Requests that were
    /// planned by the live generation alone may still be in flight when this returns: see [`Service::settled`].
    ///
    /// # Errors
    /// If requests arrive faster than the candidate can be asked about them.
    pub async fn name_with(&self, candidate: Prepared) -> Result<(), StoreError> {
        swap(&self.shared, candidate, None, true).await.map(drop)
    }

    /// Why proxies cannot apply the candidate's keys alone yet, in a sentence. The list of leases is complete only
    /// after [`Service::settled`]. The candidate waits for two kinds of leases to end:
    ///
    /// - leases that a session of this proxy holds and that lack the candidate's keys. Other proxies do not see
    ///   them, and cannot take their old keys for as long as the leases last;
    /// - leases whose resource the candidate refuses, so that their new keys are not known.
    ///
    /// # Errors
    /// If a store cannot be read.
    pub async fn holds_up(&self, candidate: Arc<Generation>) -> Result<Option<String>, StoreError> {
        // Sessions can always be read. If a store cannot be read, its leases are waited for when the candidate
        // goes live.
        let lacking = survey(&self.shared, &candidate, false).await?.lacking;
        let count = |is: &dyn Fn(&Lacking) -> bool| {
            let mut found = lacking.values().filter(|lacking| is(lacking));
            let first = found.next()?;
            Some((1 + found.count(), &first.lease.request.resource))
        };
        if let Some((count, _)) = count(&|lacking| lacking.lease.is_delegation) {
            return Ok(Some(format!("{count} keys are delegated to proxies that do not answer")));
        }
        if let Some((count, first)) = count(&|lacking| lacking.plan.is_none()) {
            return Ok(Some(format!(
                "it refuses the resources of {count} leases that have not ended, such as that of {first}"
            )));
        }
        let rests = |lacking: &Lacking| lacking.lease.keys.iter().any(|key| key.space().rests_on_session());
        Ok(count(&rests).map(|(count, first)| {
            format!("{count} of its leases rest on sessions and lack the new keys, such as that of {first}")
        }))
    }

    /// Raises the token floors of the stores other than the table above all tokens that they have given,
    /// because keys get other names.
    ///
    /// # Errors
    /// If one of the stores cannot raise its floor.
    pub async fn raise_tokens(&self) -> Result<(), StoreError> {
        self.shared.store.raise_tokens(None).await.map(drop)
    }
}

/// Makes a checked generation live, or leaves the live one in place, and examines all leases.
async fn look(shared: &Arc<ServiceContext>, prepared: Prepared) -> Result<Arc<Generation>, StoreError> {
    let found = survey(shared, prepared.generation(), true).await?;
    swap(shared, prepared, Some(Arc::new(found)), false).await
}

/// Asks the generation about all waiters, with a survey also about the leases that it did not find, and lets the loop
/// apply the generation.
async fn swap(
    shared: &Arc<ServiceContext>,
    prepared: Prepared,
    survey: Option<Arc<Survey>>,
    beside: bool,
) -> Result<Arc<Generation>, StoreError> {
    let candidate = prepared.generation().clone();
    let (mut plans, mut asked) = (HashMap::default(), Vec::new());
    for _ in 0..ROUNDS {
        plans = plans_for(shared, candidate.clone(), plans, asked).await?;
        let (reply, step) = oneshot::channel();
        let (prepared, plans, survey) = (prepared.clone(), plans.clone(), survey.clone());
        let swap = Swap { prepared, beside, plans, survey, reply };
        shared.tell(Msg::Swap(swap));
        match step.await.map_err(|_| StoreError::stopped())? {
            SwapStep::Missing(more) => asked = more,
            SwapStep::Live { generation, shadows } => {
                watch_shadows(shared, shadows);
                return Ok(generation);
            }
        }
    }
    let why = "requests arrive faster than the new policy can be asked about them".to_owned();
    Err(StoreError::Unavailable { why })
}

/// Removes shadows whose lease is over.
fn watch_shadows(shared: &Arc<ServiceContext>, shadows: Vec<Shadow>) {
    if shadows.is_empty() {
        return;
    }
    tracing::info!(leases = shadows.len(), "leases of old keys have not ended yet");
    let shared = shared.clone();
    vital::spawn("the watch over leases of old keys", async move {
        let mut left = shadows;
        while !left.is_empty() {
            let mut still = Vec::new();
            for shadow in left {
                match is_over(&shared, &shadow).await {
                    true => shared.tell(Msg::ShadowOver { nonce: shadow.nonce }),
                    false => still.push(shadow),
                }
            }
            left = still;
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
        reached(Branch::ShadowOver);
        tracing::info!("the last lease of old keys is over");
    });
}

async fn is_over(shared: &ServiceContext, shadow: &Shadow) -> bool {
    let Ok(stored) = shared.store.read(shadow.old[0].clone()).await else { return false };
    // After a delegation has ended, any lease of the key may be one that was beneath it.
    let casts = |holder: &&Holder| holder.nonce == shadow.nonce || shadow.is_delegation;
    stored.is_none_or(|stored| {
        stored.record.holders.iter().filter(casts).all(|holder| stored.has_ended(holder))
    })
}
