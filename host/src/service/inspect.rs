//! Inspecting the locks: a list, one key with its queue and the decisions about it, and notices of changes.

use std::sync::Arc;

use tokio::sync::{broadcast, oneshot};

use super::context::{Service, ServiceContext};
use super::errors::ListError;
use super::message::Msg;
use super::principal::Principal;
use super::views::{LockEntry, LockPage, LockView, Notice};
use super::why::{KeyView, Shown};
use crate::config::Verb;
use crate::lock::{Key, Space, Token};
use crate::policy::PlanRequest;
use crate::store::{Page, StoreError};

/// How many keys are read at once for a client that may not read all of them.
const READ_AT_ONCE: usize = 1_000;
/// The most keys that are read for one page.
const MAX_READ: usize = 100_000;

impl Service {
    /// A page of at most `limit` held keys that the client may read, with this prefix, in byte order, that come after
    /// `after`. The page ends early after 100,000 keys.
    ///
    /// # Errors
    /// If the store cannot be read, or the client may read none of the first 100,000 keys.
    pub async fn list(
        &self,
        principal: &Principal,
        prefix: String,
        mut after: Option<Key>,
        limit: usize,
    ) -> Result<LockPage, ListError> {
        let (mut locks, mut silent, mut read) = (Vec::new(), Vec::new(), 0);
        let (ranges, page) = match principal.identity() {
            // Each key of a page can be read.
            None => (vec![prefix], limit),
            Some(client) => (readable(&client.beginnings(Verb::Read), &prefix), limit.max(READ_AT_ONCE)),
        };
        let mut ranges = ranges.into_iter().peekable();
        while let Some(range) = ranges.peek() {
            let Page { items, more, unheard } =
                self.shared.store.list(range.clone(), after.clone(), page).await?;
            silent.extend(unheard.into_iter().filter(|store| !silent.contains(store)).collect::<Vec<_>>());
            read += items.len();
            let readable = items.iter().filter(|stored| principal.may(Verb::Read, stored.key.as_str()));
            locks.extend(readable.map(|stored| LockEntry::of(stored, principal)));
            match items.last() {
                Some(last) if more => after = Some(last.key.clone()),
                _ => drop(ranges.next()),
            }
            // Otherwise another page, so that its last key is not the name of a key that the client may not see.
            if locks.len() >= limit {
                let more = ranges.peek().is_some() || locks.len() > limit;
                locks.truncate(limit);
                return Ok(LockPage { locks, more, unheard: silent });
            }
            if read >= MAX_READ && ranges.peek().is_some() {
                return match locks.is_empty() {
                    false => Ok(LockPage { locks, more: true, unheard: silent }),
                    true => Err(ListError::TooManyKeys { read }),
                };
            }
        }
        Ok(LockPage { locks, more: false, unheard: silent })
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
            let KeyView { queue, holds, decisions } = answer.await.map_err(|_| StoreError::stopped())?;
            if stored.is_some() || !queue.is_empty() || !decisions.is_empty() {
                let shows_value = principal.may(Verb::ReadValue, key.as_str());
                let none = || LockEntry { key, token: Token::default(), holders: Vec::new(), kept: None };
                let mut entry = stored.as_ref().map_or_else(none, |stored| LockEntry::of(stored, principal));
                entry.kept = entry.kept.filter(|_| shows_value);
                let (key, stored, proxy) = (&entry.key, stored.as_ref(), &*self.shared.proxy);
                let shown = Shown { key, stored, holds: &holds, proxy, reader: principal };
                let queue = (1..).zip(queue).map(|(n, waiting)| shown.entry(n, waiting)).collect();
                let (held, others_wait) = (holds.spread(), shown.others_wait());
                return Ok(Some(LockView { entry, queue, held, others_wait, decisions }));
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

/// The prefixes of the keys to read for a list of `prefix`, in byte order, for a client that may only read names with
/// these beginnings.
fn readable(beginnings: &[&str], prefix: &str) -> Vec<String> {
    let both = |beginning: &&str| match (beginning.starts_with(prefix), prefix.starts_with(*beginning)) {
        (true, _) => Some((*beginning).to_owned()),
        (false, true) => Some(prefix.to_owned()),
        (false, false) => None,
    };
    beginnings.iter().filter_map(both).collect()
}

/// The keys that a name may mean: the keys that its policy names for it as a resource, and the name itself in
/// each space.
fn candidates(shared: &ServiceContext, name: &str) -> Vec<Key> {
    let request = PlanRequest::plain(name, "");
    let generation = shared.policies.get(shared.policy_of(name));
    let planned = generation.and_then(|generation| generation.plan(&request).ok());
    let planned = planned.and_then(|plan| shared.within_reach("", plan).ok());
    let mut keys: Vec<Key> = planned.map(|plan| plan.keys.to_vec()).unwrap_or_default();
    for space in Space::ALL {
        keys.extend(Key::new(name).map(|key| key.within(space)).filter(|key| !keys.contains(key)));
    }
    keys
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_reads_only_what_the_client_may_read_and_asks_for() {
        let beginnings = ["a/", "b/x", "c"];
        let read = |prefix| readable(&beginnings, prefix);
        assert_eq!(read(""), beginnings);
        assert_eq!(read("b/"), ["b/x"]);
        assert_eq!(read("b/xyz"), ["b/xyz"]);
        assert_eq!(read("d"), [""; 0]);
        assert_eq!(readable(&[""], "q"), ["q"]);
        assert_eq!(readable(&[], ""), [""; 0]);
    }
}
