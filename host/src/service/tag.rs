//! The part of a request that is stored with its lease, so that any proxy can ask a policy about the lease again.
//!
//! The parts of a guarded request that the policy saw become labels whose names begin with a colon. Names of client
//! labels never do.

use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD_NO_PAD;

use super::request::Request;
use crate::lock::Mode;
use crate::lock::record::{Claim, Tag};
use crate::policy::{HttpView, PlanRequest};

/// The first character of reserved label names; labels of clients do not begin with it.
pub const RESERVED: char = ':';

const METHOD: &str = ":method";
const PATH: &str = ":path";
const CAPTURE: &str = ":capture.";
const QUERY: &str = ":query.";
const HEADER: &str = ":header.";
const BODY: &str = ":body";
const MODE: &str = ":mode";

/// The labels for what a policy must be told again but the plan does not contain. The mode is included if the
/// plan has another one.
pub(super) fn labels(request: &Request, planned: Mode) -> Vec<(Box<str>, Box<str>)> {
    let mut labels = request.principal.routed().map(|routed| of_http(&routed.http)).unwrap_or_default();
    let differs = match (planned, request.mode) {
        (Mode::Permits { count: planned, .. }, Mode::Permits { count: asked, .. }) => planned != asked,
        (planned, asked) => std::mem::discriminant(&planned) != std::mem::discriminant(&asked),
    };
    if differs {
        labels.push((MODE.into(), kind(request.mode).into()));
    }
    labels
}

/// The part of a claim's request that decides its keys, as far as it is stored with a lease.
pub(super) fn request_of(claim: &Claim) -> PlanRequest {
    request(&claim.tag, &claim.owner, claim.mode)
}

/// The request of a lease, as far as it is stored with the lease.
pub(super) fn request(tag: &Tag, owner: &str, lease_mode: Mode) -> PlanRequest {
    let mode = match mode(tag).unwrap_or(lease_mode) {
        Mode::Permits { count, .. } => Mode::Permits { count, limit: 0 },
        mode => mode,
    };
    let (labels, http) = split(tag);
    PlanRequest {
        resource: tag.resource.to_string(),
        owner: owner.to_owned(),
        mode,
        ttl_ms: None,
        wait_ms: None,
        labels,
        http,
        seed: 0,
    }
}

fn kind(mode: Mode) -> String {
    match mode {
        Mode::Exclusive => "exclusive".to_owned(),
        Mode::Shared => "shared".to_owned(),
        Mode::Permits { count, .. } => count.to_string(),
    }
}

/// The requested mode, if the plan has another one.
fn mode(tag: &Tag) -> Option<Mode> {
    let (_, text) = tag.labels.iter().find(|(name, _)| &**name == MODE)?;
    match &**text {
        "exclusive" => Some(Mode::Exclusive),
        "shared" => Some(Mode::Shared),
        count => count.parse().ok().map(|count| Mode::Permits { count, limit: 0 }),
    }
}

fn of_http(http: &HttpView) -> Vec<(Box<str>, Box<str>)> {
    let mut labels: Vec<(Box<str>, Box<str>)> =
        vec![(METHOD.into(), http.method.as_str().into()), (PATH.into(), http.path.as_str().into())];
    let lists = [(CAPTURE, &http.captures), (QUERY, &http.query), (HEADER, &http.headers)];
    for (prefix, pairs) in lists {
        labels.extend(
            pairs.iter().map(|(name, value)| (format!("{prefix}{name}").into(), value.as_str().into())),
        );
    }
    if !http.body.is_empty() {
        labels.push((BODY.into(), STANDARD_NO_PAD.encode(&http.body).into()));
    }
    labels
}

/// The labels of the client, and the part of the guarded request that the policy saw.
fn split(tag: &Tag) -> (Vec<(String, String)>, Option<Arc<HttpView>>) {
    let mut plain = Vec::new();
    let mut http: Option<HttpView> = None;
    for (name, value) in &tag.labels {
        if !name.starts_with(RESERVED) {
            plain.push((name.to_string(), value.to_string()));
            continue;
        }
        if &**name == MODE {
            continue;
        }
        let http = http.get_or_insert_default();
        let lists = [(CAPTURE, &mut http.captures), (QUERY, &mut http.query), (HEADER, &mut http.headers)];
        match &**name {
            METHOD => http.method = value.to_string(),
            PATH => http.path = value.to_string(),
            BODY => http.body = STANDARD_NO_PAD.decode(&**value).unwrap_or_default(),
            name => {
                for (prefix, list) in lists {
                    if let Some(name) = name.strip_prefix(prefix) {
                        list.push((name.to_owned(), value.to_string()));
                    }
                }
            }
        }
    }
    (plain, http.map(Arc::new))
}

/// The policy that planned the guarded request. Its route may have another policy by now.
pub(super) fn policy(tag: &Tag) -> Option<&str> {
    let guarded = tag.labels.iter().any(|(name, _)| &**name == METHOD);
    guarded.then(|| tag.policy.split_once('@').map_or(&*tag.policy, |(name, _)| name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_policy_saw_comes_back() {
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let http = HttpView {
            method: "POST".into(),
            path: "/orders/42/pay".into(),
            captures: vec![pair("id", "42")],
            query: vec![pair("a", "1"), pair("a", "2")],
            headers: vec![pair("idempotency-key", "k")],
            body: b"{\"n\": \xff}".to_vec(),
        };
        let mut tag = Tag { resource: "r".into(), policy: "orders@sha256:12".into(), labels: of_http(&http) };
        tag.labels.push(("tenant".into(), "a".into()));
        assert_eq!(split(&tag), (vec![pair("tenant", "a")], Some(Arc::new(http))));
        assert_eq!(policy(&tag), Some("orders"));
        tag.labels.retain(|(name, _)| &**name == "tenant");
        assert_eq!(split(&tag), (vec![pair("tenant", "a")], None));
        assert_eq!((policy(&tag), mode(&tag)), (None, None));
        for (text, asked) in [
            ("exclusive", Mode::Exclusive),
            ("shared", Mode::Shared),
            ("3", Mode::Permits { count: 3, limit: 0 }),
        ] {
            assert_eq!(kind(asked), text);
            tag.labels = vec![(MODE.into(), text.into())];
            assert_eq!((mode(&tag), policy(&tag), split(&tag)), (Some(asked), None, (Vec::new(), None)));
        }
    }
}
