//! Keys.

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

    /// The keys of both, sorted, each once.
    pub fn union<'a>(keys: &'a [Key], more: impl Iterator<Item = &'a Key>) -> Arc<[Key]> {
        let mut all: Vec<Key> = keys.iter().chain(more).cloned().collect();
        all.sort_unstable();
        all.dedup();
        all.into()
    }

    /// Makes a key of [`Space::Table`]. Returns `None` if the text is empty or longer than [`Key::MAX_BYTES`].
    pub fn new(text: &str) -> Option<Key> {
        let fits = !text.is_empty() && text.len() <= Key::MAX_BYTES;
        fits.then(|| Key { text: text.into(), space: Space::Table })
    }

    /// The key with this text in another space.
    pub fn within(self, space: Space) -> Key {
        Key { space, ..self }
    }

    /// As [`Key::as_str`], shared with the key.
    pub fn text(&self) -> &Arc<str> {
        &self.text
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
