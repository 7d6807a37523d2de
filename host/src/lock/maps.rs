//! Hash maps and sets. In a simulation their iteration order is the same in each run.

use std::borrow::Borrow;
use std::collections::BTreeMap;
use std::hash::Hash;

#[cfg(any(test, feature = "simulation"))]
type State = std::hash::BuildHasherDefault<std::hash::DefaultHasher>;
#[cfg(not(any(test, feature = "simulation")))]
type State = std::hash::RandomState;

/// A map with the hasher of this build.
pub type HashMap<K, V> = std::collections::HashMap<K, V, State>;
/// A set with the hasher of this build.
pub type HashSet<K> = std::collections::HashSet<K, State>;

/// A map of at most so many entries. An insert beyond that forgets the entry whose last insert is longest ago.
#[derive(Debug)]
pub struct BoundedMap<K, V> {
    entries: HashMap<K, (u64, V)>,
    /// The keys by the numbers of their last inserts.
    order: BTreeMap<u64, K>,
    inserts: u64,
    most: usize,
}

impl<K: Clone + Eq + Hash, V> BoundedMap<K, V> {
    /// Makes an empty map for at most `most` entries.
    pub fn new(most: usize) -> BoundedMap<K, V> {
        BoundedMap { entries: HashMap::default(), order: BTreeMap::new(), inserts: 0, most }
    }

    /// The value of a key.
    pub fn get<Q: Eq + Hash + ?Sized>(&self, key: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
    {
        self.entries.get(key).map(|(_, value)| value)
    }

    /// Whether an insert of another key forgets no entry.
    pub fn has_room(&self) -> bool {
        self.entries.len() < self.most
    }

    /// The value of a key, to change it. The key stays as new as it was.
    pub fn get_mut<Q: Eq + Hash + ?Sized>(&mut self, key: &Q) -> Option<&mut V>
    where
        K: Borrow<Q>,
    {
        self.entries.get_mut(key).map(|(_, value)| value)
    }

    /// Sets the value of a key, which is then the newest one.
    pub fn insert(&mut self, key: K, value: V) {
        self.remove(&key);
        if self.entries.len() >= self.most
            && let Some((_, oldest)) = self.order.pop_first()
        {
            self.entries.remove(&oldest);
        }
        self.inserts += 1;
        self.order.insert(self.inserts, key.clone());
        self.entries.insert(key, (self.inserts, value));
    }

    /// Forgets a key and returns its value.
    pub fn remove<Q: Eq + Hash + ?Sized>(&mut self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
    {
        let (number, value) = self.entries.remove(key)?;
        self.order.remove(&number);
        Some(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_entry_that_was_inserted_longest_ago_is_forgotten() {
        let mut map = BoundedMap::new(2);
        map.insert("a", 1);
        map.insert("b", 2);
        map.insert("a", 3);
        map.insert("c", 4);
        assert_eq!(["a", "b", "c"].map(|key| map.get(key).copied()), [Some(3), None, Some(4)]);
        assert_eq!(map.remove("a"), Some(3));
        map.insert("d", 5);
        assert_eq!(["a", "c", "d"].map(|key| map.get(key).copied()), [None, Some(4), Some(5)]);
        assert_eq!((map.entries.len(), map.order.len()), (2, 2));
    }
}
