use std::fmt;
use std::sync::Arc;

/// What excludes: the unit of locking in the store. 1 to [`Key::MAX_BYTES`] bytes, in one [`Space`].
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    text: Arc<str>,
    space: Space,
}

/// The mechanism that guards a key. The same text in two spaces is two keys, which do not exclude each
/// other: whoever moves from one to the other holds both for a while.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Space {
    /// A row a key, with an expiry: the primitives `lease`, `once` and `version`.
    #[default]
    Table,
    /// A row lock in an open transaction.
    Row,
    /// A named lock of a session.
    Advisory,
    /// A row in each of several servers, of which the majority counts.
    Quorum,
}

impl Key {
    /// The width of the key column in the store.
    pub const MAX_BYTES: usize = 1024;

    /// A key of [`Space::Table`]; `None` where the text is empty or over [`Key::MAX_BYTES`].
    pub fn new(text: &str) -> Option<Key> {
        let fits = !text.is_empty() && text.len() <= Key::MAX_BYTES;
        fits.then(|| Key { text: text.into(), space: Space::Table })
    }

    /// The key with this text in another space.
    pub fn within(self, space: Space) -> Key {
        Key { space, ..self }
    }

    pub fn as_str(&self) -> &str {
        &self.text
    }

    pub fn space(&self) -> Space {
        self.space
    }
}

impl Space {
    pub const ALL: [Space; 4] = [Space::Table, Space::Row, Space::Advisory, Space::Quorum];

    /// Whether a lock is held by a session of the proxy that granted it, and ends with that, whatever is left of
    /// the lease.
    pub fn rests_on_session(self) -> bool {
        matches!(self, Space::Row | Space::Advisory)
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&*self.text, f)?;
        match self.space {
            Space::Table => Ok(()),
            space => write!(f, "@{space:?}"),
        }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// A fencing token: a number that strictly increases with every grant of a key.
///
/// The upper bits are the store's epoch, which rises when the server's identity changes, so that
/// a fail-over that lost writes cannot take the numbers back. Stays below 2^53, where JSON is exact.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Token(pub u64);

impl Token {
    const COUNTER_BITS: u32 = 40;
    /// The last epoch that keeps tokens below 2^53.
    pub const MAX_EPOCH: u64 = (1 << (53 - Token::COUNTER_BITS)) - 1;

    /// In a [`LeaseRef`]: whatever token the grant has, the nonce alone names it. No grant has this token.
    pub const ANY: Token = Token(0);

    /// The lowest token of an epoch; grants of that epoch are above it.
    pub fn floor_of_epoch(epoch: u64) -> Token {
        assert!(epoch <= Token::MAX_EPOCH, "epoch {epoch} does not fit a token");
        Token(epoch << Token::COUNTER_BITS)
    }

    pub fn next(self) -> Token {
        Token(self.0 + 1)
    }
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A moment on the proxy's own clock, in microseconds since the machine started; it does not stop
/// while the machine sleeps and is never set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Instant(pub u64);

/// A moment on the store's clock, in microseconds since 1970 (UTC).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServerTime(pub u64);

macro_rules! moment {
    ($name:ident) => {
        impl $name {
            pub fn plus_ms(self, ms: u32) -> $name {
                $name(self.0.saturating_add(u64::from(ms) * 1_000))
            }

            pub fn plus_us(self, us: u64) -> $name {
                $name(self.0.saturating_add(us))
            }

            /// Microseconds from `earlier` until this moment; 0 where it is not later.
            pub fn us_since(self, earlier: $name) -> u64 {
                self.0.saturating_sub(earlier.0)
            }

            /// Whole milliseconds from `earlier` until this moment; 0 where it is not later.
            pub fn ms_since(self, earlier: $name) -> u32 {
                u32::try_from(self.us_since(earlier) / 1_000).unwrap_or(u32::MAX)
            }
        }
    };
}
moment!(Instant);
moment!(ServerTime);

/// How a key is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mode {
    Exclusive,
    Shared,
    /// `count` of the key's `limit` permits.
    Permits {
        count: u32,
        limit: u32,
    },
}

/// Names one grant to the store. Whoever presents it must match the holder in every key.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LeaseRef {
    /// In the order of the store: sorted, each once.
    pub keys: Arc<[Key]>,
    /// The random number that the grant was made under.
    pub nonce: u64,
    /// The lease's token: the first key's, where an earlier version gave its keys different ones.
    pub token: Token,
}
