//! Tokens: `lk_<id>_<secret>`. The id is public. The secret has 256 random bits, so an unsalted SHA-256 of the token is
//! safe to store, and no slow hash is needed.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use sha2::{Digest, Sha256};

use crate::config::TokenConfig;
use crate::random;

/// What every token begins with, so that scanners find tokens in places where they do not belong.
const PREFIX: &str = "lk_";
const ID_BYTES: usize = 8;
const DIGITS: &[u8; 32] = b"0123456789abcdefghijklmnopqrstuv";
/// The longest id that the file of principals accepts.
const MAX_ID: usize = 32;
/// No valid token is longer.
const MAX_BYTES: usize = 256;

/// A token, and what the file of principals has of it.
pub struct NewToken {
    /// For the client. Nobody can find it out again.
    pub token: String,
    /// The public part of the token.
    pub id: String,
    /// The SHA-256 of the token, in hexadecimal digits.
    pub sha256: String,
}

impl NewToken {
    /// What the file of principals has of the token, which has no end.
    pub fn config(&self) -> TokenConfig {
        TokenConfig { id: self.id.clone(), sha256: digest(&self.token), until_us: None }
    }
}

/// Makes a token.
pub fn new_token() -> NewToken {
    let (id, secret): ([u8; ID_BYTES], [u8; 32]) = (random::number(), random::number());
    let id: String = id.iter().map(|byte| char::from(DIGITS[usize::from(byte % 32)])).collect();
    let token = format!("{PREFIX}{id}_{}", URL_SAFE_NO_PAD.encode(secret));
    let sha256 = hex(&digest(&token));
    NewToken { token, id, sha256 }
}

/// Bytes in hexadecimal digits.
pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Whether a text looks like a token that [`new_token`] has made.
pub(super) fn is_ours(token: &str) -> bool {
    token.starts_with(PREFIX)
}

/// The id of a token; `None` if the text does not have the form of one. The token may be that of nobody.
pub fn id(token: &str) -> Option<&str> {
    let (id, _secret) = token.strip_prefix(PREFIX)?.split_once('_')?;
    let is_plain = id.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit());
    (token.len() <= MAX_BYTES && (1..=MAX_ID).contains(&id.len()) && is_plain).then_some(id)
}

/// The SHA-256 of a token.
pub(super) fn digest(token: &str) -> [u8; 32] {
    Sha256::digest(token.as_bytes()).into()
}
