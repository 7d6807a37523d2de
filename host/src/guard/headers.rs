//! Headers of proxied requests and answers: hop-by-hop headers are removed, and only the proxy may set its own
//! headers.

use std::net::IpAddr;

use hyper::header::{
    self, CONNECTION, HeaderMap, HeaderName, HeaderValue, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, TE,
    TRANSFER_ENCODING, UPGRADE,
};
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};

use crate::http::Peer;
use crate::lock::{Key, Token};

/// The keys that are held for a request: percent-encoded, separated by commas.
pub const LOCK_KEY: HeaderName = HeaderName::from_static("lock-key");
/// The fencing tokens of the keys, in the same order.
pub const LOCK_TOKEN: HeaderName = HeaderName::from_static("lock-token");
/// Reports a problem with the lock: in the answer or its trailers, and for `unlocked` also in the request.
pub const LOCK_STATUS: HeaderName = HeaderName::from_static("lock-status");
/// The store was unavailable, and the route passes requests on in that case.
pub const UNLOCKED: HeaderValue = HeaderValue::from_static("unlocked");
/// The lease was lost while the upstream worked.
pub const LOST: HeaderValue = HeaderValue::from_static("lost");
/// The outcome of a `once` could not be stored: a duplicate may be executed again.
pub const UNKEPT: HeaderValue = HeaderValue::from_static("unkept");
/// `true`: the answer is the stored answer to an earlier request.
pub const LOCK_REPLAYED: HeaderName = HeaderName::from_static("lock-replayed");

const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
const HTTP2_SETTINGS: HeaderName = HeaderName::from_static("http2-settings");
const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");
const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");

/// Characters that are percent-encoded in a key, because commas separate the keys in the header.
const NOT_IN_KEYS: &AsciiSet = &CONTROLS.add(b' ').add(b'"').add(b'%').add(b',');

/// Removes hop-by-hop headers. Returns the protocol that the request asks to switch to, if any.
pub fn strip_hop_by_hop(headers: &mut HeaderMap) -> Option<HeaderValue> {
    let mut upgrade = headers.remove(UPGRADE);
    let named: Vec<HeaderName> = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| HeaderName::from_bytes(name.trim().as_bytes()).ok())
        .collect();
    // HTTP/2 in a tunnel would bypass the routes. RFC 9113, 3.1 makes `h2c` obsolete.
    if !named.contains(&UPGRADE) || upgrade.as_ref().is_some_and(|protocol| contains_token(protocol, "h2c")) {
        upgrade = None;
    }
    let takes_trailers = headers.get(TE).is_some_and(|te| contains_token(te, "trailers"));
    // A `Connection` header must not remove the headers that frame the message.
    for name in named.iter().filter(|name| !matches!(**name, header::HOST | header::CONTENT_LENGTH)) {
        headers.remove(name);
    }
    let own = [
        CONNECTION,
        KEEP_ALIVE,
        PROXY_CONNECTION,
        PROXY_AUTHENTICATE,
        PROXY_AUTHORIZATION,
        TE,
        TRANSFER_ENCODING,
        HTTP2_SETTINGS,
    ];
    for name in own {
        headers.remove(name);
    }
    if takes_trailers {
        headers.insert(TE, HeaderValue::from_static("trailers"));
    }
    upgrade
}

fn contains_token(value: &HeaderValue, token: &str) -> bool {
    let value = value.to_str().unwrap_or_default();
    value.split(',').any(|part| part.trim().eq_ignore_ascii_case(token))
}

/// Removes headers that only the proxy may set. Some gateway interfaces treat `_` and `-` in names alike, so both
/// spellings are removed.
pub fn strip_own(headers: &mut HeaderMap) {
    strip(headers, |name| name.starts_with("lock-") || name.starts_with("lock_"));
}

/// Removes headers that some applications trust over the method and path that the lock was derived from, and headers
/// with `_` in their names, which some applications treat as `-`. Headers in `kept` stay.
pub fn strip_misleading(headers: &mut HeaderMap, kept: &[String]) {
    const OVERRIDES: [&str; 5] =
        ["x-http-method-override", "x-http-method", "x-method-override", "x-original-url", "x-rewrite-url"];
    strip(headers, |name| {
        (name.contains('_') || OVERRIDES.contains(&name)) && !kept.iter().any(|kept| kept == name)
    });
}

/// Removes trailers that an application which adds trailers to the headers would take for a header that the proxy has checked,
/// set or removed, and those that RFC 9110 (6.5.1) does not allow. `read`: the headers that the route reads.
pub fn strip_trailers<'a>(trailers: &mut HeaderMap, read: impl Iterator<Item = &'a str>) {
    const NEVER: [&str; 16] = [
        "authorization",
        "connection",
        "cookie",
        "expect",
        "forwarded",
        "host",
        "keep-alive",
        "max-forwards",
        "proxy-authorization",
        "proxy-connection",
        "range",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "x-real-ip",
    ];
    strip_own(trailers);
    strip_misleading(trailers, &[]);
    read.for_each(|name| drop(trailers.remove(name)));
    strip(trailers, |name| {
        let is_framing = name.starts_with("content-") && name != "content-md5" && name != "content-digest";
        is_framing || name.starts_with("x-forwarded-") || name.starts_with("if-") || NEVER.contains(&name)
    });
}

