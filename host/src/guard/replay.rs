//! Answers that are stored for duplicates of a request.

use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use hyper::{StatusCode, http::response};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::headers;
use crate::fronts::Code;
use crate::http::{Body, Problem, Response};
use crate::lock::record::{HttpView, Origin, StoredValue};

/// A stored answer, as JSON.
#[derive(Serialize, Deserialize)]
struct Outcome {
    /// The fingerprint of the request, which tells other requests with the same name apart.
    request: String,
    status: u16,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    headers: Vec<(String, String)>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    text: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    base64: Option<String>,
    /// The answer was over the size limit: only its status is stored.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    too_large: bool,
    /// The application does not allow the answer to be stored: only its status is.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    withheld: bool,
}

/// Records an answer while it passes.
pub struct Recording {
    outcome: Outcome,
    body: Vec<u8>,
    /// The number of bytes that may still be stored.
    left: usize,
    max_value_bytes: usize,
}

/// The fingerprint of a request: a hash of its host, all that the policy saw of it, its body's length, and the
/// headers named in `caller`, which identify the sender.
pub fn fingerprint(view: &HttpView, headers: &HeaderMap, caller: &[String]) -> String {
    let mut hash = Sha256::new();
    let pairs = view.query.iter().chain(&view.headers);
    let pairs = pairs.flat_map(|(name, value)| [name.as_bytes(), value.as_bytes()]);
    let who = callers(headers, caller).flat_map(|(name, value)| [name.as_bytes(), value]);
    let said = |name| headers.get(name).map_or(&b""[..], HeaderValue::as_bytes);
    // Without a body, some clients send a length of 0 and others send no length.
    let length = Some(said(header::CONTENT_LENGTH)).filter(|length| *length != b"0").unwrap_or_default();
    let own = [view.method.as_bytes(), view.path.as_bytes(), &view.body, said(header::HOST), length];
    for piece in own.into_iter().chain(pairs).chain(who) {
        hash.update((piece.len() as u64).to_le_bytes());
        hash.update(piece);
    }
    let digest: [u8; 32] = hash.finalize().into();
    digest[..16].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The headers that identify the sender of a request.
pub fn callers<'a>(
    headers: &'a HeaderMap,
    names: &'a [String],
) -> impl Iterator<Item = (&'a str, &'a [u8])> + 'a {
    let values =
        |name: &'a String| headers.get_all(name).iter().map(|value| (name.as_str(), value.as_bytes()));
    names.iter().flat_map(values)
}

/// Whether an answer is the result of the request. Other answers ask for a repetition: later, or by an authorized
/// sender. An error of the application (500) counts as a result, because the work may have been done.
fn is_final(status: StatusCode) -> bool {
    !matches!(status.as_u16(), 401 | 403 | 407 | 408 | 425 | 429 | 502 | 503 | 504)
}

/// Whether the application allows its answer to be stored. A `private` answer may be stored if only its sender gets
/// it.
fn may_be_kept(headers: &HeaderMap, names_caller: bool) -> bool {
    let values = headers.get_all(header::CACHE_CONTROL).iter().map(HeaderValue::as_bytes);
    let mut directives = values.flat_map(|value| value.split(|byte| *byte == b','));
    !directives.any(|directive| {
        let name = directive.split(|byte| *byte == b'=').next().unwrap_or_default().trim_ascii();
        name.eq_ignore_ascii_case(b"no-store") || (!names_caller && name.eq_ignore_ascii_case(b"private"))
    })
}

impl Recording {
    /// Starts to record an answer. `None` if the answer is not stored.
    pub fn new(head: &response::Parts, once: &Once) -> Option<Recording> {
        if !is_final(head.status) {
            return None;
        }
        let kept = |(name, value): (&HeaderName, &HeaderValue)| {
            // A cookie is only for the client that got it first.
            let own = [header::DATE, header::TRAILER, header::CONTENT_LENGTH, header::SET_COOKIE];
            let value = value.to_str().ok().filter(|_| !own.contains(name))?;
            Some((name.as_str().to_owned(), value.to_owned()))
        };
        let headers: Vec<_> = head.headers.iter().filter_map(kept).collect();
        let head_bytes: usize = headers.iter().map(|(name, value)| name.len() + value.len()).sum();
        let outcome = Outcome {
            request: once.fingerprint.to_string(),
            status: head.status.as_u16(),
            headers,
            text: None,
            base64: None,
            too_large: head_bytes > once.max_bytes,
            withheld: !may_be_kept(&head.headers, once.names_caller),
        };
        Some(Recording {
            outcome,
            body: Vec::new(),
            left: once.max_bytes.saturating_sub(head_bytes),
            max_value_bytes: once.max_value_bytes,
        })
    }

    /// Whether the recorded part is within the limit.
    pub fn fits(&self) -> bool {
        !self.outcome.too_large
    }

    /// Records a piece of the body.
    pub fn data(&mut self, data: &[u8]) {
        if data.len() > self.left {
            self.outcome.too_large = true;
            self.body = Vec::new();
            self.left = 0;
        } else if !self.outcome.too_large {
            self.left -= data.len();
            self.body.extend_from_slice(data);
        }
    }

