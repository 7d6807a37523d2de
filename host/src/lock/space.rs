//! The spaces of keys: a table of the properties of each space.

/// The set of keys that a primitive's locks are in. The same text in two spaces is two different keys, which do not
/// exclude each other. To move from one space to another, a holder must hold both keys for a while.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Space {
    /// One row for each key, with an expiry.
    #[default]
    Table,
    /// A row lock in an open transaction.
    Row,
    /// A named lock of a session.
    Advisory,
    /// A row in each of several servers; a majority of them decides.
    Quorum,
}

/// A row of the table of spaces.
struct SpaceProperties {
    space: Space,
    /// In front of a key in a lease id.
    id_prefix: &'static str,
    rests_on_session: bool,
    has_own_servers: bool,
}

/// A row is at the index of its space. [`crate::peers`] sends this index, so the order must not change.
static SPACES: [SpaceProperties; 4] = [
    SpaceProperties { space: Space::Table, id_prefix: "", rests_on_session: false, has_own_servers: false },
    SpaceProperties { space: Space::Row, id_prefix: "r~", rests_on_session: true, has_own_servers: false },
    SpaceProperties {
        space: Space::Advisory,
        id_prefix: "a~",
        rests_on_session: true,
        has_own_servers: false,
    },
    SpaceProperties { space: Space::Quorum, id_prefix: "q~", rests_on_session: false, has_own_servers: true },
];

impl Space {
    /// All spaces, in the order of their indexes.
    pub const ALL: [Space; SPACES.len()] = {
        let mut all = [Space::Table; SPACES.len()];
        let mut at = 0;
        while at < all.len() {
            all[at] = SPACES[at].space;
            assert!(all[at] as usize == at, "each row is at the index of its space");
            at += 1;
        }
        all
    };

    /// The text in front of a key of this space in a lease id.
    pub fn id_prefix(self) -> &'static str {
        SPACES[self as usize].id_prefix
    }

    /// Whether a session of the granting proxy holds the lock. Such a lock ends with the session, even if the
    /// lease has time left.
    pub fn rests_on_session(self) -> bool {
        SPACES[self as usize].rests_on_session
    }

    /// Whether the keys are on servers of their own, which config.toml need not name.
    pub fn has_own_servers(self) -> bool {
        SPACES[self as usize].has_own_servers
    }
}
