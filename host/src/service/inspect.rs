//! Inspecting the locks: a list, one key with its queue and the decisions about it, and notices of changes.

use std::sync::Arc;

use tokio::sync::{broadcast, oneshot};

use super::context::{Service, ServiceContext};
use super::message::Msg;
use super::principal::Principal;
use super::views::{LockEntry, LockPage, LockView, Notice};
use crate::config::Verb;
use crate::lock::{Key, Mode, Space, Token};
use crate::policy::PlanRequest;
use crate::store::{Page, StoreError};

/// How many keys are read at once for a client that may not read all of them.
const READ_AT_ONCE: usize = 1_000;

impl Service {
    /// A page of at most `limit` held keys that the client may read, with this prefix, in byte order, that come after
    /// `after`.
    ///
    /// # Errors
    /// If the store cannot be read.
    pub async fn list(
        &self,
        principal: &Principal,
        prefix: String,
        mut after: Option<Key>,
        limit: usize,
    ) -> Result<LockPage, StoreError> {
        let (mut locks, mut silent) = (Vec::new(), Vec::new());
        // Without authentication, each key of a page can be read.
        let page = if principal.identity().is_some() { limit.max(READ_AT_ONCE) } else { limit };
        loop {
            let Page { items, more, unheard } =
                self.shared.store.list(prefix.clone(), after.clone(), page).await?;
            after = items.last().map(|last| last.key.clone());
            silent.extend(unheard.into_iter().filter(|store| !silent.contains(store)).collect::<Vec<_>>());
            let readable = items.iter().filter(|stored| principal.may(Verb::Read, stored.key.as_str()));
            locks.extend(readable.map(LockEntry::of));
            // Another page, so that its last key is not the name of a key that the client may not see.
            if !more || after.is_none() || locks.len() >= limit {
                let more = more || locks.len() > limit;
                locks.truncate(limit);
                return Ok(LockPage { locks, more, unheard: silent });
            }
        }
    }

    /// Shows a key, or a key that the policy of a resource names; `None` if nothing is known of it, or if the client
    /// may not read it. A client that may not read values does not see the key's value.
    ///
    /// # Errors
    /// If the store cannot be read.
    pub async fn show(&self, principal: &Principal, name: &str) -> Result<Option<LockView>, StoreError> {
        let candidates = candidates(&self.shared, name);
        for key in candidates.into_iter().filter(|key| principal.may(Verb::Read, key.as_str())) {
            let stored = self.shared.store.read(key.clone()).await?;
            let (reply, answer) = oneshot::channel();
            self.shared.tell(Msg::View { key: key.clone(), reply });
            let (queue, decisions) = answer.await.map_err(|_| StoreError::stopped())?;
            if stored.is_some() || !queue.is_empty() || !decisions.is_empty() {
                let shows_value = principal.may(Verb::ReadValue, key.as_str());
                let none = || LockEntry { key, token: Token::default(), holders: Vec::new(), kept: None };
                let mut entry = stored.as_ref().map_or_else(none, LockEntry::of);
                entry.kept = entry.kept.filter(|_| shows_value);
                return Ok(Some(LockView { entry, queue, decisions }));
            }
        }
        Ok(None)
    }

    /// Notices of all changes from now on. A reader that falls behind by more than `limits.watch_buffer` notices
    /// misses the oldest ones and learns how many. `None` if there are `limits.max_watchers` readers.
    pub fn watch(&self) -> Option<broadcast::Receiver<Arc<Notice>>> {
        let notices = &self.shared.notices;
        (notices.receiver_count() < self.shared.limits.max_watchers).then(|| notices.subscribe())
    }
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
