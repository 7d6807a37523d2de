//! The ways to hold a key.

/// How a key is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mode {
    /// The only holder of the key.
    Exclusive,
    /// Together with other shared holders.
    Shared,
    /// `count` of the key's `limit` permits.
    Permits {
        /// How many permits this lease takes.
        count: u32,
        /// How many permits the key has in total.
        limit: u32,
    },
}
