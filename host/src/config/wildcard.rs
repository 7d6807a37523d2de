//! Patterns for the names of resources, keys and policies.

/// A pattern for whole names. `*` matches any text, including `/`; everything else matches itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wildcard(String);

impl Wildcard {
    /// The pattern with this text.
    pub fn new(text: impl Into<String>) -> Wildcard {
        Wildcard(text.into())
    }

    /// The text of the pattern.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// What each name that matches begins with.
    pub fn beginning(&self) -> &str {
        self.0.split('*').next().unwrap_or_default()
    }

    /// Whether the pattern matches the whole name.
    pub fn matches(&self, name: &str) -> bool {
        let mut parts = self.0.split('*');
        let first = parts.next().unwrap_or_default();
        let Some(mut rest) = name.strip_prefix(first) else { return false };
        let mut parts = parts.peekable();
        if parts.peek().is_none() {
            return rest.is_empty();
        }
        while let Some(part) = parts.next() {
            if parts.peek().is_none() {
                return rest.ends_with(part);
            }
            let Some(at) = rest.find(part) else { return false };
            rest = &rest[at + part.len()..];
        }
        true
    }
}
