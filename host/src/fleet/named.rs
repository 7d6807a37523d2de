//! Under which records all leases in the store have the keys that these name.
//!
//! A proxy that has surveyed the leases by the live generations, and for which the last lease that lacked keys is over,
//! records the digest of the records that it follows. From then on, all proxies grant by these records until they
//! change, and with each change the digest changes. So a proxy that starts under records with this digest grants at
//! once: it does not read the leases, of which there may be a million.

use std::collections::BTreeMap;

use super::Fleet;
use crate::coverage::{Branch, reached};
use crate::store::StoreError;
use crate::store::registry::View;

impl Fleet {
    fn names(&self, view: &View) -> Option<String> {
        view.names(|policy| self.0.policies.get(policy).is_some(), &self.0.service.spaces()?)
    }

    /// Whether every lease in the store has the keys that the records of the view name.
    pub(super) fn are_named(&self, view: &View) -> bool {
        self.names(view).is_some_and(|names| names == view.named_by)
    }

    /// Takes the digest of other records away before this proxy grants: it may name keys otherwise, for example because
    /// it is of another version of the program.
    pub(super) async fn forget_other_names(&self, view: &View) -> Result<(), StoreError> {
        match view.named_by.is_empty() || self.are_named(view) {
            true => Ok(()),
            false => self.0.registry.record_named_by(String::new()).await,
        }
    }

    /// Records that every lease in the store has its keys, if this proxy knows that. `acks`: the records that this
    /// member has acknowledged.
    pub(super) async fn record_names(&self, view: &View, acks: &BTreeMap<String, u64>) {
        let is_acknowledged = view.records.iter().all(|record| acks.get(&record.name) == Some(&record.seq));
        if !is_acknowledged || !self.0.service.has_named_all() {
            return;
        }
        let Some(names) = self.names(view) else { return };
        // Proxies with other policies record other digests. Each of them writes once.
        if view.named_by == names || self.0.state.lock().named_by == names {
            return;
        }
        match self.0.registry.record_named_by(names.clone()).await {
            Ok(()) => {
                reached(Branch::NamesRecorded);
                self.0.state.lock().named_by = names;
            }
            Err(error) => tracing::debug!(%error, "the next proxy that starts will read all leases"),
        }
    }
}
