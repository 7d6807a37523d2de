//! The protocol between proxies.
//!
//! The called proxy first sends its name, as one line, so that another proxy with the same address is not taken for
//! it. After the line it sends [`NONCE`] random bytes, and then nothing else. The caller sends a frame for each
//! notification: two bytes of length, one byte of key space, the key, and a proof of [`PROOF`] bytes that a proxy of the same
//! store has sent this frame. The secret of the proofs is in the store and is never sent.
//!
//! The name says whether the called proxy asks for proofs. A proxy of an earlier version sends its name alone and takes
//! frames without them; it sends frames without them, too, and then wakes nobody here.

use std::net::SocketAddr;
use std::time::Duration;

use ring::hmac;

use crate::lock::{Key, Space};
use crate::store::registry::PeerSecret;

/// How long a caller waits for a connection and the name of the called proxy, and then for the rest.
pub const CONNECT_LIMIT: Duration = Duration::from_millis(500);
/// How long a connection stays open without a notification.
pub const IDLE: Duration = Duration::from_secs(60);
/// How long a caller may take for its first frame, and for each later one once it has begun.
pub const FRAME_LIMIT: Duration = Duration::from_secs(2);
/// The length of the longest frame, without its first two bytes and its proof.
pub const MAX_FRAME: usize = Key::MAX_BYTES + 1;
/// The length of the random bytes of a connection.
pub const NONCE: usize = 32;
/// The length of a proof.
pub const PROOF: usize = 32;

/// What the name of a proxy that asks for proofs ends with.
const PROVEN: &str = "/proven";

/// The name of a proxy at this address. `place` and `run` distinguish it from every other proxy there.
pub fn name(address: SocketAddr, place: &str, run: u64) -> String {
    format!("{address}/{place}{run:016x}{PROVEN}")
}

/// Whether the proxy with this name asks for proofs.
pub fn asks_for_proofs(name: &str) -> bool {
    name.ends_with(PROVEN)
}

/// The frame of a notification of this key, without its proof.
pub fn frame(key: &Key) -> Vec<u8> {
    let text = key.as_str().as_bytes();
    let mut bytes = ((text.len() + 1) as u16).to_be_bytes().to_vec();
    bytes.push(Space::ALL.iter().position(|space| *space == key.space()).unwrap_or_default() as u8);
    bytes.extend_from_slice(text);
    bytes
}

/// The key of a frame, which is given without its first two bytes. `None` if it names no key.
pub fn key_of(frame: &[u8]) -> Option<Key> {
    let (space, text) = frame.split_first()?;
    let space = Space::ALL.get(usize::from(*space))?;
    Some(Key::new(std::str::from_utf8(text).ok()?)?.within(*space))
}

/// One connection, as both sides know it. A proof is good for one frame of one connection to one proxy.
pub struct Conversation {
    name: String,
    nonce: [u8; NONCE],
    /// How many frames came before.
    frames: u64,
}

impl Conversation {
    /// A connection to the proxy `name`, which chose this nonce.
    pub fn new(name: &str, nonce: [u8; NONCE]) -> Conversation {
        Conversation { name: name.to_owned(), nonce, frames: 0 }
    }

    /// The proof of the next frame, which is given without its first two bytes.
    pub fn prove(&mut self, secret: &PeerSecret, frame: &[u8]) -> [u8; PROOF] {
        let tag = hmac::sign(&key(secret), &self.statement(frame));
        tag.as_ref().try_into().unwrap_or_else(|_| unreachable!("SHA-256 has {PROOF} bytes"))
    }

    /// Whether this is the proof of the next frame.
    pub fn is_proven(&mut self, secret: &PeerSecret, frame: &[u8], proof: &[u8]) -> bool {
        hmac::verify(&key(secret), &self.statement(frame), proof).is_ok()
    }

    /// What is proven of the next frame. No two frames have the same statement: a name has no line feed, and the two
    /// parts after it have fixed lengths.
    fn statement(&mut self, frame: &[u8]) -> Vec<u8> {
        let count = self.frames.to_be_bytes();
        self.frames += 1;
        [self.name.as_bytes(), b"\n", &self.nonce, &count, frame].concat()
    }
}

fn key(secret: &PeerSecret) -> hmac::Key {
    hmac::Key::new(hmac::HMAC_SHA256, secret.bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_decodes_to_the_key_that_was_encoded() {
        for space in Space::ALL {
            let key = Key::new("orders/\u{e9}").expect("it is a key").within(space);
            assert_eq!(key_of(&frame(&key)[2..]), Some(key));
        }
        assert_eq!(key_of(&[]), None);
        assert_eq!(key_of(&[9, b'a']), None);
        assert_eq!(key_of(&[0]), None);
        assert_eq!(key_of(&[0, 0xff]), None);
    }

    #[test]
    fn a_proof_is_good_for_one_frame_of_one_connection_of_proxies_with_one_secret() {
        let (secret, other) = (PeerSecret::random(), PeerSecret::random());
        let begins = |name: &str, nonce: u8| Conversation::new(name, [nonce; NONCE]);
        let proof = begins("a", 1).prove(&secret, b"k");
        assert!(begins("a", 1).is_proven(&secret, b"k", &proof));
        assert!(!begins("a", 1).is_proven(&other, b"k", &proof));
        assert!(!begins("b", 1).is_proven(&secret, b"k", &proof));
        assert!(!begins("a", 2).is_proven(&secret, b"k", &proof));
        assert!(!begins("a", 1).is_proven(&secret, b"l", &proof));
        assert!(!begins("a", 1).is_proven(&secret, b"k", &proof[..PROOF - 1]));
        let mut again = begins("a", 1);
        assert!(again.is_proven(&secret, b"k", &proof));
        assert!(!again.is_proven(&secret, b"k", &proof), "it was sent before");
    }
}
