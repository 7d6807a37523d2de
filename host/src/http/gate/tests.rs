//! Request shapes, each checked whole and byte by byte.

use super::*;

const LIMIT: usize = 1024;

/// What passes of `bytes` if they arrive in parts of at most `part` bytes, and the refusal.
fn run(bytes: &[u8], part: usize) -> (Vec<u8>, Option<Refusal>, u32) {
    let mut gate = Gate::new(LIMIT);
    let (mut passed, mut held) = (Vec::new(), Vec::new());
    for part in bytes.chunks(part) {
        held.extend_from_slice(part);
        let pass = gate.judge(&held);
        passed.extend(held.drain(..pass));
        if gate.refusal().is_none() {
            assert!(held.len() <= LIMIT, "{} bytes are held", held.len());
        }
    }
    (passed, gate.refusal(), gate.heads())
}

/// The result must be the same for all parts.
fn judged(bytes: &[u8]) -> (Vec<u8>, Option<Refusal>, u32) {
    let whole = run(bytes, bytes.len());
    for part in [1, 2, 3, 7, 64] {
        let parts = run(bytes, part);
        assert_eq!((parts.1, parts.2), (whole.1, whole.2), "{:?} by {part}", text(bytes));
        assert_eq!(text(&parts.0), text(&whole.0), "{:?} by {part}", text(bytes));
    }
    whole
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[track_caller]
fn refuses(bytes: impl AsRef<[u8]>, refusal: Refusal) {
    let good = "GET /good HTTP/1.1\r\nHost: x\r\n\r\n";
    for before in ["", good] {
        let bytes = [before.as_bytes(), bytes.as_ref()].concat();
        let (passed, found, heads) = judged(&bytes);
        assert_eq!(found, Some(refusal), "{:?}", text(&bytes));
        assert_eq!(text(&passed), before, "{:?}", text(&bytes));
        assert_eq!(heads as usize, before.len() / good.len());
        // Later bytes do not change a refusal.
        assert_eq!(judged(&[&bytes[..], good.as_bytes()].concat()).1, Some(refusal));
    }
}

#[track_caller]
fn passes(bytes: impl AsRef<[u8]>, heads: u32) {
    let bytes = bytes.as_ref();
    let (passed, refusal, found) = judged(bytes);
    assert_eq!((refusal, found), (None, heads), "{:?}", text(bytes));
    assert_eq!(text(&passed), text(bytes));
}

/// A head with `lines` between the Host and the end.
fn post(lines: &str) -> String {
    format!("POST /p HTTP/1.1\r\nHost: x\r\n{lines}\r\n\r\n")
}

#[test]
fn ordinary_requests_pass() {
    let get = "GET / HTTP/1.1\r\nHost: example.org:8080\r\nAccept: */*\r\n\r\n";
    passes(get, 1);
    passes("GET / HTTP/1.1\r\nhost:x\r\n\r\n", 1);
    passes("GET / HTTP/1.1\r\nHost:\r\n\r\n", 1);
    passes("GET / HTTP/1.1\r\nHost: [::1]:80\r\n\r\n", 1);
    passes("GET / HTTP/1.0\r\n\r\n", 1);
    passes("OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n", 1);
    passes(format!("\r\n{get}\r\n\r\n{get}"), 2);
    passes([&post("Content-Length: 5"), "ab\n\0c", get].concat(), 2);
    passes([&post("content-length: 0"), get].concat(), 2);
    passes(post("X-Text: tab\there, \u{e9}, and nothing\r\nX-Empty:"), 1);
    // A header whose name only begins like a known one.
    passes([&post("Content-Lengths: x\r\nTransfer_Encoding: gzip"), get].concat(), 2);
}

#[test]
fn chunked_bodies_pass() {
    let chunked = post("Transfer-Encoding: Chunked");
    let get = "GET / HTTP/1.1\r\nHost: x\r\n\r\n";
    passes([&chunked, "3\r\na\nc\r\nA\r\n0123456789\r\n0\r\n\r\n", get].concat(), 2);
    passes([&chunked, "000000000000000f\r\n0123456789abcde\r\n00\r\n\r\n", get].concat(), 2);
    passes([&chunked, "1;name=value\r\na\r\n0;last\r\nCheck: abc\r\nOther:1\r\n\r\n", get].concat(), 2);
    passes(format!("{chunked}1;{}\r\na\r\n0\r\n\r\n{get}", "e".repeat(256)), 2);
}

#[test]
fn bodies_are_skipped_by_their_length() {
    let mut gate = Gate::new(LIMIT);
    let head = post("Content-Length: 18446744073709551615");
    assert_eq!(gate.judge(head.as_bytes()), head.len());
    assert_eq!(gate.judge(&[b'\n'; 10_000]), 10_000);
    assert!(gate.is_within_message());
}

#[test]
fn an_incomplete_head_is_held_back() {
    let half = "GET / HTTP/1.1\r\nHost: x\r\nX-Half: 1";
    let (passed, refusal, heads) = judged(half.as_bytes());
    assert_eq!((passed.len(), refusal, heads), (0, None, 0));
}

#[test]
fn line_ends_other_than_crlf_are_refused() {
    refuses("GET / HTTP/1.1\nHost: x\n\n", Refusal::BareLf);
    refuses("\nGET / HTTP/1.1\r\nHost: x\r\n\r\n", Refusal::BareLf);
    refuses(post("X: 1\nContent-Length: 5"), Refusal::BareLf);
    refuses("GET / HTTP/1.1\r\nHost: x\r\n\n", Refusal::BareLf);
    refuses(post("X: 1\rContent-Length: 5"), Refusal::BareCr);
    refuses(post("X: 1\r\rContent-Length: 5"), Refusal::BareCr);
    refuses("GET / HTTP/1.1\r\r\nHost: x\r\n\r\n", Refusal::BareCr);
}

#[test]
fn control_characters_are_refused() {
    for bad in ["\0", "\x01", "\x0b", "\x0c", "\x1f", "\x7f", "\x08"] {
        refuses(post(&format!("X: a{bad}b")), Refusal::Control);
        refuses(post(&format!("X{bad}: ab")), Refusal::Control);
        refuses(post(&format!("Transfer-Encoding:{bad}chunked")), Refusal::Control);
        refuses(format!("GET /{bad} HTTP/1.1\r\nHost: x\r\n\r\n"), Refusal::Control);
    }
}

#[test]
fn malformed_request_lines_are_refused() {
    for bad in [
        "this is no request",
        "GET /",
        "GET  / HTTP/1.1",
        "GET / HTTP/1.1 ",
        " GET / HTTP/1.1",
        "GET /a b HTTP/1.1",
        "GET\t/ HTTP/1.1",
        "GET /\ta HTTP/1.1",
        "GET / HTTP/1.2",
        "GET / HTTP/2.0",
        "GET / http/1.1",
        "GET / HTTP/1.10",
        "G(T / HTTP/1.1",
        "PRI * HTTP/2.0",
    ] {
        refuses(format!("{bad}\r\nHost: x\r\n\r\n"), Refusal::RequestLine);
    }
    refuses("CONNECT example.org:443 HTTP/1.1\r\nHost: example.org:443\r\n\r\n", Refusal::Connect);
}

#[test]
fn malformed_header_lines_are_refused() {
    refuses(post("X: 1\r\n 2"), Refusal::Folded);
    refuses(post("X: 1\r\n\t2"), Refusal::Folded);
    refuses("GET / HTTP/1.1\r\n Host: x\r\n\r\n", Refusal::Folded);
    refuses(post("no colon"), Refusal::NoColon);
    refuses(post(": value"), Refusal::NoName);
    refuses(post("Content-Length : 5"), Refusal::SpaceBeforeColon);
    refuses(post("Transfer-Encoding\t: chunked"), Refusal::SpaceBeforeColon);
    refuses(post("Two Words: 5"), Refusal::Name);
    refuses(post("X(y): 5"), Refusal::Name);
    refuses(post("X\u{e9}: 5"), Refusal::Name);
}

#[test]
fn a_missing_second_or_malformed_host_is_refused() {
    refuses("GET / HTTP/1.1\r\nAccept: */*\r\n\r\n", Refusal::NoHost);
    refuses(post("Host: x"), Refusal::SecondHost);
    refuses("GET / HTTP/1.0\r\nHost: x\r\nhost: y\r\n\r\n", Refusal::SecondHost);
    for bad in ["a b", "a/b", "user@a", "a?", "a\u{e9}", "a\\b"] {
        refuses(format!("GET / HTTP/1.1\r\nHost: {bad}\r\n\r\n"), Refusal::Host);
    }
}

#[test]
fn a_target_with_another_host_than_the_header_is_refused() {
    passes("GET http://x/a HTTP/1.1\r\nHost: X\r\n\r\n", 1);
    passes("GET http://x HTTP/1.1\r\nHost: x\r\n\r\n", 1);
    passes("GET http://x:8080?a HTTP/1.1\r\nHost: x:8080\r\n\r\n", 1);
    passes("OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n", 1);
    refuses("GET http://y/a HTTP/1.1\r\nHost: x\r\n\r\n", Refusal::OtherHost);
    refuses("GET http://u:p@x/a HTTP/1.1\r\nHost: x\r\n\r\n", Refusal::Host);
    refuses("GET http:///a HTTP/1.1\r\nHost: x\r\n\r\n", Refusal::Host);
    refuses("GET x:80 HTTP/1.1\r\nHost: x\r\n\r\n", Refusal::RequestLine);
    refuses("GET * HTTP/1.1\r\nHost: x\r\n\r\n", Refusal::Asterisk);
}

#[test]
fn an_http2_head_with_two_lengths_or_a_host_that_is_none_is_refused() {
    let check = |method: &str, target: &str, headers: &[(&str, &str)]| {
        let request = hyper::Request::builder().method(method).uri(target);
        let request = headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
        check_http2_head(&request.body(()).unwrap())
    };
    assert_eq!(check("POST", "http://x/a", &[("content-length", "3"), ("host", "x")]), Ok(()));
    assert_eq!(
        check("POST", "http://x/a", &[("content-length", "3"), ("content-length", "03")]),
        Err(Refusal::SecondLength)
    );
    assert_eq!(check("GET", "http://a:b@x/a", &[]), Err(Refusal::Host));
    assert_eq!(check("GET", "http://x/a", &[("host", "y")]), Err(Refusal::OtherHost));
    assert_eq!(check("GET", "/a", &[]), Err(Refusal::NoHost));
    assert_eq!(check("GET", "*", &[("host", "x")]), Err(Refusal::Asterisk));
    assert_eq!(check("OPTIONS", "*", &[("host", "x")]), Ok(()));
}

#[test]
fn a_second_or_malformed_content_length_is_refused() {
    refuses(post("Content-Length: 5\r\ncontent-length: 5"), Refusal::SecondLength);
    refuses(post("Content-Length: 5\r\nContent-Length: 6"), Refusal::SecondLength);
    for bad in
        ["", "5, 5", "5,5", "+5", "-5", "0x5", "5 5", "5.0", "five", "18446744073709551616", "\u{0665}"]
    {
        refuses(post(&format!("Content-Length: {bad}")), Refusal::Length);
    }
}

#[test]
fn any_transfer_encoding_but_a_single_chunked_is_refused() {
    refuses(post("Content-Length: 5\r\nTransfer-Encoding: chunked"), Refusal::LengthAndEncoding);
    refuses(post("Transfer-Encoding: chunked\r\nContent-Length: 5"), Refusal::LengthAndEncoding);
    refuses(post("Transfer-Encoding: chunked\r\ntransfer-encoding: chunked"), Refusal::SecondEncoding);
    refuses(post("Transfer-Encoding: chunked\r\nTransfer-Encoding: identity"), Refusal::SecondEncoding);
    for bad in [
        "",
        "identity",
        "gzip, chunked",
        "chunked, gzip",
        "chunked, chunked",
        "xchunked",
        "chunked;a",
        "\"chunked\"",
    ] {
        refuses(post(&format!("Transfer-Encoding: {bad}")), Refusal::Encoding);
    }
    refuses("POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n", Refusal::OldEncoding);
}

/// Refusals within a body: everything before the fault has passed.
#[track_caller]
fn breaks(good: &str, bad: &str, refusal: Refusal) {
    let head = post("Transfer-Encoding: chunked");
    let bytes = [&head, good, bad].concat();
    let (passed, found, _) = judged(bytes.as_bytes());
    assert_eq!(found, Some(refusal), "{bytes:?}");
    assert_eq!(text(&passed), [&head, good].concat());
}

#[test]
fn malformed_chunks_are_refused() {
    for good in ["", "1\r\na\r\n"] {
        let sizes =
            ["", "0x5", "+5", "-5", " 5", "5 ", "5\t", "g", "5 ;a", ";a", "00000000000000005", "5,5", "1_0"];
        for bad in sizes {
            breaks(good, &format!("{bad}\r\nhello\r\n0\r\n\r\n"), Refusal::ChunkSize);
        }
        breaks(good, "5\nhello\r\n0\r\n\r\n", Refusal::BareLf);
        breaks(good, "5;a\nhello\r\n0\r\n\r\n", Refusal::BareLf);
        breaks(good, "5;a\rb\r\nhello\r\n0\r\n\r\n", Refusal::BareCr);
        breaks(good, "5;a\0\r\nhello\r\n0\r\n\r\n", Refusal::Control);
        breaks(good, &format!("5;{}\r\nhello\r\n", "e".repeat(257)), Refusal::Extension);
        breaks(good, &"5".repeat(1_000), Refusal::Extension);
    }
    for end in ["\n", "x\r\n", "\rx", "\n\r\n", "0\r\n\r\n"] {
        breaks("5\r\nhello", &format!("{end}0\r\n\r\n"), Refusal::ChunkEnd);
    }
}

#[test]
fn malformed_trailers_are_refused() {
    breaks("0\r\n", "\n", Refusal::BareLf);
    breaks("0\r\n", "Check: abc\n\r\n", Refusal::BareLf);
    breaks("0\r\n", "Check: a\rb\r\n\r\n", Refusal::BareCr);
    breaks("0\r\n", "Check: a\0b\r\n\r\n", Refusal::Control);
    breaks("0\r\n", " Check: ab\r\n\r\n", Refusal::Folded);
    breaks("0\r\n", "Check : ab\r\n\r\n", Refusal::SpaceBeforeColon);
    breaks("0\r\n", "Check\r\n\r\n", Refusal::NoColon);
    for framing in ["Content-Length: 5", "transfer-encoding: chunked", "Host: y"] {
        breaks("0\r\n", &format!("{framing}\r\n\r\n"), Refusal::Trailer);
    }
    breaks("0\r\n", &"Check: abc\r\n".repeat(LIMIT), Refusal::TooLarge);
}

#[test]
fn the_size_of_a_head_is_bounded() {
    let head = |len: usize| {
        let frame = post("X: ").len();
        post(&format!("X: {}", "a".repeat(len - frame)))
    };
    passes(head(LIMIT), 1);
    refuses(head(LIMIT + 1), Refusal::TooLarge);
    refuses(head(LIMIT * 9), Refusal::TooLarge);
    refuses("a".repeat(LIMIT + 1), Refusal::TooLarge);
    refuses("\r\n".repeat(LIMIT), Refusal::TooLarge);
    refuses(post(&"X: 1\r\n".repeat(LIMIT)), Refusal::TooLarge);
}

/// For any input, the parts make no difference, and only bytes of the input pass.
#[test]
fn random_bytes_are_judged_the_same_in_any_parts() {
    use rand::prelude::*;
    let words: [&[u8]; 16] = [
        b"POST / HTTP/1.1\r\n",
        b"GET / HTTP/1.0\r\n",
        b"Host: x\r\n",
        b"Content-Length: 5\r\n",
        b"\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"\r",
        b"\n",
        b"hello",
        b"5\r\n",
        b"0\r\n\r\n",
        b" ",
        b"X: 1\r\n",
        b"\0",
        b";e\r\n",
        b"hello\r\n",
    ];
    let mut random = StdRng::seed_from_u64(7);
    for _ in 0..20_000 {
        let count = random.random_range(1..12);
        let bytes: Vec<u8> = (0..count).flat_map(|_| words[random.random_range(0..16)]).copied().collect();
        judged(&bytes);
    }
}
