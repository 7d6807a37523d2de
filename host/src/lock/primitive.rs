//! The primitives: a table of what each of them can do, which all other modules read.

use super::mode::Mode;
use super::space::Space;

/// The mechanism that implements a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Primitive {
    /// A row with an expiry in the store's table.
    Lease,
    /// A row lock in an open transaction.
    Row,
    /// A named lock (`GET_LOCK`) of a session.
    Advisory,
    /// A version that is read first and compared when the value is committed.
    Version,
    /// Work that is done once; duplicates get its outcome.
    Once,
    /// Leases on the majority of several servers.
    Quorum,
}

/// What a client calls. A primitive takes some of the calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// Acquires a lease, or holds one for the length of a connection.
    Acquire,
    /// Begins work that is done once.
    Once,
    /// Reads a version, or commits one.
    Version,
    /// A guarded request.
    Guard,
}

impl Call {
    /// The name in recordings.
    pub fn as_str(self) -> &'static str {
        match self {
            Call::Acquire => "acquire",
            Call::Once => "once",
            Call::Version => "version",
            Call::Guard => "guard",
        }
    }

    /// The call with this name.
    pub fn named(name: &str) -> Option<Call> {
        [Call::Acquire, Call::Once, Call::Version, Call::Guard].into_iter().find(|call| call.as_str() == name)
    }
}

/// The modes of a primitive's locks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Modes {
    /// Exclusive alone.
    Exclusive,
    /// Exclusive and shared.
    Shared,
    /// Exclusive, shared, and permits.
    Permits,
}

/// A row of the table of primitives.
#[derive(Debug)]
pub struct Properties {
    primitive: Primitive,
    /// The name in plans, answers and metrics.
    pub name: &'static str,
    /// The space of the primitive's keys.
    pub space: Space,
    /// The calls that the primitive takes. It can stand in for another primitive that takes the same calls.
    pub calls: &'static [Call],
    /// The modes of its locks.
    pub modes: Modes,
    /// Whether a lock may have several keys.
    pub several_keys: bool,
    /// Whether a lock may take any one free key of several.
    pub any_key: bool,
    /// Whether the global queue can order its waiters.
    pub global_order: bool,
}

/// A row is at the index of its primitive.
static PRIMITIVES: [Properties; 6] = [
    Properties {
        primitive: Primitive::Lease,
        name: "lease",
        space: Space::Table,
        calls: &[Call::Acquire, Call::Guard],
        modes: Modes::Permits,
        several_keys: true,
        any_key: true,
        global_order: true,
    },
    Properties {
        primitive: Primitive::Row,
        name: "row",
        space: Space::Row,
        calls: &[Call::Acquire, Call::Guard],
        modes: Modes::Shared,
        several_keys: true,
        any_key: true,
        global_order: false,
    },
    Properties {
        primitive: Primitive::Advisory,
        name: "advisory",
        space: Space::Advisory,
        calls: &[Call::Acquire, Call::Guard],
        modes: Modes::Exclusive,
        several_keys: true,
        any_key: false,
        global_order: false,
    },
    Properties {
        primitive: Primitive::Version,
        name: "version",
        space: Space::Table,
        calls: &[Call::Version],
        modes: Modes::Exclusive,
        several_keys: false,
        any_key: false,
        global_order: false,
    },
    Properties {
        primitive: Primitive::Once,
        name: "once",
        space: Space::Table,
        calls: &[Call::Once, Call::Guard],
        modes: Modes::Exclusive,
        several_keys: false,
        any_key: false,
        global_order: false,
    },
    Properties {
        primitive: Primitive::Quorum,
        name: "quorum",
        space: Space::Quorum,
        calls: &[Call::Acquire, Call::Guard],
        modes: Modes::Permits,
        several_keys: true,
        any_key: false,
        global_order: false,
    },
];

impl Primitive {
    /// All primitives.
    pub const ALL: [Primitive; PRIMITIVES.len()] = {
        let mut all = [Primitive::Lease; PRIMITIVES.len()];
        let mut at = 0;
        while at < all.len() {
            all[at] = PRIMITIVES[at].primitive;
            assert!(all[at] as usize == at, "each row is at the index of its primitive");
            at += 1;
        }
        all
    };

    /// The primitive of that name.
    pub fn from_name(name: &str) -> Option<Primitive> {
        Primitive::ALL.into_iter().find(|primitive| primitive.as_str() == name)
    }

    /// The primitive whose keys are in a space, unless several primitives share the space.
    pub fn of_space(space: Space) -> Option<Primitive> {
        let mut here = Primitive::ALL.into_iter().filter(|primitive| primitive.space() == space);
        here.next().filter(|_| here.next().is_none())
    }

    /// What the primitive can do.
    pub fn properties(self) -> &'static Properties {
        &PRIMITIVES[self as usize]
    }

    /// The name in plans, answers and metrics.
    pub fn as_str(self) -> &'static str {
        self.properties().name
    }

    /// The space that contains the primitive's keys.
    pub fn space(self) -> Space {
        self.properties().space
    }

    /// Whether the primitive takes the call.
    pub fn takes(self, call: Call) -> bool {
        self.properties().calls.contains(&call)
    }

    /// Whether the holder of a lock leaves an outcome, which answers later requests.
    pub fn keeps_outcome(self) -> bool {
        self.takes(Call::Once)
    }
}

impl Modes {
    /// Whether a lock can have the mode.
    pub fn contain(self, mode: Mode) -> bool {
        match mode {
            Mode::Exclusive => true,
            Mode::Shared => self != Modes::Exclusive,
            Mode::Permits { .. } => self == Modes::Permits,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_space_names_its_only_primitive() {
        let primitives = Space::ALL.map(Primitive::of_space);
        assert_eq!(
            primitives,
            [None, Some(Primitive::Row), Some(Primitive::Advisory), Some(Primitive::Quorum)]
        );
        assert!(
            Primitive::ALL
                .into_iter()
                .all(|primitive| Primitive::from_name(primitive.as_str()) == Some(primitive))
        );
    }
}
