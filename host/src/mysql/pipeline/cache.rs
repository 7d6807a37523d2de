//! Rows as they were last seen, so that one statement can change a key without reading it first.
//!
//! A remembered row is never trusted. It is used only in a statement that applies only if the row is
//! unchanged.

use std::hash::{DefaultHasher, Hash, Hasher};

use crate::lock::Key;
use crate::lock::maps::HashMap;
use crate::lock::record::Record;
use crate::mutex::{Mutex, MutexGuard};

const SHARDS: usize = 16;
/// The number of rows in one half of a shard.
const HALF: usize = 1024;
/// Rows with more holders are always read: writing them costs more than reading.
const MAX_HOLDERS: usize = 16;

/// A row as it was at some moment of a cache scope.
#[derive(Clone, Debug)]
pub struct Row {
    pub record: Record,
    pub revision: u64,
    pub cache_scope: CacheScope,
}

/// Within a cache scope no row is deleted, and a revision identifies the content of a row. The floor rises
/// before every deletion of rows (see [`clean`](crate::mysql::clean)), which begins a new scope.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheScope {
    /// The server generation.
    pub generation: u64,
    pub epoch: u64,
    pub floor: u64,
}

/// At most `2 * SHARDS * HALF` rows. The least recently used rows are dropped first.
pub struct Cache {
    shards: Vec<Mutex<Shard>>,
}

/// A used row moves to `young`. When `young` is full, it becomes `old`, and the previous `old` is dropped.
#[derive(Default)]
struct Shard {
    young: HashMap<Key, Row>,
    old: HashMap<Key, Row>,
}

impl Cache {
    /// An empty cache.
    pub fn new() -> Cache {
        Cache { shards: (0..SHARDS).map(|_| Mutex::default()).collect() }
    }

    /// Takes the row out, if it is of this cache scope. A caller that changes the row puts the new one back.
    pub fn take(&self, key: &Key, cache_scope: CacheScope) -> Option<Row> {
        let mut shard = self.shard(key);
        let young = shard.young.remove(key);
        let old = shard.old.remove(key);
        young.or(old).filter(|row| row.cache_scope == cache_scope)
    }

    /// Puts a row in.
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

    /// Removes a row.
    pub fn forget(&self, key: &Key) {
        let mut shard = self.shard(key);
        shard.young.remove(key);
        shard.old.remove(key);
    }

    fn shard(&self, key: &Key) -> MutexGuard<'_, Shard> {
        self.shards[spread(key, SHARDS)].lock()
    }
}

/// The index below `places` that a key belongs to; the same for every call in one process.
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
    fn the_cache_is_bounded_and_keeps_the_latest_rows() {
        let cache = Cache::new();
        for n in 0..100_000 {
            cache.put(key(n), row(n as u64));
        }
        let kept = cache.shards.iter().map(|shard| {
            let shard = shard.lock();
            shard.young.len() + shard.old.len()
        });
        assert!(kept.sum::<usize>() <= 2 * SHARDS * HALF);
        assert_eq!(cache.take(&key(99_999), SCOPE).map(|row| row.revision), Some(99_999));
        assert!(cache.take(&key(0), SCOPE).is_none());
    }

    #[test]
    fn a_row_is_not_used_in_another_cache_scope() {
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
