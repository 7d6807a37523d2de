use std::fmt;
use std::sync::Arc;

use super::space::Space;

/// The unit of locking in the store: a text of 1 to [`Key::MAX_BYTES`] bytes in one [`Space`].
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    text: Arc<str>,
    space: Space,
}

impl Key {
    /// The width of the key column in the store.
    pub const MAX_BYTES: usize = 1024;

    /// Makes a key of [`Space::Table`]. Returns `None` if the text is empty or longer than [`Key::MAX_BYTES`].
    pub fn new(text: &str) -> Option<Key> {
        let fits = !text.is_empty() && text.len() <= Key::MAX_BYTES;
        fits.then(|| Key { text: text.into(), space: Space::Table })
    }

    /// The key with this text in another space.
    pub fn within(self, space: Space) -> Key {
        Key { space, ..self }
    }

    /// The text of the key, without its space.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// The space of the key.
    pub fn space(&self) -> Space {
        self.space
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
/// The upper bits are the store's epoch, which rises when the server's identity changes. So tokens do not go
/// back after a fail-over that lost writes. All tokens are below 2^53, the limit for exact integers in JSON.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Token(pub u64);

impl Token {
    const COUNTER_BITS: u32 = 40;
    /// The highest epoch whose tokens are below 2^53.
    pub const MAX_EPOCH: u64 = (1 << (53 - Token::COUNTER_BITS)) - 1;

    /// In a [`LeaseRef`]: accepts any token, so that the nonce alone identifies the grant. No grant has this
    /// token.
    pub const ANY: Token = Token(0);

    /// The lowest token of an epoch. Grants of that epoch have higher tokens.
    ///
    /// # Panics
    /// If `epoch` is above [`Token::MAX_EPOCH`].
    pub fn floor_of_epoch(epoch: u64) -> Token {
        assert!(epoch <= Token::MAX_EPOCH, "epoch {epoch} does not fit a token");
        Token(epoch << Token::COUNTER_BITS)
    }

    /// The next higher token.
    pub fn next(self) -> Token {
        Token(self.0 + 1)
    }
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A moment on the proxy's own clock, in microseconds since the machine started. This clock keeps running while
/// the machine is suspended, and nobody can set it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Instant(pub u64);

/// A moment on the store's clock, in microseconds since 1970 (UTC).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServerTime(pub u64);

macro_rules! moment {
    ($name:ident) => {
        impl $name {
            /// The moment `ms` milliseconds later; the largest moment on overflow.
            pub fn plus_ms(self, ms: u32) -> $name {
                $name(self.0.saturating_add(u64::from(ms) * 1_000))
            }

            /// The moment `us` microseconds later; the largest moment on overflow.
            pub fn plus_us(self, us: u64) -> $name {
                $name(self.0.saturating_add(us))
            }

            /// Microseconds from `earlier` to this moment; 0 if this moment is not later.
            pub fn us_since(self, earlier: $name) -> u64 {
                self.0.saturating_sub(earlier.0)
            }

            /// Whole milliseconds from `earlier` to this moment; 0 if this moment is not later.
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

/// Identifies one grant to the store. Operations on the lease succeed only if the reference matches a holder of
/// every key.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LeaseRef {
    /// The keys of the grant in the order of the store: sorted, without duplicates.
    pub keys: Arc<[Key]>,
    /// The random number of the grant: the `attempt` of its claim.
    pub nonce: u64,
    /// The token of the lease. If an earlier version of the program gave the keys different tokens, this is the
    /// token of the first key.
    pub token: Token,
}
