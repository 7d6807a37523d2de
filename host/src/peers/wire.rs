//! The protocol between proxies.
//!
//! The called proxy first sends its name, as one line, so that another proxy with the same address is not taken for
//! it. The caller then sends a frame for each notification: two bytes of length, one byte of key space, and the key.
//! The called proxy sends nothing else.

use std::time::Duration;

use crate::lock::{Key, Space};

/// How long a caller waits for a connection and the name of the called proxy.
pub const CONNECT_LIMIT: Duration = Duration::from_millis(500);
/// How long a connection stays open without a notification.
pub const IDLE: Duration = Duration::from_secs(60);
/// The length of the longest frame, without its first two bytes.
pub const MAX_FRAME: usize = Key::MAX_BYTES + 1;

/// The frame of a notification of this key.
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
}
