//! The gate judges bytes alike in any parts, and the HTTP library finds the same requests in what the gate lets
//! through.

use std::cell::RefCell;
use std::convert::Infallible;
use std::rc::Rc;

use arbitrary::{Result, Unstructured};
use http_body_util::{BodyExt, Empty};
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;

use super::input::{block_on, joined, parts};
use crate::http::gate::{Gate, Refusal};

const LIMIT: usize = 1_024;

const WORDS: [&str; 44] = [
    "POST / HTTP/1.1\r\n",
    "GET /a?b HTTP/1.1\r\n",
    "PUT http://h/a HTTP/1.1\r\n",
    "GET / HTTP/1.0\r\n",
    "Host: x\r\n",
    "host:y\r\n",
    "Content-Length: 5\r\n",
    "content-length:\t0\r\n",
    "Content-Length: 18446744073709551615\r\n",
    "Content-Length: ",
    "Transfer-Encoding: chunked\r\n",
    "transfer-encoding:CHUNKED \r\n",
    "Transfer-Encoding: gzip, chunked\r\n",
    "Transfer-Encoding: ",
    "X: 1\r\n",
    "X-Y:\r\n",
    " folded\r\n",
    "Trailer: a\r\n",
    "Expect: 100-continue\r\n",
    "\r\n",
    "\r\n\r\n",
    "\r",
    "\n",
    "\n\n",
    "hello",
    "5\r\nhello\r\n",
    "5;a=b\r\nhello\r\n",
    "0\r\n",
    "0\r\n\r\n",
    "00000005\r\n",
    "5",
    "A\r\n0123456789\r\n",
    "GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello",
    "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n",
    " ",
    "\t",
    ":",
    "0x5",
    "+5",
    "\0",
    "\u{7f}",
    "\u{e9}",
    ",",
];

pub fn hold(u: &mut Unstructured<'_>) -> Result<()> {
    let bytes = joined(u, &WORDS, 16)?;
    let whole = judge([&bytes[..]]);
    let split = judge(parts(u, &bytes)?);
    assert_eq!(split, whole, "{:?}", String::from_utf8_lossy(&bytes));
    if whole.refusal.is_none() && !whole.is_within_message {
        agrees(&whole);
    }
    Ok(())
}

#[derive(Debug, PartialEq)]
struct Verdict {
    passed: Vec<u8>,
    refusal: Option<Refusal>,
    heads: u32,
    is_within_message: bool,
}

fn judge<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> Verdict {
    let mut gate = Gate::new(LIMIT);
    let (mut passed, mut held) = (Vec::new(), Vec::new());
    for part in parts {
        held.extend_from_slice(part);
        let pass = gate.judge(&held);
        passed.extend(held.drain(..pass));
        assert!(gate.refusal().is_some() || held.len() <= LIMIT, "{} bytes are held", held.len());
    }
    Verdict {
        passed,
        refusal: gate.refusal(),
        heads: gate.heads(),
        is_within_message: gate.is_within_message(),
    }
}

/// Checks that the HTTP library finds as many requests as the gate, or none after one that it refuses.
fn agrees(verdict: &Verdict) {
    let (found, is_whole) = requests(&verdict.passed);
    let text = String::from_utf8_lossy(&verdict.passed);
    assert!(found <= verdict.heads, "{found} requests instead of {}: {text:?}", verdict.heads);
    // The library stops after a request that closes the connection.
    let lower = text.to_ascii_lowercase();
    if is_whole && !["http/1.0", "connection", "upgrade"].iter().any(|word| lower.contains(word)) {
        assert_eq!(found, verdict.heads, "{text:?}");
    }
}

/// The number of whole requests that the HTTP library finds, and whether it refuses none.
fn requests(bytes: &[u8]) -> (u32, bool) {
    let found = Rc::new(RefCell::new(0));
    let count = found.clone();
    let service = service_fn(move |request: hyper::Request<Incoming>| {
        let count = count.clone();
        async move {
            if request.into_body().collect().await.is_ok() {
                *count.borrow_mut() += 1;
            }
            Ok::<_, Infallible>(hyper::Response::new(Empty::<Bytes>::new()))
        }
    });
    let io = TokioIo::new(tokio::io::join(bytes, tokio::io::sink()));
    let served = block_on(hyper::server::conn::http1::Builder::new().serve_connection(io, service));
    (found.take(), served.is_ok())
}

#[test]
fn the_gate_and_the_http_library_find_the_same_requests() {
    super::input::check(hold);
}
