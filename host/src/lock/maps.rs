//! Hash maps and sets. In a simulation their iteration order is the same in each run.

#[cfg(any(test, feature = "simulation"))]
type State = std::hash::BuildHasherDefault<std::hash::DefaultHasher>;
#[cfg(not(any(test, feature = "simulation")))]
type State = std::hash::RandomState;

/// A map with the hasher of this build.
pub type HashMap<K, V> = std::collections::HashMap<K, V, State>;
/// A set with the hasher of this build.
pub type HashSet<K> = std::collections::HashSet<K, State>;
