//! The records that one batch of operations reads and changes.

use std::collections::BTreeMap;

use super::Record;
use crate::lock::Key;

/// The records of an operation, with a note of those that changed.
#[derive(Clone, Debug, Default)]
pub struct Records {
    entries: BTreeMap<Key, Entry>,
}

#[derive(Clone, Debug)]
struct Entry {
    record: Record,
    stored: bool,
    changed: bool,
}

impl Records {
    /// Adds the record of a key; `None` if the store has no row for the key.
    pub fn insert(&mut self, key: Key, record: Option<Record>) {
        let stored = record.is_some();
        let record = record.unwrap_or_default();
        self.entries.insert(key, Entry { record, stored, changed: false });
    }

    /// The record of a key, if it was added.
    pub fn get(&self, key: &Key) -> Option<&Record> {
        self.entries.get(key).map(|entry| &entry.record)
    }

    /// The record of a key, which is removed.
    pub fn take(&mut self, key: &Key) -> Option<Record> {
        self.entries.remove(key).map(|entry| entry.record)
    }

    /// Each changed record, in the order of the keys, and whether the store has a row for it.
    pub fn changed(&self) -> impl Iterator<Item = (&Key, &Record, bool)> {
        self.entries
            .iter()
            .filter(|(_, entry)| entry.changed)
            .map(|(key, entry)| (key, &entry.record, entry.stored))
    }

    /// Each changed record.
    pub(super) fn changed_mut(&mut self) -> impl Iterator<Item = &mut Record> {
        self.entries.values_mut().filter(|entry| entry.changed).map(|entry| &mut entry.record)
    }

    /// Whether the store has a row for the key, or gets one.
    pub(super) fn is_stored(&self, key: &Key) -> bool {
        self.entries.get(key).is_some_and(|entry| entry.stored || entry.changed)
    }

    pub(super) fn read(&self, key: &Key) -> &Record {
        &self.entries.get(key).expect("the store reads every key of an operation").record
    }

    pub(super) fn write(&mut self, key: &Key) -> &mut Record {
        let entry = self.entries.get_mut(key).expect("the store reads every key of an operation");
        entry.changed = true;
        &mut entry.record
    }
}