fn strip(headers: &mut HeaderMap, is_unwanted: impl Fn(&str) -> bool) {
    let unwanted: Vec<HeaderName> =
        headers.keys().filter(|name| is_unwanted(name.as_str())).cloned().collect();
    for name in unwanted {
        headers.remove(name);
    }
}

/// Sets the headers that name the client, the host and the protocol. Without `trust`, the client's own values are
/// removed.
pub fn forward(headers: &mut HeaderMap, peer: &Peer, host: Option<&HeaderValue>, trust: bool) {
    if !trust {
        strip(headers, |name| {
            let name = name.replace('_', "-");
            name.starts_with("x-forwarded-") || name == "x-real-ip"
        });
    }
    let ip = peer.address.ip();
    let proto = if peer.tls { "https" } else { "http" };
    let node = match ip {
        Some(IpAddr::V4(ip)) => ip.to_string(),
        Some(IpAddr::V6(ip)) => format!("\"[{ip}]\""),
        // A client of a Unix socket has no address.
        None => "unknown".to_owned(),
    };
    let host_text = host.and_then(|host| host.to_str().ok()).filter(|host| !host.contains(['"', '\\']));
    let forwarded = match host_text {
        Some(host) => format!("for={node};host=\"{host}\";proto={proto}"),
        None => format!("for={node};proto={proto}"),
    };
    if let Some(ip) = ip {
        add(headers, FORWARDED_FOR, &ip.to_string(), trust);
    }
    add(headers, header::FORWARDED, &forwarded, trust);
    if !trust || !headers.contains_key(FORWARDED_PROTO) {
        headers.insert(FORWARDED_PROTO, HeaderValue::from_static(proto));
    }
    if let Some(host) = host
        && (!trust || !headers.contains_key(FORWARDED_HOST))
    {
        headers.insert(FORWARDED_HOST, host.clone());
    }
}

/// Sets a header; with `trust`, the value is appended to the values of earlier proxies.
fn add(headers: &mut HeaderMap, name: HeaderName, value: &str, trust: bool) {
    let before: Vec<&str> = match trust {
        true => headers.get_all(&name).iter().filter_map(|value| value.to_str().ok()).collect(),
        false => Vec::new(),
    };
    let all = if before.is_empty() { value.to_owned() } else { format!("{}, {value}", before.join(", ")) };
    if let Ok(value) = HeaderValue::try_from(all) {
        headers.insert(name, value);
    }
}

/// Tells the upstream the keys and the tokens that are held.
pub fn fence(headers: &mut HeaderMap, keys: &[Key], tokens: &[Token]) {
    let keys: Vec<String> =
        keys.iter().map(|key| utf8_percent_encode(key.as_str(), NOT_IN_KEYS).to_string()).collect();
    let tokens: Vec<String> = tokens.iter().map(|token| token.0.to_string()).collect();
    for (name, value) in [(LOCK_KEY, keys.join(", ")), (LOCK_TOKEN, tokens.join(", "))] {
        // Percent-encoded text is always a valid header value.
        if let Ok(value) = HeaderValue::try_from(value) {
            headers.insert(name, value);
        }
    }
}

