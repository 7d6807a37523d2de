//! The tag of a lease in a row, which has a resource, a policy and labels. The other parts of the tag become labels
//! whose names begin with a colon.

use std::borrow::Cow;
use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD_NO_PAD;

use crate::lock::Mode;
use crate::lock::record::{HttpView, RESERVED, Tag};

const METHOD: &str = ":method";
const PATH: &str = ":path";
const CAPTURE: &str = ":capture.";
const QUERY: &str = ":query.";
const HEADER: &str = ":header.";
const BODY: &str = ":body";
const MODE: &str = ":mode";
const PRINCIPAL: &str = ":principal";
const DELEGATED_TO: &str = ":delegated-to";

/// A name and a value.
pub type Label<'a> = (Cow<'a, str>, Cow<'a, str>);

/// The labels of a tag, and its other parts as labels.
pub fn labels(tag: &Tag) -> Vec<Label<'_>> {
    let mut labels: Vec<Label<'_>> = Vec::with_capacity(tag.labels.len());
    for (name, value) in &tag.labels {
        labels.push(((&**name).into(), (&**value).into()));
    }
    if let Some(http) = &tag.http {
        add_http(&mut labels, http);
    }
    if let Some(mode) = tag.asked_mode {
        labels.push((MODE.into(), kind(mode)));
    }
    if let Some(principal) = &tag.principal {
        labels.push((PRINCIPAL.into(), (&**principal).into()));
    }
    if let Some(proxy) = &tag.delegated_to {
        labels.push((DELEGATED_TO.into(), (&**proxy).into()));
    }
    labels
}

fn add_http<'a>(labels: &mut Vec<Label<'a>>, http: &'a HttpView) {
    labels.push((METHOD.into(), http.method.as_str().into()));
    labels.push((PATH.into(), http.path.as_str().into()));
    let lists = [(CAPTURE, &http.captures), (QUERY, &http.query), (HEADER, &http.headers)];
    for (prefix, pairs) in lists {
        for (name, value) in pairs {
            labels.push((format!("{prefix}{name}").into(), value.as_str().into()));
        }
    }
    if !http.body.is_empty() {
        labels.push((BODY.into(), STANDARD_NO_PAD.encode(&http.body).into()));
    }
}

/// The tag whose [`labels`] these are.
pub fn tag(resource: Arc<str>, policy: Arc<str>, labels: Vec<Label<'_>>) -> Tag {
    let mut tag = Tag { resource, policy, ..Tag::default() };
    let mut http: Option<HttpView> = None;
    for (name, value) in labels {
        if !name.starts_with(RESERVED) {
            tag.labels.push((name.into(), value.into()));
            continue;
        }
        if name == MODE {
            tag.asked_mode = mode(&value);
            continue;
        }
        if name == PRINCIPAL {
            tag.principal = Some(value.into());
            continue;
        }
        if name == DELEGATED_TO {
            tag.delegated_to = Some(value.into());
            continue;
        }
        let http = http.get_or_insert_default();
        let lists = [(CAPTURE, &mut http.captures), (QUERY, &mut http.query), (HEADER, &mut http.headers)];
        match &*name {
            METHOD => http.method = value.into(),
            PATH => http.path = value.into(),
            BODY => http.body = STANDARD_NO_PAD.decode(&*value).unwrap_or_default(),
            name => {
                for (prefix, list) in lists {
                    if let Some(name) = name.strip_prefix(prefix) {
                        list.push((name.to_owned(), value.to_string()));
                    }
                }
            }
        }
    }
    tag.http = http.map(Arc::new);
    tag
}

fn kind(mode: Mode) -> Cow<'static, str> {
    match mode {
        Mode::Exclusive => "exclusive".into(),
        Mode::Shared => "shared".into(),
        Mode::Permits { count, .. } => count.to_string().into(),
    }
}

fn mode(text: &str) -> Option<Mode> {
    match text {
        "exclusive" => Some(Mode::Exclusive),
        "shared" => Some(Mode::Shared),
        count => count.parse().ok().map(|count| Mode::Permits { count, limit: 0 }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn comes_back(tag: &Tag) {
        assert_eq!(super::tag(tag.resource.clone(), tag.policy.clone(), labels(tag)), *tag);
    }

    #[test]
    fn the_policy_view_of_a_request_survives_encoding_and_decoding() {
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let http = HttpView {
            method: "POST".into(),
            path: "/orders/42/pay".into(),
            captures: vec![pair("id", "42")],
            query: vec![pair("a", "1"), pair("a", "2")],
            headers: vec![pair("idempotency-key", "k")],
            body: b"{\"n\": \xff}".to_vec(),
        };
        let mut tag = Tag {
            resource: "r".into(),
            policy: "orders@sha256:12".into(),
            labels: vec![("tenant".into(), "a".into())],
            asked_mode: None,
            http: Some(Arc::new(http)),
            principal: Some("billing".into()),
            delegated_to: Some("10.0.0.1:7072".into()),
        };
        comes_back(&tag);
        tag.http = None;
        comes_back(&tag);
        tag.principal = None;
        comes_back(&tag);
        for (text, asked) in [
            ("exclusive", Mode::Exclusive),
            ("shared", Mode::Shared),
            ("3", Mode::Permits { count: 3, limit: 0 }),
        ] {
            assert_eq!(kind(asked), text);
            tag.asked_mode = Some(asked);
            comes_back(&tag);
        }
    }

    /// Other versions of the proxy read the rows by these names.
    #[test]
    fn the_label_names_of_a_tag_are_stable() {
        let pair = |name: &str| vec![(name.to_owned(), "v".to_owned())];
        let (captures, query, headers) = (pair("c"), pair("q"), pair("h"));
        let (method, path) = ("GET".into(), "/".into());
        let http = HttpView { method, path, captures, query, headers, body: b"b".to_vec() };
        let tag = Tag { http: Some(Arc::new(http)), asked_mode: Some(Mode::Shared), ..Tag::default() };
        let names: Vec<_> = labels(&tag).into_iter().map(|(name, _)| name).collect();
        let stay = [":method", ":path", ":capture.c", ":query.q", ":header.h", ":body", ":mode"];
        assert_eq!(names, stay);
    }
}
