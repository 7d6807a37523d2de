//! Requests that another server could interpret differently, sent through a real socket.

use super::*;

const GOOD: &str = "POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc";

/// Heads with an invalid line, and the text of the answer to each.
const HEADS: [(&str, &str); 14] = [
    ("GET / HTTP/1.1\nhost: x\n\n", "LF alone"),
    ("GET / HTTP/1.1\r\nhost: x\r\nx: a\rb\r\n\r\n", "a CR that ends no line"),
    ("GET / HTTP/1.1\r\nhost: x\r\nx: a\0b\r\n\r\n", "a control character"),
    ("GET / HTTP/1.1\r\nhost: x\r\nx: a\r\n b\r\n\r\n", "begins with white space"),
    ("GET / HTTP/1.1\r\nhost : x\r\n\r\n", "white space before the colon"),
    ("GET / HTTP/1.1\r\nhost: x\r\n: a\r\n\r\n", "without a name"),
    ("GET / HTTP/1.1\r\n\r\n", "no Host"),
    ("GET / HTTP/1.1\r\nhost: x\r\nhost: x\r\n\r\n", "more than one Host"),
    (
        "GET / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\ncontent-length: 3\r\n\r\nabc",
        "more than one Content-L",
    ),
    ("GET / HTTP/1.1\r\nhost: x\r\ncontent-length: 3, 3\r\n\r\nabc", "not a whole number"),
    (
        "GET / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        "together",
    ),
    ("GET / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", "other than chunked"),
    ("GET / HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", "in HTTP/1.0"),
    ("CONNECT x:80 HTTP/1.1\r\nhost: x:80\r\n\r\n", "CONNECT"),
];

const BODIES: [(&str, &str); 7] = [
    ("0x3\r\nabc\r\n0\r\n\r\n", "hexadecimal digits"),
    ("3\nabc\r\n0\r\n\r\n", "LF alone"),
    ("3;a\rb\r\nabc\r\n0\r\n\r\n", "a CR that ends no line"),
    ("3\r\nabcd\r\n0\r\n\r\n", "does not end with CRLF"),
    ("3\r\nabc\r\n0\r\ncontent-length: 3\r\n\r\n", "only a header can be"),
    ("3\r\nabc\r\n0\r\nx : 3\r\n\r\n", "white space before the colon"),
    ("3\r\nabc\r\n0\r\nx: 3\n\r\n", "LF alone"),
];

#[tokio::test]
async fn an_ambiguous_head_gets_400() {
    let server = start(limits());
    for (bad, why) in HEADS {
        let answer = server.exchange(bad).await;
        assert_problem(&answer, 400, "invalid");
        assert!(answer.contains(why), "{bad:?}: {answer}");
        assert_eq!(answer.matches("HTTP/1.1 ").count(), 1, "{bad:?}: {answer}");
    }
}

#[tokio::test]
async fn requests_before_an_ambiguous_head_are_answered_and_later_requests_never() {
    let server = start(limits());
    for (bad, why) in HEADS {
        let answers = server.exchange(&[GOOD, GOOD, bad, GOOD].concat()).await;
        let answers: Vec<_> = answers.split("HTTP/1.1 ").skip(1).collect();
        assert_eq!(answers.len(), 3, "{bad:?}: {answers:?}");
        assert!(answers[0].starts_with("200 ") && answers[1].starts_with("200 "), "{answers:?}");
        assert!(answers[2].starts_with("400 ") && answers[2].contains(why), "{answers:?}");
    }
}

#[tokio::test]
async fn a_slow_request_is_answered_before_the_refusal_of_the_next_request() {
    let server = start(limits());
    let mut stream = server.send("GET /slow HTTP/1.1\r\nhost: x\r\n\r\n").await;
    server.waiting_becomes(1).await;
    stream.write_all(HEADS[0].0.as_bytes()).await.unwrap();
    let answers = read_all(&mut stream).await;
    assert!(answers.starts_with("HTTP/1.1 200 ") && answers.contains("HTTP/1.1 400 "), "{answers}");
}

#[tokio::test]
async fn a_client_that_disconnects_after_a_refused_request_leaves_the_queue() {
    let server = start(limits());
    let mut stream = server.send("GET /wait HTTP/1.1\r\nhost: x\r\n\r\n").await;
    server.waiting_becomes(1).await;
    stream.write_all(&[HEADS[0].0.as_bytes(), &[b'x'; 100_000]].concat()).await.unwrap();
    drop(stream);
    server.waiting_becomes(0).await;
}