/// Joins the cookie headers, which HTTP/2 may split, into one, because HTTP/1.1 applications read only one (RFC 9113,
/// 8.2.3).
pub fn join_cookies(headers: &mut HeaderMap) {
    let cookies: Vec<&[u8]> = headers.get_all(header::COOKIE).iter().map(HeaderValue::as_bytes).collect();
    if cookies.len() > 1
        && let Ok(all) = HeaderValue::from_bytes(&cookies.join(&b"; "[..]))
    {
        headers.insert(header::COOKIE, all);
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;
    use crate::net;

    fn map(pairs: &[(&'static str, &str)]) -> HeaderMap {
        pairs
            .iter()
            .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_str(value).unwrap()))
            .collect()
    }

    fn sorted(headers: &HeaderMap) -> Vec<String> {
        let mut lines: Vec<String> =
            headers.iter().map(|(name, value)| format!("{name}: {}", value.to_str().unwrap())).collect();
        lines.sort();
        lines
    }

    #[test]
    fn no_trailer_passes_that_an_application_could_take_for_a_checked_header() {
        let sent = [
            "x-sum",
            "content-md5",
            "lock-token",
            "lock_key",
            "x-forwarded-for",
            "x-real-ip",
            "forwarded",
            "x_forwarded_host",
            "x-http-method-override",
            "authorization",
            "cookie",
            "content-length",
            "content-type",
            "connection",
            "host",
            "if-match",
            "x-tenant",
        ];
        let mut trailers = HeaderMap::new();
        for name in sent {
            trailers.insert(HeaderName::from_static(name), HeaderValue::from_static("1"));
        }
        strip_trailers(&mut trailers, ["x-tenant"].into_iter());
        let mut left: Vec<&str> = trailers.keys().map(HeaderName::as_str).collect();
        left.sort_unstable();
        assert_eq!(left, ["content-md5", "x-sum"]);
    }

    #[test]
    fn hop_by_hop_headers_are_removed() {
        let mut headers = map(&[
            ("connection", "close, X-Private, content-length, host"),
            ("x-private", "1"),
            ("keep-alive", "timeout=5"),
            ("te", "gzip, Trailers"),
            ("transfer-encoding", "chunked"),
            ("upgrade", "websocket"),
            ("host", "a"),
            ("content-length", "3"),
            ("accept", "*/*"),
        ]);
        assert_eq!(strip_hop_by_hop(&mut headers), None, "the connection does not name it");
        assert_eq!(sorted(&headers), ["accept: */*", "content-length: 3", "host: a", "te: trailers"]);
        let mut headers = map(&[("connection", "Upgrade"), ("upgrade", "websocket")]);
        assert_eq!(strip_hop_by_hop(&mut headers).unwrap(), "websocket");
        let mut headers = map(&[("connection", "Upgrade"), ("upgrade", "h2c"), ("http2-settings", "AAM")]);
        assert_eq!((strip_hop_by_hop(&mut headers), headers.len()), (None, 0));
    }

    #[test]
    fn lock_headers_sent_by_a_client_are_removed() {
        let mut headers =
            map(&[("lock-token", "9"), ("lock_token", "9"), ("lock-key", "a"), ("locked", "1")]);
        strip_own(&mut headers);
        assert_eq!(sorted(&headers), ["locked: 1"]);
    }

    #[test]
    fn forwarded_headers_name_the_client_and_are_kept_only_from_trusted_peers() {
        let peer = Peer::new(net::Peer::new("[2001:db8::1]:5".parse::<SocketAddr>().unwrap(), true));
        let host = HeaderValue::from_static("shop.example");
        let lie = [
            ("x-forwarded-for", "1.2.3.4"),
            ("x-forwarded-proto", "ftp"),
            ("x-forwarded-port", "1"),
            ("x_forwarded_for", "1.2.3.4"),
            ("x-real-ip", "1.2.3.4"),
            ("forwarded", "for=x"),
        ];
        let mut headers = map(&lie);
        forward(&mut headers, &peer, Some(&host), false);
        assert_eq!(headers.len(), 4, "{headers:?}");
        assert_eq!(headers["x-forwarded-for"], "2001:db8::1");
        assert_eq!(headers["forwarded"], "for=\"[2001:db8::1]\";host=\"shop.example\";proto=https");
        assert_eq!(
            (&headers["x-forwarded-proto"], &headers["x-forwarded-host"]),
            (&"https".parse().unwrap(), &host)
        );
        let mut headers = map(&lie);
        forward(&mut headers, &peer, Some(&host), true);
        assert_eq!(headers["x-forwarded-for"], "1.2.3.4, 2001:db8::1");
        assert_eq!(headers["x-forwarded-proto"], "ftp");
        let local = Peer::new(net::Peer::new(net::PeerAddress::Unix { uid: 1, pid: None }, false));
        let mut headers = map(&lie);
        forward(&mut headers, &local, Some(&host), false);
        assert!(!headers.contains_key("x-forwarded-for"), "{headers:?}");
        assert_eq!(headers["forwarded"], "for=unknown;host=\"shop.example\";proto=http");
        let mut headers = map(&lie);
        forward(&mut headers, &local, Some(&host), true);
        assert_eq!(headers["x-forwarded-for"], "1.2.3.4", "the proxy before it has said who the client is");
    }

    #[test]
    fn lock_headers_list_keys_and_tokens_in_the_same_order() {
        let mut headers = HeaderMap::new();
        let keys = ["a,b", "ä c"].map(|key| Key::new(key).unwrap());
        fence(&mut headers, &keys, &[Token(7), Token(9)]);
        assert_eq!(headers[LOCK_KEY], "a%2Cb, %C3%A4%20c");
        assert_eq!(headers[LOCK_TOKEN], "7, 9");
    }

    #[test]
    fn cookie_headers_are_joined() {
        let mut headers = map(&[("cookie", "a=1"), ("accept", "x")]);
        headers.append("cookie", HeaderValue::from_static("b=2"));
        join_cookies(&mut headers);
        assert_eq!(headers.get_all("cookie").iter().collect::<Vec<_>>(), ["a=1; b=2"]);
    }
}
