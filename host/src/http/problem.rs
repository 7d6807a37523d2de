//! Problems: RFC 9457 error bodies with a stable `type`.

use std::borrow::Cow;

use bytes::Bytes;
use hyper::header::{self, HeaderValue};
use serde::ser::{Serialize, SerializeMap, Serializer};
use serde_json::Value;

use super::body::{Body, BodyError, Response};
use super::request_id;

/// The kind of a problem, for programs. HTTP's own kinds are constants here; a front adds those of what it offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind {
    /// The `type` of the problem. It never changes.
    pub slug: &'static str,
    /// The HTTP status.
    pub status: u16,
    /// The kind in words.
    pub title: &'static str,
}

/// An error answer.
#[derive(Clone, Debug)]
pub struct Problem {
    kind: Kind,
    status: u16,
    detail: Cow<'static, str>,
    members: Vec<(&'static str, Value)>,
    retry_after_s: Option<u32>,
    allow: Option<&'static str>,
    close: bool,
    /// The text for the log, if it differs from `detail`.
    inside: Option<String>,
}

/// Why a request was answered with an error, for the log.
#[derive(Clone)]
pub struct Why(pub String);

/// Marks an answer that only reports a state: the request has not failed, whatever the status, so nothing is logged.
#[derive(Clone)]
pub struct Told;

impl Kind {
    /// A field or the form of the request is invalid.
    pub const INVALID: Kind = Kind::new("invalid", 400, "The request is not valid");
    /// The body exceeds its size limit.
    pub const TOO_LARGE: Kind = Kind::new("too_large", 413, "The body is too large");
    /// The request line or the headers exceed their size limit.
    pub const HEADERS_TOO_LARGE: Kind = Kind::new("headers_too_large", 431, "The headers are too large");
    /// The request did not arrive in time or in whole.
    pub const TIMEOUT: Kind = Kind::new("timeout", 408, "The request took too long to arrive");
    /// The path, the lock or the policy is unknown.
    pub const NOT_FOUND: Kind = Kind::new("not_found", 404, "There is nothing here");
    /// The host of the request names another server.
    pub const MISDIRECTED: Kind = Kind::new("misdirected", 421, "The proxy has another name");
    /// A web page made a browser send the request.
    pub const CROSS_SITE: Kind = Kind::new("cross_site", 403, "Web pages may not send this request");
    /// The path exists, but not for this method.
    pub const METHOD_NOT_ALLOWED: Kind =
        Kind::new("method_not_allowed", 405, "Another method is needed here");
    /// The body is not declared as JSON.
    pub const UNSUPPORTED_MEDIA_TYPE: Kind =
        Kind::new("unsupported_media_type", 415, "The body must be JSON");
    /// Too many connections, or too many components to compile.
    pub const OVERLOADED: Kind = Kind::new("overloaded", 503, "The proxy has too much to do");
    /// Too many connections from one address.
    pub const TOO_MANY_CONNECTIONS: Kind =
        Kind::new("too_many_connections", 429, "The client has too many connections");
    /// The application behind the proxy gave no usable answer.
    pub const UPSTREAM_FAILED: Kind =
        Kind::new("upstream_failed", 502, "The application gave no usable answer");
    /// The application behind the proxy took too long.
    pub const UPSTREAM_TIMEOUT: Kind = Kind::new("upstream_timeout", 504, "The application took too long");

    /// A kind from its slug, status and title.
    pub const fn new(slug: &'static str, status: u16, title: &'static str) -> Kind {
        Kind { slug, status, title }
    }
}

impl Problem {
    /// A problem with the status of its kind.
    pub fn new(kind: impl Into<Kind>, detail: impl Into<Cow<'static, str>>) -> Problem {
        let kind = kind.into();
        Problem {
            kind,
            status: kind.status,
            detail: detail.into(),
            members: Vec::new(),
            retry_after_s: None,
            allow: None,
            close: [Kind::TOO_LARGE, Kind::HEADERS_TOO_LARGE, Kind::TIMEOUT].contains(&kind),
            inside: None,
        }
    }

    /// A problem with an invalid field of the request, and the reason.
    pub fn invalid(field: impl Into<String>, detail: impl AsRef<str>) -> Problem {
        let field = field.into();
        Problem::new(Kind::INVALID, format!("{field}: {}", detail.as_ref())).with("field", field)
    }

    /// A problem with the method; `allow` lists the allowed methods.
    pub fn method_not_allowed(allow: &'static str) -> Problem {
        let mut problem = Problem::new(Kind::METHOD_NOT_ALLOWED, format!("allowed here: {allow}"));
        problem.allow = Some(allow);
        problem
    }

    /// A problem with an unknown path.
    pub fn not_found(path: &str) -> Problem {
        // The client chooses the path, which may be long; its beginning is enough to recognize it.
        let shown: String = path.chars().take(200).collect();
        Problem::new(Kind::NOT_FOUND, format!("no such path: {shown}"))
    }

    /// Adds a member to the body.
    pub fn with(mut self, name: &'static str, value: impl Into<Value>) -> Problem {
        self.members.push((name, value.into()));
        self
    }

    /// Sets `Retry-After` in whole seconds: rounded up, and at least 1.
    pub fn retry_after_ms(mut self, ms: u32) -> Problem {
        self.retry_after_s = Some(ms.div_ceil(1_000).max(1));
        self
    }

