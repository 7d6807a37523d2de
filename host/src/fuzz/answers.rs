//! Headers of guarded requests, and kept answers, make whole heads: no value of them ends a line or moves the end of a
//! message.

use std::convert::Infallible;
use std::net::SocketAddr;

use arbitrary::{Result, Unstructured};
use http_body_util::{BodyExt, Empty};
use hyper::StatusCode;
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1 as http1_client;
use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use hyper::http::response;
use hyper::server::conn::http1 as http1_server;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use percent_encoding::percent_decode_str;

use super::input::{block_on, joined, one_of};
use crate::guard::headers::{self, LOCK_KEY, LOCK_TOKEN};
use crate::guard::replay::{Once, Recording, replay};
use crate::http::Peer;
use crate::lock::record::{Origin, StoredValue};
use crate::lock::{Key, ServerTime, Token};
use crate::net;

pub fn hold(u: &mut Unstructured<'_>) -> Result<()> {
    match u.int_in_range(0..=2)? {
        0 => request_headers(u),
        1 => kept_answer(u),
        _ => stored_text(u),
    }
}

const NAMES: [&str; 24] = [
    "connection",
    "keep-alive",
    "te",
    "transfer-encoding",
    "content-length",
    "upgrade",
    "host",
    "trailer",
    "x-private",
    "lock-key",
    "lock_token",
    "lock-status",
    "forwarded",
    "x-forwarded-for",
    "x_forwarded_host",
    "x-real-ip",
    "cookie",
    "http2-settings",
    "proxy-connection",
    "proxy-authorization",
    "set-cookie",
    "cache-control",
    "date",
    "expect",
];

const VALUES: [&str; 18] = [
    "close",
    "x-private, host",
    "content-length",
    "trailers",
    "chunked",
    "gzip, chunked",
    "5",
    "0",
    "upgrade",
    "websocket",
    "h2c",
    "a",
    "a\"b\\",
    "\u{e9}",
    "",
    "no-store",
    "private",
    "for=1.2.3.4, for=x",
];

fn map(u: &mut Unstructured<'_>) -> Result<HeaderMap> {
    let mut headers = HeaderMap::new();
    for _ in 0..u.int_in_range(0..=8)? {
        let name = if u.ratio(1, 8)? { u.arbitrary::<&str>()? } else { one_of(u, &NAMES)? };
        let value = if u.ratio(1, 4)? { u.arbitrary::<&[u8]>()? } else { one_of(u, &VALUES)?.as_bytes() };
        if let (Ok(name), Ok(value)) = (HeaderName::try_from(name), HeaderValue::from_bytes(value)) {
            headers.append(name, value);
        }
    }
    Ok(headers)
}

/// What the proxy passes on has no header of the client's connection, and none that only the proxy may set.
fn request_headers(u: &mut Unstructured<'_>) -> Result<()> {
    let before = map(u)?;
    let mut after = before.clone();
    headers::strip_misleading(&mut after, &[]);
    let upgrade = headers::strip_hop_by_hop(&mut after);
    headers::strip_own(&mut after);
    headers::join_cookies(&mut after);
    let address: SocketAddr = "[2001:db8::1]:5".parse().expect("an address");
    let peer = Peer::new(net::Peer::new(address, u.arbitrary()?));
    let host = after.get(header::HOST).cloned();
    let trust = u.arbitrary()?;
    headers::forward(&mut after, &peer, host.as_ref(), trust);
    for gone in [
        "connection",
        "keep-alive",
        "transfer-encoding",
        "upgrade",
        "proxy-connection",
        "lock-key",
        "lock_token",
    ] {
        assert!(!after.contains_key(gone), "{gone} of {before:?}");
    }
    for kept in [header::HOST, header::CONTENT_LENGTH] {
        assert_eq!(
            after.get_all(&kept).iter().count(),
            before.get_all(&kept).iter().count(),
            "{kept} of {before:?}"
        );
    }
    assert!(after.get_all(header::COOKIE).iter().count() <= 1);
    assert!(upgrade.is_none_or(|upgrade| !upgrade.as_bytes().eq_ignore_ascii_case(b"h2c")));
    let one = after.get_all("x-forwarded-for").iter().map(HeaderValue::as_bytes).collect::<Vec<_>>();
    assert!(one.len() == 1 && one[0].ends_with(b"2001:db8::1"), "{one:?}");
    let keys = (0..u.int_in_range(1..=3)?).map(|_| u.arbitrary::<&str>()).collect::<Result<Vec<_>>>()?;
    let keys: Vec<Key> = keys.into_iter().filter_map(Key::new).collect();
    headers::fence(&mut after, &keys, &vec![Token(7); keys.len()]);
    let text = after.get(LOCK_KEY).map_or("", |value| value.to_str().expect("ASCII"));
    let read = text.split(", ").filter(|key| !key.is_empty());
    let read: Vec<String> =
        read.map(|key| percent_decode_str(key).decode_utf8().expect("UTF-8").into_owned()).collect();
    assert_eq!(read, keys.iter().map(|key| key.as_str().to_owned()).collect::<Vec<_>>());
    assert_eq!(after[LOCK_TOKEN].to_str().map(|text| text.matches('7').count()).ok(), Some(keys.len()));
    Ok(())
}

