//! Rows as they were last seen, so that one statement can change a key without reading it first.
//!
//! Nothing here is believed: a remembered row is only ever used in a statement that changes it if
//! it is still the same.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::lock::Key;
use crate::lock::maps::HashMap;
use crate::lock::record::Record;

const SHARDS: usize = 16;
/// Rows that one half of a shard holds.
const HALF: usize = 1024;
/// Rows with more holders are read each time: writing them costs more than asking.
const MAX_HOLDERS: usize = 16;

/// A row, as it was at some moment of an era.
#[derive(Clone, Debug)]
pub struct Row {
    pub record: Record,
    pub revision: u64,
    pub cache_scope: CacheScope,
}

/// While the era lasts, no row is deleted, and a revision names one content of a row. Every deletion of rows is
/// preceded by a rise of the floor (see [`clean`](super::clean)), and so begins another era.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheScope {
    /// The choice of the server.
    pub generation: u64,
    pub epoch: u64,
    pub floor: u64,
}

/// At most `2 * SHARDS * HALF` rows; those that were not used for the longest time go first.
pub struct Cache {
    shards: Vec<Mutex<Shard>>,
}

/// Rows that are used move to `young`; when that is full it becomes `old`, and what was old goes.
#[derive(Default)]
struct Shard {
    young: HashMap<Key, Row>,
    old: HashMap<Key, Row>,
}

impl Cache {
    pub fn new() -> Cache {
        Cache { shards: (0..SHARDS).map(|_| Mutex::default()).collect() }
    }

    /// Takes the row out: whoever changes it puts the new one back.
    pub fn take(&self, key: &Key, cache_scope: CacheScope) -> Option<Row> {
        let mut shard = self.shard(key);
        let young = shard.young.remove(key);
        let old = shard.old.remove(key);
        young.or(old).filter(|row| row.cache_scope == cache_scope)
    }

    pub fn put(&self, key: Key, row: Row) {
        if row.record.holders.len() > MAX_HOLDERS {
            self.forget(&key);
            return;
        }
        let mut shard = self.shard(&key);
        if shard.young.len() >= HALF {
            shard.old = std::mem::take(&mut shard.young);
        }
        shard.young.insert(key, row);
    }

    pub fn forget(&self, key: &Key) {
        let mut shard = self.shard(key);
        shard.young.remove(key);
        shard.old.remove(key);
    }

    fn shard(&self, key: &Key) -> MutexGuard<'_, Shard> {
        let shard = &self.shards[spread(key, SHARDS)];
        shard.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Which of `places` a key belongs to; the same in every call of one process.
pub fn spread(key: &Key, places: usize) -> usize {
    let mut hasher = DefaultHasher::new();
    key.hash(&mut hasher);
    (hasher.finish() % places as u64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(n: usize) -> Key {
        Key::new(&format!("key-{n}")).expect("it is a key")
    }

    const SCOPE: CacheScope = CacheScope { generation: 1, epoch: 1, floor: 1 };

    fn row(revision: u64) -> Row {
        Row { record: Record::default(), revision, cache_scope: SCOPE }
    }

    #[test]
    fn it_stays_bounded_and_keeps_the_latest() {
        let cache = Cache::new();
        for n in 0..100_000 {
            cache.put(key(n), row(n as u64));
        }
        let kept = cache.shards.iter().map(|shard| {
            let shard = shard.lock().expect("nobody panicked");
            shard.young.len() + shard.old.len()
        });
        assert!(kept.sum::<usize>() <= 2 * SHARDS * HALF);
        assert_eq!(cache.take(&key(99_999), SCOPE).map(|row| row.revision), Some(99_999));
        assert!(cache.take(&key(0), SCOPE).is_none());
    }

    #[test]
    fn another_era_forgets() {
        let cache = Cache::new();
        for cache_scope in [
            CacheScope { generation: 2, ..SCOPE },
            CacheScope { epoch: 2, ..SCOPE },
            CacheScope { floor: 2, ..SCOPE },
        ] {
            cache.put(key(1), row(5));
            assert!(cache.take(&key(1), cache_scope).is_none(), "{cache_scope:?}");
            assert!(cache.take(&key(1), SCOPE).is_none(), "it is forgotten");
        }
        cache.put(key(1), row(5));
        assert!(cache.take(&key(1), SCOPE).is_some());
    }
}
