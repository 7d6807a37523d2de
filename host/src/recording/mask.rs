//! Names that are replaced by keyed hashes, so that a recording says which names are equal and not what they are.

use std::borrow::Cow;

use ring::hmac;

use super::line::{Http, Pairs};
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
        tag.as_ref()[..DIGITS / 2].iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// A name of which policies read the parts between slashes, such as a resource or a key.
    pub fn name<'a>(&self, text: &'a str) -> Cow<'a, str> {
        match self.names {
            Masking::Plain => text.into(),
            Masking::Hash => self.hashed(text).into(),
            Masking::Segments => {
                let hashed =
                    |segment: &str| if segment.is_empty() { String::new() } else { self.hashed(segment) };
                text.split('/').map(hashed).collect::<Vec<_>>().join("/").into()
            }
        }
    }

    /// A name without parts, such as an owner.
    pub fn word<'a>(&self, text: &'a str) -> Cow<'a, str> {
        if self.is_plain() { text.into() } else { self.hashed(text).into() }
    }

    /// The labels of a request.
    pub fn labels<'a>(&self, labels: &'a [(String, String)]) -> Pairs<'a> {
        labels.iter().map(|(name, value)| (name.into(), self.label(name, value))).collect()
    }

    /// The group of a plan, which is often the value of a label.
    pub fn group<'a>(&self, group: &'a str, labels: &[(String, String)]) -> Cow<'a, str> {
        let is_shown = |(name, value): &(String, String)| value == group && self.labels.contains(name);
        if group.is_empty() || labels.iter().any(is_shown) { group.into() } else { self.word(group) }
    }

    fn label<'a>(&self, name: &str, value: &'a str) -> Cow<'a, str> {
        let is_shown = value.is_empty() || self.labels.iter().any(|shown| shown == name);
        if is_shown { value.into() } else { self.word(value) }
    }

    /// Whether names are as the clients sent them.
    pub fn is_plain(&self) -> bool {
        self.names == Masking::Plain
    }

    /// What a policy saw of a guarded request.
    pub fn http<'a>(&self, view: &'a HttpView) -> Http<'a> {
        let words = |pairs: &'a [(String, String)]| -> Pairs<'a> {
            pairs.iter().map(|(name, value)| (name.into(), self.word(value))).collect()
        };
        let listed = view.headers.iter().filter(|(name, _)| self.headers.contains(name));
        Http {
            method: (&view.method).into(),
            path: self.name(&view.path),
            captures: words(&view.captures),
            query: words(&view.query),
            headers: listed.map(|(name, value)| (name.into(), value.into())).collect(),
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
        let masked = mask(Masking::Segments, 1);
        let masked = masked.labels(&labels);
        assert_eq!(masked[0], ("group".into(), "blue".into()));
        assert_ne!(masked[1].1, "acme");
        let (plain, mask) = (mask(Masking::Plain, 1), mask(Masking::Segments, 1));
        assert_eq!(
            (mask.group("blue", &labels), mask.group("acme", &labels)),
            ("blue".into(), mask.word("acme"))
        );
        let plain = plain.labels(&labels);
        assert_eq!(plain[1], ("tenant".into(), "acme".into()));
    }
}