/// An answer that is kept is given again as it was, within its limits.
fn kept_answer(u: &mut Unstructured<'_>) -> Result<()> {
    let status = u.int_in_range(200..=599)?;
    let mut head: response::Parts = hyper::Response::new(()).into_parts().0;
    head.status = StatusCode::from_u16(status).expect("a status");
    head.headers = map(u)?;
    headers::strip_hop_by_hop(&mut head.headers);
    headers::strip_own(&mut head.headers);
    let max_value_bytes = u.int_in_range(64..=1_024)?;
    let once = Once {
        fingerprint: "f".into(),
        names_caller: u.arbitrary()?,
        max_bytes: u.int_in_range(0..=max_value_bytes)?,
        max_value_bytes,
    };
    let Some(mut recording) = Recording::new(&head, &once) else { return Ok(()) };
    let mut body = Vec::new();
    for _ in 0..u.int_in_range(0..=3)? {
        let piece: &[u8] = u.arbitrary()?;
        recording.data(piece);
        body.extend_from_slice(piece);
    }
    let value = recording.finish();
    assert!(value.len() <= max_value_bytes.max(64), "{} bytes: {value}", value.len());
    if replay(&stored(&value), "f", "r").is_ok() {
        sends_whole(&value, Some(head.status), Some(&body));
    }
    assert!(replay(&stored(&value), "another", "r").is_err());
    Ok(())
}

/// No text in a row makes an answer that breaks its connection.
fn stored_text(u: &mut Unstructured<'_>) -> Result<()> {
    const WORDS: [&str; 26] = [
        "{\"request\":\"f\",\"status\":",
        "200",
        "204",
        "304",
        "101",
        "100",
        "99",
        "1000",
        "-1",
        ",\"headers\":[",
        "[\"a\",\"b\"]",
        "[\"content-length\",\"5\"]",
        "[\"transfer-encoding\",\"chunked\"]",
        "[\"connection\",\"close\"]",
        "[\"a\",\"b\\r\\nc: d\"]",
        "[\"lock-key\",\"x\"]",
        ",",
        "]",
        ",\"text\":\"hello\"",
        ",\"base64\":\"aGVsbG8=\"",
        ",\"base64\":\"?\"",
        ",\"too_large\":true",
        ",\"withheld\":false",
        "}",
        "null",
        "\"",
    ];
    let text = String::from_utf8_lossy(&joined(u, &WORDS, 12)?).into_owned();
    let text = if u.arbitrary()? { format!("{{\"request\":\"f\",\"status\":{text}") } else { text };
    sends_whole(&text, None, None);
    Ok(())
}

fn stored(value: &str) -> StoredValue {
    let time = ServerTime(1);
    StoredValue { value: value.into(), since: time, until: time, nonce: 1, origin: Origin::Route }
}

/// Sends the kept answer to two requests in a row, and checks that both arrive alike: so the first one has ended where
/// its head says.
fn sends_whole(value: &str, status: Option<StatusCode>, body: Option<&[u8]>) {
    let kept = stored(value);
    let service = service_fn(|_: hyper::Request<Incoming>| {
        let response = replay(&kept, "f", "r").unwrap_or_else(|problem| problem.into_response());
        std::future::ready(Ok::<_, Infallible>(response))
    });
    let (client, server) = tokio::io::duplex(1 << 16);
    let server = http1_server::Builder::new().serve_connection(TokioIo::new(server), service);
    let exchange = async {
        let (mut sender, connection) =
            http1_client::handshake(TokioIo::new(client)).await.expect("a connection");
        let ask = async {
            let mut found = Vec::new();
            for _ in 0..2 {
                let request =
                    hyper::Request::builder().uri("/").header("host", "x").body(Empty::<Bytes>::new());
                let response = sender.send_request(request.expect("a request")).await?;
                let status = response.status();
                found.push((status, response.into_body().collect().await?.to_bytes()));
            }
            drop(sender);
            Ok::<_, hyper::Error>(found)
        };
        tokio::join!(ask, connection).0
    };
    let (_, found) = block_on(async { tokio::join!(server, exchange) });
    let found = found.unwrap_or_else(|error| panic!("{value}: {error}"));
    assert_eq!(found[0], found[1], "{value}");
    if let (Some(status), Some(body)) = (status, body) {
        let has_body = !matches!(status.as_u16(), 204 | 304);
        assert_eq!(found[0], (status, Bytes::copy_from_slice(if has_body { body } else { &[] })), "{value}");
    }
}

#[test]
fn kept_answers_and_headers_make_whole_heads() {
    super::input::check(hold);
}