#[tokio::test]
async fn an_ambiguous_body_gets_400_and_ends_the_connection() {
    let server = start(limits());
    let head = "POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n";
    for (bad, why) in BODIES {
        for before in ["", GOOD] {
            let answers = server.exchange(&[before, head, bad, GOOD].concat()).await;
            let answer = answers.split("HTTP/1.1 200 ").last().unwrap();
            let answer = &answer[answer.find("HTTP/1.1 400").expect("a refusal")..];
            assert_problem(answer, 400, "invalid");
            assert!(answer.contains(why), "{bad:?}: {answer}");
            let count = answers.matches("HTTP/1.1 ").count();
            assert_eq!(count, 1 + usize::from(!before.is_empty()), "{bad:?}: {answers}");
        }
    }
}

#[tokio::test]
async fn well_formed_requests_pass_in_parts_of_any_size() {
    let chunked = "POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n\
                   2;ext\r\nab\r\n2\r\ncd\r\n0\r\ncheck: abc\r\n\r\n";
    let last = "GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
    let all = [GOOD, "\r\n", chunked, GOOD, last].concat();
    for part in [1, 2, 5, 30, 1_000] {
        let server = start(HttpLimits { header_timeout: Duration::from_secs(5), ..limits() });
        let mut stream = server.connect().await;
        stream.set_nodelay(true).unwrap();
        for part in all.as_bytes().chunks(part) {
            stream.write_all(part).await.unwrap();
            tokio::task::yield_now().await;
        }
        let answers = read_all(&mut stream).await;
        let bodies: Vec<_> = answers.split("\r\n\r\n").skip(1).map(|body| &body[..1]).collect();
        assert_eq!(bodies, ["3", "4", "3", "0"], "{part}: {answers}");
    }
}

#[tokio::test]
async fn a_request_begun_before_a_shutdown_may_still_be_completed() {
    let server = start(HttpLimits { header_timeout: Duration::from_secs(5), ..limits() });
    let mut stream = server.send("GET / HTTP/1.1\r\nho").await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    server.stop.cancel();
    tokio::time::sleep(Duration::from_millis(50)).await;
    stream.write_all(b"st: x\r\n\r\n").await.unwrap();
    assert!(read_all(&mut stream).await.starts_with("HTTP/1.1 200 "));
}

#[tokio::test]
async fn connect_requests_over_http2_are_refused() {
    let server = start(limits());
    let (mut send, _connection, _socket) = http2(&server).await;
    let request = hyper::Request::connect("x:80").body(Full::from("")).unwrap();
    assert_eq!(send.send_request(request).await.unwrap().status(), 400);
}

/// The gate sees HTTP/1 alone. An application behind a guarded route must not get two hosts, or none.
#[tokio::test]
async fn an_http2_request_has_one_host() {
    let server = start(limits());
    let (mut send, _connection, _socket) = http2(&server).await;
    let mut status = async |uri: &str, hosts: &[&str]| {
        let mut request = hyper::Request::get(uri);
        for host in hosts {
            request = request.header("host", *host);
        }
        send.send_request(request.body(Full::from("")).unwrap()).await.unwrap().status().as_u16()
    };
    assert_eq!(status("http://a/", &[]).await, 200);
    assert_eq!(status("http://a/", &["A"]).await, 200);
    assert_eq!(status("/", &["a"]).await, 200);
    assert_eq!(status("/", &[]).await, 400);
    assert_eq!(status("/", &["a", "a"]).await, 400);
    assert_eq!(status("http://a/", &["b"]).await, 400);
    assert_eq!(status("http://a/", &["a", "b"]).await, 400);
    assert_eq!(status("/", &["a/b"]).await, 400);
}

/// A client may send so much of a body that nobody reads.
#[tokio::test]
async fn an_http2_stream_has_a_small_window() {
    let server = start(limits());
    let mut stream = server.connect().await;
    stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await.unwrap();
    let mut head = [0; 9];
    stream.read_exact(&mut head).await.unwrap();
    assert_eq!(head[3], 4, "the first frame has the settings");
    let mut settings = vec![0; usize::from(head[2])];
    stream.read_exact(&mut settings).await.unwrap();
    let initial_window = settings.chunks(6).find(|setting| setting[..2] == [0, 4]);
    // Without the setting, it is 65,535.
    let window =
        initial_window.map_or(65_535, |setting| u32::from_be_bytes(setting[2..].try_into().unwrap()));
    assert_eq!(window, 65_535);
}
