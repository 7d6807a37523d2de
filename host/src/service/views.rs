//! The locks, their holders and the decisions about them, in the form that the fronts show.

use std::sync::Arc;

use tokio::sync::oneshot;

use super::core::Msg;
use super::{HolderEntry, LockEntry, LockView, ServiceContext};
use crate::lock::record::Holder;
use crate::lock::{Key, Mode, Space, Token};
use crate::policy::PlanRequest;
use crate::store::{StoreError, Stored};

pub(super) fn entry(stored: &Stored) -> LockEntry {
    let live = stored.record.holders.iter().filter(|holder| holder.over_at() > stored.now);
    let holder = |holder: &Holder| HolderEntry {
        resource: holder.tag.resource.to_string(),
        owner: holder.owner.to_string(),
        mode: holder.mode,
        token: holder.token,
        since_us: holder.since.0,
        until_us: holder.until.0,
        left_ms: holder.until.ms_since(stored.now),
        levels: holder.levels.len() as u32,
        policy: holder.tag.policy.to_string(),
    };
    LockEntry {
        key: stored.key.clone(),
        token: stored.record.token,
        holders: live.map(holder).collect(),
        kept: stored.record.kept.clone().filter(|kept| kept.until > stored.now),
    }
}

pub(super) async fn show(shared: &Arc<ServiceContext>, name: &str) -> Result<Option<LockView>, StoreError> {
    for key in candidates(shared, name) {
        let stored = shared.store.read(key.clone()).await?;
        let (reply, answer) = oneshot::channel();
        shared.tell(Msg::View { key: key.clone(), reply });
        let (queue, decisions) = answer.await.map_err(|_| StoreError::stopped())?;
        if stored.is_some() || !queue.is_empty() || !decisions.is_empty() {
            let none = || LockEntry { key, token: Token::default(), holders: Vec::new(), kept: None };
            let entry = stored.as_ref().map_or_else(none, entry);
            return Ok(Some(LockView { entry, queue, decisions }));
        }
    }
    Ok(None)
}

/// The keys that a name may mean: the keys that its policy names for it as a resource, and the name itself in
/// each space.
fn candidates(shared: &ServiceContext, name: &str) -> Vec<Key> {
    let request = PlanRequest {
        resource: name.to_owned(),
        owner: String::new(),
        mode: Mode::Exclusive,
        ttl_ms: None,
        wait_ms: None,
        labels: Vec::new(),
        http: None,
        seed: 0,
    };
    let generation = shared.policies.get(shared.policy_of(name));
    let planned = generation.and_then(|generation| generation.plan(&request).ok());
    let planned = planned.and_then(|plan| shared.within_reach("", plan).ok());
    let mut keys: Vec<Key> = planned.map(|plan| plan.keys.to_vec()).unwrap_or_default();
    for space in Space::ALL {
        keys.extend(Key::new(name).map(|key| key.within(space)).filter(|key| !keys.contains(key)));
    }
    keys
}