    /// Sets a text for the log that is more detailed than the client's.
    pub fn inside(mut self, detail: String) -> Problem {
        self.inside = Some(detail);
        self
    }

    /// Moves the detail to the log; the client sees `shown` instead.
    pub fn hide_detail(mut self, shown: &'static str) -> Problem {
        let detail = std::mem::replace(&mut self.detail, Cow::Borrowed(shown));
        self.inside.get_or_insert_with(|| detail.into_owned());
        self
    }

    /// Replaces the status.
    pub fn status(mut self, status: u16) -> Problem {
        self.status = status;
        self
    }

    /// The name of the kind, for programs.
    pub fn slug(&self) -> &'static str {
        self.kind.slug
    }

    /// The HTTP status.
    pub fn status_code(&self) -> u16 {
        self.status
    }

    /// A member of the body, as text; `None` if there is no such member, or if it is no text.
    pub fn member(&self, name: &str) -> Option<&str> {
        self.members.iter().find(|(member, _)| *member == name)?.1.as_str()
    }

    /// The kind of the problem.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The text that the client sees.
    pub fn detail(&self) -> &str {
        &self.detail
    }

    /// The reason for logs, if it is more than what the client sees.
    pub fn why(&self) -> Option<&str> {
        self.inside.as_deref()
    }

    /// The HTTP answer.
    pub fn into_response(self) -> Response {
        let mut response = hyper::Response::new(Body::full(self.to_json()));
        *response.status_mut() = hyper::StatusCode::from_u16(self.status).unwrap_or_default();
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(CONTENT_TYPE));
        if let Some(seconds) = self.retry_after_s {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if let Some(allow) = self.allow {
            headers.insert(header::ALLOW, HeaderValue::from_static(allow));
        }
        if self.status == 401 {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer realm=\"lockkeeper\""));
        }
        if self.close {
            headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        if response.status().is_server_error() {
            let why = self.inside.unwrap_or_else(|| self.detail.into_owned());
            response.extensions_mut().insert(Why(why));
        }
        response
    }

    /// The whole answer as HTTP/1.1 bytes that end the connection. For connections on which no request could be read.
    pub fn to_http1(&self) -> Vec<u8> {
        let body = self.to_json();
        let status = hyper::StatusCode::from_u16(self.status).unwrap_or_default();
        let id = request_id::fresh();
        let retry = self.retry_after_s.map(|s| format!("retry-after: {s}\r\n")).unwrap_or_default();
        let mut bytes = format!(
            "HTTP/1.1 {} {}\r\ncontent-type: {CONTENT_TYPE}\r\ncontent-length: {}\r\nx-request-id: {}\r\n\
             {retry}connection: close\r\n\r\n",
            self.status,
            status.canonical_reason().unwrap_or_default(),
            body.len(),
            id.to_str().unwrap_or_default(),
        )
        .into_bytes();
        bytes.extend_from_slice(&body);
        bytes
    }

    fn to_json(&self) -> Bytes {
        serde_json::to_vec(self).unwrap_or_default().into()
    }
}

const CONTENT_TYPE: &str = "application/problem+json";

impl From<BodyError> for Problem {
    fn from(error: BodyError) -> Problem {
        let detail = error.to_string();
        match error {
            BodyError::TooLarge { limit } => Problem::new(Kind::TOO_LARGE, detail).with("bound", limit),
            BodyError::Slow { .. } => Problem::new(Kind::TIMEOUT, detail),
            BodyError::Broken(_) => Problem::new(Kind::INVALID, detail).with("field", "body"),
        }
    }
}

impl Serialize for Problem {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("type", self.kind.slug)?;
        map.serialize_entry("title", self.kind.title)?;
        map.serialize_entry("status", &self.status)?;
        map.serialize_entry("detail", &self.detail)?;
        for (name, value) in &self.members {
            map.serialize_entry(name, value)?;
        }
        map.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn problem_bodies_have_the_members_of_the_rfc() {
        let problem =
            Problem::invalid("ttl_ms", "must be from 100 to 3600000").with("bound", "100 to 3600000");
        let body: Value = serde_json::from_slice(&problem.to_json()).unwrap();
        assert_eq!(body["type"], "invalid");
        assert_eq!(body["status"], 400);
        assert_eq!(body["field"], "ttl_ms");
        assert_eq!(body["bound"], "100 to 3600000");
        assert!(body["detail"].as_str().unwrap().starts_with("ttl_ms: "));
    }

    #[test]
    fn retry_after_is_in_seconds_and_never_zero() {
        for (ms, seconds) in [(0, "1"), (1, "1"), (1_000, "1"), (1_001, "2")] {
            let response = Problem::new(Kind::OVERLOADED, "full").retry_after_ms(ms).into_response();
            assert_eq!(response.headers()["retry-after"], seconds);
        }
    }

    #[test]
    fn a_raw_http1_problem_is_a_complete_answer() {
        let text = String::from_utf8(Problem::new(Kind::TIMEOUT, "slow").to_http1()).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 408 Request Timeout\r\n"), "{head}");
        assert!(head.contains(&format!("content-length: {}\r\n", body.len())), "{head}");
        assert!(head.contains("connection: close") && head.contains("x-request-id: "), "{head}");
    }
}
