//! Names that are replaced by keyed hashes, so that a recording says which names are equal and not what they are.

use ring::hmac;

use super::line::Http;
use crate::config::{Masking, RecordingConfig};
use crate::lock::record::HttpView;

/// How many hex digits a hashed name has.
const DIGITS: usize = 16;

/// Replaces names. The key of the hashes is made at the start of the proxy and never written, so names cannot be found by
/// trial, and differ from those of another start.
pub struct Mask {
    names: Masking,
    labels: Vec<String>,
    headers: Vec<String>,
    key: hmac::Key,
}

impl Mask {
    /// The masks of a configuration.
    pub fn new(config: &RecordingConfig, key: &[u8; 32]) -> Mask {
        Mask {
            names: config.names,
            labels: config.labels.clone(),
            headers: config.headers.clone(),
            key: hmac::Key::new(hmac::HMAC_SHA256, key),
        }
    }

    /// The parts of requests that are not as the clients sent them, for the header of a file.
    pub fn masked(&self) -> Vec<String> {
        let mut masked = Vec::new();
        match self.names {
            Masking::Plain => {}
            Masking::Segments => masked.extend(["resource (by segment)", "owner", "labels", "path", "query"]),
            Masking::Hash => masked.extend(["resource", "owner", "labels", "path", "query"]),
        }
        let mut masked: Vec<String> = masked.into_iter().map(str::to_owned).collect();
        if !self.is_plain() && !self.labels.is_empty() {
            masked.push(format!("but the labels {}", self.labels.join(", ")));
        }
        masked.push("headers that are not listed".to_owned());
        masked.push("bodies".to_owned());
        masked
    }

    fn hashed(&self, text: &str) -> String {
        let tag = hmac::sign(&self.key, text.as_bytes());
        let digits = tag.as_ref().iter().flat_map(|byte| [byte >> 4, byte & 15]);
        digits.take(DIGITS).filter_map(|digit| char::from_digit(digit.into(), 16)).collect()
    }

    /// A name of which policies read the parts between slashes, such as a resource or a key.
    pub fn name(&self, text: &str) -> String {
        match self.names {
            Masking::Plain => text.to_owned(),
            Masking::Hash => self.hashed(text),
            Masking::Segments => {
                let hashed =
                    |segment: &str| if segment.is_empty() { String::new() } else { self.hashed(segment) };
                text.split('/').map(hashed).collect::<Vec<_>>().join("/")
            }
        }
    }

    /// A name without parts, such as an owner.
    pub fn word(&self, text: &str) -> String {
        if self.is_plain() { text.to_owned() } else { self.hashed(text) }
    }

    /// The labels of a request.
    pub fn labels(&self, labels: &[(String, String)]) -> Vec<(String, String)> {
        labels.iter().map(|(name, value)| (name.clone(), self.label(name, value))).collect()
    }

    /// The value of a label. The group of a plan is the value of `group`.
    pub fn label(&self, name: &str, value: &str) -> String {
        let is_shown = value.is_empty() || self.labels.iter().any(|shown| shown == name);
        if is_shown { value.to_owned() } else { self.word(value) }
    }

    /// Whether names are as the clients sent them.
    pub fn is_plain(&self) -> bool {
        self.names == Masking::Plain
    }

    /// What a policy saw of a guarded request.
    pub fn http(&self, view: &HttpView) -> Http {
        let words = |pairs: &[(String, String)]| {
            pairs.iter().map(|(name, value)| (name.clone(), self.word(value))).collect()
        };
        let is_listed = |(name, _): &&(String, String)| self.headers.contains(name);
        Http {
            method: view.method.clone(),
            path: self.name(&view.path),
            captures: words(&view.captures),
            query: words(&view.query),
            headers: view.headers.iter().filter(is_listed).cloned().collect(),
            had_body: !view.body.is_empty(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mask(names: Masking, key: u8) -> Mask {
        let config =
            RecordingConfig { names, labels: vec!["group".to_owned()], ..RecordingConfig::default() };
        Mask::new(&config, &[key; 32])
    }

    #[test]
    fn equal_names_have_equal_hashes_by_one_key_alone() {
        let (one, other) = (mask(Masking::Segments, 1), mask(Masking::Segments, 2));
        let hashed = one.name("orders/42/orders");
        let parts: Vec<&str> = hashed.split('/').collect();
        assert_eq!((parts.len(), parts[0], parts[0].len()), (3, parts[2], DIGITS));
        assert_ne!(parts[0], parts[1]);
        assert_ne!(hashed, other.name("orders/42/orders"));
        assert_eq!(one.name("/x/"), format!("/{}/", one.word("x")));
        assert!(!mask(Masking::Hash, 1).name("a/b").contains('/'));
        assert_eq!(mask(Masking::Plain, 1).name("a/b"), "a/b");
    }

    #[test]
    fn listed_labels_keep_their_values() {
        let labels = [("group".to_owned(), "blue".to_owned()), ("tenant".to_owned(), "acme".to_owned())];
        let masked = mask(Masking::Segments, 1).labels(&labels);
        assert_eq!(masked[0], labels[0]);
        assert_ne!(masked[1].1, "acme");
        assert_eq!(mask(Masking::Plain, 1).labels(&labels), labels);
    }
}
