//! Maps and sets. In a simulation they are gone through in the same order each time.

#[cfg(any(test, feature = "simulation"))]
type State = std::hash::BuildHasherDefault<std::hash::DefaultHasher>;
#[cfg(not(any(test, feature = "simulation")))]
type State = std::hash::RandomState;

pub type HashMap<K, V> = std::collections::HashMap<K, V, State>;
pub type HashSet<K> = std::collections::HashSet<K, State>;