    /// The answer as JSON that fits into the store.
    pub fn finish(mut self) -> Box<str> {
        if self.fits() && !self.outcome.withheld {
            match String::from_utf8(self.body) {
                Ok(text) => self.outcome.text = Some(text),
                Err(bytes) => self.outcome.base64 = Some(STANDARD.encode(bytes.as_bytes())),
            }
            let json = serde_json::to_string(&self.outcome).unwrap_or_default();
            if json.len() <= self.max_value_bytes {
                return json.into();
            }
        }
        let Outcome { request, status, withheld, .. } = self.outcome;
        let (headers, too_large) = (Vec::new(), !withheld);
        let bare = Outcome { request, status, headers, text: None, base64: None, too_large, withheld };
        serde_json::to_string(&bare).unwrap_or_default().into()
    }
}

/// Turns a stored answer into a response.
///
/// # Errors
/// The stored answer is not that of a guarded request, is that of another request, or was stored without its body.
pub fn replay(kept: &StoredValue, fingerprint: &str, resource: &str) -> Result<Response, Problem> {
    let outcome = serde_json::from_str::<Outcome>(&kept.value).ok().filter(|_| kept.origin == Origin::Route);
    // An interim status ends no request.
    let status = |outcome: &Outcome| {
        StatusCode::from_u16(outcome.status).ok().filter(|status| !status.is_informational())
    };
    let (outcome, status) = match outcome.and_then(|outcome| status(&outcome).map(|status| (outcome, status)))
    {
        Some(found) => found,
        None => {
            let detail = "it was done before, but not by a guarded request: there is no answer to give";
            return Err(Problem::new(Code::Conflict, detail));
        }
    };
    if outcome.request != fingerprint {
        let detail = format!("`{resource}` was done before, for another request, or for somebody else");
        return Err(Problem::new(Code::RequestIdReused, detail).status(422));
    }
    if outcome.withheld {
        let detail = "it was done before, and the application does not let its answer be kept";
        return Err(Problem::new(Code::Conflict, detail).with("original_status", outcome.status));
    }
    if outcome.too_large {
        let detail = "it was done before, and the answer was too large to be kept";
        return Err(Problem::new(Code::Conflict, detail).with("original_status", outcome.status));
    }
    let body = match (outcome.text, outcome.base64) {
        (Some(text), _) => Bytes::from(text),
        (None, Some(base64)) => STANDARD.decode(base64).unwrap_or_default().into(),
        (None, None) => Bytes::new(),
    };
    let mut response = Response::new(Body::full(body));
    *response.status_mut() = status;
    let map = response.headers_mut();
    put(map, &outcome.headers);
    // No answer is kept with such headers, but the store may have been written by hand.
    headers::strip_hop_by_hop(map);
    headers::strip_own(map);
    map.remove(header::CONTENT_LENGTH);
    map.insert(headers::LOCK_REPLAYED, HeaderValue::from_static("true"));
    Ok(response)
}

fn put(map: &mut HeaderMap, pairs: &[(String, String)]) {
    for (name, value) in pairs {
        if let (Ok(name), Ok(value)) = (HeaderName::from_bytes(name.as_bytes()), HeaderValue::from_str(value))
        {
            map.append(name, value);
        }
    }
}

/// The data for recognizing a duplicate and for storing its answer.
#[derive(Clone)]
pub struct Once {
    pub fingerprint: Arc<str>,
    /// Whether the request identified its sender, which the fingerprint then contains.
    pub names_caller: bool,
    /// The limit of the stored answer, in bytes.
    pub max_bytes: usize,
    /// The limit of the stored JSON text, in bytes.
    pub max_value_bytes: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cache_control_decides_whether_an_answer_is_kept() {
        for (values, for_all, for_its_sender) in [
            (&[][..], true, true),
            (&["max-age=60, public"][..], true, true),
            (&["max-age=0, private, must-revalidate"][..], false, true),
            (&["no-cache", "Private=\"set-cookie\""][..], false, true),
            (&["no-cache,NO-STORE"][..], false, false),
            (&["max-age=1", " no-store "][..], false, false),
            (&["x-private, no-stored"][..], true, true),
        ] {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append(header::CACHE_CONTROL, HeaderValue::from_static(value));
            }
            let may = [false, true].map(|names_caller| may_be_kept(&headers, names_caller));
            assert_eq!(may, [for_all, for_its_sender], "{values:?}");
        }
    }

    #[test]
    fn the_fingerprint_of_a_request_includes_its_sender() {
        let view = HttpView::default();
        let caller = ["authorization", "cookie"].map(str::to_owned);
        let of = |name: HeaderName, value: &'static str, caller: &[String]| {
            let headers = HeaderMap::from_iter([(name, HeaderValue::from_static(value))]);
            fingerprint(&view, &headers, caller)
        };
        let one = of(header::AUTHORIZATION, "a", &caller);
        assert_eq!(one, of(header::AUTHORIZATION, "a", &caller));
        for other in [
            of(header::AUTHORIZATION, "b", &caller),
            of(header::COOKIE, "a", &caller),
            of(header::ACCEPT, "a", &caller),
        ] {
            assert_ne!(one, other);
        }
        assert_eq!(of(header::AUTHORIZATION, "a", &[]), of(header::AUTHORIZATION, "b", &[]));
    }
}
