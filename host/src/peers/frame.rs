//! The frame of a notification: two bytes of length, one byte of key space, and the key.

use crate::lock::{Key, Space};

/// The length of the longest frame, without its first two bytes.
pub const MAX_BYTES: usize = Key::MAX_BYTES + 1;

/// The frame that names this key.
pub fn encode(key: &Key) -> Vec<u8> {
    let text = key.as_str().as_bytes();
    let mut frame = ((text.len() + 1) as u16).to_be_bytes().to_vec();
    frame.push(Space::ALL.iter().position(|space| *space == key.space()).unwrap_or_default() as u8);
    frame.extend_from_slice(text);
    frame
}

/// The key of a frame, which is given without its first two bytes. `None` if it names no key.
pub fn decode(frame: &[u8]) -> Option<Key> {
    let (space, text) = frame.split_first()?;
    let space = Space::ALL.get(usize::from(*space))?;
    Some(Key::new(std::str::from_utf8(text).ok()?)?.within(*space))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_say_what_was_put_in() {
        for space in Space::ALL {
            let key = Key::new("orders/\u{e9}").expect("it is a key").within(space);
            assert_eq!(decode(&encode(&key)[2..]), Some(key));
        }
        assert_eq!(decode(&[]), None);
        assert_eq!(decode(&[9, b'a']), None);
        assert_eq!(decode(&[0]), None);
        assert_eq!(decode(&[0, 0xff]), None);
    }
}
