//! Fencing tokens.

use std::fmt;

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
